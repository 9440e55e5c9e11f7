package poolfeed

import (
	"errors"
	"log/slog"

	"larder/client"
	"larder/conductor"
	"larder/conductor/kvevent"
)

var errFormat = errors.New("poolfeed: the member's events name no tenant: have it publish with kv_events_format rfc1527")

// apply applies a batch, if it is the one that is due.
func (f *Feed) apply(m message) error {
	due := f.next
	f.next = m.sequence + 1
	if m.sequence != due {
		f.gaps.Add(1)
		return errGap // what is listed now is not older than what the batch says
	}
	if err := f.batch.Decode(m.payload); err != nil {
		f.bad.Add(1)
		return errGap
	}
	if f.batch.Bad > 0 {
		f.bad.Add(uint64(f.batch.Bad))
		return errGap
	}
	for i := range f.batch.Events {
		if err := f.event(&f.batch.Events[i]); err != nil {
			return err
		}
	}
	return nil
}

// event applies an event.
func (f *Feed) event(e *kvevent.Event) error {
	f.events.Add(1)
	if e.Kind == kvevent.Cleared {
		f.cfg.Index.Clear(f.cfg.Instance, kvevent.NoRank, kvevent.Media)
		return nil
	}
	if len(e.Tenant) == 0 {
		return errFormat
	}
	if _, followed := f.cfg.Tenants[string(e.Tenant)]; !followed || e.BlockSize == 0 {
		f.foreign.Add(1)
		return nil
	}
	s := &f.src.Scope
	if string(e.Tenant) != s.Tenant || string(e.Model) != s.Model || string(e.LoRA) != s.LoRA || string(e.Salt) != s.Salt {
		*s = conductor.Scope{Tenant: string(e.Tenant), Model: string(e.Model), LoRA: string(e.LoRA), Salt: string(e.Salt)}
	}
	s.BlockSize = e.BlockSize
	f.put(e)
	return nil
}

// put has the index take note of an event of the present scope.
func (f *Feed) put(e *kvevent.Event) {
	f.src.Instance, f.src.Rank, f.src.Once, f.src.Epoch = f.cfg.Instance, kvevent.NoRank, true, f.epoch
	e.Standard = !f.cfg.EngineHashes
	if err := f.cfg.Index.Apply(&f.src, e, kvevent.NoRank); err != nil {
		f.bad.Add(1)
		if !f.refused {
			f.refused = true
			f.cfg.Logger.Warn("the index refuses blocks of the pool; others like them are counted, and not logged", slog.Any("error", err))
		}
	}
}

// maxBlockSize is the tokens of the largest block that an index can tell.
const maxBlockSize = 1 << 20

// page applies a page of a listing.
func (f *Feed) page(tenant string, blocks []client.BlockInfo, contexts []client.PrefixContext) {
	f.listed.Add(uint64(len(blocks)))
	for _, on := range []kvevent.Medium{kvevent.CPU, kvevent.Disk} {
		for i := 0; i < len(blocks); {
			b := &blocks[i]
			f.hashes = f.hashes[:0]
			for ; i < len(blocks) && blocks[i].Context == b.Context && blocks[i].Group == b.Group; i++ {
				if on == kvevent.CPU && blocks[i].InMemory || on == kvevent.Disk && blocks[i].OnDisk {
					f.hashes = append(f.hashes, blocks[i].Hash)
				}
			}
			c := &contexts[b.Context]
			switch {
			case len(f.hashes) == 0:
			case c.BlockSize == 0 || c.BlockSize > maxBlockSize:
				f.foreign.Add(uint64(len(f.hashes)))
			default:
				f.src.Scope = conductor.Scope{
					Tenant: tenant, Model: c.Model, LoRA: c.LoRA, Salt: c.Salt, BlockSize: int(c.BlockSize),
				}
				f.put(&kvevent.Event{
					Kind: kvevent.Stored, Medium: on, Rank: kvevent.NoRank, Hashes: f.hashes, BaseBlock: -1, Group: int(b.Group >> 16),
				})
			}
		}
	}
}
