package protocol

// HeartbeatReply answers HEARTBEAT (0xF1); it also fits every other reply of which only the error matters.
type HeartbeatReply struct {
	Error
}

// StatsEntry is one operation that a Maru client reports: {client_id?, op_type?, result?, size?, latency_us?}.
type StatsEntry struct {
	ClientID  string  // "client_id"; Maru's default is "_unknown"
	OpType    string  // "op_type"; "unknown"
	Result    string  // "result": hit, miss, partial or none
	Size      uint64  // "size": bytes
	LatencyUS float64 // "latency_us"
}

// ReportStatsRequest is REPORT_STATS (0xF2); the reply is a SuccessReply.
type ReportStatsRequest struct {
	Entries []StatsEntry // "entries": at most MaxReport
}

// OperationStats sums up the operations of one kind. The interval figures are of the time since the last GET_STATS.
type OperationStats struct {
	Operation     string  // its key in the map of operations
	Count         uint64  // "count"
	HitCount      uint64  // "hit_count"
	MissCount     uint64  // "miss_count"
	TotalBytes    uint64  // "total_bytes"
	LatencySumUS  float64 // "latency_sum_us"
	AvgUS         float64 // "avg_latency_us"
	MinUS         float64 // "min_latency_us"
	MaxUS         float64 // "max_latency_us"
	IntervalCount uint64  // "interval_count"
	IntervalAvgUS float64 // "interval_avg_us"
	IntervalMinUS float64 // "interval_min_us"
	IntervalMaxUS float64 // "interval_max_us"
}

// ClientStats are the sums of one client, or of all under the name "_all".
type ClientStats struct {
	Client     string           // its key in the map of clients
	Operations []OperationStats // "operations": map from operation to its sums
}

// GetStatsReply answers GET_STATS (0xF0).
type GetStatsReply struct {
	Error
	TotalEntries   uint64        // "kv_manager"."total_entries"
	TotalSize      uint64        // "kv_manager"."total_size": bytes of entries
	NumAllocations uint64        // "allocation_manager"."num_allocations"
	TotalAllocated uint64        // "allocation_manager"."total_allocated": bytes of regions
	ActiveClients  uint64        // "allocation_manager"."active_clients"
	Clients        []ClientStats // "stats_manager"."clients": map from client to its sums
}

// InstanceUsage is one row of GetUsageReply.
type InstanceUsage struct {
	InstanceID string // "instance_id"
	Regions    uint64 // "regions": how many
	Allocated  uint64 // "allocated": bytes of them
	Used       uint64 // "used": bytes of the entries in them
}

// GetUsageReply answers GET_USAGE (0xF3).
type GetUsageReply struct {
	Error
	Instances []InstanceUsage // "instances", by instance id
	PoolTotal uint64          // "pool_total": bytes
	PoolFree  uint64          // "pool_free": bytes
}
