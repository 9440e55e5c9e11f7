package collective

import (
	"fmt"

	"larder/pg/shm"
)

// inRoom is the fabric of a host: blocks are written once, and all others read them, or release what they have no use for.
type inRoom struct {
	room  *shm.Room
	list  []int
	most  int          // bytes in a slot that are used
	taken *[2][]uint64 // by track and position: chunks that were released
}

func newInRoom(c *Comm) (*inRoom, error) {
	room, list := c.Room, c.Local
	if room.Len() != len(list) {
		return nil, fmt.Errorf("%w: a room of %d members, and %d that are local", ErrComm, room.Len(), len(list))
	}
	l := room.Layout()
	r := &inRoom{room: room, list: list, most: min(c.Table.RoomChunk, l.SlotBytes) &^ (leastChunk - 1), taken: &c.taken}
	if l.Tracks < tracks || r.most < len(list)*2*leastChunk {
		return nil, fmt.Errorf("%w: a room of %d members needs %d tracks and slots of %d bytes, not %d and %d: see Layout",
			ErrComm, len(list), tracks, len(list)*2*leastChunk, l.Tracks, l.SlotBytes)
	}
	for t := range c.taken {
		if c.taken[t] == nil {
			c.taken[t] = make([]uint64, len(list))
		}
	}
	return r, nil
}

func (r *inRoom) members() ([]int, int) { return r.list, r.room.Me() }

func (r *inRoom) shares() bool { return true }

func (r *inRoom) chunk(split bool) int {
	if split {
		return r.most / max(len(r.list)-1, 1) &^ (leastChunk - 1)
	}
	return r.most
}

// place is where in a block the piece of position to begins, of those of all but from.
func (r *inRoom) place(o *flow, from, to int) int {
	if to > from {
		to--
	}
	stride := o.piece
	if o.uneven {
		stride += lengthBytes
	}
	return to * stride
}

func (r *inRoom) send(o *flow, t, b int) bool {
	slot := r.room.TryReserve(t)
	if slot == nil {
		return false
	}
	n := 0
	if !o.split || t == results {
		n = o.fill(slot, t, b, 0)
	} else {
		for k := range r.list {
			if o.wants(t, o.me, k) {
				at := r.place(o, o.me, k)
				n = at + o.fill(slot[at:], t, b, k)
			}
		}
	}
	r.room.Publish(t, shm.Header{Seq: o.seq, Sig: o.sig, Step: u32(o.total[t] - 1 - b)}, n)
	return true
}

func (r *inRoom) peek(o *flow, t, from int) (piece []byte, left int, ok bool) {
	h, p, ok := r.room.TryRead(t, from)
	if !ok {
		return nil, 0, false
	}
	if h.Seq != o.seq || h.Sig != o.sig {
		o.differ(r.list[from], h.Seq, h.Sig)
		return nil, 0, false
	}
	if o.split && t == inputs {
		p = p[min(r.place(o, from, o.me), len(p)):]
	}
	return p, int(h.Step), true
}

func (r *inRoom) next(t, from int) {
	r.taken[t][from]++
	r.room.Release(t, from)
}

// dead counts what a member that is down has published. That does not change any more, and what the flow needs of it is the same at
// all members, so all come to the same end.
func (r *inRoom) dead(o *flow, from int) error {
	why := r.room.Err(from)
	if why == nil && !r.room.IsDown(from) {
		return nil
	}
	for t := range 2 {
		want := o.want[t][from]
		if want < 0 {
			want = 1
			if h, _, ok := r.room.TryRead(t, from); ok {
				want = int(h.Step) + 1
			}
		}
		if want > 0 && (why != nil || r.room.Published(t, from)-r.taken[t][from] < uint64(want)) {
			return &DownError{Member: r.list[from], Err: why}
		}
	}
	return nil
}

func (r *inRoom) look(o *flow) {
	r.hear(o)
	r.compare(o)
}

// compare finds members that are in another operation, by what they have published.
func (r *inRoom) compare(o *flow) {
	for k, member := range r.list {
		if k == o.me {
			continue
		}
		// Who tells of a later operation has done what it has to do here. Others may have come to tell something since all were heard.
		n, _, ahead := r.room.TryRead(notices, k)
		ahead = ahead && n.Seq>>stageBits > o.seq>>stageBits
		for t := range 2 {
			due := o.want[t][k] != 0
			h, _, ok := r.room.TryRead(t, k)
			switch {
			case ok && (h.Seq < o.seq || h.Seq == o.seq && !due || h.Seq > o.seq && due):
				o.differ(member, h.Seq, h.Sig)
			case !ok && ahead && due:
				o.differ(member, n.Seq, n.Sig)
			}
		}
	}
}

// hear takes notices that are not for later.
func (r *inRoom) hear(o *flow) {
	for k, member := range r.list {
		for k != r.room.Me() {
			h, p, ok := r.room.TryRead(notices, k)
			if !ok {
				break
			}
			n, err := readNotice(h.Seq, h.Sig, p)
			if o.heed(member, n, err) {
				break
			}
			r.room.Release(notices, k)
		}
	}
}

func (r *inRoom) notify(n notice) {
	if slot := r.room.TryReserve(notices); slot != nil {
		n.put(slot)
		r.room.Publish(notices, shm.Header{Seq: n.seq, Sig: n.sig}, noticeBytes)
	}
}
