package server

import (
	"math/bits"
	"sync/atomic"

	"larder/protocol"
)

// Counters are what the server counts. They only grow; readers may take them at any time.
type Counters struct {
	// Requests and Errors are by message type (the low 8 bits); a batch counts once.
	Requests, Errors [256]atomic.Uint64
	// Latency is by message type, from the frame's being read to the reply's being written into the connection's
	// buffer, in nanoseconds. Of reads served from memory one in latencySample is measured.
	Latency [256]Histogram

	Keys, Hits          atomic.Uint64 // keys looked up, and found
	LeasesGranted       atomic.Uint64
	LeasesReleased      atomic.Uint64
	TouchesDropped      atomic.Uint64
	TouchesLogged       atomic.Uint64
	AllocWaits          atomic.Uint64 // requests that waited for a victim
	AllocTimeouts       atomic.Uint64 // and those that were answered PENDING
	AllocsKept          atomic.Uint64 // and those that were refused for other tenants' guarantees
	AllocReplans        atomic.Uint64 // plans that Apply found out of date
	EarlyRevokes        atomic.Uint64 // regions asked for ahead of need: see Config.RevokeWatermark
	CondemnedWaits      atomic.Uint64 // reads that waited for the outcome of an eviction
	StampWaits          atomic.Uint64 // reads that waited for the log to say that an entry's time is over
	RevokesSent         atomic.Uint64 // pushes, repetitions included
	FencesSent          atomic.Uint64 // the same, to homes of devices
	RevokesPending      atomic.Int64  // regions that wait for an answer
	NameWatches         atomic.Int64  // WATCH_NAMES that wait
	RegionsFenced       atomic.Int64  // regions of ended sessions whose processes may still write
	FreedPushed         atomic.Uint64 // pages
	PromotionsPaced     atomic.Uint64 // reads of what was wanted in a faster tier, of clients that had promoted enough for now
	DemotedBytes        atomic.Uint64 // that finished tasks have copied to slower tiers
	SessionsExpired     atomic.Uint64
	SessionsFenced      atomic.Uint64 // processes proven dead
	KVEventsLost        atomic.Uint64 // changes of blocks that were not published since too many waited
	KVEventsGaps        atomic.Uint64 // holes in the sequence of what was published
	Confirms            atomic.Uint64 // rounds that proved leadership
	ConfirmFailures     atomic.Uint64
	Groups              atomic.Uint64 // log entries proposed
	GroupCommands       Histogram     // commands in each
	GroupBytes          Histogram
	GroupNanos          Histogram                          // from proposal to applied
	Forwarded           [forwardOutcomeCount]atomic.Uint64 // lookups that the leader was asked for clients without a session
	ConnectionsAccepted atomic.Uint64
	ConnectionsRefused  atomic.Uint64
	ConnectionsDropped  atomic.Uint64 // for what the client did, or did not: bad frames, not reading, idle
	Connections         atomic.Int64
	BytesIn, BytesOut   atomic.Uint64
}

// HistogramBuckets is the number of buckets of a Histogram.
const HistogramBuckets = 40

// Histogram counts values by their binary order of magnitude: bucket i holds those of i bits, the last all larger.
type Histogram struct {
	Buckets [HistogramBuckets]atomic.Uint64
	Sum     atomic.Uint64
}

// Observe counts v.
func (h *Histogram) Observe(v uint64) {
	h.Buckets[min(bits.Len64(v), HistogramBuckets-1)].Add(1)
	h.Sum.Add(v)
}

// observeLatency counts a request's duration in nanoseconds.
func (c *Counters) observeLatency(t protocol.Type, nanos int64) {
	c.Latency[t].Observe(uint64(max(nanos, 0)))
}
