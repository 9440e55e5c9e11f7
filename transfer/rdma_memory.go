package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// pinned is memory that is registered with every NIC that takes it.
type pinned struct {
	b       []byte
	address uint64
	access  Access
	regions []atomic.Pointer[Region] // by port; nil if the NIC does not know it
}

// register makes memory known to all NICs. One that does not take it, for there may not be more locked memory say, does not
// lead to it: other transports do.
func (r *rdma) register(b []byte, access Access) *pinned {
	if r == nil {
		return nil
	}
	m := &pinned{b: b, address: uint64(addressOf(b)), access: access, regions: make([]atomic.Pointer[Region], len(r.ports))}
	for _, p := range r.ports {
		if err := p.register(m); err != nil {
			r.e.cfg.Logger.Warn("transfer: a NIC does not take memory", slog.String("nic", p.nic.Name()), slog.Int("bytes", len(b)),
				slog.Any("error", err))
		}
	}
	r.edit(func(list []*pinned) []*pinned {
		at, _ := slices.BinarySearchFunc(list, m.address, func(o *pinned, a uint64) int { return cmp.Compare(o.address, a) })
		return slices.Insert(list, at, m)
	})
	return m
}

// edit changes the list of what is registered.
func (r *rdma) edit(fn func(list []*pinned) []*pinned) {
	r.editing.Lock()
	defer r.editing.Unlock()
	list := fn(slices.Clone(*r.local.Load()))
	r.local.Store(&list)
}

// deregister ends the use of memory. When it returns nil no NIC reads it or writes to it any more.
func (r *rdma) deregister(m *pinned) (err error) {
	if r == nil || m == nil {
		return nil
	}
	r.edit(func(list []*pinned) []*pinned { return slices.DeleteFunc(list, func(o *pinned) bool { return o == m }) })
	for _, p := range r.ports {
		err = errors.Join(err, p.deregister(m))
	}
	return err
}

// deregister ends what NICs know of a buffer that is retired. ctx ends the wait: a NIC that is being reset takes its time.
func (b *Buffer) deregister(ctx context.Context) error {
	if b.pinned == nil {
		return nil
	}
	done := make(chan error, 1)
	go func() { done <- b.e.rdma.deregister(b.pinned) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// bufferAccess is how a buffer is registered. Memory that nobody may write may be mapped for reading only.
func bufferAccess(readOnly bool) Access {
	if readOnly {
		return RemoteRead
	}
	return LocalWrite | RemoteRead | RemoteWrite
}

// find is the registered memory in which a piece of a request lies, nil if there is none that serves.
func (r *rdma) find(b []byte, op Op) *pinned {
	address, list := uint64(addressOf(b)), *r.local.Load()
	at, found := slices.BinarySearchFunc(list, address, func(o *pinned, a uint64) int { return cmp.Compare(o.address, a) })
	if !found {
		at--
	}
	if at < 0 {
		return nil
	}
	m := list[at]
	off := address - m.address
	if off > uint64(len(m.b)) || uint64(len(b)) > uint64(len(m.b))-off || op == Read && m.access&LocalWrite == 0 {
		return nil
	}
	return m
}

// keysRemembered is of how many retired regions a NIC's keys are remembered. Peers may keep a key until they hear that it is
// stale, so none of these is given out again: it could open other memory at the same address. A NIC gives out each of its
// 2^32 keys in turn, or nearly.
const keysRemembered = 64 << 10

// keys remembers the last keys that were retired.
type keys struct {
	set  map[uint32]struct{}
	ring []uint32
	at   int
}

func (k *keys) add(key uint32) {
	if k.set == nil {
		k.set = map[uint32]struct{}{}
	}
	if _, known := k.set[key]; known {
		return
	}
	k.set[key] = struct{}{}
	if len(k.ring) < keysRemembered {
		k.ring = append(k.ring, key)
		return
	}
	delete(k.set, k.ring[k.at])
	k.ring[k.at] = key
	k.at = (k.at + 1) % keysRemembered
}

// keyTries is how many regions are made to find one whose key was not in use lately.
const keyTries = 8

var errKeys = errors.New("transfer: the NIC gives out keys that were in use lately")

// register makes memory known to this NIC.
func (p *port) register(m *pinned) error {
	p.regs.Lock()
	defer p.regs.Unlock()
	p.registered[m] = struct{}{} // a reset tries again
	return p.registerLocked(m)
}

func (p *port) registerLocked(m *pinned) error {
	var used []Region
	defer func() {
		for _, region := range used {
			_ = region.Deregister() // nobody knows it
		}
	}()
	for range keyTries {
		region, err := p.nic.Register(m.b, m.access)
		if err != nil {
			return fmt.Errorf("transfer: register %d bytes with NIC %s: %w", len(m.b), p.nic.Name(), err)
		}
		if _, recent := p.retired.set[region.RKey()]; recent {
			used = append(used, region)
			continue
		}
		m.regions[p.index].Store(&region)
		return nil
	}
	return errKeys
}

func (p *port) deregister(m *pinned) error {
	p.regs.Lock()
	defer p.regs.Unlock()
	if region := m.regions[p.index].Load(); region != nil {
		if err := (*region).Deregister(); err != nil {
			return fmt.Errorf("transfer: take memory from NIC %s: %w", p.nic.Name(), err)
		}
		p.retired.add((*region).RKey())
		m.regions[p.index].Store(nil)
	}
	delete(p.registered, m)
	return nil
}

// reset resets the NIC, which forgets all memory, and makes that known to it again, under other keys.
func (p *port) reset(ctx context.Context) error {
	p.regs.Lock()
	defer p.regs.Unlock()
	if err := p.nic.Reset(ctx); err != nil {
		return err
	}
	for m := range p.registered {
		if region := m.regions[p.index].Swap(nil); region != nil {
			p.retired.add((*region).RKey())
		}
	}
	for m := range p.registered {
		if err := p.registerLocked(m); err != nil {
			p.r.e.cfg.Logger.Warn("transfer: a NIC does not take memory after a reset", slog.String("nic", p.nic.Name()),
				slog.Int("bytes", len(m.b)), slog.Any("error", err))
		}
	}
	return nil
}

// bounce is memory for requests whose own is not registered: a pool of slabs of a slice each. Whoever finds it empty waits.
type bounce struct {
	r     *rdma
	mu    sync.Mutex
	m     *pinned
	slabs chan []byte
}

// minSlabs is how many slabs there are at least, however long slices are: so many slices are under way.
const minSlabs = 4

// open makes the slabs when they are first needed.
func (b *bounce) open() (chan []byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.slabs != nil {
		return b.slabs, nil
	}
	size := b.r.e.cfg.SliceSize
	n := max(b.r.e.cfg.BounceBytes/size, minSlabs)
	mem, err := unix.Mmap(-1, 0, n*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("transfer: map %d bytes of bounce buffers: %w", n*size, err)
	}
	b.m = b.r.register(mem, LocalWrite)
	b.slabs = make(chan []byte, n)
	for i := range n {
		b.slabs <- mem[i*size : (i+1)*size : (i+1)*size]
	}
	return b.slabs, nil
}

// close unmaps the slabs. No NIC uses them any more.
func (b *bounce) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.m != nil {
		_ = unix.Munmap(b.m.b) // it is one
	}
}
