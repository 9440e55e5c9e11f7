package raft

import (
	"log/slog"
	"time"
)

// When a leader hands over because its disk is slow: every write of the cluster waits for a majority, and every read and
// heartbeat for the leader's loop, so a leader that is much slower than others costs everybody what a follower would
// cost nobody. It is compared with the others, since handing over helps nobody where all disks are slow.
const (
	// slowSync is the mean time of a log write below which leadership stays: what an election costs is not won back soon.
	slowSync = 20 * time.Millisecond
	// slowRaces is the least number of writes in a window that say anything: one slow write is no slow disk.
	slowRaces = 3
	// slowMoves is the least time between two attempts.
	slowMoves = time.Minute
)

// races compares the leader's log writes with the followers': messages leave before the leader itself writes, so each
// write is a race. A follower that has answered before half of the leader's own time is over has won it, with two trips
// over the network on top. It is guarded by the Node's lock.
type races struct {
	index uint64 // last entry of the write in progress, 0 if none
	begun int64  // boottime in nanoseconds, as the next
	first int64  // when the first of the others had it, 0 if none has

	writes, lost int   // of the window
	nanos        int64 // spent in them
}

// start begins a race, or adds entries to the one in progress.
func (r *races) start(index uint64, now int64) {
	if r.index == 0 {
		r.begun = now
	}
	r.index, r.first = index, 0
}

// acked notes that another voter has everything up to index.
func (r *races) acked(index uint64, now func() int64) {
	if r.index != 0 && r.first == 0 && index >= r.index {
		r.first = now()
	}
}

// end is called when the leader has written, too.
func (r *races) end(now int64) {
	if r.index == 0 {
		return
	}
	r.writes++
	r.nanos += now - r.begun
	if r.first != 0 && 2*(r.first-r.begun) < now-r.begun {
		r.lost++
	}
	r.index, r.first = 0, 0
}

// window judges the races since the last call, and begins anew. Slow means that three quarters of them were lost.
func (r *races) window() (mean time.Duration, slow bool) {
	if r.writes >= slowRaces {
		mean = time.Duration(r.nanos / int64(r.writes))
		slow = mean >= slowSync && 4*r.lost >= 3*r.writes
	}
	r.writes, r.lost, r.nanos = 0, 0, 0
	return mean, slow
}

// watchSpeed hands leadership over when this member's disk has been much slower than the others' for an election timeout.
// Not often: the next leader may be no better for a reason that is not seen here.
func (n *Node) watchSpeed(count int) {
	if count%n.core.cfg.ElectionTicks != 0 || n.solo.Load() {
		return
	}
	n.mu.Lock()
	mean, slow := n.races.window()
	n.mu.Unlock()
	if !slow || !n.leads.Load() || n.movedAt != 0 && time.Duration(count-n.movedAt)*n.cfg.Tick < slowMoves {
		return
	}
	n.movedAt = count
	n.wg.Go(func() {
		err := n.TransferLeadership(n.ctx, 0)
		n.cfg.Core.logger().Warn("handing leadership over, the log's disk is much slower than another member's",
			slog.Duration("write_duration", mean), slog.Any("error", err))
	})
}

// isVoter says whether a member has a vote.
func (n *Node) isVoter(id uint64) bool {
	m, ok := n.core.log.confs.newest().find(id)
	return ok && !m.Learner
}
