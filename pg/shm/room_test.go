package shm

import (
	"os"
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
