package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
)

// Header goes with a chunk. The room passes it on as it is.
type Header struct {
	Seq  uint64 // of the operation
	Sig  uint64 // of what the operation is: kind, type, count, root
	Step uint32 // within the operation
	Len  uint32 // of the chunk in bytes: Publish fills it in
}

// Room is where the members of a host publish chunks to each other. Each has an outbox with tracks; a track is a log of
// chunks, in slots that are used again once all living members have released what was in them.
//
// One goroutine at a time may use a room; Down and IsDown may be called by any.
type Room struct {
	me      int
	own     *Outbox
	members []member
	tracks  []track
}

// member is another member of the room, or me.
type member struct {
	mem  []byte // its outbox
	bell *Bell
	down atomic.Bool
	err  error   // why its outbox is not read any more
	read []reads // by track: what I have of it
}

// reads is one track of one member, as far as I have read it.
type reads struct {
	slots    []byte
	at       uint64         // chunks that I have released
	released *atomic.Uint64 // the same, in my outbox, for its owner to see
	starved  *atomic.Uint64 // in its outbox: it waits for my releases
}

// track is one of mine.
type track struct {
	slots   []byte
	at      uint64 // chunks that I have published
	free    uint64 // chunks that may have been published before somebody must be asked again
	starved *atomic.Uint64
	waits   bool
	others  []*atomic.Uint64 // by member: how many it has released, in its outbox
}

// NewRoom joins the outboxes of a host's members, which are counted from 0: own is that of member me, and closed with the room;
// others are the files of the rest, which may be closed afterwards, and bells theirs, which stay the caller's. What belongs to me in
// them is not looked at.
func NewRoom(me int, own *Outbox, others []*os.File, bells []*Bell) (*Room, error) {
	n := len(others)
	if n != own.members || len(bells) != n || me < 0 || me >= n {
		return nil, fmt.Errorf("%w: member %d of a room with %d files, %d bells, and an outbox for %d",
			ErrConfig, me, n, len(bells), own.members)
	}
	r := &Room{me: me, own: own, members: make([]member, n), tracks: make([]track, own.layout.Tracks)}
	size := own.layout.bytes(n)
	for k := range r.members {
		m := &r.members[k]
		if k == me {
			m.mem = own.mem
			continue
		}
		if others[k] == nil || bells[k] == nil {
			return nil, errors.Join(fmt.Errorf("%w: member %d has no file or no bell", ErrConfig, k), r.unmapOthers())
		}
		err := expect(others[k], size, "outbox")
		if err == nil {
			m.mem, err = mapFile(others[k], size, false)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("outbox of member %d: %w", k, err), r.unmapOthers())
		}
		m.bell = bells[k]
	}
	for t := range r.tracks {
		r.lay(t)
	}
	return r, nil
}

// lay finds the places of a track in everybody's memory.
func (r *Room) lay(t int) {
	l, n, own := r.own.layout, len(r.members), r.own.mem
	tr := &r.tracks[t]
	tr.slots, tr.free = l.track(own, t, n), wide(l.Slots)
	tr.starved = word64(own, l.starvedAt(t))
	tr.others = make([]*atomic.Uint64, n)
	for k := range r.members {
		m := &r.members[k]
		tr.others[k] = word64(m.mem, l.releasedAt(t, r.me, n))
		m.read = append(m.read, reads{
			slots:    l.track(m.mem, t, n),
			released: word64(own, l.releasedAt(t, k, n)),
			starved:  word64(m.mem, l.starvedAt(t)),
		})
	}
}

// Len is the number of members.
func (r *Room) Len() int { return len(r.members) }

// Me is which of them this process is.
func (r *Room) Me() int { return r.me }

// Layout is that of all outboxes.
func (r *Room) Layout() Layout { return r.own.layout }

// slot is where the i-th chunk of a track lies.
func (r *Room) slot(slots []byte, i uint64) []byte {
	span := r.own.layout.slotSpan()
	return slots[narrow(i&wide(r.own.layout.Slots-1))*span:][:span]
}

// TryReserve is the memory of the next chunk of mine on a track, SlotBytes long, or nil while a member that is alive has not
// released what is there. It may be called again before Publish, and is the same memory then. Where it was nil, my bell is rung
// when somebody releases.
func (r *Room) TryReserve(t int) []byte {
	tr := &r.tracks[t]
	if tr.at == tr.free && !r.rescan(tr, t) {
		if tr.waits {
			return nil
		}
		tr.waits = true
		tr.starved.Store(1)
		if !r.rescan(tr, t) { // who has not seen it may have released before
			return nil
		}
	}
	if tr.waits {
		tr.waits = false
		tr.starved.Store(0)
	}
	return r.slot(tr.slots, tr.at)[slotHeader:][:r.own.layout.SlotBytes:r.own.layout.SlotBytes]
}

// rescan looks how far the slowest living member is, and reports whether there is a slot.
func (r *Room) rescan(tr *track, t int) bool {
	slowest := tr.at
	for k := range r.members {
		m := &r.members[k]
		if k == r.me || m.down.Load() || m.err != nil {
			continue
		}
		released := tr.others[k].Load()
		if tr.at-released > wide(r.own.layout.Slots) { // more than there is, or fewer than it had
			r.corrupt(k, "it has released %d of %d chunks on track %d", released, tr.at, t)
			continue
		}
		slowest = min(slowest, released)
	}
	tr.free = slowest + wide(r.own.layout.Slots)
	return tr.at < tr.free
}

// Publish makes the first n bytes of what TryReserve has given visible to all others, with a header, and rings their bells. n may
// be 0: a mere signal.
func (r *Room) Publish(t int, h Header, n int) {
	tr := &r.tracks[t]
	if n < 0 || n > r.own.layout.SlotBytes || n > maxSlotBytes || tr.at == tr.free {
		panic(fmt.Sprintf("shm: publish %d bytes in a slot of %d that was not reserved", n, r.own.layout.SlotBytes))
	}
	s := r.slot(tr.slots, tr.at)
	h.Len = uint32(n)
	putHeader(s, h)
	tr.at++
	word64(s, slotTurn).Store(tr.at)
	for k := range r.members {
		if m := &r.members[k]; k != r.me && !m.down.Load() { // a dead one may seem to sleep for ever
			m.bell.Ring()
		}
	}
}

// TryRead is member k's next chunk on a track, the first that I have not released. It is valid until Release. A member that has gone
// mad may change it, so what is decoded is copied first. ok is false as long as there is none; Err may say why there will be none.
func (r *Room) TryRead(t, k int) (h Header, p []byte, ok bool) {
	m := &r.members[k]
	rd := &m.read[t]
	s := r.slot(rd.slots, rd.at)
	turn := word64(s, slotTurn).Load()
	if turn != rd.at+1 {
		r.expectOld(k, t, turn, rd.at)
		return Header{}, nil, false
	}
	if m.err != nil {
		return Header{}, nil, false
	}
	h = getHeader(s)
	if int(h.Len) > r.own.layout.SlotBytes {
		r.corrupt(k, "a chunk of %d bytes in a slot of %d on track %d", int(h.Len), r.own.layout.SlotBytes, t)
		return Header{}, nil, false
	}
	return h, s[slotHeader:][:h.Len:h.Len], true
}

// expectOld checks the turn of a slot that has nothing new: it is that of the chunk before, or none.
func (r *Room) expectOld(k, t int, turn, at uint64) {
	slots := wide(r.own.layout.Slots)
	if turn != 0 && turn+slots != at+1 {
		r.corrupt(k, "chunk %d where %d comes next on track %d", turn-1, at, t)
	}
}

// Release gives member k's chunk back that TryRead has given, and rings its bell if it waits for a slot.
func (r *Room) Release(t, k int) {
	m := &r.members[k]
	rd := &m.read[t]
	rd.at++
	rd.released.Store(rd.at)
	if rd.starved.Load() != 0 && k != r.me {
		m.bell.Ring()
	}
}

// Published is how many chunks member k has published on a track so far, whether or not I have released them. Once k is dead it is
// the same for all that ask.
func (r *Room) Published(t, k int) uint64 {
	if k == r.me {
		return r.tracks[t].at
	}
	rd := &r.members[k].read[t]
	n := rd.at
	for n-rd.at < wide(r.own.layout.Slots) && word64(r.slot(rd.slots, n), slotTurn).Load() == n+1 {
		n++
	}
	return n
}

// corrupt notes that a member's outbox is not to be read any more.
func (r *Room) corrupt(k int, format string, args ...any) {
	if m := &r.members[k]; m.err == nil {
		m.err = fmt.Errorf("%w: member %d of this host: %s", ErrCorrupt, k, fmt.Sprintf(format, args...))
	}
}

// Err is why nothing more will be read from member k, whose outbox holds nonsense, or nil. Nobody waits for its releases any more.
// A member that was declared down by others while it lives finds this, too: they have gone on without it.
func (r *Room) Err(k int) error { return r.members[k].err }

// Down says that member k is dead: nobody waits for its releases any more. What it has published stays readable.
func (r *Room) Down(k int) { r.members[k].down.Store(true) }

// IsDown reports whether Down was called.
func (r *Room) IsDown(k int) bool { return r.members[k].down.Load() }

// Close lets go of all memory, the own outbox's too. Chunks must not be touched any more, and no method called.
func (r *Room) Close() error { return errors.Join(r.unmapOthers(), r.own.Close()) }

func (r *Room) unmapOthers() (err error) {
	for k := range r.members {
		m := &r.members[k]
		if k != r.me && m.mem != nil {
			err = errors.Join(err, unmap(m.mem))
			m.mem = nil
		}
	}
	return err
}

// Headers are in the byte order of the host: nobody else reads them.

func putHeader(s []byte, h Header) {
	binary.NativeEndian.PutUint64(s[slotSeq:], h.Seq)
	binary.NativeEndian.PutUint64(s[slotSig:], h.Sig)
	binary.NativeEndian.PutUint32(s[slotStep:], h.Step)
	binary.NativeEndian.PutUint32(s[slotLen:], h.Len)
}

func getHeader(s []byte) Header {
	return Header{
		Seq: binary.NativeEndian.Uint64(s[slotSeq:]), Sig: binary.NativeEndian.Uint64(s[slotSig:]),
		Step: binary.NativeEndian.Uint32(s[slotStep:]), Len: binary.NativeEndian.Uint32(s[slotLen:]),
	}
}
