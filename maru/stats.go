package maru

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strconv"
	"sync"

	"larder/meta"
)

// maxStats bounds the pairs of client, operation and result that are counted apart. Maru has no bound; what is reported
// beyond it is dropped.
const maxStats = 65536

// maxStatName bounds each of their names.
const maxStatName = 256

// Report is one operation as a client has measured it.
type Report struct {
	Op, Result, Client string
	Size               meta.MaruInt
	LatencyUS          float64
}

// set takes one field of a report. What is not of the field's type is as if it were not there.
func (p *Report) set(name string, v value) {
	switch {
	case name == "op_type" && v.kind == kindStr:
		p.Op = string(v.bytes)
	case name == "result" && v.kind == kindStr:
		p.Result = string(v.bytes)
	case name == "client_id" && v.kind == kindStr:
		p.Client = string(v.bytes)
	case name == "size" && v.kind == kindInt:
		p.Size = v.int
	case name == "latency_us" && v.kind == kindFloat:
		p.LatencyUS = v.float
	case name == "latency_us" && v.kind == kindInt:
		if p.LatencyUS = float64(v.int.Abs); v.int.Neg {
			p.LatencyUS = -p.LatencyUS
		}
	}
}

// Stats adds up what clients report, as Maru's server does: in the memory of the member that leads. All methods may be
// called concurrently.
type Stats struct {
	mu   sync.Mutex
	sums map[statKey]*stat
}

type statKey struct{ client, op, result string }

// stat is the sums of one pair; latency is that of all time, recent that since GET_STATS last asked.
type stat struct {
	hits, misses    uint64
	bytes           meta.MaruSum
	latency, recent spread
}

// spread is what is kept of latencies.
type spread struct {
	count         uint64
	sum, min, max float64
}

func (s *spread) add(v float64) {
	if s.count == 0 {
		s.min = math.Inf(1)
	}
	s.count++
	s.sum += v
	s.min, s.max = min(s.min, v), max(s.max, v)
}

func (s *spread) merge(o *spread) {
	if o.count == 0 {
		return
	}
	if s.count == 0 {
		s.min = math.Inf(1)
	}
	s.count += o.count
	s.sum += o.sum
	s.min, s.max = min(s.min, o.min), max(s.max, o.max)
}

func (s *stat) merge(o *stat) {
	s.hits += o.hits
	s.misses += o.misses
	s.bytes = s.bytes.Plus(o.bytes)
	s.latency.merge(&o.latency)
	s.recent.merge(&o.recent)
}

// Record adds reports.
func (s *Stats) Record(reports []Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sums == nil {
		s.sums = map[statKey]*stat{}
	}
	for i := range reports {
		p := &reports[i]
		key := statKey{p.Client, p.Op, p.Result}
		x := s.sums[key]
		if x == nil {
			if len(s.sums) >= maxStats || max(len(p.Client), len(p.Op), len(p.Result)) > maxStatName {
				continue
			}
			x = &stat{}
			s.sums[key] = x
		}
		switch p.Result {
		case "hit":
			x.hits++
		case "miss":
			x.misses++
		}
		var size meta.MaruSum
		size.Add(p.Size)
		x.bytes = x.bytes.Plus(size)
		x.latency.add(p.LatencyUS)
		x.recent.add(p.LatencyUS)
	}
}

// append writes the sums per client and operation, and of all clients, and begins the recent ones anew.
func (s *Stats) append(b []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, clients := map[string]*stat{}, map[string]map[string]*stat{}
	// Floats are added up in one order, so that the same reports give the same sums.
	keys := slices.SortedFunc(maps.Keys(s.sums), func(a, b statKey) int {
		return cmp.Or(cmp.Compare(a.client, b.client), cmp.Compare(a.op, b.op), cmp.Compare(a.result, b.result))
	})
	for _, key := range keys {
		x := s.sums[key]
		of := clients[key.client]
		if of == nil {
			of = map[string]*stat{}
			clients[key.client] = of
		}
		mergeInto(of, key.op, x)
		mergeInto(all, key.op, x)
		x.recent = spread{}
	}
	delete(clients, "_all") // as in Maru, a client of that name would take the place of the sums: here it does not
	b = appendMap(appendStr(append(b, 0x81), "clients"), len(clients)+1)
	b = appendOps(appendStr(b, "_all"), all)
	for _, name := range slices.Sorted(maps.Keys(clients)) {
		b = appendOps(appendStr(b, name), clients[name])
	}
	return b
}

func mergeInto(m map[string]*stat, op string, x *stat) {
	if m[op] == nil {
		m[op] = &stat{}
	}
	m[op].merge(x)
}

func appendOps(b []byte, ops map[string]*stat) []byte {
	b = appendMap(appendStr(append(b, 0x81), "operations"), len(ops))
	for _, op := range slices.Sorted(maps.Keys(ops)) {
		x := ops[op]
		b = append(appendStr(b, op), 0x8c)
		b = appendUint(appendStr(b, "count"), x.latency.count)
		b = appendUint(appendStr(b, "hit_count"), x.hits)
		b = appendUint(appendStr(b, "miss_count"), x.misses)
		total, ok := x.bytes.Int()
		if !ok {
			total = meta.MaruInt{}
		}
		b = appendNumber(appendStr(b, "total_bytes"), total)
		b = appendFloat(appendStr(b, "latency_sum_us"), tenth(x.latency.sum))
		b = appendAverage(appendStr(b, "avg_latency_us"), &x.latency)
		b = appendLeast(appendStr(b, "min_latency_us"), &x.latency)
		b = appendFloat(appendStr(b, "max_latency_us"), tenth(x.latency.max))
		b = appendUint(appendStr(b, "interval_count"), x.recent.count)
		b = appendAverage(appendStr(b, "interval_avg_us"), &x.recent)
		b = appendLeast(appendStr(b, "interval_min_us"), &x.recent)
		b = appendFloat(appendStr(b, "interval_max_us"), tenth(x.recent.max))
	}
	return b
}

// appendAverage and appendLeast write an integer 0 of nothing, as Maru does.
func appendAverage(b []byte, s *spread) []byte {
	if s.count == 0 {
		return append(b, 0)
	}
	return appendFloat(b, tenth(s.sum/float64(s.count)))
}

func appendLeast(b []byte, s *spread) []byte {
	if s.count == 0 {
		return append(b, 0)
	}
	return appendFloat(b, tenth(s.min))
}

// tenth rounds to one decimal as Python does: to the nearest one of the number's exact value, of two that are as near to
// the even one.
func tenth(v float64) float64 {
	f, err := strconv.ParseFloat(strconv.FormatFloat(v, 'f', 1, 64), 64)
	if err != nil {
		return v
	}
	return f
}
