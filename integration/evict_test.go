package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

// TestDeadClientLeavesNothingBehind kills a client between its writing bytes and its registering them. What it held goes
// to the next client that needs it, which sees no failed store.
func TestDeadClientLeavesNothingBehind(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "66MiB"}) // 16 regions of 4 MiB behind the header
	dying := cluster.StartChild(t, c, cluster.NewLedger(), "hold", cluster.ChildConfig{Name: "dying", Live: 12, Size: cluster.RegionSize})
	dying.Hears("holding")
	dying.Kill()

	x := c.Open(client.Config{})
	cluster.Fill(t, x, "heir", 3*64<<20/(64<<10), 64<<10) // three times the pool
	require.NotZero(t, cluster.Held(t, x, "heir", 3*64<<20/(64<<10)))
	values, err := x.ExistsBatch(t.Context(), [][]byte{[]byte("dying/0")})
	require.NoError(t, err)
	require.Equal(t, []bool{false}, values, "what was never registered is not there")
	_, _, other := c.Evictions()
	require.Zero(t, other, "there was nobody else to take from")
	require.Greater(t, x.Stats().Bytes, uint64(12*cluster.RegionSize), "the regions of the dead client were taken over")
	c.Check()
}

// TestPausedClientIsFencedUntilItIsGone pauses a client while it holds memory that it has not registered, for longer
// than its session lasts. The memory of a process that may still write is given to nobody; when it is gone, it is.
func TestPausedClientIsFencedUntilItIsGone(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Pool: "66MiB", Flags: []string{"--session-ttl=5s", "--alloc-timeout=1s"}})
	sleeper := cluster.StartChild(t, c, cluster.NewLedger(), "hold", cluster.ChildConfig{Name: "sleeper", Live: 12, Size: cluster.RegionSize})
	sleeper.Hears("holding")
	sleeper.Signal(syscall.SIGSTOP)
	cluster.Within(t, "end of the session", func() error {
		status, err := c.Leader().Status()
		if err == nil && status.Stats.Sessions != 0 {
			err = fmt.Errorf("%d sessions are open", status.Stats.Sessions)
		}
		return err
	})
	x := c.Open(client.Config{})
	cluster.Fill(t, x, "other", 4096, 64<<10)
	require.LessOrEqual(t, x.Stats().Bytes, uint64(4*cluster.RegionSize), "memory of a process that may still write was given away")
	sleeper.Kill()
	cluster.Fill(t, x, "heir", 2*64<<20/(64<<10), 64<<10)
	y := c.Open(client.Config{})
	cluster.Fill(t, y, "second", 32, 64<<10)
	c.Check()
}

// TestOwnEntriesAreEvictedBeforeThoseOfOthers fills a pool by several clients whose own entries suffice: none loses
// anything to another.
func TestOwnEntriesAreEvictedBeforeThoseOfOthers(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Pool: "66MiB"})
	const clients, each = 4, 4 * cluster.RegionSize / cluster.PageSize
	all := make([]*client.Client, 0, clients)
	for i := range clients {
		x := c.Open(client.Config{})
		cluster.Fill(t, x, fmt.Sprintf("c%d", i), each, cluster.PageSize)
		all = append(all, x)
	}
	for i, x := range all {
		cluster.Fill(t, x, fmt.Sprintf("again%d", i), 2*each, cluster.PageSize)
	}
	own, _, other := c.Evictions()
	require.NotZero(t, own)
	require.Zero(t, other, "a client lost a region while the requester's own entries sufficed")
	for _, x := range all {
		require.Zero(t, x.Stats().Revoked)
	}
}

// TestRegionIsTakenFromBusyClient makes a client that owns nothing need what busy ones have. They see no failed call.
func TestRegionIsTakenFromBusyClient(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "34MiB", Flags: []string{"--min-region-age=100ms"}})
	l := cluster.NewLoad(t, c)
	l.MayLose = true
	busy := make([]*client.Client, 0, 2)
	for i := range 2 {
		x := c.Open(client.Config{})
		busy = append(busy, x)
		cluster.Fill(t, x, fmt.Sprintf("fill%d", i), 16<<20/cluster.PageSize, cluster.PageSize)
		l.Writer(x, fmt.Sprintf("busy%d", i), 400)
		l.Reader(x)
	}
	for i := range 3 {
		x := c.Open(client.Config{})
		cluster.Fill(t, x, fmt.Sprintf("new%d", i), 2*cluster.RegionSize/cluster.PageSize, cluster.PageSize)
		require.NotZero(t, cluster.Held(t, x, fmt.Sprintf("new%d", i), 2*cluster.RegionSize/cluster.PageSize))
	}
	_, _, other := c.Evictions()
	require.NotZero(t, other)
	var revoked uint64
	for _, x := range busy {
		revoked += x.Stats().Revoked
	}
	require.NotZero(t, revoked)
	t.Logf("%d regions were taken, %d of them from the busy clients", other, revoked)
	l.Stop()
	c.Check()
}

// TestFullPoolFailsNoStore has writers flat out in a pool that is always full, while leaders are killed.
func TestFullPoolFailsNoStore(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "34MiB", Flags: []string{"--min-region-age=100ms"}})
	l := cluster.NewLoad(t, c)
	l.MayLose = true
	for i := range 3 {
		x := c.Open(client.Config{Checksums: i == 0})
		n := 0
		l.GoPaced(func(r *rand.Rand) {
			items := make([]client.Item, 1+r.IntN(16))
			for k := range items {
				key := fmt.Sprintf("full%d/%d", i, n)
				n++
				l.Ledger.Of(key).Begin(1)
				items[k] = client.Item{Key: []byte(key), Value: cluster.ValueOf(nil, key, 1)}
			}
			err := l.Call(func(ctx context.Context) error {
				_, err := x.PutBatch(ctx, items)
				return err
			})
			if err != nil {
				l.Fail(fmt.Errorf("put batch: %w", err))
			}
			for k := range items {
				l.Ledger.Of(string(items[k].Key)).Ack()
			}
			l.Puts.Add(uint64(len(items)))
		})
		l.Reader(x)
	}
	probe := l.Prober(c.Open(client.Config{}))
	for range 4 {
		leader := c.Leader()
		leader.Kill()
		at := time.Now()
		d := probe.Await(t, at)
		t.Logf("a store was acknowledged %v after the leader's death", d)
		leader.Restart()
	}
	l.Stop()
	own, departed, other := c.Evictions()
	t.Logf("evicted: %d own entries, %d of departed clients, %d of others", own, departed, other)
	require.NotZero(t, own)
	l.VerifyAll(c.Open(client.Config{}))
	c.Settled()
	c.Check()
}
