package collective

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/shm"
)

// world is a mesh all of whose members are in this process, polled one by one in an order that a seed decides: so any
// interleaving can be had again.
type world struct {
	tb    testing.TB
	rng   *rand.Rand
	comms []*Comm
	rooms []*shm.Room // by member, nil for those without
	place []int       // by member: index in its room
	lanes [][]lane    // by member and peer
	dead  []bool
	at    []int // by member: operations that it is through with, the one that failed too
}

type lane struct {
	p *shm.Producer
	c *shm.Consumer
}

// setting is what a world is made of. Sizes are small so that little data takes many blocks.
type setting struct {
	hosts  [][]int // nil: all on one
	layout shm.Layout
	ring   int
	table  Table
}

func oneHost(n int) [][]int {
	h := make([]int, n)
	for i := range h {
		h[i] = i
	}
	return [][]int{h}
}

func apart(n int) [][]int {
	h := make([][]int, n)
	for i := range h {
		h[i] = []int{i}
	}
	return h
}

var tiny = setting{
	layout: shm.Layout{Tracks: 3, Slots: 4, SlotBytes: 2048},
	ring:   4096,
	table: Table{
		OneShot: 512, LaneOneShot: 1024, Split: 1024, SplitMembers: 3, Tree: 5, TreeBytes: 256, Stage: 512,
		RoomChunk: 2048, LaneChunk: 512, Blocks: 3, MinChunk: 128, Lead: 2,
	},
}

type silent struct{}

func (silent) Ring() {}

func newWorld(tb testing.TB, s setting, seed uint64) *world {
	tb.Helper()
	n := len(slices.Concat(s.hosts...))
	w := &world{
		tb: tb, rng: rand.New(rand.NewPCG(seed, 1)), comms: make([]*Comm, n), rooms: make([]*shm.Room, n), place: make([]int, n),
		lanes: make([][]lane, n), dead: make([]bool, n),
	}
	for i := range w.lanes {
		w.lanes[i] = make([]lane, n)
	}
	for _, h := range s.hosts {
		if len(h) > 1 {
			w.share(h, s.layout)
		}
	}
	alone := len(s.hosts) == 1
	for i := range n {
		for k := range n {
			if i != k && !alone {
				p, c, err := shm.NewRing(s.ring, silent{}, silent{})
				require.NoError(tb, err)
				w.lanes[i][k].p, w.lanes[k][i].c = p, c
				tb.Cleanup(func() { require.NoError(tb, p.Close()); require.NoError(tb, c.Close()) })
			}
		}
	}
	for i := range n {
		local := s.hosts[slices.IndexFunc(s.hosts, func(h []int) bool { return slices.Contains(h, i) })]
		w.comms[i] = &Comm{
			N: n, Me: i, Room: w.rooms[i], Local: local, Hosts: s.hosts, Table: s.table,
			Lane: func(k int) (*shm.Producer, *shm.Consumer) { return w.lanes[i][k].p, w.lanes[i][k].c },
		}
	}
	return w
}

// share gives members a room.
func (w *world) share(h []int, l shm.Layout) {
	var boxes []*shm.Outbox
	var files []*os.File
	bells := make([]*shm.Bell, len(h))
	for i := range h {
		o, err := shm.NewOutbox(l, len(h))
		require.NoError(w.tb, err)
		bells[i], err = shm.NewBell()
		require.NoError(w.tb, err)
		boxes, files = append(boxes, o), append(files, o.File())
	}
	for i, member := range h {
		r, err := shm.NewRoom(i, boxes[i], files, bells)
		require.NoError(w.tb, err)
		w.rooms[member], w.place[member] = r, i
	}
	w.tb.Cleanup(func() {
		for i, member := range h {
			require.NoError(w.tb, w.rooms[member].Close())
			require.NoError(w.tb, bells[i].Close())
		}
	})
}

// kill has a member do nothing any more, and the others learn of it.
func (w *world) kill(dead int) {
	w.dead[dead] = true
	for i, c := range w.comms {
		if i == dead {
			continue
		}
		if w.rooms[i] != nil && slices.Contains(c.Local, dead) {
			w.rooms[i].Down(w.place[dead])
		}
		if l := w.lanes[i][dead]; l.p != nil {
			l.p.Fail(os.ErrClosed)
			l.c.Fail(os.ErrClosed)
		}
	}
}

// hang is after how many polls of each member without progress of any a test has hung. It is more than stallPolls.
const hang = 4 * stallPolls

// run has every member that is alive carry out its operations one after the other, and gives each one's error. step is called
// after every poll.
func (w *world) run(ops [][]Args, step func(polled int)) []error {
	n := len(w.comms)
	running, at, errs := make([]Op, n), make([]int, n), make([]error, n)
	w.at = at
	var list []int // of those that are at it
	idle, progress := 0, uint64(0)
	for polls := 0; ; polls++ {
		if polls%16 == 0 || len(list) == 0 {
			list = list[:0]
			now := uint64(0)
			for i, c := range w.comms {
				now += c.Progress() + uint64(at[i])
				if !w.dead[i] && errs[i] == nil && at[i] < len(ops[i]) {
					list = append(list, i)
				}
			}
			if len(list) == 0 {
				return errs
			}
			if idle++; now != progress {
				idle, progress = 0, now
			}
			if idle > hang*n/16 {
				w.tb.Fatalf("hangs: members %v of %d are in operations %v", list, n, at)
			}
		}
		i := list[w.rng.IntN(len(list))]
		if w.rng.IntN(4) == 0 {
			i = list[0] // some run ahead
		}
		if w.dead[i] || errs[i] != nil || at[i] == len(ops[i]) {
			list = slices.DeleteFunc(list, func(k int) bool { return k == i })
			continue
		}
		if running[i] == nil {
			running[i] = w.comms[i].Start(ops[i][at[i]])
		}
		done, err := running[i].Poll()
		if done || err != nil {
			running[i], errs[i] = nil, err
			at[i]++
		}
		if step != nil {
			step(i)
		}
	}
}
