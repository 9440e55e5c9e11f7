package integration

import (
	"context"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
	"larder/protocol"
)

// Sizes of the disks that are filled here.
const (
	diskSize     = "300m"
	diskMinFree  = "--min-free-disk=64MiB"
	diskLeftFull = 32 << 20 // below what is kept free, and far from none
)

// TestDiskFullAlone fills the disk of the only member: reads go on, changes are refused in a moment and say why, and
// when there is space again they are taken.
func TestDiskFullAlone(t *testing.T) {
	disk := cluster.SmallDisk(t, diskSize)
	c := cluster.Start(t, cluster.Options{
		Pool: "34MiB", Flags: []string{diskMinFree},
		DataDir: func(uint64) string { return filepath.Join(disk, "data") },
	})
	x := c.Open(client.Config{})
	cluster.Fill(t, x, "before", 64, cluster.PageSize)
	undo := cluster.FillDisk(t, disk, diskLeftFull)
	cluster.Within(t, "the disk's being seen full", func() error {
		status, err := c.Nodes[0].Status()
		if err == nil && !status.Disk.Full {
			err = errors.New("not full")
		}
		return err
	})
	raw := cluster.DialRaw(t, c.Nodes[0].Client)
	begun := time.Now()
	reply, err := raw.Do(protocol.TypeDelete, cluster.As(protocol.TypeDelete, (&protocol.KeysRequest{Keys: [][]byte{[]byte("before/0")}}).AppendAs))
	require.NoError(t, err)
	t.Logf("a change was refused after %v", time.Since(begun))
	var refusal protocol.KeysReply
	require.NoError(t, refusal.DecodeAs(reply.Payload, protocol.TypeDelete))
	require.Equal(t, protocol.CodeDiskFull, refusal.Code, refusal.Message)
	require.Contains(t, refusal.Message, "space")

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	_, err = x.Put(ctx, []byte("during"), cluster.MakeValue(nil, "during", 1, 100))
	cancel()
	require.Error(t, err)
	t.Log("what a client says:", err)
	require.Equal(t, 64, cluster.Held(t, x, "before", 64), "reads go on")
	require.Error(t, c.Nodes[0].Get("/readyz", nil))

	undo()
	cluster.Fill(t, x, "after", 64, cluster.PageSize)
	require.Equal(t, 64, cluster.Held(t, x, "after", 64))
	require.NoError(t, c.Nodes[0].Terminate())
	c.Nodes[0].Restart()
	require.Equal(t, 64, cluster.Held(t, x, "before", 64))
}

// TestDiskFullOfOneMember fills the disk of one of three, a follower's and then the leader's: the cluster goes on.
func TestDiskFullOfOneMember(t *testing.T) {
	cluster.SkipShort(t)
	disks := make(map[uint64]string)
	c := cluster.New(t, cluster.Options{
		Members: 3, Flags: []string{diskMinFree}, DataDir: func(id uint64) string {
			disks[id] = cluster.SmallDisk(t, diskSize)
			return filepath.Join(disks[id], "data")
		},
	})
	for _, n := range c.Nodes {
		n.Start()
	}
	leader := c.Leader()
	l := cluster.NewLoad(t, c)
	l.Writer(c.Open(client.Config{}), "w", 200)
	l.Reader(c.Open(client.Config{}))
	probe := l.Prober(c.Open(client.Config{}))
	for _, victim := range []*cluster.Node{c.Nodes[leader.ID%3], leader} {
		undo := cluster.FillDisk(t, disks[victim.ID], diskLeftFull)
		at := time.Now()
		cluster.Within(t, "the disk's being seen full", func() error {
			status, err := victim.Status()
			if err == nil && !status.Disk.Full {
				err = errors.New("not full")
			}
			return err
		})
		time.Sleep(time.Second)
		if victim == leader {
			undo() // a leader that cannot hand over has to wait for space
		}
		t.Logf("member %d (leader: %v) full: a store was acknowledged %v after", victim.ID, victim == leader, probe.Await(t, time.Now()))
		t.Logf("and the first after the fault %v after it", probe.After(at))
		if victim != leader {
			undo()
		}
	}
	l.Stop()
	l.VerifyAll(c.Open(client.Config{}))
	c.Settled()
	c.Check()
}

// TestSlowMember makes one member slow by stopping it for most of the time: a disk that takes 100 ms for each sync looks
// the same from outside. As a follower it slows nobody; as the leader it loses its place or goes on, and nothing is lost.
func TestSlowMember(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	l := cluster.NewLoad(t, c)
	l.Writer(c.Open(client.Config{}), "w", 200)
	l.Reader(c.Open(client.Config{}))
	probe := l.Prober(c.Open(client.Config{}))
	for round, slow := range []*cluster.Node{c.Nodes[c.Leader().ID%3], c.Leader()} {
		began := time.Now()
		for time.Since(began) < 4*time.Second {
			slow.Signal(syscall.SIGSTOP)
			time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(50*time.Millisecond))))
			slow.Signal(syscall.SIGCONT)
			time.Sleep(10 * time.Millisecond)
		}
		t.Logf("%s slow: %s", [...]string{"a follower", "the leader"}[round], probe.Summary(began))
		probe.Await(t, time.Now())
	}
	l.Stop()
	l.VerifyAll(c.Open(client.Config{}))
	c.Settled()
}
