package integration

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

// poolFaults are what can happen to a pool's file while no master runs.
var poolFaults = map[string]func(t *testing.T, c *cluster.Cluster){
	"removed": func(t *testing.T, c *cluster.Cluster) {
		t.Helper()
		require.NoError(t, os.Remove(c.Pool))
	},
	"emptied": func(t *testing.T, c *cluster.Cluster) {
		t.Helper()
		require.NoError(t, os.Truncate(c.Pool, 0))
	},
	"emptied and grown again": func(t *testing.T, c *cluster.Cluster) {
		t.Helper()
		info, err := os.Stat(c.Pool)
		require.NoError(t, err)
		require.NoError(t, os.Truncate(c.Pool, 0))
		require.NoError(t, os.Truncate(c.Pool, info.Size()))
	},
	"cut": func(t *testing.T, c *cluster.Cluster) {
		t.Helper()
		require.NoError(t, os.Truncate(c.Pool, 8<<20))
	},
	"replaced by a file of zeros": func(t *testing.T, c *cluster.Cluster) {
		t.Helper()
		info, err := os.Stat(c.Pool)
		require.NoError(t, err)
		require.NoError(t, os.Remove(c.Pool))
		require.NoError(t, os.WriteFile(c.Pool, nil, 0o600))
		require.NoError(t, os.Truncate(c.Pool, info.Size()))
	},
}

// TestEntriesOfLostDeviceAreDropped loses the bytes of the pool while all masters are down. What lay there is not served
// afterwards, to clients from before and new ones, and new values can be stored.
func TestEntriesOfLostDeviceAreDropped(t *testing.T) {
	for name, fault := range poolFaults {
		t.Run(name, func(t *testing.T) {
			c := cluster.Start(t, cluster.Options{Pool: "34MiB"})
			old := c.Open(client.Config{})
			const n = 256
			cluster.Fill(t, old, "before", n, cluster.PageSize)
			require.Equal(t, n, cluster.Held(t, old, "before", n))
			c.Nodes[0].Kill()
			fault(t, c)
			c.Nodes[0].Restart()
			fresh := c.Open(client.Config{})
			require.Zero(t, cluster.Held(t, fresh, "before", n))
			require.Zero(t, cluster.Held(t, old, "before", n))
			cluster.Fill(t, fresh, "after", n, cluster.PageSize)
			require.Equal(t, n, cluster.Held(t, fresh, "after", n))
			cluster.Fill(t, old, "again", n, cluster.PageSize)
			require.Equal(t, n, cluster.Held(t, old, "again", n))
			require.Equal(t, n, cluster.Held(t, fresh, "again", n))
			c.Check()
		})
	}
}

// TestEntriesSurviveRestart is the other side: what was not lost is served, after an orderly stop and after a kill.
func TestEntriesSurviveRestart(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Pool: "34MiB"})
	x := c.Open(client.Config{Checksums: true})
	cluster.Fill(t, x, "k", 256, cluster.PageSize)
	require.NoError(t, c.Nodes[0].Terminate())
	c.Nodes[0].Restart()
	require.Equal(t, 256, cluster.Held(t, x, "k", 256))
	c.Nodes[0].Kill()
	c.Nodes[0].Restart()
	require.Equal(t, 256, cluster.Held(t, x, "k", 256))
	c.Check()
}

// TestForeignDeviceIsRefused starts a server on a file that holds something else, and then another pool's device.
func TestForeignDeviceIsRefused(t *testing.T) {
	c := cluster.New(t, cluster.Options{Pool: "34MiB"})
	require.NoError(t, os.WriteFile(c.Pool, []byte(strings.Repeat("precious ", 1<<20)), 0o600))
	refusedStart(t, c.Nodes[0], "force")
	require.NoError(t, os.Remove(c.Pool))

	c.Nodes[0].Start()
	c.Leader()
	require.NoError(t, c.Nodes[0].Terminate())
	other := cluster.New(t, cluster.Options{Pool: "34MiB"})
	other.Nodes[0].Flags = append(other.Nodes[0].Flags, "--pool="+c.Pool+",size=34MiB")
	refusedStart(t, other.Nodes[0], "pool")
	c.Nodes[0].Restart() // the right owner still can

	t.Run("corrupt header", func(t *testing.T) {
		c.Nodes[0].Kill()
		f, err := os.OpenFile(c.Pool, os.O_RDWR, 0)
		require.NoError(t, err)
		for _, at := range []int64{40, 4096 + 40} {
			_, err = f.WriteAt([]byte("scribble"), at)
			require.NoError(t, err)
		}
		require.NoError(t, f.Close())
		refusedStart(t, c.Nodes[0], "force")
	})
}

// refusedStart starts a server that must refuse, and say why.
func refusedStart(t *testing.T, n *cluster.Node, word string) {
	t.Helper()
	n.Start()
	err := n.Wait()
	require.Error(t, err)
	lines := strings.Split(strings.TrimSpace(n.Log.String()), "\n")
	last := strings.Join(lines[max(0, len(lines)-4):], "\n")
	require.Contains(t, last, "larder: ")
	require.Contains(t, last, word)
	n.Log.Reset()
}

// TestDataDirectoriesThatAreNotRight starts servers on data directories that they must not use.
func TestDataDirectoriesThatAreNotRight(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "34MiB"})
	x := c.Open(client.Config{})
	cluster.Fill(t, x, "k", 64, cluster.PageSize)
	follower := c.Nodes[0]
	if c.Leader() == follower {
		follower = c.Nodes[1]
	}

	t.Run("another cluster's", func(t *testing.T) {
		follower.Kill()
		flags := follower.Flags
		follower.Flags = slices.Concat(flags, []string{"--cluster-name=elsewhere"})
		refusedStart(t, follower, "cluster")
		follower.Flags = flags
	})
	t.Run("another member's", func(t *testing.T) {
		dir := follower.Dir
		for _, n := range c.Nodes {
			if n != follower && c.Leader() != n {
				n.Kill()
				follower.Dir = n.Dir
				refusedStart(t, follower, "member")
				n.Start()
			}
		}
		follower.Dir = dir
		follower.Restart()
	})
	t.Run("put back from a copy", func(t *testing.T) {
		// The member's disk is set back in time: what it acknowledged since is gone, so it must not vote again.
		follower.Kill()
		copied := filepath.Join(c.Dir, "copy")
		require.NoError(t, os.CopyFS(copied, os.DirFS(follower.Dir)))
		follower.Restart()
		cluster.Fill(t, x, "later", 64, cluster.PageSize)
		c.Settled()
		follower.Kill()
		require.NoError(t, os.RemoveAll(follower.Dir))
		require.NoError(t, os.Rename(copied, follower.Dir))
		follower.Start()
		// It ends by itself, as soon as it hears of what it should have.
		require.Error(t, follower.Wait())
		require.Contains(t, follower.Log.String(), "rolled back")
	})
	require.Equal(t, 64, cluster.Held(t, x, "k", 64), "the others go on")
	require.Equal(t, 64, cluster.Held(t, x, "later", 64))
}

// TestConfigurationErrorsHelp starts servers with mistakes in their configuration.
func TestConfigurationErrorsHelp(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "larder.yaml")
	for name, v := range map[string]struct {
		yaml, want string
		flags      []string
	}{
		"unknown key":      {yaml: "data_dir: x\nevction_policy: lru\n", want: "eviction_policy"},
		"unknown policy":   {yaml: "eviction_policy: lruu\n", want: "lru"},
		"short session":    {yaml: "session_ttl: 2s\n", want: "election"},
		"page size":        {yaml: "page_size: 12KiB\n", want: "power of two"},
		"unknown flag":     {flags: []string{"--evction-policy=lru"}, want: "--evction-policy"},
		"no such file":     {flags: []string{"--config=" + filepath.Join(dir, "none.yaml")}, want: "none.yaml"},
		"several mistakes": {yaml: "page_size: 12KiB\nsession_ttl: 1ms\n", want: "session_ttl"},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"serve", "--data-dir=" + filepath.Join(dir, "data")}, v.flags...)
			if v.yaml != "" {
				require.NoError(t, os.WriteFile(file, []byte(v.yaml), 0o600))
				args = append(args, "--config="+file)
			}
			out, errs, err := cluster.Run(t, args...)
			require.Error(t, err)
			require.Empty(t, out)
			require.Contains(t, errs, v.want)
			require.NoDirExists(t, filepath.Join(dir, "data"), "nothing is made before the configuration is sound")
		})
	}
}
