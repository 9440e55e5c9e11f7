package integration

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
)

// poolFaults are what can happen to a pool's file while no master runs.
var poolFaults = map[string]func(t *testing.T, c *cluster){
	"removed": func(t *testing.T, c *cluster) {
		t.Helper()
		require.NoError(t, os.Remove(c.pool))
	},
	"emptied": func(t *testing.T, c *cluster) {
		t.Helper()
		require.NoError(t, os.Truncate(c.pool, 0))
	},
	"emptied and grown again": func(t *testing.T, c *cluster) {
		t.Helper()
		info, err := os.Stat(c.pool)
		require.NoError(t, err)
		require.NoError(t, os.Truncate(c.pool, 0))
		require.NoError(t, os.Truncate(c.pool, info.Size()))
	},
	"cut": func(t *testing.T, c *cluster) {
		t.Helper()
		require.NoError(t, os.Truncate(c.pool, 8<<20))
	},
	"replaced by a file of zeros": func(t *testing.T, c *cluster) {
		t.Helper()
		info, err := os.Stat(c.pool)
		require.NoError(t, err)
		require.NoError(t, os.Remove(c.pool))
		require.NoError(t, os.WriteFile(c.pool, nil, 0o600))
		require.NoError(t, os.Truncate(c.pool, info.Size()))
	},
}

// TestEntriesOfLostDeviceAreDropped loses the bytes of the pool while all masters are down. What lay there is not served
// afterwards, to clients from before and new ones, and new values can be stored.
func TestEntriesOfLostDeviceAreDropped(t *testing.T) {
	for name, fault := range poolFaults {
		t.Run(name, func(t *testing.T) {
			c := startCluster(t, clusterOptions{pool: "34MiB"})
			old := c.open(client.Config{})
			const n = 256
			fill(t, old, "before", n, pageSize)
			require.Equal(t, n, held(t, old, "before", n))
			c.nodes[0].kill()
			fault(t, c)
			c.nodes[0].restart()
			fresh := c.open(client.Config{})
			require.Zero(t, held(t, fresh, "before", n))
			require.Zero(t, held(t, old, "before", n))
			fill(t, fresh, "after", n, pageSize)
			require.Equal(t, n, held(t, fresh, "after", n))
			fill(t, old, "again", n, pageSize)
			require.Equal(t, n, held(t, old, "again", n))
			require.Equal(t, n, held(t, fresh, "again", n))
			c.check()
		})
	}
}

// TestEntriesSurviveRestart is the other side: what was not lost is served, after an orderly stop and after a kill.
func TestEntriesSurviveRestart(t *testing.T) {
	c := startCluster(t, clusterOptions{pool: "34MiB"})
	x := c.open(client.Config{Checksums: true})
	fill(t, x, "k", 256, pageSize)
	require.NoError(t, c.nodes[0].terminate())
	c.nodes[0].restart()
	require.Equal(t, 256, held(t, x, "k", 256))
	c.nodes[0].kill()
	c.nodes[0].restart()
	require.Equal(t, 256, held(t, x, "k", 256))
	c.check()
}

// TestForeignDeviceIsRefused starts a server on a file that holds something else, and then another pool's device.
func TestForeignDeviceIsRefused(t *testing.T) {
	c := newCluster(t, clusterOptions{pool: "34MiB"})
	require.NoError(t, os.WriteFile(c.pool, []byte(strings.Repeat("precious ", 1<<20)), 0o600))
	refusedStart(t, c.nodes[0], "force")
	require.NoError(t, os.Remove(c.pool))

	c.nodes[0].start()
	c.leader()
	require.NoError(t, c.nodes[0].terminate())
	other := newCluster(t, clusterOptions{pool: "34MiB"})
	other.nodes[0].flags = append(other.nodes[0].flags, "--pool="+c.pool+",size=34MiB")
	refusedStart(t, other.nodes[0], "pool")
	c.nodes[0].restart() // the right owner still can

	t.Run("corrupt header", func(t *testing.T) {
		c.nodes[0].kill()
		f, err := os.OpenFile(c.pool, os.O_RDWR, 0)
		require.NoError(t, err)
		for _, at := range []int64{40, 4096 + 40} {
			_, err = f.WriteAt([]byte("scribble"), at)
			require.NoError(t, err)
		}
		require.NoError(t, f.Close())
		refusedStart(t, c.nodes[0], "force")
	})
}

// refusedStart starts a server that must refuse, and say why.
func refusedStart(t *testing.T, n *node, word string) {
	t.Helper()
	n.start()
	err := n.wait()
	require.Error(t, err)
	lines := strings.Split(strings.TrimSpace(n.log.String()), "\n")
	last := strings.Join(lines[max(0, len(lines)-4):], "\n")
	require.Contains(t, last, "larder: ")
	require.Contains(t, last, word)
	n.log.buf = nil
}

// TestDataDirectoriesThatAreNotRight starts servers on data directories that they must not use.
func TestDataDirectoriesThatAreNotRight(t *testing.T) {
	c := startCluster(t, clusterOptions{members: 3, pool: "34MiB"})
	x := c.open(client.Config{})
	fill(t, x, "k", 64, pageSize)
	follower := c.nodes[0]
	if c.leader() == follower {
		follower = c.nodes[1]
	}

	t.Run("another cluster's", func(t *testing.T) {
		follower.kill()
		flags := follower.flags
		follower.flags = slices.Concat(flags, []string{"--cluster-name=elsewhere"})
		refusedStart(t, follower, "cluster")
		follower.flags = flags
	})
	t.Run("another member's", func(t *testing.T) {
		dir := follower.dir
		for _, n := range c.nodes {
			if n != follower && c.leader() != n {
				n.kill()
				follower.dir = n.dir
				refusedStart(t, follower, "member")
				n.start()
			}
		}
		follower.dir = dir
		follower.restart()
	})
	t.Run("put back from a copy", func(t *testing.T) {
		// The member's disk is set back in time: what it acknowledged since is gone, so it must not vote again.
		follower.kill()
		copied := filepath.Join(c.dir, "copy")
		require.NoError(t, os.CopyFS(copied, os.DirFS(follower.dir)))
		follower.restart()
		fill(t, x, "later", 64, pageSize)
		c.settled()
		follower.kill()
		require.NoError(t, os.RemoveAll(follower.dir))
		require.NoError(t, os.Rename(copied, follower.dir))
		follower.start()
		// It ends by itself, as soon as it hears of what it should have.
		require.Error(t, follower.wait())
		require.Contains(t, follower.log.String(), "rolled back")
	})
	require.Equal(t, 64, held(t, x, "k", 64), "the others go on")
	require.Equal(t, 64, held(t, x, "later", 64))
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
			out, errs, err := run(t, args...)
			require.Error(t, err)
			require.Empty(t, out)
			require.Contains(t, errs, v.want)
			require.NoDirExists(t, filepath.Join(dir, "data"), "nothing is made before the configuration is sound")
		})
	}
}
