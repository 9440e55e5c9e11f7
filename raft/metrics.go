package raft

import (
	"math/bits"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Histogram counts durations in buckets that double: bucket i holds those below
// 2^i microseconds.
type Histogram struct {
	// Counts by bucket, the last without an upper end.
	Counts [histogramBuckets]uint64
	// SumNanos of all.
	SumNanos uint64
}

const histogramBuckets = 26 // up to 33 s

// histogram is a Histogram that is written concurrently.
type histogram struct {
	counts [histogramBuckets]atomic.Uint64
	sum    atomic.Uint64
}

func (h *histogram) observe(nanos int64) {
	nanos = max(nanos, 0)
	i := min(bits.Len64(uint64(nanos)/1000), histogramBuckets-1)
	h.counts[i].Add(1)
	h.sum.Add(uint64(nanos))
}

func (h *histogram) snapshot() (s Histogram) {
	for i := range h.counts {
		s.Counts[i] = h.counts[i].Load()
	}
	s.SumNanos = h.sum.Load()
	return s
}

// latencySample times one proposal at a time: reading the clock for each would cost
// more than the rest of Propose.
type latencySample struct {
	index atomic.Uint64 // being timed, 0 if none
	at    atomic.Int64
}

// start times the proposal at index unless another is being timed.
func (l *latencySample) start(index uint64, now func() int64) {
	if l.index.Load() == 0 {
		l.at.Store(now())
		l.index.CompareAndSwap(0, index)
	}
}

// end ends the timing once everything up to applied is applied.
func (l *latencySample) end(applied uint64, now func() int64, h *histogram) {
	if i := l.index.Load(); i != 0 && i <= applied {
		h.observe(now() - l.at.Load())
		l.index.Store(0)
	}
}

type nodeStats struct {
	proposals, readRounds          atomic.Uint64
	ticksDropped                   atomic.Uint64
	snapshotsSent, snapshotsFailed atomic.Uint64
	syncs, applies                 histogram
}

// StoreMetrics is what a Store counts.
type StoreMetrics struct {
	// FsyncLatency is Pebble's histogram of log syncs in seconds; nil before the first. Register or export it.
	FsyncLatency prometheus.Histogram
	// DiskBytes is the space that Pebble uses; L0Sublevels and CompactionDebtBytes show that it falls behind.
	DiskBytes, CompactionDebtBytes uint64
	L0Sublevels                    int32
	// WriteStalls, DiskSlow, DiskFull and BackgroundErrors count events; DiskSlowMaxNanos is the longest.
	WriteStalls, DiskSlow, DiskFull, BackgroundErrors, DiskSlowMaxNanos int64
	Space                                                               Space
	// CacheHits and CacheMisses of blocks.
	CacheHits, CacheMisses int64
}

// Metrics measures the store. It takes Pebble's lock for a moment: call it at
// scrapes, not per request.
func (s *Store) Metrics() StoreMetrics {
	m := s.db.Metrics()
	h := &s.health
	return StoreMetrics{
		FsyncLatency:        m.LogWriter.FsyncLatency,
		DiskBytes:           m.DiskSpaceUsage(),
		CompactionDebtBytes: m.Compact.EstimatedDebt,
		L0Sublevels:         m.Levels[0].Sublevels,
		WriteStalls:         h.stalls.Load(),
		DiskSlow:            h.slowOps.Load(),
		DiskFull:            h.diskFulls.Load(),
		BackgroundErrors:    h.backgroundErrors.Load(),
		DiskSlowMaxNanos:    h.slowMaxNanos.Load(),
		Space:               s.Space(),
		CacheHits:           m.BlockCache.Hits,
		CacheMisses:         m.BlockCache.Misses,
	}
}

// NodeMetrics is what a Node counts, at one moment.
type NodeMetrics struct {
	// Status of the member and its view of the others.
	Status Status
	// Proposals accepted, ReadRounds asked of the cluster.
	Proposals, ReadRounds uint64
	// TicksDropped because the loop was busy.
	TicksDropped uint64
	// SnapshotsSent and SnapshotsFailed to followers.
	SnapshotsSent, SnapshotsFailed uint64
	// ApplyQueue is the number of batches that wait for the state machine.
	ApplyQueue int
	// LogSync is the time to write and sync one batch of the log.
	LogSync Histogram
	// ProposeApply is the time from a proposal to its application here, of one proposal at a time.
	ProposeApply Histogram
	// Store's own.
	Store StoreMetrics
}

// Metrics measures the member.
func (n *Node) Metrics() NodeMetrics {
	return NodeMetrics{
		Status:          n.Status(),
		Proposals:       n.stats.proposals.Load(),
		ReadRounds:      n.stats.readRounds.Load(),
		TicksDropped:    n.stats.ticksDropped.Load(),
		SnapshotsSent:   n.stats.snapshotsSent.Load(),
		SnapshotsFailed: n.stats.snapshotsFailed.Load(),
		ApplyQueue:      n.queue.len(),
		LogSync:         n.stats.syncs.snapshot(),
		ProposeApply:    n.stats.applies.snapshot(),
		Store:           n.cfg.Store.Metrics(),
	}
}
