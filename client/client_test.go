package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"larder/protocol"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// value makes bytes that only this key has.
func value(key string, size int) []byte {
	b := make([]byte, size)
	r := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(append([]byte(key), make([]byte, 8)...)), uint64(len(key))))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func put(tb testing.TB, c *Client, key string, size int) {
	tb.Helper()
	_, err := c.Put(tb.Context(), []byte(key), value(key, size))
	require.NoError(tb, err)
}

func requireValue(tb testing.TB, c *Client, key string, size int) {
	tb.Helper()
	got, err := c.Get(tb.Context(), []byte(key), nil)
	require.NoError(tb, err, key)
	require.True(tb, bytes.Equal(value(key, size), got), "wrong bytes of %s", key)
}

func TestPutGetOfEverySize(t *testing.T) {
	for _, sums := range []bool{false, true} {
		t.Run(fmt.Sprint("checksums=", sums), func(t *testing.T) {
			f := newFake(t, 64*16*4096, 1)
			c := f.open(t, func(cfg *Config) { cfg.Checksums = sums })
			for _, size := range []int{1, 100, 4095, 4096, 4097, 3 * 4096, 15*4096 + 1, 16 * 4096, 17 * 4096} {
				key := fmt.Sprint("size-", size)
				put(t, c, key, size)
				requireValue(t, c, key, size)
				v, err := c.View(t.Context(), []byte(key))
				require.NoError(t, err)
				require.Equal(t, value(key, size), v.Bytes())
				require.NoError(t, v.Close())
			}
			s := c.Stats()
			require.EqualValues(t, 9, s.Stored)
			require.EqualValues(t, 18, s.Hits)
			require.Zero(t, s.InFlight)
		})
	}
}

func TestMissingKeyAndBadArguments(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	_, err := c.Get(t.Context(), []byte("nope"), nil)
	require.ErrorIs(t, err, ErrNotFound)
	e, ok := errors.AsType[*Error](err)
	require.True(t, ok)
	require.Equal(t, "nope", e.Key)
	_, err = c.View(t.Context(), []byte("nope"))
	require.ErrorIs(t, err, ErrNotFound)
	for name, call := range map[string]func() error{
		"empty key":   func() error { _, err := c.Put(t.Context(), nil, []byte{1}); return err },
		"long key":    func() error { _, err := c.Get(t.Context(), make([]byte, protocol.MaxKeyBytes+1), nil); return err },
		"empty value": func() error { _, err := c.Put(t.Context(), []byte("k"), nil); return err },
		"empty alloc": func() error { _, err := c.Alloc(t.Context(), []byte("k"), 0); return err },
		"too many results": func() error {
			return c.PutBatchInto(t.Context(), []Item{{Key: []byte("k"), Value: []byte{1}}}, make([]PutResult, 2))
		},
		"bad shard": func() error {
			_, err := c.Put(t.Context(), []byte("k"), []byte{1}, WithShard(2, 2))
			return err
		},
		"too many shards": func() error {
			_, err := c.Put(t.Context(), []byte("k"), []byte{1}, WithShard(0, MaxShards+1))
			return err
		},
		"too many shards of an Alloc": func() error {
			a, err := c.Alloc(t.Context(), []byte("k"), 1)
			require.NoError(t, err)
			_, err = a.Store(t.Context(), WithShard(0, MaxShards+1))
			return err
		},
		"too many shards to match": func() error {
			_, _, err := c.PrefixMatch(t.Context(), PrefixContext{}, []uint64{1}, MaxShards+1, false)
			return err
		},
	} {
		require.ErrorIs(t, call(), ErrConfig, name)
	}
	_, err = Open(t.Context(), Config{PageSize: 5000, Conns: 99, Tier: "tape", Addrs: []string{"nowhere"}})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "Tier")
	require.ErrorContains(t, err, "PageSize")
	require.ErrorContains(t, err, "Conns")
	require.ErrorContains(t, err, "nowhere")
}

func TestPutOfAHeldKeyFreesItsPage(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	put(t, c, "a", 4096)
	free := c.Stats().FreePages
	res, err := c.Put(t.Context(), []byte("a"), value("other", 4096))
	require.NoError(t, err)
	require.False(t, res.Stored)
	require.Equal(t, free, c.Stats().FreePages)
	requireValue(t, c, "a", 4096)
}

func TestBatchAsksOnceAndRegistersOnce(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, func(cfg *Config) { cfg.RegionSize = 20 * 4096 })
	items := batch("k", 8)
	res, err := c.PutBatch(t.Context(), items)
	require.NoError(t, err)
	for _, r := range res {
		require.True(t, r.Stored)
	}
	require.Equal(t, 1, f.count(protocol.TypeRequestAlloc))
	require.Equal(t, 1, f.count(protocol.TypeBatchRegister))
	require.Zero(t, f.count(protocol.TypeBatchExists), "the allocation has said what is held")

	items = append(items, batch("l", 4)...)
	res, err = c.PutBatch(t.Context(), items)
	require.NoError(t, err)
	for i, r := range res {
		require.Equal(t, i >= 8, r.Stored, i)
	}
	require.Equal(t, 1, f.count(protocol.TypeBatchExists), "free pages suffice: the keys are asked for instead")
	require.Equal(t, 1, f.count(protocol.TypeRequestAlloc))
	require.Equal(t, 8, c.Stats().FreePages)
	var order []string
	f.do(func() {
		for e := f.order.Front(); e != nil; e = e.Next() {
			order = append(order, e.Value.(*fakeEntry).key)
		}
	})
	want := make([]string, 0, len(items))
	for i := range items {
		want = append(want, string(items[i].Key))
	}
	require.Equal(t, want, order, "recency is that of the items")

	keys := [][]byte{[]byte("k3"), []byte("none"), []byte("l0")}
	got, err := c.GetBatch(t.Context(), keys, [][]byte{make([]byte, 0, 4096)})
	require.NoError(t, err)
	require.Equal(t, value("k3", 4096), got[0])
	require.Nil(t, got[1])
	require.Equal(t, value("l0", 4096), got[2])
}

func batch(prefix string, n int) (items []Item) {
	for i := range n {
		key := fmt.Sprint(prefix, i)
		items = append(items, Item{Key: []byte(key), Value: value(key, 4096)})
	}
	return items
}

func TestViewBatchStopsAtTheFirstMiss(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, nil)
	_, err := c.PutBatch(t.Context(), batch("k", 6))
	require.NoError(t, err)
	keys := [][]byte{[]byte("k0"), []byte("k1"), []byte("gap"), []byte("k2")}
	v, err := c.ViewBatch(t.Context(), keys, true)
	require.NoError(t, err)
	require.Equal(t, 2, v.Len())
	require.Equal(t, value("k1", 4096), v.Bytes(1))
	require.NoError(t, v.Close())
	require.NoError(t, c.ViewInto(t.Context(), v, keys, false))
	require.Equal(t, 4, v.Len())
	require.Nil(t, v.Bytes(2))
	require.NoError(t, v.Close())
	n, err := c.LookupBatch(t.Context(), keys, true)
	require.NoError(t, err)
	require.Equal(t, 2, n)
}

func TestFullPoolEvictsInOneExchangeAndReusesThePages(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	for i := range 16 {
		put(t, c, fmt.Sprint("old", i), 4096)
	}
	before := f.count(protocol.TypeRequestAlloc)
	_, err := c.PutBatch(t.Context(), batch("new", 5))
	require.NoError(t, err)
	require.Equal(t, before+1, f.count(protocol.TypeRequestAlloc))
	s := c.Stats()
	require.EqualValues(t, 5, s.Evicted)
	require.Zero(t, s.FreePages)
	for i := range 5 {
		_, err := c.Get(t.Context(), fmt.Append(nil, "old", i), nil)
		require.ErrorIs(t, err, ErrNotFound)
		requireValue(t, c, fmt.Sprint("new", i), 4096)
	}
	for i := 5; i < 16; i++ {
		requireValue(t, c, fmt.Sprint("old", i), 4096)
	}
}

func TestBatchLargerThanThePoolIsStoredInParts(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	res, err := c.PutBatch(t.Context(), batch("k", 40))
	require.NoError(t, err)
	for _, r := range res {
		require.True(t, r.Stored)
	}
	requireValue(t, c, "k39", 4096)
}

func TestNoSpaceWhenNothingIsEvictable(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	_, err := c.Put(t.Context(), []byte("huge"), make([]byte, 64*4096))
	require.ErrorIs(t, err, ErrNoSpace)
	for i := range 16 {
		a, err := c.Alloc(t.Context(), fmt.Append(nil, i), 4096)
		require.NoError(t, err)
		defer a.Abort()
	}
	_, err = c.Put(t.Context(), []byte("more"), make([]byte, 1))
	require.ErrorIs(t, err, ErrNoSpace)
}

func TestEvictedPageRestsBeforeItIsUsedAgain(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	var now atomic.Int64
	now.Store(1e12)
	c := f.open(t, func(cfg *Config) { cfg.Clock = now.Load; cfg.TTL = time.Hour })
	for i := range 16 {
		put(t, c, strconv.Itoa(i), 4096)
	}
	f.do(func() { f.restMS = 300 })
	done := make(chan error, 1)
	go func() {
		_, err := c.Put(context.Background(), []byte("late"), value("late", 4096))
		done <- err
	}()
	require.Eventually(t, func() bool { return f.count(protocol.TypeRequestAlloc) > 1 }, time.Second, time.Millisecond)
	select {
	case err := <-done:
		t.Fatal("a page was used before its quarantine was over", err)
	case <-time.After(400 * time.Millisecond):
	}
	now.Add(400e6)
	require.NoError(t, <-done)
}

func TestConcurrentShortagesBecomeOneRequest(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, nil)
	hold := make(chan struct{})
	var once sync.Once
	f.do(func() {
		f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			if h.Type == protocol.TypeRequestAlloc {
				once.Do(func() { f.mu.Unlock(); <-hold; f.mu.Lock() })
			}
			return nil
		}
	})
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() { put(t, c, fmt.Sprint("c", i), 4096) })
	}
	require.Eventually(t, func() bool {
		c.pool.mu.Lock()
		defer c.pool.mu.Unlock()
		return len(c.pool.queue) == 40
	}, time.Second, time.Millisecond)
	close(hold)
	wg.Wait()
	require.LessOrEqual(t, f.count(protocol.TypeRequestAlloc), 3, "three regions of 16 pages hold 40 values")
}

func TestLostReplyIsRepeatedUnderTheSameSeq(t *testing.T) {
	for _, typ := range []protocol.Type{protocol.TypeBatchRegister, protocol.TypeRequestAlloc, protocol.TypeBatchDelete} {
		t.Run(typ.String(), func(t *testing.T) {
			f := newFake(t, 64*4096, 1)
			c := f.open(t, nil)
			var lost atomic.Bool
			f.do(func() {
				f.after = func(_ *fakeConn, h protocol.Header) bool { return h.Type != typ || lost.Swap(true) }
			})
			res, err := c.Put(t.Context(), []byte("k"), value("k", 4096))
			require.NoError(t, err)
			require.True(t, res.Stored, "the answer to the first attempt")
			requireValue(t, c, "k", 4096)
			was, err := c.Delete(t.Context(), []byte("k"))
			require.NoError(t, err)
			require.Equal(t, []bool{true}, was)
			require.True(t, lost.Load())
			require.Equal(t, 1, c.Stats().Regions)
			require.Eventually(t, func() bool {
				c.pool.mu.Lock()
				defer c.pool.mu.Unlock()
				c.pool.wakeResting()
				return c.pool.nfree == 16
			}, time.Second, time.Millisecond)
		})
	}
}

func TestMasterThatDoesNotAnswerIsLeft(t *testing.T) {
	f := newFake(t, 64*4096, 2)
	c := f.open(t, nil)
	put(t, c, "a", 4096)
	f.do(func() {
		f.before = func(cn *fakeConn, _ protocol.Header, _ []byte) *protocol.Error {
			if cn.m.id == 0 {
				return errSilent
			}
			f.leader = 1
			return nil
		}
	})
	put(t, c, "b", 4096)
	requireValue(t, c, "a", 4096)
	require.Contains(t, c.Leader(), "master1")
}

// A master that was cut off from the others knows of no leader, while they may have elected one.
func TestMasterThatKnowsOfNoLeaderIsLeft(t *testing.T) {
	f := newFake(t, 64*4096, 2)
	c := f.open(t, nil)
	put(t, c, "a", 4096)
	f.do(func() {
		f.before = func(cn *fakeConn, _ protocol.Header, _ []byte) *protocol.Error {
			if cn.m.id == 0 {
				return &protocol.Error{Code: protocol.CodeUnavailable, RetryAfterMS: 5, Message: "no leader is known"}
			}
			f.leader = 1
			return nil
		}
	})
	put(t, c, "b", 4096)
	require.Contains(t, c.Leader(), "master1")
}

// The master that was left comes last, once: it may hang.
func TestTheMasterThatWasLeftIsPassedOver(t *testing.T) {
	c := &Client{addrs: []string{"a", "b", "c"}, left: "b"}
	got := make([]string, 0, 5)
	for range 5 {
		addr, _ := c.nextAddr()
		got = append(got, addr)
	}
	require.Equal(t, []string{"a", "c", "a", "b", "c"}, got)
	c = &Client{addrs: []string{"alone"}, left: "alone"}
	addr, _ := c.nextAddr()
	require.Equal(t, "alone", addr)
}

func TestRedirectsFollowTheLeader(t *testing.T) {
	f := newFake(t, 256*4096, 3)
	c := f.open(t, nil)
	for i := range 12 {
		f.do(func() { f.leader = i % 3 })
		put(t, c, fmt.Sprint("k", i), 4096)
		requireValue(t, c, fmt.Sprint("k", i), 4096)
		require.Contains(t, c.Leader(), fmt.Sprint("master", i%3))
	}
	// An election: nobody leads for a while, and then another does.
	f.do(func() { f.leader = -1 })
	f.masters[2].cut()
	go func() { time.Sleep(100 * time.Millisecond); f.do(func() { f.leader = 1 }) }()
	put(t, c, "after", 4096)
	require.Equal(t, 1, c.Stats().Regions, "the session and its regions live on")
}

func TestInterruptedStoreIsCanceledBeforeItsPageIsUsedAgain(t *testing.T) {
	for _, applied := range []bool{false, true} {
		t.Run(fmt.Sprint("applied=", applied), func(t *testing.T) {
			f := newFake(t, 16*4096, 1)
			c := f.open(t, func(cfg *Config) { cfg.CallTimeout = 200 * time.Millisecond })
			put(t, c, "first", 4096)
			var open atomic.Bool
			var first atomic.Bool
			f.do(func() {
				mute := func(h protocol.Header) bool {
					if h.Type == protocol.TypeBatchRegister && !applied {
						return true // also what is still on its way when the others are answered
					}
					return (h.Type == protocol.TypeBatchRegister || h.Type == protocol.TypeCancel) && !open.Load()
				}
				f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
					if mute(h) && (!applied || h.Type != protocol.TypeBatchRegister || first.Swap(true)) {
						return errSilent
					}
					return nil
				}
				f.after = func(_ *fakeConn, h protocol.Header) bool { return !mute(h) }
			})
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_, err := c.Put(ctx, []byte("k"), value("k", 4096))
			require.ErrorIs(t, err, ErrTimeout)
			s := c.Stats()
			require.EqualValues(t, 1, s.Unknown)
			require.Equal(t, 14, s.FreePages, "the page is neither free nor used")
			require.Equal(t, 1, s.InFlight)
			require.Eventually(t, func() bool { return f.count(protocol.TypeBatchRegister) > 1 }, 3*time.Second, time.Millisecond,
				"it has reached the master, on however slow a machine")
			open.Store(true)
			require.Eventually(t, func() bool { return c.Stats().InFlight == 0 }, 3*time.Second, time.Millisecond)
			held, err := c.Exists(t.Context(), []byte("k"))
			require.NoError(t, err)
			require.Equal(t, applied, held)
			if applied {
				require.Equal(t, 14, c.Stats().FreePages)
				requireValue(t, c, "k", 4096)
			} else {
				require.Equal(t, 15, c.Stats().FreePages)
			}
		})
	}
}

func TestWindowBlocksFurtherMutations(t *testing.T) {
	var w window
	gone := make(chan struct{})
	for i := range protocol.Window {
		seq, err := w.take(t.Context(), gone)
		require.NoError(t, err)
		require.EqualValues(t, i+1, seq)
	}
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan uint64)
	go func() { seq, _ := w.take(ctx, gone); got <- seq }()
	w.release(2) // the lowest is still open
	select {
	case <-got:
		t.Fatal("the window is full")
	case <-time.After(20 * time.Millisecond):
	}
	w.release(1)
	require.EqualValues(t, protocol.Window+1, <-got)
	require.EqualValues(t, 3, w.acked())
	_, err := w.take(ctx, gone)
	require.NoError(t, err)
	cancel()
	_, err = w.take(ctx, gone)
	require.ErrorIs(t, err, context.Canceled)
	close(gone)
	_, err = w.take(t.Context(), gone)
	require.ErrorIs(t, err, ErrSessionExpired)
}

func TestExpiredSessionIsReplacedAndStoresGoOn(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	heard := make(chan Revoked, 10)
	c := f.open(t, func(cfg *Config) { cfg.OnRevoke = func(r Revoked) { heard <- r } })
	put(t, c, "a", 4096)
	id := c.pool.list[0].id
	a, err := c.Alloc(t.Context(), []byte("open"), 4096)
	require.NoError(t, err)
	old := c.sess.Load()
	f.do(func() { f.sessions[old.id].ended = true })
	put(t, c, "b", 4096)
	require.NotEqual(t, old.id, c.sess.Load().id)
	require.EqualValues(t, 1, c.Stats().SessionsLost)
	require.Equal(t, Revoked{Region: id, Bytes: 16 * 4096, Reason: ErrSessionExpired}, <-heard)
	copy(a.Bytes(), value("x", 4096)) // harmless: goes nowhere
	_, err = a.Store(t.Context())
	require.ErrorIs(t, err, ErrSessionExpired)
	require.True(t, Retryable(err))
	requireValue(t, c, "a", 4096)
	requireValue(t, c, "b", 4096)
	require.Equal(t, 1, c.Stats().Regions)
	f.do(func() {
		var r protocol.HandshakeRequest
		last := f.seen[0]
		for _, s := range f.seen {
			if s.typ == protocol.TypeHandshake {
				last = s
			}
		}
		require.NoError(t, r.Decode(last.payload))
		require.Equal(t, old.id, r.Replaces, "the new session says that the old one writes no more")
	})
	require.NoError(t, c.Close(t.Context()))
	require.Empty(t, heard, "each region is told of once, and what is given back is not")
}

// OnRevoke hears of a region once, whatever tells the client that it is gone.
func TestOnRevokeHearsOnceOfEachRegionThatIsGone(t *testing.T) {
	revoke := func(f *fake) {
		for _, r := range f.regions {
			r.owner.push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: r.RegionID, Epoch: r.Epoch}).Append(nil))
		}
	}
	for name, take := range map[string]func(f *fake){
		"a REVOKE":                  revoke,
		"a REVOKE that comes twice": func(f *fake) { revoke(f); revoke(f) },
		"the refusal of a store":    func(f *fake) { clear(f.regions) },
		"a store's refusal and a REVOKE": func(f *fake) {
			for _, r := range f.regions {
				r.owner, r.Epoch = nil, r.Epoch+1
			}
			for _, s := range f.sessions {
				for id, r := range f.regions {
					s.push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: id, Epoch: r.Epoch}).Append(nil))
				}
			}
		},
		"a HANDSHAKE": func(f *fake) {
			clear(f.regions)
			for _, s := range f.sessions {
				_ = s.conn.nc.Close()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 256*4096, 1)
			heard := make(chan Revoked, 10)
			c := f.open(t, func(cfg *Config) { cfg.OnRevoke = func(r Revoked) { heard <- r } })
			put(t, c, "a", 4096)
			want := Revoked{Region: c.pool.list[0].id, Bytes: 16 * 4096, Reason: ErrRevoked}
			f.do(func() {
				for e := f.order.Front(); e != nil; e = f.order.Front() {
					f.drop(e)
				}
				take(f)
			})
			put(t, c, "b", 4096)
			select {
			case got := <-heard:
				require.Equal(t, want, got)
			case <-time.After(5 * time.Second):
				require.Fail(t, "OnRevoke does not hear of it")
			}
			put(t, c, "c", 4096)
			require.NoError(t, c.Close(t.Context()))
			require.Empty(t, heard)
		})
	}
}

// A master that was restored from a snapshot may have given the number of a session to somebody else: the client that
// resumes it is not the one, and opens another. It keeps its session where the refusal does not mean that.
func TestASessionThatIsSomebodyElsesIsReplaced(t *testing.T) {
	for _, tc := range []struct {
		code protocol.Code
		lost bool
	}{
		{protocol.CodeForbidden, true},
		{protocol.CodeBadRequest, true},
		{protocol.CodeNotFound, true},
		{protocol.CodeBusy, false},
		{protocol.CodeUnavailable, false},
		{protocol.CodeLimit, false},
		{protocol.CodeInternal, false},
	} {
		t.Run(tc.code.String(), func(t *testing.T) {
			f := newFake(t, 64*4096, 1)
			c := f.open(t, nil)
			put(t, c, "a", 4096)
			old := c.sess.Load()
			refusals := 0
			f.do(func() {
				f.before = func(_ *fakeConn, h protocol.Header, p []byte) *protocol.Error {
					var r protocol.HandshakeRequest
					if h.Type == protocol.TypeHandshake {
						require.NoError(t, r.Decode(p))
					}
					if r.Session == 0 || refusals > 1 {
						return nil
					}
					refusals++
					return &protocol.Error{Code: tc.code, RetryAfterMS: 1}
				}
				for _, s := range f.sessions {
					_ = s.conn.nc.Close() // the client notices, and resumes
				}
			})
			put(t, c, "b", 4096)
			requireValue(t, c, "b", 4096)
			require.Equal(t, tc.lost, c.sess.Load().id != old.id)
			f.do(func() { require.Positive(t, refusals) })
		})
	}
}

func TestDeadlineSuspendsStoresUntilTheSessionIsConfirmed(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	var skew atomic.Int64
	c := f.open(t, func(cfg *Config) {
		base := time.Now()
		cfg.Clock = func() int64 { return int64(time.Since(base)) + skew.Load() }
	})
	put(t, c, "a", 4096)
	var mute atomic.Bool
	mute.Store(true)
	f.do(func() {
		f.before = func(*fakeConn, protocol.Header, []byte) *protocol.Error {
			if mute.Load() {
				return &protocol.Error{Code: protocol.CodeUnavailable}
			}
			return nil
		}
	})
	skew.Store(3000e6) // the TTL has passed
	written := c.Stats().BytesWritten
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := c.Put(ctx, []byte("b"), value("b", 4096))
	require.ErrorIs(t, err, ErrTimeout)
	require.Equal(t, written, c.Stats().BytesWritten, "no copy into the pool has started")
	require.NotZero(t, c.Stats().Suspended)
	mute.Store(false)
	put(t, c, "b", 4096)
	requireValue(t, c, "b", 4096)
	require.Zero(t, c.Stats().SessionsLost)
}

func TestRevokeMovesStoresToAnotherRegion(t *testing.T) {
	f := newFake(t, 256*4096, 1)
	heard := make(chan Revoked, 1)
	c := f.open(t, func(cfg *Config) { cfg.OnRevoke = func(r Revoked) { heard <- r } })
	put(t, c, "a", 4096)
	a, err := c.Alloc(t.Context(), []byte("open"), 4096)
	require.NoError(t, err)
	var id uint64
	f.do(func() {
		for _, r := range f.regions {
			id = r.RegionID
			for e := f.order.Front(); e != nil; e = f.order.Front() {
				f.drop(e)
			}
			r.owner.push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: id, Epoch: 1}).Append(nil))
		}
	})
	require.Equal(t, Revoked{Region: id, Bytes: 16 * 4096, Reason: ErrRevoked}, <-heard)
	require.Equal(t, 1, f.count(protocol.TypeRevokeDone))
	raw, err := os.ReadFile(f.path)
	require.NoError(t, err)
	copy(a.Bytes(), bytes.Repeat([]byte{0xEE}, 4096))
	now, err := os.ReadFile(f.path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(raw, now), "what is stored after the acknowledgement never reaches the pool")
	_, err = a.Store(t.Context())
	require.ErrorIs(t, err, ErrRevoked)
	put(t, c, "b", 4096)
	requireValue(t, c, "b", 4096)
	require.Equal(t, 1, c.Stats().Regions)
}

func TestRevokeUnderLoadFailsNoCall(t *testing.T) {
	f := newFake(t, 4096*4096, 1)
	f.limit = 4
	c := f.open(t, nil)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(3 * time.Millisecond):
			}
			f.do(func() {
				for _, r := range f.regions {
					for e := f.order.Front(); e != nil; {
						n := e.Next()
						if e.Value.(*fakeEntry).loc.RegionID == r.RegionID {
							f.drop(e)
						}
						e = n
					}
					r.Epoch++ // marked: nothing can be registered there any more
					r.owner.push(protocol.TypeRevoke, (&protocol.RevokePush{RegionID: r.RegionID, Epoch: r.Epoch}).Append(nil))
					break
				}
			})
		}
	})
	var workers sync.WaitGroup
	for w := range 4 {
		workers.Go(func() {
			for i := range 60 {
				key := fmt.Sprint("w", w, "-", i)
				if _, err := c.Put(context.Background(), []byte(key), value(key, 4096)); err != nil {
					t.Error(err)
					return
				}
				got, err := c.Get(context.Background(), []byte(key), nil)
				if err != nil && !errors.Is(err, ErrNotFound) {
					t.Error(err)
				} else if err == nil && !bytes.Equal(got, value(key, 4096)) {
					t.Errorf("wrong bytes of %s", key)
				}
			}
		})
	}
	workers.Wait()
	close(stop)
	wg.Wait()
	require.NotZero(t, c.Stats().Revoked)
}

func TestCopyThatOutlivesItsLeaseIsRepeated(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	var now atomic.Int64
	var jump atomic.Int64
	now.Store(1e12)
	// Each reading of the clock takes jump: so a lookup and its copy take at least two of them.
	c := f.open(t, func(cfg *Config) { cfg.Clock = func() int64 { return now.Add(jump.Load()) } })
	put(t, c, "k", 4096)
	f.do(func() { f.leaseMS = 100; f.ttlMS = 1 << 40 })
	jump.Store(110e6)
	requireValue(t, c, "k", 4096)
	require.NotZero(t, c.Stats().Late, "the first copies ended after 100 ms and were thrown away")
	f.do(func() {
		f.leaseMS = 1
	})
	jump.Store(600e6)
	_, err := c.Get(t.Context(), []byte("k"), nil)
	require.ErrorIs(t, err, ErrLease)
	require.True(t, Retryable(err))
	jump.Store(0)
}

func TestViewIsRenewedUntilItIsClosed(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	put(t, c, "k", 4096)
	f.do(func() { f.leaseMS = 1000 })
	v, err := c.View(t.Context(), []byte("k"))
	require.NoError(t, err)
	time.Sleep(1200 * time.Millisecond)
	require.NoError(t, v.Close())
	require.NotZero(t, f.count(protocol.TypeRenew))

	f.do(func() { f.leaseMS = 100 })
	v, err = c.View(t.Context(), []byte("k"))
	require.NoError(t, err)
	f.do(func() {
		f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			if h.Type == protocol.TypeRenew {
				return &protocol.Error{Code: protocol.CodeUnavailable}
			}
			return nil
		}
	})
	time.Sleep(200 * time.Millisecond)
	require.ErrorIs(t, v.Close(), ErrLease, "its lease ended while it was open")
}

func TestLeasesAreGivenBack(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	for i := range 16 {
		put(t, c, strconv.Itoa(i), 4096)
		requireValue(t, c, strconv.Itoa(i), 4096)
	}
	put(t, c, "more", 4096) // every entry was leased a moment ago; the leases are released ahead of the request
	require.EqualValues(t, 1, c.Stats().Evicted)
	requireValue(t, c, "more", 4096)
	require.Eventually(t, func() bool {
		n := 0
		f.do(func() { n = len(f.leases) })
		return n == 0
	}, time.Second, time.Millisecond, "an idle client gives its leases back too")
}

func TestLostBytesAreMisses(t *testing.T) {
	t.Run("new generation", func(t *testing.T) {
		f := newFake(t, 16*4096, 1)
		c := f.open(t, nil)
		put(t, c, "k", 4096)
		f.do(func() {
			f.gen++
			require.NoError(t, f.device.SetGeneration(f.gen, 1))
		})
		_, err := c.Get(t.Context(), []byte("k"), nil)
		require.ErrorIs(t, err, ErrNotFound)
		require.NotZero(t, c.Stats().GenerationMisses)
	})
	t.Run("checksum", func(t *testing.T) {
		f := newFake(t, 16*4096, 1)
		c := f.open(t, func(cfg *Config) { cfg.Checksums = true })
		file, err := os.OpenFile(f.path, os.O_RDWR, 0)
		require.NoError(t, err)
		for _, key := range []string{"k", "l"} {
			put(t, c, key, 4096)
			f.do(func() {
				x := f.entries[key].Value.(*fakeEntry)
				_, err = file.WriteAt([]byte{^value(key, 4096)[9]}, int64(x.loc.Offset+x.loc.KVOffset)+9)
			})
			require.NoError(t, err)
		}
		require.NoError(t, file.Close())
		_, err = c.Get(t.Context(), []byte("k"), nil)
		require.ErrorIs(t, err, ErrNotFound)
		v, err := c.ViewBatch(t.Context(), [][]byte{[]byte("l")}, true)
		require.NoError(t, err)
		require.Zero(t, v.Len())
		require.EqualValues(t, 2, c.Stats().ChecksumFaults)
		put(t, c, "k", 4096)
		requireValue(t, c, "k", 4096)
	})
	t.Run("truncated", func(t *testing.T) {
		f := newFake(t, 16*4096, 1)
		c := f.open(t, nil)
		put(t, c, "k", 4096)
		require.NoError(t, os.Truncate(f.path, 2<<20))
		_, err := c.Get(t.Context(), []byte("k"), nil)
		require.ErrorIs(t, err, ErrNotFound)
		require.NotZero(t, c.Stats().Truncated)
		_, err = c.Put(t.Context(), []byte("l"), value("l", 4096))
		require.Error(t, err, "and a store fails instead of crashing")
	})
}

func TestPagesFreedByOthersComeBack(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	a := f.open(t, nil)
	b := f.open(t, func(cfg *Config) { cfg.Instance = "b" })
	put(t, a, "k", 4096)
	put(t, a, "l", 4096)
	require.Equal(t, 14, a.Stats().FreePages)
	_, err := b.Delete(t.Context(), []byte("k"))
	require.NoError(t, err)
	var page protocol.Page
	f.do(func() {
		s := f.sessions[a.sess.Load().id]
		for _, r := range f.regions {
			page = protocol.Page{Key: []byte("k"), RegionID: r.RegionID, KVLength: 4096}
		}
		s.push(protocol.TypeFreed, (&protocol.FreedPush{ID: 1, Pages: []protocol.Page{page}}).Append(nil))
	})
	require.Eventually(t, func() bool { return a.Stats().FreePages == 15 }, time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return f.count(protocol.TypeFreedAck) == 1 }, time.Second, time.Millisecond)
	put(t, a, "m", 4096) // takes the page
	f.do(func() {
		s := f.sessions[a.sess.Load().id]
		s.push(protocol.TypeFreed, (&protocol.FreedPush{ID: 1, Pages: []protocol.Page{page}}).Append(nil))
	})
	require.Eventually(t, func() bool { return f.count(protocol.TypeFreedAck) == 2 }, time.Second, time.Millisecond)
	require.Equal(t, 14, a.Stats().FreePages, "news of an earlier life of the page changes nothing")
	requireValue(t, a, "m", 4096)
}

func TestReconnectBringsPagesInLine(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	for i := range 4 {
		put(t, c, strconv.Itoa(i), 4096)
	}
	f.do(func() { f.drop(f.entries["1"]); f.drop(f.entries["2"]) }) // while the client is cut off
	f.masters[0].cut()
	require.Eventually(t, func() bool {
		_, _ = c.Exists(t.Context(), []byte("0"))
		c.pool.mu.Lock()
		defer c.pool.mu.Unlock()
		c.pool.wakeResting()
		return c.pool.nfree == 14
	}, 2*time.Second, 5*time.Millisecond)
	for i := range 14 {
		put(t, c, fmt.Sprint("new", i), 4096)
	}
	requireValue(t, c, "0", 4096)
	requireValue(t, c, "3", 4096)
	require.Equal(t, 1, c.Stats().Regions)
}

// The answer to a REGISTER is lost, and the entry has gone by the next HANDSHAKE, which does not name its page. The answer
// to the repetition is the first one's, and nothing is told of the page any more.
func TestPagesOfARepeatedRegisterAreNotLost(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	put(t, c, "first", 4096)
	lose := true
	f.do(func() {
		f.after = func(_ *fakeConn, h protocol.Header) bool {
			if h.Type != protocol.TypeBatchRegister || !lose {
				return true
			}
			lose = false
			f.drop(f.entries["second"])
			return false
		}
	})
	res, err := c.Put(t.Context(), []byte("second"), value("second", 4096))
	require.NoError(t, err)
	require.True(t, res.Stored)
	require.Eventually(t, func() bool {
		c.pool.mu.Lock()
		defer c.pool.mu.Unlock()
		c.pool.wakeResting()
		return c.pool.nfree == 15
	}, 2*time.Second, 5*time.Millisecond)
	hellos := f.count(protocol.TypeHandshake)
	require.Never(t, func() bool { return f.count(protocol.TypeHandshake) != hellos }, 200*time.Millisecond, 20*time.Millisecond)
	requireValue(t, c, "first", 4096)
}

func TestZeroCopyStore(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, func(cfg *Config) { cfg.Checksums = true })
	a, err := c.Alloc(t.Context(), []byte("k"), 5000)
	require.NoError(t, err)
	require.Len(t, a.Bytes(), 5000)
	copy(a.Bytes(), value("k", 5000))
	res, err := a.Store(t.Context(), WithPrefix(&PrefixContext{Model: "m"}, 1, 0, 0))
	require.NoError(t, err)
	require.True(t, res.Stored)
	a.Abort() // does nothing
	_, err = a.Store(t.Context())
	require.ErrorIs(t, err, ErrConfig)
	requireValue(t, c, "k", 5000)
	b, err := c.Alloc(t.Context(), []byte("l"), 4096)
	require.NoError(t, err)
	free := c.Stats().FreePages
	b.Abort()
	require.Equal(t, free+1, c.Stats().FreePages)
}

func TestCloseEndsEverything(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, func(cfg *Config) { cfg.Conns = 3 })
	put(t, c, "k", 4096)
	v, err := c.View(t.Context(), []byte("k"))
	require.NoError(t, err)
	a, err := c.Alloc(t.Context(), []byte("open"), 4096)
	require.NoError(t, err)
	require.NoError(t, c.Close(t.Context()))
	require.NoError(t, c.Close(t.Context()))
	require.Equal(t, 1, f.count(protocol.TypeGoodbye))
	require.Equal(t, value("k", 4096), v.Bytes(), "an open view stays readable")
	_ = v.Close()
	copy(a.Bytes(), "harmless")
	a.Abort()
	_, err = c.Get(t.Context(), []byte("k"), nil)
	require.ErrorIs(t, err, ErrClosed)
	_, err = c.Put(t.Context(), []byte("k"), []byte{1})
	require.ErrorIs(t, err, ErrClosed)
	_, err = c.Alloc(t.Context(), []byte("k"), 1)
	require.ErrorIs(t, err, ErrClosed)
}

func TestOpenFailsWhenNobodyAnswers(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := Open(ctx, Config{Addrs: []string{"unix:" + t.TempDir() + "/none"}})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "no such file")
}

func TestManyClientsManyKeysNoWrongByte(t *testing.T) {
	f := newFake(t, 6*16*4096, 2)
	f.limit = 2
	var wg sync.WaitGroup
	for n := range 3 {
		c := f.open(t, func(cfg *Config) { cfg.Instance, cfg.Conns, cfg.Timeout = fmt.Sprint("c", n), 1+n, time.Minute })
		for w := range 4 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(n), uint64(w)))
				for range 150 {
					key := fmt.Sprint("k", r.IntN(120))
					size := len(key) * 4000 // one size per key
					if _, err := c.Put(context.Background(), []byte(key), value(key, size)); err != nil {
						t.Error(err)
						return
					}
					key = fmt.Sprint("k", r.IntN(120))
					got, err := c.Get(context.Background(), []byte(key), nil)
					if err != nil && !errors.Is(err, ErrNotFound) {
						t.Error(err)
						return
					}
					if err == nil && !bytes.Equal(got, value(key, len(key)*4000)) {
						t.Errorf("wrong bytes of %s", key)
						return
					}
				}
			})
		}
	}
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				f.do(func() { f.leader = i % 2 })
				f.masters[i%2].cut()
			}
		}
	}()
	wg.Wait()
	close(stop)
	<-done
}
