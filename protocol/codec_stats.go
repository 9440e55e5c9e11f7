package protocol

// Append appends m as the payload of HEARTBEAT's reply.
func (m *HeartbeatReply) Append(b []byte) []byte { return AppendErrorReply(b, &m.Error) }

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *HeartbeatReply) Decode(b []byte) error {
	*m = HeartbeatReply{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		d.fault(d.name(), &m.Error)
	}
	return d.endReply(&m.Error, 0)
}

// Append appends m as the payload of REPORT_STATS.
func (m *ReportStatsRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.array("entries", len(m.Entries))
	for i := range m.Entries {
		v := &m.Entries[i]
		row := e.open()
		e.optStr("client_id", v.ClientID)
		e.optStr("op_type", v.OpType)
		e.optStr("result", v.Result)
		e.uint("size", v.Size)
		e.float("latency_us", v.LatencyUS)
		e.close(row)
	}
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *ReportStatsRequest) Decode(b []byte) error {
	*m = ReportStatsRequest{Entries: m.Entries[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "entries":
			m.Entries = d.statsEntries(m.Entries)
			have |= 1
		default:
			d.skip()
		}
	}
	d.need(have, "entries")
	return d.end()
}

func (d *dec) statsEntries(s []StatsEntry) []StatsEntry {
	for v := range elements(d, &s, MaxReport, "entries") {
		d.statsEntry(v)
	}
	return s
}

func (d *dec) statsEntry(v *StatsEntry) {
	old := *v
	*v = StatsEntry{}
	for n := d.element(); d.next(&n); {
		switch string(d.name()) {
		case "client_id":
			v.ClientID = d.str(old.ClientID, MaxNameBytes)
		case "op_type":
			v.OpType = d.str(old.OpType, MaxNameBytes)
		case "result":
			v.Result = d.str(old.Result, MaxNameBytes)
		case "size":
			v.Size = d.uint()
		case "latency_us":
			v.LatencyUS = d.float()
		default:
			d.skip()
		}
	}
}

// Append appends m as the payload of GET_STATS' reply.
func (m *GetStatsReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.field("kv_manager")
	kv := e.open()
	e.uint("total_entries", m.TotalEntries)
	e.uint("total_size", m.TotalSize)
	e.close(kv)
	e.field("allocation_manager")
	alloc := e.open()
	e.uint("num_allocations", m.NumAllocations)
	e.uint("total_allocated", m.TotalAllocated)
	e.uint("active_clients", m.ActiveClients)
	e.close(alloc)
	e.field("stats_manager")
	stats := e.open()
	e.field("clients")
	e.b = appendMapHead(e.b, len(m.Clients))
	for i := range m.Clients {
		e.clientStats(&m.Clients[i])
	}
	e.close(stats)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

func (e *enc) clientStats(c *ClientStats) {
	e.b = append(appendStrHead(e.b, len(c.Client)), c.Client...)
	s := e.open()
	e.field("operations")
	e.b = appendMapHead(e.b, len(c.Operations))
	for i := range c.Operations {
		o := &c.Operations[i]
		e.b = append(appendStrHead(e.b, len(o.Operation)), o.Operation...)
		e.operationStats(o)
	}
	e.close(s)
}

func (e *enc) operationStats(o *OperationStats) {
	s := e.open()
	e.uint("count", o.Count)
	e.uint("hit_count", o.HitCount)
	e.uint("miss_count", o.MissCount)
	e.uint("total_bytes", o.TotalBytes)
	e.float("latency_sum_us", o.LatencySumUS)
	e.average("avg_latency_us", o.AvgUS, o.Count)
	e.average("min_latency_us", o.MinUS, o.Count)
	e.float("max_latency_us", o.MaxUS)
	e.uint("interval_count", o.IntervalCount)
	e.average("interval_avg_us", o.IntervalAvgUS, o.IntervalCount)
	e.average("interval_min_us", o.IntervalMinUS, o.IntervalCount)
	e.float("interval_max_us", o.IntervalMaxUS)
	e.close(s)
}

// average appends v or, as Maru does, the int 0 where there is nothing to take an average or minimum of.
func (e *enc) average(name string, v float64, count uint64) {
	if count == 0 {
		e.uint(name, 0)
		return
	}
	e.float(name, v)
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *GetStatsReply) Decode(b []byte) error {
	*m = GetStatsReply{Clients: m.Clients[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "kv_manager":
			m.decodeEntries(&d)
			have |= 1
		case "allocation_manager":
			m.decodeAllocations(&d)
			have |= 2
		case "stats_manager":
			m.decodeClients(&d)
			have |= 4
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "kv_manager", "allocation_manager", "stats_manager")
}

func (m *GetStatsReply) decodeEntries(d *dec) {
	for n := d.mapHead(); d.next(&n); {
		switch string(d.name()) {
		case "total_entries":
			m.TotalEntries = d.uint()
		case "total_size":
			m.TotalSize = d.uint()
		default:
			d.skip()
		}
	}
	d.inside("kv_manager", -1)
}

func (m *GetStatsReply) decodeAllocations(d *dec) {
	for n := d.mapHead(); d.next(&n); {
		switch string(d.name()) {
		case "num_allocations":
			m.NumAllocations = d.uint()
		case "total_allocated":
			m.TotalAllocated = d.uint()
		case "active_clients":
			m.ActiveClients = d.uint()
		default:
			d.skip()
		}
	}
	d.inside("allocation_manager", -1)
}

func (m *GetStatsReply) decodeClients(d *dec) {
	for n := d.mapHead(); d.next(&n); {
		switch string(d.name()) {
		case "clients":
			m.Clients = d.clientStats(m.Clients)
		default:
			d.skip()
		}
	}
	d.inside("stats_manager", -1)
}

func (d *dec) clientStats(s []ClientStats) []ClientStats {
	s = s[:0]
	for n := d.fits(d.mapHead(), 1, MaxList); d.next(&n); {
		s = append(s, ClientStats{Client: d.label()})
		c := &s[len(s)-1]
		for k := d.element(); d.next(&k); {
			switch string(d.name()) {
			case "operations":
				c.Operations = d.operationStats(c.Operations)
			default:
				d.skip()
			}
		}
		d.inside("clients", len(s)-1)
	}
	return s
}

func (d *dec) operationStats(s []OperationStats) []OperationStats {
	s = s[:0]
	for n := d.fits(d.mapHead(), 1, MaxList); d.next(&n); {
		s = append(s, OperationStats{Operation: d.label()})
		o := &s[len(s)-1]
		for k := d.element(); d.next(&k); {
			d.operationField(d.name(), o)
		}
		d.inside("operations", len(s)-1)
	}
	return s
}

func (d *dec) operationField(name []byte, o *OperationStats) {
	switch string(name) {
	case "count":
		o.Count = d.uint()
	case "hit_count":
		o.HitCount = d.uint()
	case "miss_count":
		o.MissCount = d.uint()
	case "total_bytes":
		o.TotalBytes = d.uint()
	case "latency_sum_us":
		o.LatencySumUS = d.float()
	case "avg_latency_us":
		o.AvgUS = d.float()
	case "min_latency_us":
		o.MinUS = d.float()
	case "max_latency_us":
		o.MaxUS = d.float()
	case "interval_count":
		o.IntervalCount = d.uint()
	case "interval_avg_us":
		o.IntervalAvgUS = d.float()
	case "interval_min_us":
		o.IntervalMinUS = d.float()
	case "interval_max_us":
		o.IntervalMaxUS = d.float()
	default:
		d.skip()
	}
}

// Append appends m as the payload of GET_USAGE's reply.
func (m *GetUsageReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.array("instances", len(m.Instances))
	for i := range m.Instances {
		v := &m.Instances[i]
		row := e.open()
		e.str("instance_id", v.InstanceID)
		e.uint("regions", v.Regions)
		e.uint("allocated", v.Allocated)
		e.uint("used", v.Used)
		e.close(row)
	}
	e.uint("pool_total", m.PoolTotal)
	e.uint("pool_free", m.PoolFree)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *GetUsageReply) Decode(b []byte) error {
	*m = GetUsageReply{Instances: m.Instances[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "instances":
			m.Instances = d.usages(m.Instances)
			have |= 1
		case "pool_total":
			m.PoolTotal = d.uint()
			have |= 2
		case "pool_free":
			m.PoolFree = d.uint()
			have |= 4
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "instances", "pool_total", "pool_free")
}

func (d *dec) usages(s []InstanceUsage) []InstanceUsage {
	for v := range elements(d, &s, MaxList, "instances") {
		d.usage(v)
	}
	return s
}

func (d *dec) usage(v *InstanceUsage) {
	*v = InstanceUsage{}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch string(d.name()) {
		case "instance_id":
			v.InstanceID = d.label()
			have |= 1
		case "regions":
			v.Regions = d.uint()
			have |= 2
		case "allocated":
			v.Allocated = d.uint()
			have |= 4
		case "used":
			v.Used = d.uint()
			have |= 8
		default:
			d.skip()
		}
	}
	d.need(have, "instance_id", "regions", "allocated", "used")
}
