package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/cmd/replay"
	"larder/integration/cluster"
)

// locate returns the devices that the n values which Fill stored lie on, and how many are on each.
func locate(t *testing.T, x *client.Client, name string, n int) map[uint64]int {
	t.Helper()
	found := map[uint64]int{}
	for i := range n {
		l, err := x.Lookup(t.Context(), fmt.Appendf(nil, "%s/%d", name, i))
		if err == nil {
			found[l.Device]++
		}
	}
	return found
}

// lost waits until none of the n values which Fill stored are to be found.
func lost(t *testing.T, c *cluster.Cluster, x *client.Client, name string, n int) {
	t.Helper()
	cluster.Within(t, "loss of "+name, func() error {
		if found := locate(t, x, name, n); len(found) > 0 {
			return fmt.Errorf("found %v", found)
		}
		return nil
	})
	require.Zero(t, cluster.Held(t, x, name, n))
	c.Check()
}

// back waits until all n values which Fill stored can be read again: a client finds a node that has come back when it has
// asked for it, and takes what it cannot reach until then for a miss.
func back(t *testing.T, x *client.Client, name string, n int) {
	t.Helper()
	cluster.Within(t, "return of "+name, func() error {
		if held := cluster.Held(t, x, name, n); held != n {
			return fmt.Errorf("%d of %d", held, n)
		}
		return nil
	})
}

// TestMemoryOfANode stores and reads values in memory of nodes, mapped and by transfer.
func TestMemoryOfANode(t *testing.T) {
	for name, flags := range map[string][]string{"mapped": nil, "by transfer": {"--no-map"}} {
		t.Run(name, func(t *testing.T) {
			c := cluster.Start(t, cluster.Options{Pool: "34MiB"})
			a := c.Donate("a", append(flags, "--dram=34MiB")...)
			b := c.Donate("b", append(flags, "--dram=34MiB")...)
			for _, d := range []*cluster.Donor{a, b} {
				x := c.Open(client.Config{Near: []string{d.Name}, Tier: "dram"})
				cluster.Fill(t, x, d.Name, 256, cluster.PageSize)
				require.Equal(t, map[uint64]int{d.Device("dram").ID: 256}, locate(t, x, d.Name, 256))
				other := c.Open(client.Config{})
				require.Equal(t, 256, cluster.Held(t, x, d.Name, 256))
				require.Equal(t, 256, cluster.Held(t, other, d.Name, 256))
				granted := d.Device("dram").Granted
				require.Equal(t, len(flags) > 0, granted > 0, "%d regions are granted", granted)
			}
		})
	}
}

// TestNodeIsKilled ends a node between any two of its instructions. What lay in its memory is gone, and what is on its disk
// is back when it is: nothing in between is served, and never wrong bytes.
func TestNodeIsKilled(t *testing.T) {
	for name, flags := range map[string][]string{"mapped": nil, "by transfer": {"--no-map"}} {
		t.Run(name, func(t *testing.T) {
			c := cluster.Start(t, cluster.Options{Pool: "34MiB"})
			d := c.Donate("a", append(flags, "--dram=34MiB", "--ssd-size=64MiB")...)
			dram := c.Open(client.Config{Near: []string{"a"}, Tier: "dram"})
			disk := c.Open(client.Config{Near: []string{"a"}, Tier: "ssd"})
			reader := c.Open(client.Config{})
			cluster.Fill(t, dram, "dram", 256, cluster.PageSize)
			cluster.Fill(t, disk, "disk", 256, cluster.PageSize)
			require.Equal(t, 256, cluster.Held(t, reader, "dram", 256))
			require.Equal(t, 256, cluster.Held(t, reader, "disk", 256))
			before := d.Device("dram")
			require.Equal(t, map[uint64]int{d.Device("ssd").ID: 256}, locate(t, reader, "disk", 256))

			d.Kill()
			require.Zero(t, cluster.Held(t, reader, "disk", 256), "it is away")
			lost(t, c, reader, "dram", 256)
			cluster.Fill(t, dram, "meanwhile", 256, cluster.PageSize) // elsewhere
			require.Equal(t, 256, cluster.Held(t, reader, "meanwhile", 256))

			d.Start()
			d.Ready()
			require.NotEqual(t, before.UUID, d.Device("dram").UUID, "memory is new")
			back(t, reader, "disk", 256)
			require.Zero(t, cluster.Held(t, reader, "dram", 256))
			cluster.Fill(t, dram, "again", 256, cluster.PageSize)
			cluster.Fill(t, disk, "again on disk", 256, cluster.PageSize)
			require.Equal(t, 256, cluster.Held(t, reader, "again", 256))
			require.Equal(t, 256, cluster.Held(t, reader, "again on disk", 256))
		})
	}
}

// TestNodeStops ends a node in good order: nobody waits for its session's deadline.
func TestNodeStops(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Pool: "34MiB", Flags: []string{"--session-ttl=1m"}})
	d := c.Donate("a", "--dram=34MiB", "--ssd-size=64MiB")
	x := c.Open(client.Config{Near: []string{"a"}, Tier: "dram"})
	disk := c.Open(client.Config{Near: []string{"a"}, Tier: "ssd"})
	cluster.Fill(t, x, "dram", 256, cluster.PageSize)
	cluster.Fill(t, disk, "disk", 256, cluster.PageSize)
	d.Terminate()
	lost(t, c, x, "dram", 256)
	require.Zero(t, cluster.Held(t, x, "disk", 256))
	d.Start()
	d.Ready()
	back(t, x, "disk", 256)
}

// TestLeaderChangesUnderNodes kills leaders: each new one is told of the devices again, and clients go on.
func TestLeaderChangesUnderNodes(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "34MiB"})
	d := c.Donate("a", "--no-map", "--dram=34MiB", "--ssd-size=64MiB")
	x := c.Open(client.Config{Near: []string{"a"}, Tier: "dram"})
	disk := c.Open(client.Config{Near: []string{"a"}, Tier: "ssd"})
	reader := c.Open(client.Config{})
	before := d.Device("dram")
	for i := range 3 {
		name := fmt.Sprintf("round%d", i)
		cluster.Fill(t, x, name, 128, cluster.PageSize)
		cluster.Fill(t, disk, "disk-"+name, 128, cluster.PageSize)
		leader := c.Leader()
		leader.Kill()
		cluster.Fill(t, x, "during-"+name, 64, cluster.PageSize)
		back(t, reader, name, 128)
		back(t, reader, "disk-"+name, 128)
		back(t, reader, "during-"+name, 64)
		leader.Restart()
	}
	require.Equal(t, before.UUID, d.Device("dram").UUID, "its session goes on")
}

// demoted waits until so many entries have been copied to a node's disk, and all that was to be copied with them: tasks are
// carried out beside each other, and what is colder may come later.
func demoted(t *testing.T, c *cluster.Cluster, d *cluster.Donor, want int) {
	t.Helper()
	cluster.Within(t, "demotion", func() error {
		if n := d.Device("ssd").Copied; n < uint64(max(want, 0)) {
			return fmt.Errorf("%d of %d copied", n, want)
		}
		if tasks := c.Ctl("tasks", "--json"); strings.Contains(tasks, `"waiting"`) || strings.Contains(tasks, `"running"`) {
			return errors.New(tasks)
		}
		return nil
	})
}

// TestWhatIsEvictedIsReadFromDisk stores four times as much as the memory of a node holds, no faster than its cold end is
// copied to the disk: nothing of it is lost to eviction.
func TestWhatIsEvictedIsReadFromDisk(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Pool: "34MiB"})
	d := c.Donate("a", "--dram=34MiB", "--ssd-size=256MiB")
	id := d.Device("dram").ID
	x := c.Open(client.Config{Device: id, NoPromote: true})
	reader := c.Open(client.Config{Device: id, NoPromote: true})
	const parts, each, fit = 32, 256, 2048 // parts of 4 MiB, of which eight fit the memory
	const ahead = 128                      // a client has as many pages as that freed before it needs them
	for i := range parts {
		cluster.Fill(t, x, fmt.Sprintf("part%d", i), each, cluster.PageSize)
		// What has been evicted, and what the next part evicts: less than the coldest 30%, which are to have copies.
		demoted(t, c, d, (i+1)*each-fit+ahead+each)
	}
	where := map[uint64]int{}
	for i := range parts {
		name := fmt.Sprintf("part%d", i)
		for device, n := range locate(t, reader, name, each) {
			where[device] += n
		}
		require.Equal(t, each, cluster.Held(t, reader, name, each), "%s; %v", name, where)
	}
	require.Greater(t, where[d.Device("ssd").ID], parts*each/2, "most of it lies on the disk: %v", where)
	c.Check()

	d.Kill() // all that the disk has is back, and what was in memory alone is not
	d.Start()
	d.Ready()
	cluster.Within(t, "return of what the disk has", func() error {
		if held := cluster.Held(t, reader, "part0", each); held != each {
			return fmt.Errorf("%d", held)
		}
		return nil
	})
	held := 0
	for i := range parts {
		held += cluster.Held(t, reader, fmt.Sprintf("part%d", i), each)
	}
	require.GreaterOrEqual(t, held, where[d.Device("ssd").ID])
	c.Check()
}

// TestNodeIsDrained moves all that lies on a node elsewhere, while its leaders are killed, and then takes it away.
func TestNodeIsDrained(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "34MiB"})
	a := c.Donate("a", "--dram=66MiB")
	b := c.Donate("b", "--dram=66MiB", "--bandwidth=8MiB")
	x := c.Open(client.Config{Device: a.Device("dram").ID})
	const n = 2048 // 32 MiB
	cluster.Fill(t, x, "k", n, cluster.PageSize)
	require.NoError(t, x.Close(t.Context()))
	reader := c.Open(client.Config{NoPromote: true})
	c.Ctl("drain", "node", "a")
	for range 2 {
		leader := c.Leader()
		leader.Kill()
		c.Leader()
		leader.Restart()
	}
	to := b.Device("dram").ID
	cluster.Within(t, "an empty node", func() error {
		if where := locate(t, reader, "k", n); where[to] != n {
			return fmt.Errorf("lies on %v", where)
		}
		return nil
	})
	a.Terminate()
	require.Equal(t, n, cluster.Held(t, reader, "k", n), "nothing was lost")
	c.Check()
}

// TestLostReplicasAreMadeAgain kills a node, for good, on which all values have a copy. Another one gets them.
func TestLostReplicasAreMadeAgain(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Members: 3, Pool: "34MiB"})
	a := c.Donate("a", "--dram=34MiB")
	b := c.Donate("b", "--dram=34MiB")
	x := c.Open(client.Config{Near: []string{"a"}, Tier: "dram", Replicas: 2})
	y := c.Open(client.Config{Near: []string{"b"}, Tier: "dram", Replicas: 2, NoPromote: true})
	reader := c.Open(client.Config{NoPromote: true})
	const n = 256
	cluster.Fill(t, x, "of-a", n, cluster.PageSize)
	cluster.Fill(t, y, "of-b", n, cluster.PageSize)
	require.Equal(t, map[uint64]int{a.Device("dram").ID: n}, locate(t, reader, "of-a", n))
	third := c.Donate("c", "--dram=66MiB")
	b.Kill()
	leader := c.Leader()
	leader.Kill() // what is left to do does not depend on who knows of it
	c.Leader()
	leader.Restart()
	cluster.Within(t, "copies on the third node", func() error {
		if copied := third.Device("dram").Copied; copied != 2*n {
			return fmt.Errorf("%d", copied)
		}
		return nil
	})
	a.Kill()
	cluster.Within(t, "values of the third node alone", func() error {
		for _, name := range []string{"of-a", "of-b"} {
			if on := locate(t, reader, name, n); on[third.Device("dram").ID] != n {
				return fmt.Errorf("%s lies on %v", name, on)
			}
		}
		return nil
	})
	require.Equal(t, n, cluster.Held(t, reader, "of-a", n))
	require.Equal(t, n, cluster.Held(t, reader, "of-b", n))
	c.Check()
}

// TestReplayWhileNodesAreKilled replays requests into a pool that holds a part of them, whose nodes are killed by turns:
// every byte that is read is one that was stored.
func TestReplayWhileNodesAreKilled(t *testing.T) {
	dir, err := os.MkdirTemp("", "larder-replay-") // short, for the socket's path
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	t.Setenv("XDG_STATE_HOME", dir)
	out, errs, err := cluster.Run(t, "replay", "--requests=400", "--speed=20", "--clients=2", "--page=4KiB", "--pool=10MiB",
		"--nodes=2", "--node-dram=10MiB", "--node-ssd=128MiB", "--kill-nodes=1s", "--checksums", "--quiet", "--json")
	require.NoError(t, err, "%s", errs)
	var report replay.Report
	require.NoError(t, json.Unmarshal([]byte(out), &report))
	require.Zero(t, report.Failures, report.FailureTexts)
	require.Equal(t, 400, report.Requests)
	require.NotNil(t, report.Nodes)
	require.NotZero(t, report.Nodes.Kills)
	require.NotZero(t, report.PrefixHits)
}

// TestNodeThatIsPausedTooLong stops a node for longer than its sessions last, and lets it go on. Its memory was given up
// meanwhile, so it brings new memory; what its disk has is the same.
func TestNodeThatIsPausedTooLong(t *testing.T) {
	cluster.SkipShort(t)
	for name, flags := range map[string][]string{"mapped": nil, "by transfer": {"--no-map"}} {
		t.Run(name, func(t *testing.T) {
			c := cluster.Start(t, cluster.Options{Pool: "34MiB", Flags: []string{"--session-ttl=5s"}})
			d := c.Donate("a", append(flags, "--dram=34MiB", "--ssd-size=64MiB")...)
			before := d.Device("dram")
			disk := d.Device("ssd")
			x := c.Open(client.Config{Near: []string{"a"}, Tier: "dram"})
			y := c.Open(client.Config{Near: []string{"a"}, Tier: "ssd"})
			cluster.Fill(t, x, "dram", 256, cluster.PageSize)
			cluster.Fill(t, y, "disk", 256, cluster.PageSize)
			d.Signal(syscall.SIGSTOP)
			lost(t, c, x, "dram", 256)
			cluster.Fill(t, x, "meanwhile", 256, cluster.PageSize)
			d.Signal(syscall.SIGCONT)
			cluster.Within(t, "new memory", func() error {
				if status, err := d.Status(); err != nil || !status.Ready() || status.Devices[0].UUID == before.UUID {
					return fmt.Errorf("%+v, %w", status, err)
				}
				return nil
			})
			require.Equal(t, disk.UUID, d.Device("ssd").UUID)
			back(t, x, "disk", 256)
			require.Equal(t, 256, cluster.Held(t, x, "meanwhile", 256))
			cluster.Fill(t, x, "again", 256, cluster.PageSize)
			cluster.Fill(t, y, "again on disk", 256, cluster.PageSize)
			require.Equal(t, 256, cluster.Held(t, y, "again", 256))
			back(t, y, "again on disk", 256)
		})
	}
}
