package integration

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/protocol"
)

// smallDisk mounts a file system of its own for a data directory, or skips the test where that is not permitted.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.Mkdir(dir, 0o700))
	if err := syscall.Mount("larder-test", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("a file system of its own for a data directory cannot be mounted here: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

// fillDisk leaves no more than left bytes of a file system free, and returns what undoes it.
func fillDisk(t *testing.T, dir string, left uint64) (undo func()) {
	t.Helper()
	path := filepath.Join(dir, "ballast of the test")
	f, err := os.Create(path)
	require.NoError(t, err)
	var s syscall.Statfs_t
	require.NoError(t, syscall.Statfs(dir, &s))
	free := s.Bavail * uint64(s.Bsize)
	require.Greater(t, free, left)
	require.NoError(t, syscall.Fallocate(int(f.Fd()), 0, 0, int64(free-left)))
	require.NoError(t, f.Close())
	return func() { require.NoError(t, os.Remove(path)) }
}

// Sizes of the disks that are filled here.
const (
	diskSize     = "300m"
	diskMinFree  = "--min-free-disk=64MiB"
	diskLeftFull = 32 << 20 // below what is kept free, and far from none
)

// TestDiskFullAlone fills the disk of the only member: reads go on, changes are refused in a moment and say why, and
// when there is space again they are taken.
func TestDiskFullAlone(t *testing.T) {
	disk := smallDisk(t, diskSize)
	c := startCluster(t, clusterOptions{
		pool: "34MiB", flags: []string{diskMinFree},
		dataDir: func(uint64) string { return filepath.Join(disk, "data") },
	})
	x := c.open(client.Config{})
	fill(t, x, "before", 64, pageSize)
	undo := fillDisk(t, disk, diskLeftFull)
	within(t, "the disk's being seen full", func() error {
		status, err := c.nodes[0].status()
		if err == nil && !status.Disk.Full {
			err = errors.New("not full")
		}
		return err
	})
	raw := dialRaw(t, c.nodes[0].client)
	begun := time.Now()
	reply, err := raw.do(protocol.TypeDelete, as(protocol.TypeDelete, (&protocol.KeysRequest{Keys: [][]byte{[]byte("before/0")}}).AppendAs))
	require.NoError(t, err)
	t.Logf("a change was refused after %v", time.Since(begun))
	var refusal protocol.KeysReply
	require.NoError(t, refusal.DecodeAs(reply.payload, protocol.TypeDelete))
	require.Equal(t, protocol.CodeDiskFull, refusal.Code, refusal.Message)
	require.Contains(t, refusal.Message, "space")

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	_, err = x.Put(ctx, []byte("during"), makeValue(nil, "during", 1, 100))
	cancel()
	require.Error(t, err)
	t.Log("what a client says:", err)
	require.Equal(t, 64, held(t, x, "before", 64), "reads go on")
	require.Error(t, c.nodes[0].get("/readyz", nil))

	undo()
	fill(t, x, "after", 64, pageSize)
	require.Equal(t, 64, held(t, x, "after", 64))
	require.NoError(t, c.nodes[0].terminate())
	c.nodes[0].restart()
	require.Equal(t, 64, held(t, x, "before", 64))
}

// TestDiskFullOfOneMember fills the disk of one of three, a follower's and then the leader's: the cluster goes on.
func TestDiskFullOfOneMember(t *testing.T) {
	skipShort(t)
	disks := make(map[uint64]string)
	c := newCluster(t, clusterOptions{
		members: 3, flags: []string{diskMinFree}, dataDir: func(id uint64) string {
			disks[id] = smallDisk(t, diskSize)
			return filepath.Join(disks[id], "data")
		},
	})
	for _, n := range c.nodes {
		n.start()
	}
	leader := c.leader()
	l := newLoad(t, c)
	l.writer(c.open(client.Config{}), "w", 200)
	l.reader(c.open(client.Config{}))
	probe := l.prober(c.open(client.Config{}))
	for _, victim := range []*node{c.nodes[leader.id%3], leader} {
		undo := fillDisk(t, disks[victim.id], diskLeftFull)
		at := time.Now()
		within(t, "the disk's being seen full", func() error {
			status, err := victim.status()
			if err == nil && !status.Disk.Full {
				err = errors.New("not full")
			}
			return err
		})
		time.Sleep(time.Second)
		if victim == leader {
			undo() // a leader that cannot hand over has to wait for space
		}
		t.Logf("member %d (leader: %v) full: a store was acknowledged %v after", victim.id, victim == leader, probe.await(t, time.Now()))
		t.Logf("and the first after the fault %v after it", probe.after(at))
		if victim != leader {
			undo()
		}
	}
	l.stop()
	l.verifyAll(c.open(client.Config{}))
	c.settled()
	c.check()
}

// TestSlowMember makes one member slow by stopping it for most of the time: a disk that takes 100 ms for each sync looks
// the same from outside. As a follower it slows nobody; as the leader it loses its place or goes on, and nothing is lost.
func TestSlowMember(t *testing.T) {
	skipShort(t)
	c := startCluster(t, clusterOptions{members: 3})
	l := newLoad(t, c)
	l.writer(c.open(client.Config{}), "w", 200)
	l.reader(c.open(client.Config{}))
	probe := l.prober(c.open(client.Config{}))
	for round, slow := range []*node{c.nodes[c.leader().id%3], c.leader()} {
		began := time.Now()
		for time.Since(began) < 4*time.Second {
			slow.signal(syscall.SIGSTOP)
			time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(50*time.Millisecond))))
			slow.signal(syscall.SIGCONT)
			time.Sleep(10 * time.Millisecond)
		}
		t.Logf("%s slow: %s", [...]string{"a follower", "the leader"}[round], probe.summary(began))
		probe.await(t, time.Now())
	}
	l.stop()
	l.verifyAll(c.open(client.Config{}))
	c.settled()
}

// summary says how many stores were acknowledged since a time, and how long they took.
func (p *resume) summary(since time.Time) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var took []time.Duration
	for _, s := range p.puts {
		if s.from.After(since) {
			took = append(took, s.to.Sub(s.from))
		}
	}
	return "stores took " + percentiles(took)
}
