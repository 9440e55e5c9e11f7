package source

import (
	"bytes"
	"fmt"
	"log/slog"

	"github.com/zeebo/xxh3"

	"larder/conductor"
	"larder/conductor/kvevent"
)

const (
	maxPlaces  = 4096 // of one source: instances, ranks and media
	maxOrigins = 4096 // of one pool's master: tenants, models and instances
	maxAlso    = 1024 // adapters of an engine
)

// held is a place that a source has stored blocks at.
type held struct {
	Tenant   string         `json:"tenant"`
	Instance string         `json:"instance"`
	Rank     int            `json:"rank"`
	Medium   kvevent.Medium `json:"medium"`
}

// origin is what an event of a pool's master says that it is of.
type origin struct{ tenant, model, backend, salt string }

// apply applies a batch, and takes note of its number.
func (s *source) apply(seq, sum uint64, payload []byte, replayed bool) {
	s.m.frozen.RLock()
	defer s.m.frozen.RUnlock()
	c := &s.counters
	if err := s.batch.Decode(payload); err != nil {
		c.bad.Add(1)
		s.complain(err)
	}
	for i := range s.batch.Events {
		s.event(&s.batch.Events[i], s.batch.RankOf(&s.batch.Events[i]))
	}
	if s.batch.Bad > 0 {
		s.complain(s.batch.Reason)
	}
	c.bad.Add(uint64(s.batch.Bad))         //nolint:gosec // counts
	c.unknown.Add(uint64(s.batch.Unknown)) //nolint:gosec // counts
	c.events.Add(uint64(len(s.batch.Events)))
	c.batches.Add(1)
	if replayed {
		c.replayed.Add(1)
	}
	s.move(func(p *position) { p.passed(seq, sum) })
}

// What a source refuses of an engine that says more than can be.
var (
	errPlaces  = fmt.Errorf("source: blocks at more than %d instances, ranks and media", maxPlaces)
	errOrigins = fmt.Errorf("source: events of more than %d tenants, models and instances", maxOrigins)
)

// event applies one event. The manager is not frozen.
func (s *source) event(e *kvevent.Event, rank int) {
	src, err := s.of(e)
	if err != nil {
		s.counters.bad.Add(1)
		s.complain(err)
		return
	}
	if rank == kvevent.NoRank {
		rank = src.Rank
	}
	if e.Kind == kvevent.Cleared {
		s.cleared(e, rank)
		return
	}
	if e.Kind == kvevent.Stored {
		if err = s.hold(held{src.Scope.Tenant, src.Instance, rank, e.Medium}); err == nil {
			s.also(e)
			s.verify(e)
		}
	}
	if err == nil {
		err = s.m.cfg.Index.Apply(src, e, rank)
	}
	if err != nil {
		s.counters.bad.Add(1)
		s.complain(err)
	}
}

// of says what an event is of. Engines speak for themselves alone; events of a pool's master name what they are of.
func (s *source) of(e *kvevent.Event) (*conductor.Source, error) {
	if s.Type != Mooncake {
		return &s.own, nil
	}
	salt := e.Salt
	e.Salt = nil // it is that of the engine's scope
	if src := s.origins[origin{string(e.Tenant), string(e.Model), string(e.Backend), string(salt)}]; src != nil {
		return src, nil
	}
	o := origin{string(e.Tenant), string(e.Model), string(e.Backend), string(salt)}
	if len(s.origins) >= maxOrigins {
		return nil, errOrigins
	}
	src := s.own
	for _, f := range []struct {
		field *string
		value string
	}{{&src.Scope.Tenant, o.tenant}, {&src.Scope.Model, o.model}, {&src.Instance, o.backend}, {&src.Scope.Salt, o.salt}} {
		if f.value != "" {
			*f.field = f.value
		}
	}
	s.origins[o] = &src
	return &src, nil
}

// hold takes note that a source has blocks at a place.
func (s *source) hold(at held) error {
	if s.last == at {
		return nil
	}
	if _, there := s.held[at]; !there {
		if len(s.held) >= maxPlaces {
			return errPlaces
		}
		s.held[at] = struct{}{}
	}
	s.last = at
	return nil
}

// also takes note of another scope that an engine has stored blocks in.
func (s *source) also(e *kvevent.Event) {
	own := &s.own.Scope
	if len(e.Tokens) == 0 || s.Type == Mooncake ||
		(e.BlockSize == 0 || e.BlockSize == own.BlockSize) && (len(e.LoRA) == 0 || string(e.LoRA) == own.LoRA) {
		return
	}
	scope := *own
	if e.BlockSize > 0 {
		scope.BlockSize = e.BlockSize
	}
	if len(e.LoRA) > 0 {
		scope.LoRA = string(e.LoRA)
	}
	s.remember(scope)
}

// remember adds a scope to those that events without one are looked for in. The oldest makes room.
func (s *source) remember(scope conductor.Scope) {
	if _, there := s.alsoIn[scope]; there {
		return
	}
	if len(s.own.Also) >= maxAlso {
		delete(s.alsoIn, s.own.Also[0])
		s.own.Also = s.own.Also[1:]
	}
	s.alsoIn[scope] = struct{}{}
	s.own.Also = append(s.own.Also, scope)
}

// cleared drops what an event says is gone: of a rank and, if it names one, a medium; of a pool, what it names.
func (s *source) cleared(e *kvevent.Event, rank int) {
	s.drop(func(at held) bool {
		return (e.Medium == kvevent.Media || e.Medium == at.Medium) && (rank == kvevent.NoRank || rank == at.Rank) &&
			(s.Type != Mooncake || named(e.Backend, at.Instance) && named(e.Tenant, at.Tenant))
	})
	if s.Type != Mooncake && e.Medium == kvevent.Media && len(s.held) == 0 {
		s.mu.Lock()
		s.partial = false // it has nothing that is not known
		s.mu.Unlock()
	}
}

// named reports whether an event is of what it may have named.
func named(name []byte, is string) bool { return len(name) == 0 || string(name) == is }

// drop clears places of the source. The manager is not frozen.
func (s *source) drop(which func(held) bool) {
	for at := range s.held {
		if which(at) {
			s.m.cfg.Index.ClearRank(at.Tenant, at.Instance, at.Rank, at.Medium)
			delete(s.held, at)
		}
	}
	s.last = held{}
}

// forget drops all that is known of the source, and up to where. partial says that it will be told of no more than a part of
// what the engine has.
func (s *source) forget(partial bool) {
	s.m.frozen.RLock()
	defer s.m.frozen.RUnlock()
	s.drop(func(held) bool { return true })
	s.own.Also = nil
	clear(s.alsoIn)
	clear(s.origins)
	s.move((*position).forget)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.partial = partial
}

// covers reports whether a batch begins with a clear of all that is known of the source: what was missed before it does not
// matter then.
func (s *source) covers(payload []byte) bool {
	if s.Type == Mooncake || !bytes.Contains(payload, clearedName) || s.batch.Decode(payload) != nil || len(s.batch.Events) == 0 {
		return false
	}
	first := &s.batch.Events[0]
	rank := s.batch.RankOf(first)
	if rank == kvevent.NoRank {
		rank = s.own.Rank
	}
	for at := range s.held {
		if at.Rank != rank {
			return false
		}
	}
	return first.Kind == kvevent.Cleared && first.Medium == kvevent.Media
}

// clearedName is in each batch that clears: few are, and others need not be decoded to know that.
var clearedName = []byte("AllBlocksCleared")

// sumOf tells batches apart.
func sumOf(payload []byte) uint64 { return xxh3.Hash(payload) }

// complain notes what was bad last.
func (s *source) complain(err error) {
	s.m.cfg.Logger.Debug("an event is passed over", append(s.attrs(), slog.Any("error", err))...)
	s.trouble(err)
}
