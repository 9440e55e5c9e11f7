package client

import "sync/atomic"

// counters are what Stats shows.
type counters struct {
	hits, misses, stored, deduplicated, bytesRead, bytesWritten         atomic.Uint64
	retries, reconnects, unknown, serverErrors, suspended, sessionsLost atomic.Uint64
	shortages, allocs, evicted, freed, revoked, restarts                atomic.Uint64
	late, checksumFaults, generationMisses, truncated, leasesDropped    atomic.Uint64
	condemned                                                           atomic.Uint64
	layersSent                                                          atomic.Uint64
	copied, promoted, notPromoted, replicas                             atomic.Uint64
	remoteReads, remoteFaults, fallovers                                atomic.Uint64
	leaderChanges                                                       atomic.Uint64
	tiers                                                               [3]atomic.Uint64
	phases                                                              [4]atomic.Uint64
}

// Stats says what a client has done since it was opened, and what it holds now.
type Stats struct {
	Hits         uint64 // keys read that were there
	Misses       uint64 // keys read that were not, or whose bytes did not survive
	Stored       uint64 // new entries
	Deduplicated uint64 // values that were there already
	BytesRead    uint64
	BytesWritten uint64
	ByTier       [3]uint64 // values read, repetitions included, from cxl, dram and ssd

	Allocs    uint64    // REQUEST_ALLOCs
	ByPhase   [4]uint64 // those that brought memory: from free space, own entries, departed owners, other clients
	Shortages uint64    // stores that found no free page
	Evicted   uint64    // own entries evicted for own stores
	Freed     uint64    // own entries that others deleted or evicted
	Revoked   uint64    // regions taken away
	Restarts  uint64    // stores begun again in another region, or after a change of session

	Retries       uint64 // requests sent again
	Reconnects    uint64 // connections lost: leader changes among them
	LeaderChanges uint64 // connections to another leader than the one before
	ServerErrors  uint64 // requests answered with an error
	Unknown       uint64 // mutations given up without an answer, and settled in the background
	Suspended     uint64 // waits of stores for a confirmation of the session
	SessionsLost  uint64

	Late             uint64 // reads thrown away because their lease had ended
	ChecksumFaults   uint64 // values whose checksum was wrong: counted as misses
	GenerationMisses uint64 // locations whose device has lost its bytes, or is not to be found
	Truncated        uint64 // reads of mapped bytes that were gone
	Condemned        uint64 // locations that the leader dropped, since this client found something else there than was stored

	Copied       uint64 // copies of entries that CopyIn and promotions have added
	Promoted     uint64 // of those, the ones that the leader wanted when the entry was read
	NotPromoted  uint64 // wishes of that kind that were declined: there was no room, or too much to do
	Replicas     uint64 // copies that were stored together with their entries
	LayersSent   uint64 // layers of values sent to Receivers
	RemoteReads  uint64 // values read from devices that are not mapped here
	RemoteFaults uint64 // reads from and writes to such devices that failed
	Fallovers    uint64 // reads that went on at another location of the same entry

	Regions   int
	Bytes     uint64 // of the regions
	FreePages int
	InFlight  int // mutations without an answer
}

// readFrom counts a value that was read from a device.
func (n *counters) readFrom(d *device) {
	switch d.tier {
	case "dram":
		n.tiers[1].Add(1)
	case slowTier:
		n.tiers[2].Add(1)
	default:
		n.tiers[0].Add(1)
	}
}

// Stats returns the client's counters.
func (c *Client) Stats() Stats {
	n := &c.counters
	s := Stats{
		Hits: n.hits.Load(), Misses: n.misses.Load(), Stored: n.stored.Load(), Deduplicated: n.deduplicated.Load(),
		BytesRead: n.bytesRead.Load(), BytesWritten: n.bytesWritten.Load(),
		Allocs: n.allocs.Load(), Shortages: n.shortages.Load(), Evicted: n.evicted.Load(), Freed: n.freed.Load(),
		Revoked: n.revoked.Load(), Restarts: n.restarts.Load(),
		Retries: n.retries.Load(), Reconnects: n.reconnects.Load(), LeaderChanges: n.leaderChanges.Load(),
		ServerErrors: n.serverErrors.Load(),
		Unknown:      n.unknown.Load(), Suspended: n.suspended.Load(), SessionsLost: n.sessionsLost.Load(),
		Late: n.late.Load(), ChecksumFaults: n.checksumFaults.Load(), GenerationMisses: n.generationMisses.Load(),
		Truncated: n.truncated.Load(), Condemned: n.condemned.Load(),
		RemoteReads: n.remoteReads.Load(), RemoteFaults: n.remoteFaults.Load(),
		Fallovers:  n.fallovers.Load(),
		LayersSent: n.layersSent.Load(),
		Copied:     n.copied.Load(), Promoted: n.promoted.Load(), NotPromoted: n.notPromoted.Load(), Replicas: n.replicas.Load(),
	}
	for i := range s.ByPhase {
		s.ByPhase[i] = n.phases[i].Load()
	}
	for i := range s.ByTier {
		s.ByTier[i] = n.tiers[i].Load()
	}
	if sess := c.sess.Load(); sess != nil {
		s.InFlight = sess.window.inFlight()
	}
	p := c.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	s.Regions, s.FreePages = len(p.regions), p.nfree
	for _, r := range p.regions {
		s.Bytes += r.length
	}
	return s
}
