package chaos

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
	"larder/protocol"
)

// leftFull is what filling a disk leaves: far below what is kept free, and far from none.
const leftFull = minFree / 2

// ownDisks skips a case where members have no file systems of their own.
func (r *run) ownDisks() {
	r.t.Helper()
	if r.c.Nodes[0].Disk == "" {
		r.t.Skip("SKIPPED: file systems cannot be mounted here, so no disk can be filled")
	}
}

// diskFullLeader fills the leader's disk: reads go on, changes are refused within a second and say why, and are taken
// again when there is space.
func diskFullLeader(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	r.ownDisks()
	x := r.c.Open(client.Config{})
	cluster.Fill(t, x, "before", 64, cluster.PageSize)
	for range 2 {
		leader := r.c.Leader()
		undo := cluster.FillDisk(t, leader.Disk, leftFull)
		at := time.Now()
		r.fault("disk full of the leader")
		took := r.refusal(leader, at)
		r.figure("from a full disk to the first typed refusal", ms(took), "ms", "<= 1000", took <= time.Second)
		require.LessOrEqual(t, took, 5*time.Second+cluster.Stalled(at), "far more than a busy machine explains")
		begun := time.Now()
		require.Equal(t, 64, cluster.Held(t, x, "before", 64), "reads go on")
		r.figure("64 values read while the disk is full", ms(time.Since(begun)), "ms", "", true)
		r.sleep(500*time.Millisecond, 2*time.Second)
		undo()
		r.figure("from space to the next acknowledged store", ms(r.writing(time.Now(), 4)), "ms", "", true)
	}
	r.finish()
}

// refusal sends changes to a member until one is refused for want of disk space, and returns how long after a time that
// was: the members look at their disks five times a second.
func (r *run) refusal(n *cluster.Node, since time.Time) time.Duration {
	r.t.Helper()
	raw := cluster.DialRaw(r.t, n.Client)
	defer raw.Close()
	var took time.Duration
	cluster.Within(r.t, "a refusal", func() error {
		sent := time.Now()
		request := protocol.KeysRequest{Keys: [][]byte{fmt.Appendf(nil, "nothing/%d", sent.UnixNano())}}
		reply, err := raw.Do(protocol.TypeDelete, cluster.As(protocol.TypeDelete, request.AppendAs))
		if err != nil {
			return err
		}
		var refused protocol.KeysReply
		if err := refused.DecodeAs(reply.Payload, protocol.TypeDelete); err != nil {
			return err
		}
		if refused.Code != protocol.CodeDiskFull {
			return fmt.Errorf("code %v: %s", refused.Code, refused.Message)
		}
		took = time.Since(since)
		require.Contains(r.t, refused.Message, "space")
		return nil
	})
	return took
}

// diskFullFollower fills a follower's disk: nobody else notices.
func diskFullFollower(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{})
	r.ownDisks()
	r.until(caseTime, func(i int) {
		n := r.follower()
		left := uint64(leftFull)
		if i%2 == 1 {
			left = minFree / 8 // what it is sent is refused too
		}
		undo := cluster.FillDisk(t, n.Disk, left)
		r.fault("disk full of a follower")
		cluster.Within(t, "the disk's being seen full", func() error {
			status, err := n.Status()
			if err == nil && !status.Disk.Full {
				err = errors.New("not full")
			}
			return err
		})
		at := time.Now()
		r.writing(at, 2)
		r.sleep(time.Second, 2*time.Second)
		t.Logf("stores while a follower's disk is full: %s", r.probe.Summary(at))
		r.writing(time.Now(), 2)
		undo()
		r.sleep(500*time.Millisecond, time.Second)
	})
	r.finish()
}
