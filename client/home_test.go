package client

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

func TestAHomeHearsOfGrantsFencesAndTasks(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	grants, fences, tasks := make(chan protocol.GrantPush, 1), make(chan protocol.FencePush, 1), make(chan protocol.TasksPush, 1)
	c := f.open(t, func(cfg *Config) {
		cfg.Home = true
		cfg.OnGrant = func(p protocol.GrantPush) { grants <- p }
		cfg.OnFence = func(p protocol.FencePush) { fences <- p }
		cfg.OnTasks = func(p protocol.TasksPush) { tasks <- p }
	})
	var s *fakeSession
	f.do(func() { s = f.sessions[c.Session()] })
	grant := protocol.GrantPush{ID: 3, RegionID: 4, Epoch: 5, Device: 2, Offset: 4096, Length: 8192}
	s.push(protocol.TypeGrant, grant.Append(nil))
	require.Equal(t, grant, <-grants)
	require.NoError(t, c.Granted(t.Context(), protocol.GrantedRequest{ID: 3, Fault: "no"}))
	fence := protocol.FencePush{RegionID: 4, Epoch: 5, Device: 2}
	s.push(protocol.TypeFence, fence.Append(nil))
	require.Equal(t, fence, <-fences)
	require.NoError(t, c.Fenced(t.Context(), protocol.FencedRequest{RegionID: 4, Epoch: 5, Device: 2}))
	s.push(protocol.TypeTasksPush, (&protocol.TasksPush{Device: 2}).Append(nil))
	require.Equal(t, protocol.TasksPush{Device: 2}, <-tasks)
	require.Equal(t, 1, f.count(protocol.TypeGranted))
	require.Equal(t, 1, f.count(protocol.TypeFenced))
}

func TestPushesThatAreNotCarriedOutAreBounded(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	hold := make(chan struct{})
	c := f.open(t, func(cfg *Config) {
		cfg.Home = true
		cfg.OnFence = func(protocol.FencePush) { <-hold }
	})
	defer close(hold)
	var s *fakeSession
	f.do(func() { s = f.sessions[c.Session()] })
	for range maxPushes + 3 {
		s.push(protocol.TypeFence, (&protocol.FencePush{RegionID: 1}).Append(nil))
	}
	require.Eventually(t, func() bool { return c.handlers.dropped.Load() == 3 }, 5*time.Second, time.Millisecond)
	put(t, c, "k", 4096) // the rest goes on
}

func TestAttachAndTasksAreExchanges(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, func(cfg *Config) { cfg.Home = true })
	var attached protocol.AttachRequest
	f.do(func() {
		f.answers = map[protocol.Type]func(p []byte) []byte{
			protocol.TypeAttach: func(p []byte) []byte {
				require.NoError(t, attached.Decode(p))
				return (&protocol.AttachReply{Device: 9, Generation: 11, Fresh: true}).Append(nil)
			},
			protocol.TypeTasks: func([]byte) []byte {
				return (&protocol.TasksReply{Canceled: []uint64{1}, Tasks: []protocol.Task{{ID: 2, Kind: "demote", Total: 1, Items: []protocol.TaskItem{
					{Key: []byte("k"), Slot: 3, Version: 4},
				}}}}).Append(nil)
			},
			protocol.TypeTaskDone: func([]byte) []byte { return (&protocol.SuccessReply{Success: true}).Append(nil) },
			protocol.TypeCopy: func([]byte) []byte {
				return (&protocol.CopyReply{Tasks: []uint64{2}, Found: []bool{true}}).Append(nil)
			},
			protocol.TypeTaskStatus: func([]byte) []byte {
				return (&protocol.TaskStatusReply{Tasks: []protocol.TaskStatus{{ID: 2, State: "running"}}}).Append(nil)
			},
			protocol.TypeCancelTask: func([]byte) []byte {
				return (&protocol.TaskStatusReply{Tasks: []protocol.TaskStatus{{ID: 2, State: "canceled"}}}).Append(nil)
			},
		}
	})
	rep, err := c.Attach(t.Context(), protocol.AttachRequest{UUID: "00112233445566778899aabbccddeeff", Node: "n", Tier: "dram", Size: 1 << 20})
	require.NoError(t, err)
	require.Equal(t, uint64(9), rep.Device)
	require.True(t, rep.Fresh)
	require.NotZero(t, attached.Seq, "it is a mutation")
	tasks, err := c.Tasks(t.Context(), protocol.TasksRequest{Device: 9, Limit: 8})
	require.NoError(t, err)
	require.Equal(t, "k", string(tasks.Tasks[0].Items[0].Key))
	wanted, err := c.TaskDone(t.Context(), protocol.TaskDoneRequest{Task: 2, Done: 1})
	require.NoError(t, err)
	require.True(t, wanted)
	copied, err := c.Copy(t.Context(), protocol.CopyRequest{Keys: [][]byte{[]byte("k")}, Tier: "ssd"})
	require.NoError(t, err)
	require.Equal(t, []uint64{2}, copied.Tasks)
	status, err := c.TaskStatus(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, "running", status[0].State)
	status, err = c.CancelTasks(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, "canceled", status[0].State)
}

func TestOnSessionHearsOfEachConnectionAfterTheFirst(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	heard := make(chan bool, 10)
	c := f.open(t, func(cfg *Config) { cfg.OnSession = func(resumed bool) { heard <- resumed } })
	id, _ := c.Pool()
	require.Equal(t, [16]byte{1}, id)
	f.masters[0].cut()
	require.True(t, <-heard)
	old := c.Session()
	f.do(func() { f.sessions[old].ended = true })
	f.masters[0].cut()
	require.False(t, <-heard)
	require.NotEqual(t, old, c.Session())
}

// rested is how many pages of a client are free when those have been woken whose quarantine is over.
func rested(c *Client) int {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	c.pool.wakeResting()
	return c.pool.nfree
}

// What was deleted in a region while its home was away, or just before, may have been read: a lease outlives a session.
func TestFreePagesOfARegionThatIsTakenOverRest(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.limit = 1
	first := f.open(t, func(cfg *Config) { cfg.Home = true })
	_, err := first.PutBatch(t.Context(), batch("k", 10))
	require.NoError(t, err)
	first.shut(ErrClosed) // without a goodbye
	now := int64(1e18)
	var clock atomic.Int64
	clock.Store(now)
	second := f.open(t, func(cfg *Config) { cfg.Home, cfg.Clock = true, clock.Load })
	require.Eventually(t, func() bool { return second.Stats().Regions == 1 }, 5*time.Second, time.Millisecond)
	stored := make(chan error, 1)
	go func() {
		_, err := second.Put(context.Background(), []byte("l"), value("l", 4096))
		stored <- err
	}()
	require.Eventually(t, func() bool { return second.Stats().Shortages == 1 }, 5*time.Second, time.Millisecond)
	clock.Store(now + 20e6) // what the fake says
	require.Zero(t, rested(second))
	clock.Store(now + 20e6 + margin(20e6))
	require.NoError(t, <-stored)
	require.Equal(t, 5, rested(second))
	require.Zero(t, second.Stats().Evicted, "it waited")
}

// A home's next session has the regions of the one before, and finds free what is free there.
func TestAHomeTakesItsRegionsOver(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.limit = 1
	home := func(cfg *Config) { cfg.Home = true }
	first := f.open(t, home)
	_, err := first.PutBatch(t.Context(), batch("k", 10))
	require.NoError(t, err)
	first.shut(ErrClosed) // without a goodbye
	var told atomic.Int64
	second := f.open(t, func(cfg *Config) { cfg.Home, cfg.OnRevoke = true, func(Revoked) { told.Add(1) } })
	require.Eventually(t, func() bool { return second.Stats().Regions == 1 }, 5*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return rested(second) == 6 }, 5*time.Second, time.Millisecond)
	_, err = second.PutBatch(t.Context(), batch("l", 8)) // more than is free: entries of the first are evicted
	require.NoError(t, err)
	for _, k := range []string{"k2", "k9", "l0", "l7"} {
		requireValue(t, second, k, 4096)
	}
	require.Zero(t, told.Load())
}

// News of pages of regions that a home is about to take over comes once: it waits for them.
func TestWhatIsFreedWhileAHomeTakesItsRegionsOverIsFree(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	f.addNode(t, "dram", 1<<20).first = true
	f.limit = 1
	first := f.open(t, func(cfg *Config) { cfg.Home = true })
	_, err := first.PutBatch(t.Context(), batch("k", 10))
	require.NoError(t, err)
	first.shut(ErrClosed) // without a goodbye
	free := func(cn *fakeConn, key string) {
		e := f.entries[key]
		if e == nil {
			return // a request that was sent again
		}
		page := f.drop(e)
		cn.write(protocol.TypeFreed, 0, (&protocol.FreedPush{ID: 1, Pages: []protocol.Page{page}}).Append(nil))
	}
	f.do(func() {
		f.after = func(cn *fakeConn, h protocol.Header) bool {
			if h.Type == protocol.TypeHandshake { // its reply, which is made already, says that k0 is there
				free(cn, "k0")
			}
			return true
		}
		f.before = func(cn *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			if h.Type == protocol.TypeAccess {
				free(cn, "k1")
			}
			return nil
		}
	})
	second := f.open(t, func(cfg *Config) { cfg.Home = true })
	require.Eventually(t, func() bool { return second.Stats().Regions == 1 }, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return rested(second) == 8 }, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool {
		second.pool.mu.Lock()
		defer second.pool.mu.Unlock()
		return second.pool.kept == nil
	}, 10*time.Second, time.Millisecond, "nothing is remembered for longer")
}
