package shm

import (
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rooms makes a room of n members that are all in this process, each with mappings of its own, and a bell for each.
func rooms(tb testing.TB, n int, l Layout) ([]*Room, []*Bell) {
	tb.Helper()
	var boxes []*Outbox
	var files []*os.File
	var bells []*Bell
	for range n {
		o, err := NewOutbox(l, n)
		require.NoError(tb, err)
		b, err := NewBell()
		require.NoError(tb, err)
		boxes, files, bells = append(boxes, o), append(files, o.File()), append(bells, b)
		tb.Cleanup(func() { require.NoError(tb, b.Close()) })
	}
	var all []*Room
	for me := range n {
		r, err := NewRoom(me, boxes[me], files, bells)
		require.NoError(tb, err)
		all = append(all, r)
	}
	tb.Cleanup(func() {
		for _, r := range all {
			require.NoError(tb, r.Close())
		}
	})
	return all, bells
}

func TestEveryMemberReadsWhatAllOthersPublish(t *testing.T) {
	const members, chunks = 4, 2000
	all, bells := rooms(t, members, Layout{Tracks: 2, Slots: 4, SlotBytes: 4096})
	for _, b := range bells {
		b.longest = time.Hour // no wake-up may be lost
	}
	var wg sync.WaitGroup
	for me, r := range all {
		wg.Go(func() {
			sent, got := 0, make([]int, members)
			got[me] = chunks
			for done := 0; done < members || sent < chunks; {
				require.True(t, bells[me].Wait(func() bool {
					moved := false
					if sent < chunks {
						if p := r.TryReserve(sent & 1); p != nil {
							n := sent % len(p)
							p[0], p[n] = byte(me), byte(sent)
							r.Publish(sent&1, Header{Seq: uint64(sent), Sig: uint64(me), Step: 7}, n+1)
							sent++
							moved = true
						}
					}
					done = 0
					for k := range members {
						if got[k] < chunks {
							if h, p, ok := r.TryRead(got[k]&1, k); ok {
								require.Equal(t, Header{uint64(got[k]), uint64(k), 7, uint32(got[k]%4096 + 1)}, h)
								require.Equal(t, byte(got[k]), p[len(p)-1])
								r.Release(got[k]&1, k)
								got[k]++
								moved = true
							}
						}
						if got[k] == chunks {
							done++
						}
					}
					return moved || done == members && sent == chunks
				}, 5*time.Microsecond, 10*time.Second))
			}
		})
	}
	wg.Wait()
}

// publish publishes a number on track 0.
func publish(t *testing.T, r *Room, n byte) {
	t.Helper()
	p := r.TryReserve(0)
	require.NotNil(t, p)
	p[0] = n
	r.Publish(0, Header{Seq: uint64(n)}, 1)
}

func TestASlotIsUsedAgainWhenAllHaveReleasedIt(t *testing.T) {
	all, _ := rooms(t, 3, Layout{Slots: 2, SlotBytes: 100})
	a, b, c := all[0], all[1], all[2]
	publish(t, a, 1)
	publish(t, a, 2)
	require.Nil(t, a.TryReserve(0))
	require.NotNil(t, a.TryReserve(1), "another track is another log")
	require.Len(t, a.TryReserve(1), 100)
	b.Release(0, 0)
	require.Nil(t, a.TryReserve(0), "one of two")
	_, p, ok := c.TryRead(0, 0)
	require.True(t, ok)
	require.Equal(t, []byte{1}, p)
	require.Equal(t, uint64(2), c.Published(0, 0))
	require.Equal(t, uint64(2), a.Published(0, 0))
	c.Release(0, 0)
	publish(t, a, 3)
	require.Nil(t, a.TryReserve(0))
	_, p, _ = b.TryRead(0, 0)
	require.Equal(t, []byte{2}, p)
}

func TestADeadMember(t *testing.T) {
	all, _ := rooms(t, 3, Layout{Slots: 2, SlotBytes: 100})
	a, b, dead := all[0], all[1], all[2]
	publish(t, dead, 7)
	publish(t, dead, 8)
	publish(t, a, 1)
	publish(t, a, 2)
	b.Release(0, 0)
	require.Nil(t, a.TryReserve(0))
	a.Down(2)
	require.True(t, a.IsDown(2))
	require.NotNil(t, a.TryReserve(0), "nobody waits for the dead")
	for _, want := range []byte{7, 8} {
		_, p, ok := a.TryRead(0, 2)
		require.True(t, ok, "what it has published stays")
		require.Equal(t, []byte{want}, p)
		a.Release(0, 2)
	}
	_, _, ok := a.TryRead(0, 2)
	require.False(t, ok)
	require.NoError(t, a.Err(2))
	require.Equal(t, uint64(2), a.Published(0, 2))
}

// One that others have declared down while it lives finds that they have gone on.
func TestAMemberThatOthersHaveLeftBehind(t *testing.T) {
	all, _ := rooms(t, 2, Layout{Slots: 2, SlotBytes: 100})
	a, behind := all[0], all[1]
	a.Down(1)
	for n := range byte(5) {
		publish(t, a, n)
	}
	_, _, ok := behind.TryRead(0, 0)
	require.False(t, ok)
	require.ErrorIs(t, behind.Err(0), ErrCorrupt)
	require.ErrorContains(t, behind.Err(0), "member 0")
}

func TestAnOutboxOfNonsense(t *testing.T) {
	l, err := Layout{Slots: 2, SlotBytes: 100}.orDefault()
	require.NoError(t, err)
	slot := func(r *Room) []byte { return r.tracks[0].slots }
	for name, garble := range map[string]func(mad *Room){
		"turn":                func(mad *Room) { word64(slot(mad), slotTurn).Store(77) },
		"length":              func(mad *Room) { word32(slot(mad), slotLen).Store(101) },
		"greatest length":     func(mad *Room) { word32(slot(mad), slotLen).Store(^uint32(0)) },
		"releases":            func(mad *Room) { word64(mad.own.mem, l.releasedAt(0, 0, 3)).Store(5) },
		"releases taken back": func(mad *Room) { word64(mad.own.mem, l.releasedAt(0, 0, 3)).Store(^uint64(0)) },
	} {
		t.Run(name, func(t *testing.T) {
			all, _ := rooms(t, 3, l)
			a, b, mad := all[0], all[1], all[2]
			publish(t, mad, 1)
			publish(t, b, 2)
			publish(t, a, 3)
			publish(t, a, 4)
			b.Release(0, 0)
			garble(mad)
			require.NotNil(t, func() []byte { // one of the two finds it
				if _, _, ok := a.TryRead(0, 2); ok {
					return a.TryReserve(0)
				}
				return []byte{}
			}(), "nobody waits for a member that has gone mad")
			require.ErrorIs(t, a.Err(2), ErrCorrupt)
			require.ErrorContains(t, a.Err(2), "member 2")
			_, _, ok := a.TryRead(0, 2)
			require.False(t, ok)
			_, p, ok := a.TryRead(0, 1)
			require.True(t, ok, "the others are not touched by it")
			require.Equal(t, []byte{2}, p)
			require.NoError(t, a.Err(1))
		})
	}
}

func TestNobodyElseWritesToAnOutbox(t *testing.T) {
	o, err := NewOutbox(Layout{}, 2)
	require.NoError(t, err)
	_, err = mapFile(o.File(), o.layout.bytes(2), true)
	require.Error(t, err)
	require.NoError(t, o.Close())
	require.NoError(t, o.Close())
}

func TestRoomsThatCannotBe(t *testing.T) {
	for name, l := range map[string]Layout{
		"negative": {Tracks: -1}, "slots": {Slots: 3}, "many slots": {Slots: 1 << 20}, "large": {SlotBytes: 1 << 40},
		"in all": {Tracks: 16, Slots: 4096, SlotBytes: 1 << 20},
	} {
		_, err := NewOutbox(l, 2)
		require.ErrorIs(t, err, ErrConfig, name)
	}
	_, err := NewOutbox(Layout{}, 0)
	require.ErrorIs(t, err, ErrConfig)
	a, err := NewOutbox(Layout{Slots: 2}, 2)
	require.NoError(t, err)
	b, err := NewOutbox(Layout{Slots: 4}, 2)
	require.NoError(t, err)
	own, theirs := twins(t)
	_, err = NewRoom(0, a, []*os.File{nil, b.File()}, []*Bell{own, theirs})
	require.ErrorIs(t, err, ErrFile, "another layout")
	require.ErrorContains(t, err, "member 1")
	_, err = NewRoom(0, a, []*os.File{nil, nil}, []*Bell{own, theirs})
	require.ErrorIs(t, err, ErrConfig)
	_, err = NewRoom(2, a, []*os.File{nil, b.File()}, []*Bell{own, theirs})
	require.ErrorIs(t, err, ErrConfig)
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// Four processes publish to each other as fast as they can, and check what they read. One after the other is killed.
func TestProcessesThatAreKilledOneAfterTheOther(t *testing.T) {
	s, cmds, ins := seats(t, childLayout, 4, "room %d %d")
	work := func(until func() bool) {
		deadline := time.Now().Add(20 * time.Second)
		for !until() {
			s.bell.Wait(func() bool {
				moved, err := s.step()
				require.NoError(t, err)
				return moved
			}, 5*time.Microsecond, 20*time.Millisecond)
			require.Less(t, time.Now(), deadline, "sent %d, got %d", s.sent, s.got)
		}
	}
	for k := 1; k < 3; k++ {
		goal := s.sent + 500
		work(func() bool { return s.sent >= goal })
		require.NoError(t, cmds[k].Process.Kill())
		require.Error(t, cmds[k].Wait())
		left := s.room.Published(0, k)
		s.room.Down(k)
		for other := k + 1; other < 4; other++ {
			_, err := ins[other].Write([]byte{byte('0' + k), '\n'})
			require.NoError(t, err)
		}
		goal = s.sent + 500
		work(func() bool { return s.sent >= goal && uint64(s.got[k]) == left })
		require.Equal(t, left, s.room.Published(0, k))
	}
	require.NoError(t, ins[3].Close())
	require.NoError(t, cmds[3].Wait())
}

// count is how many files and mappings the process has.
func count(t *testing.T) (files, maps int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	text, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return len(list), strings.Count(string(text), "larder-")
}

func TestNothingIsLeftBehind(t *testing.T) {
	use := func() {
		t.Run("", func(t *testing.T) {
			rooms(t, 3, Layout{})
			newRing(t, 4096)
			_, err := NewRoom(0, &Outbox{members: 1}, nil, nil)
			require.Error(t, err)
		})
		runtime.GC() // bells are unmapped by it
		runtime.GC()
	}
	use()
	require.Eventually(t, func() bool { runtime.GC(); _, maps := count(t); return maps == 0 }, 5*time.Second, time.Millisecond)
	files, _ := count(t)
	for range 5 {
		use()
	}
	after, _ := count(t)
	require.Equal(t, files, after)
	require.Eventually(t, func() bool { runtime.GC(); _, maps := count(t); return maps == 0 }, 5*time.Second, time.Millisecond)
}
