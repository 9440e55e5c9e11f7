package client

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// itemsOf makes the items that copy entries of a fake.
func itemsOf(f *fake, keys ...string) (items []CopyItem) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range keys {
		x := f.entries[k].Value.(*fakeEntry)
		items = append(items, CopyItem{Key: []byte(k), Version: x.version, From: append([]protocol.Location{x.loc}, x.copies...)})
	}
	return items
}

func TestCopyInAddsALocationToEntries(t *testing.T) {
	for name, first := range map[string]bool{"from a node to mapped memory": false, "from one node to another": true} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 64*4096, 1)
			f.features = protocol.FeatureCopies
			keys := laid(f.addNode(t, "dram", 1<<20), 6, 5000)
			to := f.addNode(t, "ssd", 1<<20)
			to.first = first
			c := f.open(t, nil)
			res, err := c.CopyIn(t.Context(), itemsOf(f, "far0", "far1", "far2", "far3", "far4", "far5"))
			require.NoError(t, err)
			want := uint64(1)
			if first {
				want = to.id
			}
			for i, k := range keys {
				require.Equal(t, CopyResult{Outcome: CopyDone, Bytes: 5000}, res[i])
				require.Equal(t, []uint64{2, want}, f.locations(string(k)))
			}
			require.EqualValues(t, 6, c.Stats().Copied)
			require.Equal(t, 1, f.count(protocol.TypeBatchRegister))
			require.Zero(t, f.count(protocol.TypeBatchExists))
			clear(f.nodes[0].mem) // what the copies were made of
			l := protocol.Location{}
			f.do(func() { l = f.entries["far3"].Value.(*fakeEntry).copies[0] })
			found := []protocol.LookupResult{{Found: true, Location: l, LeaseMS: unleased}}
			dst := make([][]byte, 1)
			c.readAll(t.Context(), [][]byte{[]byte("far3")}, found, c.cfg.Clock(), dst, 5000, func(_, got int) { require.Equal(t, good, got) })
			require.Equal(t, value("far3", 5000), dst[0])
		})
	}
}

func TestCopyInCopiesNothingWhoseLeaseIsOver(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	laid(f.addNode(t, "dram", 1<<20), 2, 4096)
	c := f.open(t, nil)
	items := itemsOf(f, "far0", "far1")
	for i := range items {
		items[i].Lease, items[i].LeaseMS, items[i].AskedAt = 77, 1000, c.cfg.Clock()-int64(time.Minute)
	}
	res, err := c.CopyIn(t.Context(), items)
	require.NoError(t, err)
	for i := range res {
		require.Equal(t, CopyFailed, res[i].Outcome)
		require.ErrorIs(t, res[i].Err, ErrLease)
	}
	require.Equal(t, []uint64{2}, f.locations("far0"))
	for i := range items {
		items[i].AskedAt = c.cfg.Clock()
	}
	res, err = c.CopyIn(t.Context(), items)
	require.NoError(t, err)
	require.Equal(t, CopyDone, res[0].Outcome)
	require.Equal(t, CopyDone, res[1].Outcome)
}

func TestCopyInSkipsWhatNeedsNoCopy(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	n := f.addNode(t, "dram", 1<<20)
	laid(n, 4, 4096)
	c := f.open(t, nil)
	items := itemsOf(f, "far0", "far1", "far2", "far3")
	_, err := c.CopyIn(t.Context(), items[3:])
	require.NoError(t, err)
	free := c.Stats().FreePages
	items[0].Version++ // it is another by now
	_, err = c.Delete(t.Context(), []byte("far1"))
	require.NoError(t, err)
	res, err := c.CopyIn(t.Context(), items)
	require.NoError(t, err)
	require.Equal(t, CopySkipped, res[0].Outcome)
	require.Equal(t, CopySkipped, res[1].Outcome)
	require.Equal(t, CopyDone, res[2].Outcome)
	require.Equal(t, CopySkipped, res[3].Outcome, "it has a location there")
	require.Equal(t, free-1, c.Stats().FreePages)
}

func TestCopyInPassesOverWhatCannotBeRead(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	a, b := f.addNode(t, "dram", 1<<20), f.addNode(t, "dram", 1<<20)
	for _, k := range []string{"both", "one", "sum"} {
		a.lay(k, value(k, 4096), checksum(value(k, 4096)))
	}
	b.lay("both", value("both", 4096), checksum(value("both", 4096)))
	c := f.open(t, nil)
	items := itemsOf(f, "both", "one", "sum")
	items = append(items, CopyItem{Key: []byte("none"), Version: 1}, CopyItem{Key: nil, From: items[0].From})
	items[2].From[0].Checksum++
	items[0].From[0].Generation++ // the device has lost them
	items[1].From[0].Generation++
	res, err := c.CopyIn(t.Context(), items)
	require.NoError(t, err)
	require.Equal(t, CopyDone, res[0].Outcome)
	require.Equal(t, CopyFailed, res[1].Outcome)
	require.ErrorIs(t, res[1].Err, errUnreadable)
	require.ErrorIs(t, res[2].Err, errUnreadable)
	require.ErrorIs(t, res[3].Err, ErrConfig)
	require.ErrorIs(t, res[4].Err, ErrConfig)
	require.Equal(t, 15, c.Stats().FreePages)
}

// A batch that is larger than what the client may have is copied in parts, of which the first makes room.
func TestCopyInEvicts(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	keys := laid(f.addNode(t, "dram", 1<<20), 40, 4096)
	c := f.open(t, func(cfg *Config) { cfg.Device = 1 })
	f.do(func() { f.restMS = 0 })
	put(t, c, "old", 4096)
	items := make([]string, 0, len(keys))
	for _, k := range keys {
		items = append(items, string(k))
	}
	res, err := c.CopyIn(t.Context(), itemsOf(f, items[:10]...))
	require.NoError(t, err)
	require.Equal(t, CopyDone, res[9].Outcome)
}

// A page whose registration has no known outcome is neither freed nor used.
func TestACopyOfUnknownOutcomeKeepsItsPage(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	laid(f.addNode(t, "dram", 1<<20), 1, 4096)
	c := f.open(t, func(cfg *Config) { cfg.Timeout, cfg.CallTimeout = 300*time.Millisecond, 100*time.Millisecond })
	put(t, c, "a", 4096)
	free := c.Stats().FreePages
	f.do(func() {
		f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			if h.Type == protocol.TypeBatchRegister || h.Type == protocol.TypeCancel {
				return errSilent
			}
			return nil
		}
	})
	_, err := c.CopyIn(t.Context(), itemsOf(f, "far0"))
	require.Error(t, err)
	require.Equal(t, free-1, c.Stats().FreePages)
	f.do(func() { f.before = nil })
	require.Eventually(t, func() bool { return c.Stats().FreePages == free }, 5*time.Second, time.Millisecond)
}

func TestAValueThatTheLeaderWantsFasterIsPromoted(t *testing.T) {
	reads := map[string]func(t *testing.T, c *Client){
		"Get": func(t *testing.T, c *Client) { t.Helper(); requireValue(t, c, "far0", 4096) },
		"GetBatch": func(t *testing.T, c *Client) {
			t.Helper()
			_, err := c.GetBatch(t.Context(), [][]byte{[]byte("far0")}, nil)
			require.NoError(t, err)
		},
		"View": func(t *testing.T, c *Client) {
			t.Helper()
			v, err := c.View(t.Context(), []byte("far0"))
			require.NoError(t, err)
			require.NoError(t, v.Close())
		},
	}
	for name, read := range reads {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 16*4096, 1)
			f.features = protocol.FeatureCopies
			n := f.addNode(t, "ssd", 1<<20)
			laid(n, 1, 4096)
			f.do(func() { f.entries["far0"].Value.(*fakeEntry).promote = true })
			c := f.open(t, nil)
			read(t, c)
			require.Eventually(t, func() bool { return slices.Equal(f.locations("far0"), []uint64{2, 1}) }, 5*time.Second, time.Millisecond)
			clear(n.mem)
			requireValue(t, c, "far0", 4096) // the copy is read from now on
			require.Eventually(t, func() bool { return c.Stats().Promoted == 1 }, 5*time.Second, time.Millisecond)
		})
	}
}

// An entry that is promoted into a full tier takes the place of one that is cold, and that lies below, too. Where there is none
// it is let be, and nothing is asked for a while.
func TestAPromotionTakesThePlaceOfWhatLiesBelow(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.features, f.restMS = protocol.FeatureCopies, 20
	laid(f.addNode(t, "ssd", 1<<20), 2, 4096)
	f.do(func() {
		for _, k := range []string{"far0", "far1"} {
			f.entries[k].Value.(*fakeEntry).promote = true
		}
	})
	c := f.open(t, nil)
	for i := range 16 {
		put(t, c, fmt.Sprint("own", i), 4096)
	}
	declined := func() uint64 { return c.Stats().NotPromoted }
	requireValue(t, c, "far0", 4096)
	require.Eventually(t, func() bool { return declined() == 1 }, 5*time.Second, time.Millisecond)
	asked := f.count(protocol.TypeRequestAlloc)
	requireValue(t, c, "far0", 4096)
	require.EqualValues(t, 2, declined(), "at once")
	f.do(func() {
		x := f.entries["own3"].Value.(*fakeEntry)
		x.copies = []protocol.Location{f.entries["far1"].Value.(*fakeEntry).loc}
	})
	c.promotions.rests.Store(0)
	requireValue(t, c, "far0", 4096)
	require.Eventually(t, func() bool { return slices.Equal(f.locations("far0"), []uint64{2, 1}) }, 5*time.Second, time.Millisecond)
	require.Equal(t, []uint64{2}, f.locations("own3"))
	require.Equal(t, asked+1, f.count(protocol.TypeRequestAlloc))
	for i := range 16 {
		if i != 3 {
			requireValue(t, c, fmt.Sprint("own", i), 4096)
		}
	}
}

func TestAClientMayDeclineToPromote(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.features = protocol.FeatureCopies
	laid(f.addNode(t, "ssd", 1<<20), 1, 4096)
	f.do(func() { f.entries["far0"].Value.(*fakeEntry).promote = true })
	c := f.open(t, func(cfg *Config) { cfg.NoPromote = true })
	put(t, c, "a", 4096)
	registered := f.count(protocol.TypeBatchRegister)
	for range 3 {
		requireValue(t, c, "far0", 4096)
	}
	require.NoError(t, c.Close(t.Context()))
	require.Equal(t, registered, f.count(protocol.TypeBatchRegister))
}

// What cannot be queued is declined, and the queue's bytes come back.
func TestPromotionsAreBounded(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.features = protocol.FeatureCopies
	n := f.addNode(t, "ssd", 4<<20)
	keys := laid(n, maxPromotions+20, 4096)
	f.do(func() {
		for _, k := range keys {
			f.entries[string(k)].Value.(*fakeEntry).promote = true
		}
		f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			if h.Type == protocol.TypeBatchRegister && f.entries["a"] != nil {
				return &protocol.Error{Code: protocol.CodeBusy}
			}
			return nil
		}
	})
	c := f.open(t, nil)
	put(t, c, "a", 4096)
	for range 2 {
		_, err := c.GetBatch(t.Context(), keys, nil)
		require.NoError(t, err)
	}
	require.Greater(t, c.Stats().NotPromoted, uint64(20))
	require.LessOrEqual(t, len(c.promotions.queue), maxPromotions)
	f.do(func() { f.before = nil })
	require.Eventually(t, func() bool { return c.promotions.bytes.Load() == 0 }, 10*time.Second, time.Millisecond)
}

// Items that wait for others to be copied keep their leases.
func TestCopyInKeepsTheLeasesOfWhatWaits(t *testing.T) {
	const size = copyWindow/2 + 1 // two do not fit one window
	f := newFake(t, 4*size/4096*4096, 1)
	n := f.addNode(t, "dram", 3*size)
	for _, k := range []string{"a", "b"} {
		n.lay(k, bytes.Repeat([]byte(k), size), 0)
	}
	c := f.open(t, func(cfg *Config) { cfg.RegionSize, cfg.CallTimeout = 2*size/4096*4096+8192, time.Second })
	items := itemsOf(f, "a", "b")
	asked := c.cfg.Clock()
	f.do(func() {
		for i := range items {
			items[i].Lease, items[i].LeaseMS, items[i].AskedAt = uint64(77000+i), 2000, asked
			f.leases[items[i].Lease] = f.entries[string(items[i].Key)].Value.(*fakeEntry)
		}
		f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error { // the first takes longer than a lease
			if h.Type == protocol.TypeBatchRegister && c.cfg.Clock() < asked+3*int64(time.Second) {
				return errSilent
			}
			return nil
		}
	})
	res, err := c.CopyIn(t.Context(), items)
	require.NoError(t, err)
	for i := range res {
		require.Equal(t, CopyResult{Outcome: CopyDone, Bytes: size}, res[i])
	}
	require.NotZero(t, f.count(protocol.TypeRenew))
}
