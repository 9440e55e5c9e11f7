package transfer

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
)

// Handle names a buffer of a segment under one generation. Who knows it may read and write there.
type Handle struct {
	ID         uint32 `json:"id"`
	Generation uint64 `json:"generation,string"` // random, never 0
}

// BufferInfo describes a buffer to other processes.
type BufferInfo struct {
	Handle
	Name     string `json:"name,omitempty"` // the owner's choice, at most maxName bytes
	Bytes    uint64 `json:"bytes"`
	ReadOnly bool   `json:"read_only,omitempty"`
	Storage  bool   `json:"storage,omitempty"`  // it has no memory: see [Engine.RegisterStorage]
	Location string `json:"location,omitempty"` // where its memory lies: an entry of the topology's matrix; empty if not known
}

// maxName bounds the names of engines and buffers, in bytes: they stand in a descriptor, of which all must fit a frame.
const maxName = 128

// maxListed bounds the buffers in a descriptor for the same reason; maxBuffers bounds all of an engine. Each takes a word of
// a table that processes of this host map, and a few hundred bytes here: a device of 4 TiB in regions of 64 MiB has as many.
const (
	maxListed  = 4096
	maxBuffers = 64 << 10
)

// Buffer is memory that other processes may reach. Its methods may be called concurrently.
type Buffer struct {
	e    *Engine
	info BufferInfo
	mem  []byte
	slot int // in the table that processes of this host see; -1: none, since nobody can map it

	unlisted bool

	file   *os.File // that mem is mapped from; nil if it is this process's alone
	offset int64
	own    bool    // mem and file are the buffer's own
	pinned *pinned // as NICs know it; nil if there are none

	suspect atomic.Bool // a part of mem was found to be gone

	storage Storage         // nil if it is memory
	ctx     context.Context //nolint:containedctx // the storage's calls; it ends when the buffer is retired
	cancel  context.CancelFunc
	failing atomic.Bool // the last call of the storage failed

	mu      sync.Mutex
	retired bool
	users   []interrupter // at work in it; one that is so twice is listed twice
	idle    chan struct{} // closed when it is retired and has no user
	gone    sync.Once
}

// interrupter is what is at work in a buffer for a peer. It lets go of it soon after interrupt was called.
type interrupter interface{ interrupt() }

// BufferOptions say what others may do with a buffer.
type BufferOptions struct {
	Name     string // for descriptors
	ReadOnly bool   // WRITEs are refused
	Unlisted bool   // it stands in no descriptor: whoever needs it is told its handle in another way
	// File is what the memory is mapped from, shared, and Offset where in it: processes of this host map it too, and copy
	// by themselves. They can reach nothing else of the file as long as they keep to the protocol; one that must not be
	// trusted with it must not be given a token. The file must stay open until [Buffer.Retire] has returned.
	File   *os.File
	Offset int64
	// Location is where the memory lies, as the topology's matrix calls it: cpu:0, gpu:1. Empty asks the kernel.
	Location string
}

// Allocate makes memory of n bytes and registers it, so that processes of this host can map it. The memory goes with
// [Buffer.Retire].
func (e *Engine) Allocate(n int, o BufferOptions) (*Buffer, []byte, error) {
	if n <= 0 {
		return nil, nil, fmt.Errorf("transfer: allocate %q: %d bytes", o.Name, n)
	}
	p, err := newPages("larder-buffer", n)
	if err != nil {
		return nil, nil, err
	}
	o.File, o.Offset = p.f, 0
	b, err := e.register(p.b, o, true)
	if err != nil {
		p.close()
		return nil, nil, err
	}
	return b, p.b, nil
}

// Register makes mem reachable for others. It must stay mapped until [Buffer.Retire] has returned.
func (e *Engine) Register(mem []byte, o BufferOptions) (*Buffer, error) {
	return e.register(mem, o, false)
}

func (e *Engine) register(mem []byte, o BufferOptions, own bool) (*Buffer, error) {
	if len(mem) == 0 {
		return nil, fmt.Errorf("transfer: register %q: no memory", o.Name)
	}
	b := &Buffer{mem: mem, file: o.File, offset: o.Offset, own: own}
	b.info.Bytes = uint64(len(mem))
	b.pinned = e.rdma.register(mem, bufferAccess(o.ReadOnly))
	if err := e.add(b, o); err != nil {
		return nil, errors.Join(err, e.rdma.deregister(b.pinned))
	}
	return b, nil
}

// add puts a buffer, which has its length, into the engine's table, under a number and a generation of its own.
func (e *Engine) add(b *Buffer, o BufferOptions) error {
	if n := max(len(o.Name), len(o.Location)); n > maxName {
		return fmt.Errorf("transfer: register: the name or location has %d bytes, at most %d fit", n, maxName)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	if b.unlisted = o.Unlisted; e.registered >= maxBuffers || !b.unlisted && e.listed >= maxListed {
		return fmt.Errorf("transfer: register %q: %d buffers are registered, of at most %d, and %d are listed, of at most %d: retire some",
			o.Name, e.registered, maxBuffers, e.listed, maxListed)
	}
	generation, err := newGeneration()
	if err != nil {
		return err
	}
	switch n := len(e.freeSlots); {
	case b.storage != nil:
		b.slot = -1
	case n > 0:
		b.slot, e.freeSlots = e.freeSlots[n-1], e.freeSlots[:n-1]
	default:
		b.slot, e.slots = e.slots, e.slots+1
	}
	e.lastBuffer++
	b.e, b.idle = e, make(chan struct{})
	b.info.Handle = Handle{ID: e.lastBuffer &^ storageBit, Generation: generation}
	b.info.Name, b.info.ReadOnly, b.info.Storage = o.Name, o.ReadOnly, b.storage != nil
	e.locate(b, &o)
	if b.info.Storage {
		b.info.ID |= storageBit
	}
	if e.sharer != nil {
		e.sharer.publish(b, b.info.Generation)
	}
	e.buffers.m.Store(b.info.ID, b)
	e.count(b, 1)
	return nil
}

// bufferTable finds buffers by their ids, without a lock.
type bufferTable struct{ m sync.Map }

// of is the buffer of an id, nil if there is none.
func (t *bufferTable) of(id uint32) *Buffer {
	v, _ := t.m.Load(id)
	b, _ := v.(*Buffer)
	return b
}

// all are the buffers, in no order.
func (t *bufferTable) all(yield func(*Buffer) bool) {
	t.m.Range(func(_, v any) bool {
		b, _ := v.(*Buffer)
		return yield(b)
	})
}

// count counts a buffer, and has the descriptor be published if it is in there. The caller holds mu.
func (e *Engine) count(b *Buffer, by int) {
	e.registered += by
	if !b.unlisted {
		e.listed += by
		e.changed()
	}
}

// newGeneration draws one. Who cannot read it cannot guess it.
func newGeneration() (uint64, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, fmt.Errorf("transfer: draw a generation: %w", err)
	}
	return binary.LittleEndian.Uint64(b[:]) | 1, nil
}

// Info describes the buffer.
func (b *Buffer) Info() BufferInfo { return b.info }

// Retire takes the buffer out of the segment, and returns when nobody reads from it or writes to it for a peer any more.
// Transfers that are at work in it fail with [ErrStale]. If ctx ends first the buffer stays fenced: call Retire again
// before the memory is used for something else.
func (b *Buffer) Retire(ctx context.Context) error {
	b.fence()
	select {
	case <-b.idle:
	case <-ctx.Done():
		return fmt.Errorf("transfer: retire buffer %d: %w", b.info.ID, ctx.Err())
	}
	if b.e.sharer != nil && !b.e.sharer.settle(ctx.Done()) {
		return fmt.Errorf("transfer: retire buffer %d: a process of this host that has mapped it is in the middle of a copy: %w",
			b.info.ID, ctx.Err())
	}
	if err := b.deregister(ctx); err != nil {
		return fmt.Errorf("transfer: retire buffer %d: %w", b.info.ID, err)
	}
	b.gone.Do(func() {
		b.e.freeSlot(b.slot)
		if b.own {
			(&pages{b.file, b.mem}).close()
		}
	})
	return nil
}

// fence lets nobody into the buffer any more, and has those leave who are at work in it.
func (b *Buffer) fence() {
	b.e.forget(b)
	b.mu.Lock()
	if !b.retired {
		b.retired = true
		if len(b.users) == 0 {
			close(b.idle)
		}
		if b.e.sharer != nil {
			b.e.sharer.publish(b, 0)
		}
	}
	users := slices.Clone(b.users)
	b.mu.Unlock()
	if b.cancel != nil {
		b.cancel()
	}
	for _, u := range users {
		u.interrupt()
	}
}

func (e *Engine) freeSlot(slot int) {
	if slot < 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.freeSlots = append(e.freeSlots, slot)
}

// forget takes a buffer out of the engine's table.
func (e *Engine) forget(b *Buffer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, there := e.buffers.m.LoadAndDelete(b.info.ID); there {
		e.count(b, -1)
	}
}

// find finds the buffer that a request means, if it may do what it asks for.
func (e *Engine) find(op Op, h Handle, off, length uint64) (*Buffer, error) {
	b := e.buffers.of(h.ID)
	if b == nil || b.info.Generation != h.Generation {
		return nil, ErrStale
	}
	switch {
	case off > b.info.Bytes || length > b.info.Bytes-off:
		return nil, ErrRange
	case op == Write && b.info.ReadOnly:
		return nil, ErrReadOnly
	}
	return b, nil
}

// hold finds the bytes that a request means, and keeps them until release. Storage has none, but is kept.
func (e *Engine) hold(op Op, h Handle, off, length uint64, by interrupter) (*Buffer, []byte, error) {
	b, err := e.find(op, h, off, length)
	if err != nil {
		return nil, nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.retired {
		return nil, nil, ErrStale
	}
	b.users = append(b.users, by)
	if b.storage != nil {
		return b, nil, nil
	}
	return b, b.mem[off : off+length : off+length], nil
}

// retain holds once more what its caller holds.
func (b *Buffer) retain(by interrupter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.users = append(b.users, by)
}

// looked comes after a look into the buffer's memory, and before anybody is told what was there. The race detector does not
// see that whoever is told writes later, but it sees the lock, which each writer has had since.
func (b *Buffer) looked() {
	b.mu.Lock()
	defer b.mu.Unlock()
}

// release ends a hold.
func (b *Buffer) release(by interrupter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	last := len(b.users) - 1
	for i, u := range b.users {
		if u == by {
			b.users[i], b.users[last] = b.users[last], nil
			b.users = b.users[:last]
			break
		}
	}
	if b.retired && len(b.users) == 0 {
		close(b.idle)
	}
}
