package server

import (
	"runtime"
	"strconv"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

// requestTypes lists the message types in the order of their numbers.
var requestTypes = func() []protocol.Type {
	var list []protocol.Type
	for t := range 256 {
		if protocol.Type(t).Known() {
			list = append(list, protocol.Type(t))
		}
	}
	return list
}()

// collect emits every metric of a server. Nothing is counted twice: the numbers are read from the server's own counters
// and from the index.
func (m *metrics) collect(e emitter) {
	m.collectCounters(e, m.server.Counters())
	m.collectKVEvents(e)
	m.collectMaru(e)
	m.collectMaruRM(e)
	status := m.server.Status()
	m.collectStatus(e, &status)
	m.collectIndex(e, &status)
	r := m.server.Raft()
	collectRaft(e, &r)
}

// Ranges of histograms, as powers of two.
const (
	minLatency, maxLatency   = 10, 34 // 1 us to 17 s, in nanoseconds
	minCommands, maxCommands = 0, 16
	minBytes, maxBytes       = 6, 21 // 64 B to 2 MiB
	nanoseconds              = 1e9
)

// collectCounters emits what the listeners and the leader count.
func (m *metrics) collectCounters(e emitter, c *Counters) {
	for _, t := range requestTypes {
		n := c.Requests[t].Load()
		if n == 0 {
			continue
		}
		e.counter("requests_total", "Requests by message type; a batch counts once.", n, "type", t.String())
		e.counter("request_errors_total", "Requests that were answered with an error.", c.Errors[t].Load(), "type", t.String())
		e.histogram("request_duration_seconds", "From a request's being read to its reply's being written; of reads a sample.",
			&c.Latency[t], nanoseconds, minLatency, maxLatency, "type", t.String())
	}
	for _, v := range []struct {
		name, help string
		value      uint64
	}{
		{"lookup_keys_total", "Keys looked up.", c.Keys.Load()},
		{"lookup_hits_total", "Keys looked up and found.", c.Hits.Load()},
		{"leases_granted_total", "Read leases granted.", c.LeasesGranted.Load()},
		{"leases_released_total", "Read leases that their holders ended early.", c.LeasesReleased.Load()},
		{"touches_logged_total", "Uses of entries that went into the log.", c.TouchesLogged.Load()},
		{"touches_dropped_total", "Uses of entries above touch_budget that did not.", c.TouchesDropped.Load()},
		{"alloc_waits_total", "Allocations that waited for a victim.", c.AllocWaits.Load()},
		{"alloc_timeouts_total", "Allocations that were answered PENDING.", c.AllocTimeouts.Load()},
		{"alloc_guarantee_refusals_total", "Allocations refused for other tenants' guarantees.", c.AllocsKept.Load()},
		{"alloc_replans_total", "Evictions that were planned again because their victims had gone.", c.AllocReplans.Load()},
		{"early_revokes_total", "Regions asked of live clients ahead of need, by revoke_watermark.", c.EarlyRevokes.Load()},
		{"stamp_waits_total", "Reads that waited for the log to say that an entry's time is over.", c.StampWaits.Load()},
		{"condemned_waits_total", "Lookups that waited for the outcome of an eviction.", c.CondemnedWaits.Load()},
		{"revokes_sent_total", "Requests to clients to give up a region, repetitions included.", c.RevokesSent.Load()},
		{"freed_pages_pushed_total", "Pages that owners were told are free.", c.FreedPushed.Load()},
		{"fences_sent_total", "Requests to homes of devices to fence a region, repetitions included.", c.FencesSent.Load()},
		{"promotions_paced_total", "Reads of what was wanted in a faster tier, of clients at their rate.", c.PromotionsPaced.Load()},
		{"demoted_bytes_total", "Bytes that were copied to slower tiers ahead of eviction, by tasks that are done.", c.DemotedBytes.Load()},
		{"sessions_expired_total", "Sessions that ended for want of a heartbeat.", c.SessionsExpired.Load()},
		{"sessions_fenced_total", "Sessions whose process was proven dead.", c.SessionsFenced.Load()},
		{"leadership_confirms_total", "Rounds that proved leadership for reads.", c.Confirms.Load()},
		{"leadership_confirm_failures_total", "Such rounds that failed.", c.ConfirmFailures.Load()},
		{"groups_total", "Log entries proposed, each with the commands of many requests.", c.Groups.Load()},
		{"connections_accepted_total", "Client connections accepted.", c.ConnectionsAccepted.Load()},
		{"connections_refused_total", "Client connections above max_connections.", c.ConnectionsRefused.Load()},
		{"connections_dropped_total", "Client connections closed for bad frames, silence or not reading.", c.ConnectionsDropped.Load()},
		{"received_bytes_total", "Bytes received from clients.", c.BytesIn.Load()},
		{"sent_bytes_total", "Bytes sent to clients.", c.BytesOut.Load()},
	} {
		e.counter(v.name, v.help, v.value)
	}
	for outcome, name := range forwardOutcomes {
		e.counter("forwarded_total", "Lookups that this member, not leading, passed on to the leader.",
			c.Forwarded[outcome].Load(), "outcome", name)
	}
	e.gauge("revokes_pending", "Regions that wait for their owner to give them up.", float64(c.RevokesPending.Load()))
	e.gauge("regions_fenced", "Regions of ended sessions whose processes may still write.", float64(c.RegionsFenced.Load()))
	e.gauge("name_watches", "Watches of names that wait for a change.", float64(c.NameWatches.Load()))
	e.gauge("connections", "Open client connections.", float64(c.Connections.Load()))
	e.histogram("group_commands", "Commands in a log entry.", &c.GroupCommands, 1, minCommands, maxCommands)
	e.histogram("group_bytes", "Bytes of a log entry.", &c.GroupBytes, 1, minBytes, maxBytes)
	e.histogram("group_duration_seconds", "From a log entry's proposal to its being applied.",
		&c.GroupNanos, nanoseconds, minLatency, maxLatency)
}

// collectStatus emits what Raft and the disk say.
func (m *metrics) collectStatus(e emitter, s *Status) {
	e.gauge("build_info", "1, with the version of the binary as a label.", 1,
		"version", s.Version, "go_version", runtime.Version())
	e.gauge("uptime_seconds", "Since the start.", float64(s.UptimeMS)/1e3)
	e.gauge("raft_term", "Raft term.", float64(s.Term))
	e.gauge("raft_commit_index", "Last log entry known to be committed.", float64(s.Commit))
	e.gauge("raft_applied_index", "Last log entry applied.", float64(s.Applied))
	e.gauge("raft_last_index", "Last log entry held.", float64(s.LastIndex))
	e.gauge("raft_lag_entries", "Log entries that are committed and not applied.", float64(s.Commit-min(s.Applied, s.Commit)))
	e.gauge("raft_has_leader", "Whether a leader is known.", truth(s.Leader != 0))
	e.gauge("raft_is_leader", "Whether this member leads and answers.", truth(s.Serving))
	e.gauge("leader_grace_seconds", "What is left of a new leader's wait before it evicts.", float64(s.GraceMS)/1e3)
	e.gauge("members", "Members of the cluster.", float64(len(s.Members)))
	if s.Serving {
		for i := range s.Members {
			member := &s.Members[i]
			id := strconv.FormatUint(member.ID, 10)
			e.gauge("member_lag_entries", "Log entries that a member is behind its leader; leader only.", float64(member.Lag), "member", id)
			e.gauge("member_active", "Whether a member was heard from lately; leader only.", truth(member.Active), "member", id)
		}
	}
	e.gauge("disk_avail_bytes", "Free space of the data directory's disk.", float64(s.Disk.AvailBytes))
	e.gauge("disk_size_bytes", "Size of the data directory's disk.", float64(s.Disk.TotalBytes))
	e.gauge("disk_full", "Whether changes are refused for want of space.", truth(s.Disk.Full))
}

// collectRaft emits what the log and its store count.
func collectRaft(e emitter, r *raft.NodeMetrics) {
	const microseconds = 1e6
	e.doubling("raft_sync_duration_seconds", "To write and sync one batch of the log.", r.LogSync.Counts[:],
		float64(r.LogSync.SumNanos)/nanoseconds, microseconds, 4, len(r.LogSync.Counts)-2)
	e.counter("raft_proposals_total", "Log entries proposed by this member.", r.Proposals)
	e.counter("raft_read_rounds_total", "Rounds that asked the cluster for reads.", r.ReadRounds)
	e.counter("raft_ticks_dropped_total", "Steps of the clock dropped because the member was busy.", r.TicksDropped)
	e.counter("raft_snapshots_total", "Snapshots for followers.", r.SnapshotsSent, "outcome", "sent")
	e.counter("raft_snapshots_total", "Snapshots for followers.", r.SnapshotsFailed, "outcome", "failed")
	e.gauge("raft_apply_queue", "Batches that wait to be applied.", float64(r.ApplyQueue))
	s := &r.Store
	e.gauge("store_bytes", "Disk space of Pebble.", float64(s.DiskBytes))
	e.gauge("store_compaction_debt_bytes", "What Pebble has yet to compact.", float64(s.CompactionDebtBytes))
	e.gauge("store_l0_sublevels", "Sublevels of Pebble's first level; writes stall when there are many.", float64(s.L0Sublevels))
	for _, v := range []struct {
		name, help string
		value      int64
	}{
		{"store_write_stalls_total", "Times that Pebble made writes wait.", s.WriteStalls},
		{"store_disk_slow_total", "Disk operations that took too long.", s.DiskSlow},
		{"store_disk_full_total", "Writes that found the disk full.", s.DiskFull},
		{"store_background_errors_total", "Failed flushes and compactions.", s.BackgroundErrors},
		{"store_cache_hits_total", "Blocks found in Pebble's cache.", s.CacheHits},
		{"store_cache_misses_total", "Blocks not found there.", s.CacheMisses},
	} {
		e.counter(v.name, v.help, uint64(max(v.value, 0)))
	}
}

// collectDevices emits how the devices are used, and what is copied between them.
func (m *metrics) collectDevices(e emitter, s *Status) {
	for i := range s.Devices {
		d := &s.Devices[i]
		labels := []string{"device", strconv.FormatUint(d.ID, 10), "node", d.Node, "tier", d.Tier}
		e.gauge("device_size_bytes", "Size of a device.", float64(d.Size), labels...)
		e.gauge("device_free_bytes", "Bytes of a device in no region.", float64(d.Free), labels...)
		e.gauge("device_live_bytes", "Bytes of entries on a device, copies included.", float64(d.LiveBytes), labels...)
		e.gauge("device_copy_bytes", "Bytes of copies on a device.", float64(d.CopyBytes), labels...)
		e.gauge("device_entries", "Locations of entries on a device, copies included.", float64(d.Entries), labels...)
		e.gauge("device_serving", "Whether what lies on a device is served.", truth(d.Mode != meta.DeviceAway.String()), labels...)
		e.gauge("device_draining", "Whether a device is given up.", truth(d.Draining), labels...)
		if s.Serving {
			e.gauge("device_ready", "Whether regions are given on a device; leader only.", truth(d.Ready && !d.Draining), labels...)
		}
	}
	waiting := map[string]int{}
	for _, t := range m.server.Tasks() {
		if t.State == meta.TaskWaiting.String() || t.State == meta.TaskRunning.String() {
			waiting[t.Kind]++
		}
	}
	for kind := meta.TaskDemote; kind <= meta.TaskRepair; kind++ {
		e.gauge("tasks", "Tasks that are not over, by kind.", float64(waiting[kind.String()]), "kind", kind.String())
	}
}

// truth is the number of a condition.
func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// phaseNames label the steps of REQUEST_ALLOC.
var phaseNames = [...]string{"free", "own", "departed", "other"}

// collectIndex emits what the index holds.
func (m *metrics) collectIndex(e emitter, s *Status) {
	x := &s.Stats
	e.gauge("entries", "Entries in the index.", float64(x.Entries))
	e.gauge("entries_lacking_replicas", "Entries that lie on fewer nodes than was asked for.", float64(x.Lacking))
	e.gauge("entry_bytes", "Bytes of the entries.", float64(x.LiveBytes))
	e.gauge("key_bytes", "Bytes of the keys.", float64(x.KeyBytes))
	e.gauge("contexts", "Prefix contexts.", float64(x.Contexts))
	guaranteed := uint64(0)
	for i := range x.Tenants {
		guaranteed += x.Tenants[i].Guarantee
	}
	e.gauge("tenants", "Tenants that have had a session, or limits.", float64(len(x.Tenants)))
	e.gauge("guaranteed_bytes", "Bytes of the pool that are guaranteed to tenants.", float64(guaranteed))
	e.gauge("names", "Names.", float64(x.Names))
	e.gauge("name_bytes", "Bytes of the keys and values of names.", float64(x.NameBytes))
	e.gauge("sessions", "Sessions by state.", float64(x.Sessions), "state", "open")
	e.gauge("sessions", "Sessions by state.", float64(x.Closed), "state", "closed")
	for _, state := range regionStateList {
		e.gauge("regions", "Regions by state.", float64(x.Regions[state]), "state", state.String())
	}
	free, given := map[string]uint64{}, map[string]uint64{}
	const pool = "Bytes of the pool's devices by tier; free = in no region."
	for i := range s.Devices {
		d := &s.Devices[i]
		free[d.Tier] += d.Free
		given[d.Tier] += d.Size - min(d.Free, d.Size)
	}
	for _, tier := range protocol.Tiers {
		if free[tier]+given[tier] == 0 {
			continue
		}
		e.gauge("pool_bytes", pool, float64(free[tier]), "tier", tier, "state", "free")
		e.gauge("pool_bytes", pool, float64(given[tier]), "tier", tier, "state", "allocated")
	}
	m.collectDevices(e, s)
	e.counter("copies_registered_total", "Copies of entries registered.", x.Copied)
	e.counter("promotions_total", "Entries of the slowest tier that were copied to a faster one.", x.Promoted)
	e.counter("promoted_bytes_total", "Bytes of these.", x.PromotedSize)
	e.counter("entries_fallen_total", "Entries whose primary location went while a copy stayed.", x.Fallen)
	for _, reason := range removalReasons {
		e.counter("entries_removed_total", "Entries that left the index.", x.Removed[reason], "reason", reason.String())
	}
	for phase, name := range phaseNames {
		e.counter("allocs_total", "Allocations carried out, by the step that found the space.", x.Allocs[phase], "phase", name)
		if phase > 0 {
			e.counter("evictions_total", "Entries evicted, by the step that took them.",
				x.Evictions[phase], "phase", name)
		}
	}
	e.counter("entries_registered_total", "Entries registered.", x.Registered)
	e.counter("entries_existing_total", "Registrations of a key that was held.", x.Existing)
	e.counter("entries_deduplicated_total", "Registrations whose content was held under another key.", x.Deduplicated)
	e.counter("entry_uses_total", "Uses of entries that the policy was told.", x.Touched)
}
