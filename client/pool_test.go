package client

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

func TestBitsetAgainstASlice(t *testing.T) {
	for _, n := range []int{1, 63, 64, 65, 4096, 5000} {
		b := newBitset(n, false)
		want := make([]bool, n)
		r := rand.New(rand.NewPCG(uint64(n), 1))
		for range 2000 {
			i := r.IntN(n)
			if want[i] = r.IntN(2) == 0; want[i] {
				b.add(i)
			} else {
				b.remove(i)
			}
			count, first := 0, -1
			for j, has := range want {
				if has {
					count++
					if first < 0 {
						first = j
					}
				}
			}
			require.Equal(t, count, b.count)
			require.Equal(t, first, b.first())
			require.Equal(t, want[i], b.has(i))
			size := 1 + r.IntN(5)
			at, total := naiveRuns(want, size)
			require.Equal(t, at, b.run(size))
			require.Equal(t, total, b.runs(size))
		}
	}
	full := newBitset(130, true)
	require.Equal(t, 0, full.run(130))
	require.Equal(t, -1, full.run(131))
	require.Equal(t, 2, full.runs(64))
}

// naiveRuns is the obvious way: the first run of size members, and how many disjoint ones fit.
func naiveRuns(set []bool, size int) (at, total int) {
	at = -1
	for i := 0; i < len(set); {
		n := 0
		for i+n < len(set) && set[i+n] {
			n++
		}
		if n >= size && at < 0 {
			at = i
		}
		total += n / size
		i += n + 1
	}
	return at, total
}

// testRegion is a region of n pages without memory.
func testRegion(id uint64, n int) *region {
	return &region{
		id: id, epoch: 1, length: uint64(n) * 4096, pageSize: 4096,
		free: newBitset(n, true), used: newBitset(n, false), keys: make([]uint64, n),
	}
}

func TestPageStates(t *testing.T) {
	now := int64(1e9)
	p := newPool(func() int64 { return now }, false)
	r := testRegion(1, 8)
	p.add(r)
	page := func(key string, at, n, after uint64) *protocol.Page {
		return &protocol.Page{Key: []byte(key), RegionID: 1, KVOffset: at * 4096, KVLength: n * 4096, FreeAfterMS: after}
	}

	a, ok := p.takeRun(3)
	require.True(t, ok)
	require.Equal(t, 5, p.nfree)
	r.keys[a.page] = keyHash([]byte("a"))
	p.use(a)
	p.freed(page("other", 0, 3, 0))
	require.Equal(t, 5, p.nfree, "another key's news")
	p.freed(&protocol.Page{Key: []byte("a"), RegionID: 1, KVOffset: 100, KVLength: 1})
	p.freed(&protocol.Page{Key: []byte("a"), RegionID: 1, KVOffset: 0, KVLength: 1 << 60})
	p.freed(&protocol.Page{Key: []byte("a"), RegionID: 9, KVLength: 1})
	require.Equal(t, 5, p.nfree, "places that are none")
	p.freed(page("a", 0, 3, 100))
	require.Equal(t, 5, p.nfree, "in quarantine")
	require.Positive(t, p.wakeResting())
	now += 99e6
	p.wakeResting()
	require.Equal(t, 5, p.nfree)
	now += 5e6
	require.Zero(t, p.wakeResting())
	require.Equal(t, 8, p.nfree)
	p.freed(page("a", 0, 3, 0))
	require.Equal(t, 8, p.nfree, "freed once")

	// News of the end of an entry comes before the answer to its REGISTER.
	b, _ := p.takeRun(1)
	r.keys[b.page] = keyHash([]byte("b"))
	p.freed(page("b", uint64(b.page), 1, 0))
	require.Equal(t, 7, p.nfree, "its fate is not known yet")
	p.use(b)
	require.Equal(t, 8, p.nfree)

	_, ok = p.takeRun(9)
	require.False(t, ok)
	c, _ := p.takeRun(8)
	p.forget(r, ErrRevoked)
	p.release(c)
	require.Zero(t, p.nfree, "pages of a region that was given up do not come back")
}

func TestReconcileLeavesAloneWhatChangedMeanwhile(t *testing.T) {
	now := int64(0)
	p := newPool(func() int64 { return now }, false)
	r := testRegion(1, 8)
	p.add(r)
	gone, _ := p.takeRun(1) // page 0: the master lost it
	p.use(gone)
	stays, _ := p.takeRun(1) // page 1
	p.use(stays)
	writing, _ := p.takeRun(1) // page 2: taken throughout
	p.noteChanges()
	fresh, _ := p.takeRun(1) // page 3: registered after the HANDSHAKE was sent
	p.use(fresh)
	late := testRegion(2, 4)
	p.add(late) // given after it was sent
	dropped, revoking := p.reconcile([]protocol.OwnedRegion{{
		Region:   protocol.Region{Handle: protocol.Handle{RegionID: 1}, Epoch: 1},
		Occupied: []uint64{1 * 4096, 4096, 5 * 4096, 2 * 4096},
	}}, 10)
	require.Empty(t, dropped)
	require.Empty(t, revoking)
	require.False(t, r.used.has(0))
	require.False(t, r.free.has(0), "rests first")
	require.True(t, r.used.has(1))
	require.False(t, r.free.has(2) || r.used.has(2), "still taken")
	require.True(t, r.used.has(3), "the master could not know")
	require.True(t, r.used.has(5) && r.used.has(6), "the master knows an entry there")
	require.Equal(t, 2+4, p.nfree) // pages 4 and 7, and the new region
	now += 20e6
	p.wakeResting()
	require.True(t, r.free.has(0))
	p.release(writing)

	p.noteChanges()
	dropped, _ = p.reconcile(nil, 10)
	require.Len(t, dropped, 2)
	require.Zero(t, p.nfree)
}

// A REQUEST_ALLOC evicts key a, and its answer is lost twice over: a HANDSHAKE tells that the page is free, the client
// stores a there again, and only then the answer comes.
func TestALateAnswerDoesNotFreeAPageThatWasStoredSince(t *testing.T) {
	now := int64(0)
	p := newPool(func() int64 { return now }, false)
	r := testRegion(1, 2)
	p.add(r)
	store := func() run {
		t.Helper()
		a, ok := p.takeRun(1)
		require.True(t, ok)
		r.keys[a.page] = keyHash([]byte("a"))
		p.use(a)
		return a
	}
	a := store()
	answer := &protocol.Page{Key: []byte("a"), RegionID: 1, KVOffset: a.offset(), KVLength: 4096}
	handshake := func(occupied ...uint64) {
		p.noteChanges()
		p.reconcile([]protocol.OwnedRegion{{
			Region: protocol.Region{Handle: protocol.Handle{RegionID: 1}, Epoch: 1}, Occupied: occupied,
		}}, 0)
	}
	p.asks()
	handshake()
	require.Equal(t, 2, p.nfree, "the eviction was told")
	require.Equal(t, a.page, store().page)
	p.evicted(answer)
	require.True(t, r.used.has(a.page), "it holds an entry")
	p.told()
	p.evicted(answer)
	require.False(t, r.used.has(a.page), "an answer to what was asked since is believed")

	b := store()
	p.asks()
	handshake(b.offset(), 4096)
	p.evicted(&protocol.Page{Key: []byte("a"), RegionID: 1, KVOffset: b.offset(), KVLength: 4096})
	require.False(t, r.used.has(b.page), "the retry evicted what has not changed since the HANDSHAKE")
}
