package shm

import (
	"errors"
	"fmt"
	"os"
)

// Layout is how large an outbox is. All members of a room have the same; what is 0 is as in [DefaultLayout].
type Layout struct {
	Tracks    int // logs that are independent of each other
	Slots     int // of a track, a power of two: so many chunks may be published and not yet released
	SlotBytes int // the most a chunk may have
}

// DefaultLayout has a track for inputs and one for results. Chunks should be small enough that one is written while the one before is
// read, and that all that two members have under way stays in their caches, but large enough that the 0.2 us of a hand-over are
// nothing beside the copy. An exchange of two processes as an all-reduce makes it (publish one half, reduce the other, publish that,
// copy) takes, on two busy cores with 2 MiB of L2 each, p50 in us, best of 5 runs:
//
//	bytes    4 x 64 KiB  8 x 64  16 x 64  4 x 128  8 x 128  16 x 128  4 x 256  4 x 512  8 x 32 KiB
//	64 KiB           17      18       19       17       19        21       17       17       19
//	1 MiB           213     297      282      286      304       270      273      292      312
//	16 MiB         3552    5579     5313    6026      5684      5467     5731     6136     9018
//
// So anything from 64 to 256 KiB will do as far as that machine can tell; less costs. More slots let a member that is off its core be
// late without stopping the others.
var DefaultLayout = Layout{Tracks: 2, Slots: 8, SlotBytes: 128 << 10}

// Bounds of a layout and a room, far above what is of use: they keep sums of bytes from overflowing.
const (
	maxTracks    = 16
	maxSlots     = 4096
	maxSlotBytes = 64 << 20
	maxMembers   = 1024
)

// orDefault fills in what is 0, and checks.
func (l Layout) orDefault() (Layout, error) {
	for _, f := range []struct {
		n    *int
		def  int
		most int
		what string
	}{
		{&l.Tracks, DefaultLayout.Tracks, maxTracks, "tracks"},
		{&l.Slots, DefaultLayout.Slots, maxSlots, "slots"},
		{&l.SlotBytes, DefaultLayout.SlotBytes, maxSlotBytes, "bytes in a slot"},
	} {
		if *f.n == 0 {
			*f.n = f.def
		}
		if *f.n < 0 || *f.n > f.most {
			return l, fmt.Errorf("%w: a layout has 1 to %d %s, not %d", ErrConfig, f.most, f.what, *f.n)
		}
	}
	if l.Slots&(l.Slots-1) != 0 {
		return l, fmt.Errorf("%w: the number of slots is a power of two, not %d", ErrConfig, l.Slots)
	}
	return l, nil
}

// An outbox is a page-aligned head and the slots of each track. The head is lines of [apart] bytes:
//
//	starved, by track               uint64: not 0 while the owner waits for a slot of it
//	released, by track and member   uint64: how many chunks of that member the owner of this outbox has released
//
// A slot begins with a header of 64 bytes and goes on with the chunk, so that a small one comes with its header:
//
//	0  turn  uint64: 1 + the number of the chunk in its track, stored last
//	8  seq, 16 sig  uint64
//	24 step, 28 len uint32
const (
	slotTurn   = 0
	slotSeq    = 8
	slotSig    = 16
	slotStep   = 24
	slotLen    = 28
	slotHeader = 64
)

func (l Layout) starvedAt(track int) int              { return track * apart }
func (l Layout) releasedAt(track, k, members int) int { return (l.Tracks + track*members + k) * apart }

func (l Layout) head(members int) int { return wholePages(l.Tracks * (1 + members) * apart) }

func (l Layout) slotSpan() int         { return (slotHeader + l.SlotBytes + apart - 1) &^ (apart - 1) }
func (l Layout) trackSpan() int        { return l.Slots * l.slotSpan() }
func (l Layout) bytes(members int) int { return wholePages(l.head(members) + l.Tracks*l.trackSpan()) }

func (l Layout) track(mem []byte, t, members int) []byte { // its slots
	return mem[l.head(members)+t*l.trackSpan():][:l.trackSpan()]
}

// Outbox is a member's memory in a room: what it publishes, and how far it has read what others have. No other process can
// write to it.
type Outbox struct {
	layout  Layout
	members int
	mem     []byte
	f       *os.File
}

// NewOutbox makes the outbox of a member of a room of so many members.
func NewOutbox(l Layout, members int) (*Outbox, error) {
	l, err := l.orDefault()
	if err != nil {
		return nil, err
	}
	if members < 1 || members > maxMembers {
		return nil, fmt.Errorf("%w: a room has 1 to %d members, not %d", ErrConfig, maxMembers, members)
	}
	size := l.bytes(members)
	if size > maxOutbox {
		return nil, fmt.Errorf("%w: an outbox of %d bytes, the most is %d", ErrConfig, size, maxOutbox)
	}
	f, err := create("larder-outbox", size)
	if err != nil {
		return nil, err
	}
	mem, err := mapFile(f, size, true)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	sealWrites(f)
	return &Outbox{layout: l, members: members, mem: mem, f: f}, nil
}

// maxOutbox bounds an outbox in bytes.
const maxOutbox = 1 << 30

// File is what the others open. It stays the outbox's.
func (o *Outbox) File() *os.File { return o.f }

// Layout is the outbox's size, with defaults filled in.
func (o *Outbox) Layout() Layout { return o.layout }

// Close lets go of the memory, of an outbox that has no room; a room closes its own.
func (o *Outbox) Close() error {
	if o.mem == nil {
		return nil
	}
	mem := o.mem
	o.mem = nil
	return errors.Join(unmap(mem), o.f.Close())
}
