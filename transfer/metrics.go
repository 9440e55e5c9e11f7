package transfer

import (
	"cmp"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// counters are what an engine counts over its life, beside what its rails do.
type counters struct {
	transports map[string]*transportCounters // of all of Transports
	served     [Write + 1]opCounters         // what peers asked for over connections, by operation
	begun      atomic.Uint64                 // batches
	done       atomic.Uint64
	failed     atomic.Uint64
	unsettled  atomic.Uint64
	slices     atomic.Uint64 // of batches that were begun
	hedged     atomic.Uint64 // slices that came first over another rail
	duration   [durationBuckets]atomic.Uint64
	nanos      atomic.Uint64 // sum of durations
	sent       atomic.Uint64 // notifications
	unsent     atomic.Uint64
	received   atomic.Uint64
	refused    atomic.Uint64 // notifications from others that found the queue full
	zeroCopy   zeroCopyCounters
}

// transportCounters are those of one transport, to all peers.
type transportCounters struct {
	ops    [Write + 1]opCounters
	errors atomic.Uint64
}

// opCounters are those of one operation.
type opCounters struct{ slices, bytes atomic.Uint64 }

func (o *opCounters) add(bytes uint64) {
	o.slices.Add(1)
	o.bytes.Add(bytes)
}

// durationBuckets are powers of two from 1 us: the last is 67 s and all above.
const durationBuckets = 28

func newCounters() *counters {
	c := &counters{transports: map[string]*transportCounters{}}
	for _, name := range Transports {
		c.transports[name] = &transportCounters{}
	}
	return c
}

// ended counts a batch that took so many nanoseconds.
func (c *counters) ended(b *Batch, took int64) {
	switch {
	case b.unsettled.Load():
		c.unsettled.Add(1)
	case b.failed.Load():
		c.failed.Add(1)
	default:
		c.done.Add(1)
	}
	i := 0
	for limit := int64(1e3); took > limit && i < durationBuckets-1; limit *= 2 {
		i++
	}
	c.duration[i].Add(1)
	c.nanos.Add(uint64(max(took, 0)))
}

// notify counts a notification that was sent, or not.
func (c *counters) notify(err error) {
	if err == nil {
		c.sent.Add(1)
	} else {
		c.unsent.Add(1)
	}
}

// metricPrefix begins the names of an engine's metrics.
const metricPrefix = "larder_transfer_"

// collector is what NewCollector gives.
type collector struct{ e *Engine }

// NewCollector gives an engine's metrics to Prometheus. One engine of a process may be registered at a registry, or each
// under labels of its own.
func NewCollector(e *Engine) prometheus.Collector { return &collector{e} }

// Describe implements prometheus.Collector. It describes nothing: which rails there are changes.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	m := metrics{out}
	m.rails(c.e)
	m.transports(c.e.counters)
	m.own(c.e)
	m.batches(c.e.counters)
	m.zeroCopy(&c.e.counters.zeroCopy)
}

// metrics sends metrics.
type metrics struct{ out chan<- prometheus.Metric }

// send emits one value. labels alternate between names and values.
func (m metrics) send(kind prometheus.ValueType, name, help string, value float64, labels ...string) {
	names, values := make([]string, 0, len(labels)/2), make([]string, 0, len(labels)/2)
	for i := 0; i+1 < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	m.out <- prometheus.MustNewConstMetric(prometheus.NewDesc(metricPrefix+name, help, names, nil), kind, value, values...)
}

func (m metrics) counter(name, help string, value uint64, labels ...string) {
	m.send(prometheus.CounterValue, name, help, float64(value), labels...)
}

func (m metrics) gauge(name, help string, value float64, labels ...string) {
	m.send(prometheus.GaugeValue, name, help, value, labels...)
}

// railKey tells rails apart. Segments that were opened twice have the same.
type railKey struct{ peer, transport, on, from, to string }

// railSum is the rails of one key together.
type railSum struct {
	railKey
	slices, bytes, errors            uint64
	connections, unsettled, unusable int
	latency                          float64 // seconds, the longest
}

// rails emits what each way to a peer has carried. The rails of a segment that was closed are gone.
func (m metrics) rails(e *Engine) {
	sums := map[railKey]*railSum{}
	for _, s := range e.openSegments() {
		d := s.Descriptor()
		for _, p := range s.Paths() {
			k := railKey{d.name(), p.Transport, onLabel(p.Storage), cmp.Or(p.From, "any"), p.To}
			r := sums[k]
			if r == nil {
				r = &railSum{railKey: k}
				sums[k] = r
			}
			r.slices, r.bytes, r.errors = r.slices+p.Slices, r.bytes+p.Bytes, r.errors+p.Errors
			r.connections, r.unsettled = r.connections+p.Connections, r.unsettled+p.Unsettled
			r.latency = max(r.latency, p.Latency.Seconds())
			if p.State == "paused" {
				r.unusable = 1
			}
		}
	}
	for _, r := range sums {
		labels := []string{"peer", r.peer, "transport", r.transport, "on", r.on, "from", r.from, "to", r.to}
		m.counter("rail_slices_total", "Slices that a rail to an open segment has carried.", r.slices, labels...)
		m.counter("rail_bytes_total", "Bytes that a rail has carried.", r.bytes, labels...)
		m.counter("rail_errors_total", "Attempts of a rail that failed.", r.errors, labels...)
		m.gauge("rail_connections", "Open connections of a rail.", float64(r.connections), labels...)
		m.gauge("rail_unsettled_connections", "Connections whose end the peer has not confirmed.", float64(r.unsettled), labels...)
		m.gauge("rail_paused", "1 while a rail pauses after failures.", float64(r.unusable), labels...)
		m.gauge("rail_latency_seconds", "From a slice's hand-over to its end, a moving average.", r.latency, labels...)
	}
}

// openSegments are the segments that are open.
func (e *Engine) openSegments() []*Segment {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]*Segment, 0, len(e.segments))
	for s := range e.segments {
		all = append(all, s)
	}
	return all
}

func onLabel(storage bool) string {
	if storage {
		return "storage"
	}
	return "memory"
}

// transports emits what was carried, either way.
func (m metrics) transports(c *counters) {
	for name, t := range c.transports {
		m.counter("errors_total", "Attempts that failed, by transport.", t.errors.Load(), "transport", name)
		for _, op := range []Op{Read, Write} {
			m.counter("slices_total", "Slices that this process has moved, by transport.", t.ops[op].slices.Load(),
				"transport", name, "op", op.String())
			m.counter("bytes_total", "Bytes of those.", t.ops[op].bytes.Load(), "transport", name, "op", op.String())
		}
	}
	for _, op := range []Op{Read, Write} {
		s := &c.served[op]
		m.counter("served_slices_total", "Slices that peers have moved over connections to here.", s.slices.Load(), "op", op.String())
		m.counter("served_bytes_total", "Bytes of those.", s.bytes.Load(), "op", op.String())
	}
}

// zeroCopy emits what became of writes that were not to be copied.
func (m metrics) zeroCopy(c *zeroCopyCounters) {
	for outcome, n := range map[string]uint64{"spared": c.spared.Load(), "copied": c.copied.Load(), "refused": c.refused.Load()} {
		m.counter("zero_copy_writes_total", "Writes over TCP that the kernel was asked not to copy, by what it did.", n, "outcome", outcome)
	}
	m.counter("zero_copy_given_up_total", "Connections that do without zero-copy writes since the kernel copied all the same.",
		c.givenUp.Load())
}

// own emits what the engine has.
func (m metrics) own(e *Engine) {
	buffers, bytes := map[bool]int{}, map[bool]uint64{}
	for b := range e.buffers.all {
		buffers[b.info.Storage]++
		bytes[b.info.Storage] += b.info.Bytes
	}
	for _, storage := range []bool{false, true} {
		m.gauge("buffers", "Registered buffers.", float64(buffers[storage]), "on", onLabel(storage))
		m.gauge("buffer_bytes", "Bytes of those.", float64(bytes[storage]), "on", onLabel(storage))
	}
	m.gauge("staging_bytes", "Staging memory in use, between storage and peers.", float64(e.staging.used()))
	m.gauge("staging_limit_bytes", "Bound of staging memory.", float64(e.staging.limit))
	m.gauge("served_connections", "Connections from peers.", float64(e.target.count()))
	m.gauge("segments", "Open segments of others.", float64(len(e.openSegments())))
	c := e.counters
	const sent = "Notifications to others."
	m.counter("notifications_sent_total", sent, c.sent.Load(), "outcome", "delivered")
	m.counter("notifications_sent_total", sent, c.unsent.Load(), "outcome", "failed")
	const received = "Notifications from others."
	m.counter("notifications_received_total", received, c.received.Load(), "outcome", "queued")
	m.counter("notifications_received_total", received, c.refused.Load(), "outcome", "refused")
	m.gauge("notifications_waiting", "Notifications that nobody has taken yet.", float64(len(e.inbox.queue)))
	const published = "Publications of this engine in its directory."
	m.counter("publications_total", published, e.published.Load(), "outcome", "done")
	m.counter("publications_total", published, e.unpublished.Load(), "outcome", "failed")
}

// batches emits how batches ended.
func (m metrics) batches(c *counters) {
	outcomes := map[string]uint64{"done": c.done.Load(), "failed": c.failed.Load(), "unsettled": c.unsettled.Load()}
	ended := uint64(0)
	for outcome, n := range outcomes {
		m.counter("batches_total", "Batches that ended, by the worst of their requests.", n, "outcome", outcome)
		ended += n
	}
	m.gauge("batches_open", "Batches under way.", float64(c.begun.Load()-min(ended, c.begun.Load())))
	m.counter("batch_slices_total", "Slices of all batches.", c.slices.Load())
	m.counter("hedged_slices_total", "Slices that waited too long, and came first over another rail.", c.hedged.Load())
	counts, total, limit := map[float64]uint64{}, uint64(0), 1e-6
	for i := range c.duration {
		total += c.duration[i].Load()
		if i < durationBuckets-1 {
			counts[limit] = total
		}
		limit *= 2
	}
	desc := prometheus.NewDesc(metricPrefix+"batch_duration_seconds", "From a batch's submission to its end.", nil, nil)
	m.out <- prometheus.MustNewConstHistogram(desc, total, float64(c.nanos.Load())/1e9, counts)
}

// count is how many connections there are.
func (t *target) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.conns)
}
