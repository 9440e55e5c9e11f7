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
)

// evictions returns what has been evicted so far: own entries, entries of departed clients, regions of other clients.
func (c *cluster) evictions() (own, departed, other uint64) {
	c.t.Helper()
	status, err := c.leader().status()
	require.NoError(c.t, err)
	e := status.Stats.Evictions
	return e[1], e[2], e[3]
}

// fill stores n values of size bytes each under name, in batches. No store may fail.
func fill(t *testing.T, x *client.Client, name string, n, size int) {
	t.Helper()
	for from := 0; from < n; from += fillBatch {
		items := make([]client.Item, min(fillBatch, n-from))
		for i := range items {
			key := fmt.Sprintf("%s/%d", name, from+i)
			items[i] = client.Item{Key: []byte(key), Value: makeValue(nil, key, 1, size)}
		}
		_, err := x.PutBatch(t.Context(), items)
		require.NoError(t, err, "store %d of %d", from, n)
	}
}

// fillBatch is how many values fill stores at a time.
const fillBatch = 16

// held counts which of the n values that fill stored are there, and verifies those.
func held(t *testing.T, x *client.Client, name string, n int) int {
	t.Helper()
	count := 0
	for from := 0; from < n; from += 64 {
		keys := make([][]byte, min(64, n-from))
		for i := range keys {
			keys[i] = fmt.Appendf(nil, "%s/%d", name, from+i)
		}
		values, err := x.GetBatch(t.Context(), keys, nil)
		require.NoError(t, err)
		for i, value := range values {
			if value == nil {
				continue
			}
			_, err := checkValue(string(keys[i]), value)
			require.NoError(t, err)
			count++
		}
	}
	return count
}

// TestDeadClientLeavesNothingBehind kills a client between its writing bytes and its registering them. What it held goes
// to the next client that needs it, which sees no failed store.
func TestDeadClientLeavesNothingBehind(t *testing.T) {
	c := startCluster(t, clusterOptions{members: 3, pool: "66MiB"}) // 16 regions of 4 MiB behind the header
	dying := startChild(t, c, newLedger(), "hold", childConfig{Name: "dying", Live: 12, Size: regionSize})
	dying.hears("holding")
	dying.kill()

	x := c.open(client.Config{})
	fill(t, x, "heir", 3*64<<20/(64<<10), 64<<10) // three times the pool
	require.NotZero(t, held(t, x, "heir", 3*64<<20/(64<<10)))
	values, err := x.ExistsBatch(t.Context(), [][]byte{[]byte("dying/0")})
	require.NoError(t, err)
	require.Equal(t, []bool{false}, values, "what was never registered is not there")
	_, _, other := c.evictions()
	require.Zero(t, other, "there was nobody else to take from")
	require.Greater(t, x.Stats().Bytes, uint64(12*regionSize), "the regions of the dead client were taken over")
	c.check()
}

// TestPausedClientIsFencedUntilItIsGone pauses a client while it holds memory that it has not registered, for longer
// than its session lasts. The memory of a process that may still write is given to nobody; when it is gone, it is.
func TestPausedClientIsFencedUntilItIsGone(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{pool: "66MiB", flags: []string{"--session-ttl=5s", "--alloc-timeout=1s"}})
	sleeper := startChild(t, c, newLedger(), "hold", childConfig{Name: "sleeper", Live: 12, Size: regionSize})
	sleeper.hears("holding")
	sleeper.signal(syscall.SIGSTOP)
	within(t, "end of the session", func() error {
		status, err := c.leader().status()
		if err == nil && status.Stats.Sessions != 0 {
			err = fmt.Errorf("%d sessions are open", status.Stats.Sessions)
		}
		return err
	})
	x := c.open(client.Config{})
	fill(t, x, "other", 4096, 64<<10)
	require.LessOrEqual(t, x.Stats().Bytes, uint64(4*regionSize), "memory of a process that may still write was given away")
	sleeper.kill()
	fill(t, x, "heir", 2*64<<20/(64<<10), 64<<10)
	y := c.open(client.Config{})
	fill(t, y, "second", 32, 64<<10)
	c.check()
}

// TestOwnEntriesAreEvictedBeforeThoseOfOthers fills a pool by several clients whose own entries suffice: none loses
// anything to another.
func TestOwnEntriesAreEvictedBeforeThoseOfOthers(t *testing.T) {
	c := startCluster(t, clusterOptions{pool: "66MiB"})
	const clients, each = 4, 4 * regionSize / pageSize
	all := make([]*client.Client, 0, clients)
	for i := range clients {
		x := c.open(client.Config{})
		fill(t, x, fmt.Sprintf("c%d", i), each, pageSize)
		all = append(all, x)
	}
	for i, x := range all {
		fill(t, x, fmt.Sprintf("again%d", i), 2*each, pageSize)
	}
	own, _, other := c.evictions()
	require.NotZero(t, own)
	require.Zero(t, other, "a client lost a region while the requester's own entries sufficed")
	for _, x := range all {
		require.Zero(t, x.Stats().Revoked)
	}
}

// TestRegionIsTakenFromBusyClient makes a client that owns nothing need what busy ones have. They see no failed call.
func TestRegionIsTakenFromBusyClient(t *testing.T) {
	c := startCluster(t, clusterOptions{members: 3, pool: "34MiB", flags: []string{"--min-region-age=100ms"}})
	l := newLoad(t, c)
	l.mayLose = true
	busy := make([]*client.Client, 0, 2)
	for i := range 2 {
		x := c.open(client.Config{})
		busy = append(busy, x)
		fill(t, x, fmt.Sprintf("fill%d", i), 16<<20/pageSize, pageSize)
		l.writer(x, fmt.Sprintf("busy%d", i), 400)
		l.reader(x)
	}
	for i := range 3 {
		x := c.open(client.Config{})
		fill(t, x, fmt.Sprintf("new%d", i), 2*regionSize/pageSize, pageSize)
		require.NotZero(t, held(t, x, fmt.Sprintf("new%d", i), 2*regionSize/pageSize))
	}
	_, _, other := c.evictions()
	require.NotZero(t, other)
	var revoked uint64
	for _, x := range busy {
		revoked += x.Stats().Revoked
	}
	require.NotZero(t, revoked)
	t.Logf("%d regions were taken, %d of them from the busy clients", other, revoked)
	l.stop()
	c.check()
}

// TestFullPoolFailsNoStore has writers flat out in a pool that is always full, while leaders are killed.
func TestFullPoolFailsNoStore(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{members: 3, pool: "34MiB", flags: []string{"--min-region-age=100ms"}})
	l := newLoad(t, c)
	l.mayLose = true
	for i := range 3 {
		x := c.open(client.Config{Checksums: i == 0})
		n := 0
		l.goPaced(func(r *rand.Rand) {
			items := make([]client.Item, 1+r.IntN(16))
			for k := range items {
				key := fmt.Sprintf("full%d/%d", i, n)
				n++
				l.ledger.of(key).begin(1)
				items[k] = client.Item{Key: []byte(key), Value: valueOf(nil, key, 1)}
			}
			err := l.call(func(ctx context.Context) error {
				_, err := x.PutBatch(ctx, items)
				return err
			})
			if err != nil {
				l.fail(fmt.Errorf("put batch: %w", err))
			}
			for k := range items {
				l.ledger.of(string(items[k].Key)).ack()
			}
			l.puts.Add(uint64(len(items)))
		})
		l.reader(x)
	}
	probe := l.prober(c.open(client.Config{}))
	for range 4 {
		leader := c.leader()
		leader.kill()
		at := time.Now()
		d := probe.await(t, at)
		t.Logf("a store was acknowledged %v after the leader's death", d)
		leader.restart()
	}
	l.stop()
	own, departed, other := c.evictions()
	t.Logf("evicted: %d own entries, %d of departed clients, %d regions of others", own, departed, other)
	require.NotZero(t, own)
	l.verifyAll(c.open(client.Config{}))
	c.settled()
	c.check()
}
