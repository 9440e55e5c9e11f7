package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

var errStays = errors.New("it still leads")

// starve lets a member have a tenth of a processor, and returns what undoes it.
func (r *run) starve(n *cluster.Node) (undo func()) {
	r.t.Helper()
	group := fmt.Sprintf("/sys/fs/cgroup/cpu/larder-chaos-%d-%d", os.Getpid(), n.ID)
	if err := os.Mkdir(group, 0o700); err != nil {
		r.t.Skipf("SKIPPED: no control group for processors can be made here: %v", err)
	}
	write := func(file, text string) {
		require.NoError(r.t, os.WriteFile(filepath.Join(group, file), []byte(text), 0o600))
	}
	write("cpu.cfs_period_us", "100000")
	write("cpu.cfs_quota_us", "10000")
	write("cgroup.procs", strconv.Itoa(n.PID()))
	return func() {
		if pid := n.PID(); pid != 0 {
			require.NoError(r.t, os.WriteFile("/sys/fs/cgroup/cpu/cgroup.procs", []byte(strconv.Itoa(pid)), 0o600))
		}
		cluster.Within(r.t, "the end of the control group", func() error { return os.Remove(group) })
	}
}

// cpuStarved gives the leader, then a follower, a tenth of a processor.
func cpuStarved(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	for _, who := range []string{"the leader", "a follower"} {
		n := r.c.Leader()
		if who == "a follower" {
			n = r.follower()
		}
		at := time.Now()
		undo := r.starve(n)
		r.fault("a tenth of a processor for " + who)
		time.Sleep(caseTime / 2)
		undo()
		t.Logf("stores while %s starves: %s", who, r.probe.Summary(at))
		r.writing(time.Now(), 4)
	}
	r.finish()
}

// clientKilled kills clients between their writing bytes and their registering them, and in the middle of whatever they
// do: what was acknowledged stays, what was not leaves no trace, and the memory comes back.
func clientKilled(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{pool: "1GiB"})
	r.until(caseTime, func(i int) {
		holder := cluster.StartChild(t, r.c, r.load.Ledger, "hold", cluster.ChildConfig{
			Name: fmt.Sprintf("holder%d", i), Live: 8, Size: cluster.RegionSize,
		})
		holder.Hears("holding")
		writer := cluster.StartChild(t, r.c, r.load.Ledger, "write", cluster.ChildConfig{Name: fmt.Sprintf("dying%d", i), Live: 20})
		r.sleep(200*time.Millisecond, 800*time.Millisecond)
		holder.Kill()
		r.fault("kill -9 of a client that has not registered")
		writer.Alive()
		writer.Kill()
		r.fault("kill -9 of a client at work")
		x := r.c.Open(client.Config{})
		values, err := x.ExistsBatch(t.Context(), [][]byte{fmt.Appendf(nil, "holder%d/0", i)})
		require.NoError(t, err)
		require.Equal(t, []bool{false}, values, "what was never registered is not there")
	})
	r.finish()
}

// poolLost is a case in which the bytes of the pool go while the servers run and clients have it mapped. Whatever is read
// then is right or missing; when the pool is whole again, it takes new values.
func poolLost(t *testing.T, name, kind string, lose func(r *run)) {
	t.Helper()
	r := begin(t, name, settings{noLoad: true, pool: "34MiB"})
	old := r.c.Open(client.Config{Checksums: true})
	const n = 256
	cluster.Fill(t, old, "before", n, cluster.PageSize)
	require.Equal(t, n, cluster.Held(t, old, "before", n))
	lose(r)
	r.fault(kind)
	t.Logf("%d of %d values are read by a client that had mapped the pool", cluster.Held(t, old, "before", n), n)
	fresh, err := client.Open(t.Context(), client.Config{Addrs: r.c.Addrs(), PageSize: cluster.PageSize, RegionSize: cluster.RegionSize})
	if err == nil {
		t.Logf("%d of %d values are read by a new client", cluster.Held(t, fresh, "before", n), n)
		fresh.Close(t.Context()) //nolint:errcheck // its pool is broken
	}
	lost := time.Now()
	value := cluster.MakeValue(nil, "again/0", 1, 1000)
	cluster.Within(t, "stores again, with the servers running on", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		x, err := client.Open(ctx, client.Config{Addrs: r.c.Addrs(), PageSize: cluster.PageSize, RegionSize: cluster.RegionSize})
		if err != nil {
			return err
		}
		defer x.Close(ctx) //nolint:errcheck // its pool may be broken
		if _, err = x.Put(ctx, []byte("again/0"), value); err != nil {
			return err
		}
		got, err := x.Get(ctx, []byte("again/0"), nil)
		if err == nil {
			require.Equal(t, value, got)
		}
		return err
	})
	r.figure("from the loss of the pool to the next store that can be read", ms(time.Since(lost)), "ms", "", true)
	cluster.Held(t, old, "before", n) // right or missing
	r.killAll()
	for _, n := range r.c.Nodes {
		n.Start()
	}
	r.c.Leader()
	fresh = r.c.Open(client.Config{Checksums: true})
	t.Logf("%d of %d values are read after a restart", cluster.Held(t, fresh, "before", n), n)
	cluster.Fill(t, fresh, "after", n, cluster.PageSize)
	require.Equal(t, n, cluster.Held(t, fresh, "after", n))
	r.finish()
}

// poolCut truncates the pool's file under everybody.
func poolCut(t *testing.T, name string) {
	t.Helper()
	poolLost(t, name, "pool file truncated", func(r *run) {
		require.NoError(t, os.Truncate(r.c.Pool, 4<<20))
	})
}

// poolReplaced puts another file of zeros in the place of the pool's.
func poolReplaced(t *testing.T, name string) {
	t.Helper()
	poolLost(t, name, "pool file replaced", func(r *run) {
		info, err := os.Stat(r.c.Pool)
		require.NoError(t, err)
		require.NoError(t, os.Remove(r.c.Pool))
		require.NoError(t, os.WriteFile(r.c.Pool, nil, 0o600))
		require.NoError(t, os.Truncate(r.c.Pool, info.Size()))
	})
}

// membersChanged replaces members while leaders are killed.
func membersChanged(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	for i := range 2 {
		leaving := r.c.Leader()
		if i == 1 {
			leaving = r.follower()
		}
		joining := r.c.AddNode(uint64(100 + i))
		joining.Flags = append(joining.Flags, "--join")
		id := strconv.FormatUint(joining.ID, 10)
		r.c.Ctl("members", "add", "--id", id, "--client-addr", joining.Client, "--admin-addr", joining.Admin, joining.Peer)
		joining.Start()
		promote := append(append([]string{"ctl"}, r.c.AdminFlags()...), "members", "promote", id)
		cluster.Within(t, "promotion", func() error {
			_, errs, err := cluster.Run(t, promote...)
			if err != nil {
				return errors.New(errs)
			}
			return nil
		})
		r.fault("member added")
		joining.Ready()
		killed := r.c.Leader()
		killed.Kill()
		r.fault("kill -9 of the leader")
		r.writing(time.Now(), 6)
		killed.Restart()
		r.c.Ctl("members", "remove", strconv.FormatUint(leaving.ID, 10))
		r.fault("member removed")
		cluster.Within(t, "end of the removed member", func() error {
			if leaving.State() != cluster.Down {
				return errors.New("it still runs")
			}
			return nil
		})
		r.c.Forget(leaving)
		r.writing(time.Now(), 4)
	}
	r.finish()
}
