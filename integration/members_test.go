package integration

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/cmd/replay"
	"larder/integration/cluster"
)

// TestMembersChangeUnderLoad replaces every member of a cluster, one after the other, and moves leadership, under load.
func TestMembersChangeUnderLoad(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	l := cluster.NewLoad(t, c)
	l.Writer(c.Open(client.Config{}), "w", 200)
	l.Reader(c.Open(client.Config{}))
	probe := l.Prober(c.Open(client.Config{}))
	old := append([]*cluster.Node(nil), c.Nodes...)
	for i, leaving := range old {
		joining := c.AddNode(uint64(100 + i))
		joining.Flags = append(joining.Flags, "--join")
		id := strconv.FormatUint(joining.ID, 10)
		c.Ctl("members", "add", "--id", id, "--client-addr", joining.Client, "--admin-addr", joining.Admin, joining.Peer)
		joining.Start()
		cluster.Within(t, "promotion", func() error {
			_, errs, err := cluster.Run(t, append(append([]string{"ctl"}, c.AdminFlags()...), "members", "promote", id)...)
			if err != nil {
				return errors.New(errs)
			}
			return nil
		})
		joining.Ready()
		if i == 0 {
			at := time.Now()
			c.Ctl("transfer-leader", id)
			require.Equal(t, joining.ID, c.Leader().ID)
			t.Logf("leadership was handed over; a store was acknowledged %v after it was asked for", probe.Await(t, at))
		}
		c.Ctl("members", "remove", strconv.FormatUint(leaving.ID, 10))
		cluster.Within(t, "end of the removed member", func() error {
			if leaving.State() != cluster.Down {
				return errors.New("it still runs")
			}
			return nil
		})
		probe.Await(t, time.Now())
	}
	l.Stop()
	l.VerifyAll(c.Open(client.Config{}))
	status := c.Settled()
	require.Len(t, status.Members, 3)
	for _, m := range status.Members {
		require.False(t, m.Learner)
		require.GreaterOrEqual(t, m.ID, uint64(100))
	}
	c.Check()
}

// TestOrderlyStopHandsLeadershipOver stops the leader as an operator would.
func TestOrderlyStopHandsLeadershipOver(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "66MiB"})
	l := cluster.NewLoad(t, c)
	probe := l.Prober(c.Open(client.Config{}))
	l.Reader(c.Open(client.Config{}))
	stood := make([]time.Duration, 0, 3)
	for range 3 {
		probe.Await(t, time.Now())
		leader := c.Leader()
		at := time.Now()
		require.NoError(t, leader.Terminate())
		stood = append(stood, probe.Await(t, at))
		leader.Restart()
	}
	t.Logf("time from the signal to the next acknowledged store: %s", cluster.Percentiles(stood))
	l.Stop()
	c.Settled()
}

// TestRestoredSnapshotServesNothingOld saves the index, changes the pool, and restores the index into a new cluster:
// where things lay then is not served, and the new cluster works.
func TestRestoredSnapshotServesNothingOld(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Pool: "34MiB"})
	x := c.Open(client.Config{})
	cluster.Fill(t, x, "old", 128, cluster.PageSize)
	file := filepath.Join(t.TempDir(), "snapshot")
	c.Ctl("snapshot", "save", file)
	require.NoError(t, x.Clear(t.Context(), client.Scope{All: true}))
	cluster.Fill(t, x, "new", 256, cluster.PageSize) // over what the snapshot knows
	before, err := c.Nodes[0].Status()
	require.NoError(t, err)
	require.NoError(t, c.Nodes[0].Terminate())

	restored := c.AddNode(7)
	out, errs, err := cluster.Run(t, append([]string{
		"ctl", "snapshot", "restore", file, "--data-dir=" + restored.Dir, "--listen=" + restored.Client,
		"--peer-listen=" + restored.Peer, "--admin-listen=" + restored.Admin, "--socket=none",
	}, restored.Flags...)...)
	require.NoError(t, err, "%s%s", out, errs)
	c.Nodes = c.Nodes[1:]
	restored.Start()
	restored.Ready()
	after, err := restored.Status()
	require.NoError(t, err)
	require.Greater(t, after.Incarnation, before.Incarnation)
	y := c.Open(client.Config{})
	require.Zero(t, cluster.Held(t, y, "old", 128), "the bytes may be others by now")
	require.Zero(t, cluster.Held(t, y, "new", 256), "the snapshot does not know them")
	cluster.Fill(t, y, "later", 256, cluster.PageSize)
	require.Equal(t, 256, cluster.Held(t, y, "later", 256))
	c.Check()
}

// TestReplayGoesOnWhileLeadersDie replays a sample trace against a cluster whose leaders are killed.
func TestReplayGoesOnWhileLeadersDie(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "66MiB"})
	args := slices.Concat([]string{
		"replay", "--clients=3", "--page=16KiB", "--region=1MiB", "--requests=1500", "--json", "--quiet", "--checksums",
	}, c.AdminFlags())
	type outcome struct {
		out, errs string
		err       error
	}
	done := make(chan outcome, 1)
	go func() {
		out, errs, err := cluster.Run(t, args...)
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
			c.Settled()
			c.Check()
			return
		case <-time.After(1500 * time.Millisecond):
			if kills < 6 {
				leader := c.Leader()
				leader.Kill()
				kills++
				c.Leader()
				leader.Restart()
			}
		}
	}
}
