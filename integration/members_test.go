package integration

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/cmd/replay"
)

// pause stops a process for a while.
func pause(n *node, d time.Duration) {
	n.signal(syscall.SIGSTOP)
	time.Sleep(d)
	n.signal(syscall.SIGCONT)
}

// TestMembersChangeUnderLoad replaces every member of a cluster, one after the other, and moves leadership, under load.
func TestMembersChangeUnderLoad(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{members: 3})
	l := newLoad(t, c)
	l.writer(c.open(client.Config{}), "w", 200)
	l.reader(c.open(client.Config{}))
	probe := l.prober(c.open(client.Config{}))
	old := append([]*node(nil), c.nodes...)
	for i, leaving := range old {
		joining := c.addNode(uint64(100 + i))
		joining.flags = append(joining.flags, "--join")
		id := strconv.FormatUint(joining.id, 10)
		c.ctl("members", "add", "--id", id, "--client-addr", joining.client, "--admin-addr", joining.admin, joining.peer)
		joining.start()
		within(t, "promotion", func() error {
			_, errs, err := run(t, append(append([]string{"ctl"}, c.adminFlags()...), "members", "promote", id)...)
			if err != nil {
				return errors.New(errs)
			}
			return nil
		})
		joining.ready()
		if i == 0 {
			at := time.Now()
			c.ctl("transfer-leader", id)
			require.Equal(t, joining.id, c.leader().id)
			t.Logf("leadership was handed over; a store was acknowledged %v after it was asked for", probe.await(t, at))
		}
		c.ctl("members", "remove", strconv.FormatUint(leaving.id, 10))
		within(t, "end of the removed member", func() error {
			if leaving.state() != down {
				return errors.New("it still runs")
			}
			return nil
		})
		probe.await(t, time.Now())
	}
	l.stop()
	l.verifyAll(c.open(client.Config{}))
	status := c.settled()
	require.Len(t, status.Members, 3)
	for _, m := range status.Members {
		require.False(t, m.Learner)
		require.GreaterOrEqual(t, m.ID, uint64(100))
	}
	c.check()
}

// TestOrderlyStopHandsLeadershipOver stops the leader as an operator would.
func TestOrderlyStopHandsLeadershipOver(t *testing.T) {
	c := startCluster(t, clusterOptions{members: 3, pool: "66MiB"})
	l := newLoad(t, c)
	probe := l.prober(c.open(client.Config{}))
	l.reader(c.open(client.Config{}))
	stood := make([]time.Duration, 0, 3)
	for range 3 {
		probe.await(t, time.Now())
		leader := c.leader()
		at := time.Now()
		require.NoError(t, leader.terminate())
		stood = append(stood, probe.await(t, at))
		leader.restart()
	}
	t.Logf("time from the signal to the next acknowledged store: %s", percentiles(stood))
	l.stop()
	c.settled()
}

// TestRestoredSnapshotServesNothingOld saves the index, changes the pool, and restores the index into a new cluster:
// where things lay then is not served, and the new cluster works.
func TestRestoredSnapshotServesNothingOld(t *testing.T) {
	c := startCluster(t, clusterOptions{pool: "34MiB"})
	x := c.open(client.Config{})
	fill(t, x, "old", 128, pageSize)
	file := filepath.Join(t.TempDir(), "snapshot")
	c.ctl("snapshot", "save", file)
	require.NoError(t, x.Clear(t.Context(), client.Scope{All: true}))
	fill(t, x, "new", 256, pageSize) // over what the snapshot knows
	before, err := c.nodes[0].status()
	require.NoError(t, err)
	require.NoError(t, c.nodes[0].terminate())

	restored := c.addNode(7)
	out, errs, err := run(t, append([]string{
		"ctl", "snapshot", "restore", file, "--data-dir=" + restored.dir, "--listen=" + restored.client,
		"--peer-listen=" + restored.peer, "--admin-listen=" + restored.admin, "--socket=none",
	}, restored.flags...)...)
	require.NoError(t, err, "%s%s", out, errs)
	c.nodes = c.nodes[1:]
	restored.start()
	restored.ready()
	after, err := restored.status()
	require.NoError(t, err)
	require.Greater(t, after.Incarnation, before.Incarnation)
	y := c.open(client.Config{})
	require.Zero(t, held(t, y, "old", 128), "the bytes may be others by now")
	require.Zero(t, held(t, y, "new", 256), "the snapshot does not know them")
	fill(t, y, "later", 256, pageSize)
	require.Equal(t, 256, held(t, y, "later", 256))
	c.check()
}

// TestReplayGoesOnWhileLeadersDie replays a sample trace against a cluster whose leaders are killed.
func TestReplayGoesOnWhileLeadersDie(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{members: 3, pool: "66MiB"})
	args := slices.Concat([]string{
		"replay", "--clients=3", "--page=16KiB", "--region=1MiB", "--requests=1500", "--json", "--quiet", "--checksums",
	}, c.adminFlags())
	type outcome struct {
		out, errs string
		err       error
	}
	done := make(chan outcome, 1)
	go func() {
		out, errs, err := run(t, args...) //nolint:testifylint // the program was built before
		done <- outcome{out, errs, err}
	}()
	kills := 0
	for {
		select {
		case o := <-done:
			require.NoError(t, o.err, o.errs)
			var report replay.Report
			require.NoError(t, json.Unmarshal([]byte(o.out), &report), o.out)
			t.Logf("%d of %d requests, block ratio %.3f, %d retries, %d kills, evictions %+v, %.1f s",
				report.Requests, report.Of, report.BlockRatio, report.Retries, kills, report.Evictions, report.Seconds)
			require.Zero(t, report.Failures, report.FailureTexts)
			require.Equal(t, report.Of, report.Requests)
			require.NotZero(t, kills)
			c.settled()
			c.check()
			return
		case <-time.After(1500 * time.Millisecond):
			if kills < 6 {
				leader := c.leader()
				leader.kill()
				kills++
				c.leader()
				leader.restart()
			}
		}
	}
}
