package server

import (
	"slices"
	"sync"

	"larder/protocol"
)

// Limits of what clients can report: more clients are summed up as "_other", more operations as "other".
const (
	maxReportClients    = 1024
	maxReportOperations = 64
)

// reports sums up the operations that Maru's clients report, as its server does: per client, and for all as "_all".
type reports struct {
	mu      sync.Mutex
	clients map[string]map[string]*protocol.OperationStats
}

// add counts one operation.
func (r *reports) add(e *protocol.StatsEntry) {
	client, op := e.ClientID, e.OpType
	if client == "" {
		client = "_unknown"
	}
	if op == "" {
		op = "unknown"
	}
	for _, name := range [...]string{client, "_all"} {
		s := r.operation(name, op)
		s.Count++
		s.IntervalCount++
		switch e.Result {
		case "hit", "partial":
			s.HitCount++
		case "miss":
			s.MissCount++
		}
		s.TotalBytes += e.Size
		s.LatencySumUS += e.LatencyUS
		s.AvgUS = s.LatencySumUS / float64(s.Count)
		s.IntervalAvgUS += (e.LatencyUS - s.IntervalAvgUS) / float64(s.IntervalCount)
		if s.Count == 1 || e.LatencyUS < s.MinUS {
			s.MinUS = e.LatencyUS
		}
		if s.IntervalCount == 1 || e.LatencyUS < s.IntervalMinUS {
			s.IntervalMinUS = e.LatencyUS
		}
		s.MaxUS = max(s.MaxUS, e.LatencyUS)
		s.IntervalMaxUS = max(s.IntervalMaxUS, e.LatencyUS)
	}
}

// operation finds or makes a row.
func (r *reports) operation(client, op string) *protocol.OperationStats {
	if r.clients == nil {
		r.clients = map[string]map[string]*protocol.OperationStats{}
	}
	ops := r.clients[client]
	if ops == nil {
		if len(r.clients) >= maxReportClients && client != "_all" && client != "_other" {
			return r.operation("_other", op)
		}
		ops = map[string]*protocol.OperationStats{}
		r.clients[client] = ops
	}
	s := ops[op]
	if s == nil {
		if len(ops) >= maxReportOperations && op != "other" {
			return r.operation(client, "other")
		}
		s = &protocol.OperationStats{Operation: op}
		ops[op] = s
	}
	return s
}

// take returns the sums, and starts a new interval.
func (r *reports) take() []protocol.ClientStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := make([]string, 0, len(r.clients))
	for name := range r.clients {
		names = append(names, name)
	}
	out := make([]protocol.ClientStats, 0, len(names))
	for _, name := range sorted(names) {
		c := protocol.ClientStats{Client: name}
		for _, s := range r.clients[name] {
			c.Operations = append(c.Operations, *s)
			s.IntervalCount, s.IntervalAvgUS, s.IntervalMinUS, s.IntervalMaxUS = 0, 0, 0, 0
		}
		slices.SortFunc(c.Operations, func(a, b protocol.OperationStats) int {
			if a.Operation < b.Operation {
				return -1
			}
			return 1
		})
		out = append(out, c)
	}
	return out
}

// sorted sorts names in place and returns them.
func sorted(names []string) []string {
	slices.Sort(names)
	return names
}

// reportStats serves REPORT_STATS.
func (m *Master) reportStats(h protocol.Header, payload, out []byte) []byte {
	var req protocol.ReportStatsRequest
	if err := req.Decode(payload); err != nil {
		return m.refuseErr(out, h, err)
	}
	m.reports.mu.Lock()
	for i := range req.Entries {
		m.reports.add(&req.Entries[i])
	}
	m.reports.mu.Unlock()
	b, mark := protocol.BeginReply(out, h)
	reply := protocol.SuccessReply{Success: true}
	return protocol.EndFrame(reply.Append(b), mark)
}

// getStats serves GET_STATS.
func (m *Master) getStats(h protocol.Header, out []byte) []byte {
	m.state.RLock()
	st := m.machine.Stats()
	m.state.RUnlock()
	regions := uint64(0)
	for _, n := range st.Regions {
		regions += uint64(n) //nolint:gosec // not negative
	}
	reply := protocol.GetStatsReply{
		TotalEntries: st.Entries, TotalSize: st.LiveBytes, NumAllocations: regions,
		TotalAllocated: st.PoolBytes - st.FreeBytes, ActiveClients: uint64(st.Sessions), //nolint:gosec // not negative
		Clients: m.reports.take(),
	}
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark)
}
