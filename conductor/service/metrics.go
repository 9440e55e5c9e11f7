package service

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttpadaptor"

	"larder/conductor/poolfeed"
	"larder/conductor/source"
)

// metricPrefix begins the name of every metric of the conductor.
const metricPrefix = "larder_conductor_"

// metrics are what /metrics tells: what is counted here, and what is read from the index, the sources and the schedulers when
// somebody asks.
type metrics struct {
	s        *Service
	handler  fasthttp.RequestHandler
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	rejected *prometheus.CounterVec
}

func newMetrics(s *Service) *metrics {
	m := &metrics{
		s: s,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: metricPrefix + "requests_total", Help: "Requests by path and HTTP status.",
		}, []string{"path", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: metricPrefix + "request_duration_seconds", Help: "From a request's being read to its answer's being made.",
			Buckets: prometheus.ExponentialBuckets(16e-6, 2, 16), // 16 us to half a second
		}, []string{"path"}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: metricPrefix + "rejected_total", Help: "Requests that were not scheduled, by stage and reason.",
		}, []string{"stage", "reason"}),
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(m, m.requests, m.seconds, m.rejected, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	// A few scrapers; more are told to come back.
	m.handler = fasthttpadaptor.NewFastHTTPHandler(promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	return m
}

// request counts one.
func (m *metrics) request(path string, status int, nanos int64) {
	m.requests.WithLabelValues(path, strconv.Itoa(status)).Inc()
	m.seconds.WithLabelValues(path).Observe(float64(nanos) / 1e9)
}

// writeMetrics answers a scrape.
func (s *Service) writeMetrics(r *call) (any, error) {
	s.metrics.handler(r.RequestCtx)
	return nil, nil //nolint:nilnil // it is answered
}

// Describe implements prometheus.Collector. It describes nothing, which makes the collector an unchecked one.
func (m *metrics) Describe(chan<- *prometheus.Desc) {}

// emitter sends metrics.
type emitter struct{ out chan<- prometheus.Metric }

func (e emitter) send(kind prometheus.ValueType, name, help string, value float64, labels ...string) {
	names, values := make([]string, 0, len(labels)/2), make([]string, 0, len(labels)/2)
	for i := 0; i+1 < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	e.out <- prometheus.MustNewConstMetric(prometheus.NewDesc(metricPrefix+name, help, names, nil), kind, value, values...)
}

func (e emitter) counter(name, help string, value uint64, labels ...string) {
	e.send(prometheus.CounterValue, name, help, float64(value), labels...)
}

// counted is a counter and its value.
type counted struct {
	name, help string
	value      uint64
}

// counters sends several with the same labels.
func (e emitter) counters(list []counted, labels ...string) {
	for _, c := range list {
		e.counter(c.name, c.help, c.value, labels...)
	}
}

func (e emitter) gauge(name, help string, value float64, labels ...string) {
	e.send(prometheus.GaugeValue, name, help, value, labels...)
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	e := emitter{out}
	m.collectIndex(e)
	m.collectSources(e)
	m.s.drift.collect(e)
	m.s.schedulers.collect(e)
	m.s.copies.collect(e)
	if m.s.feed != nil {
		collectFeed(e, m.s.feed.Stats())
	}
}

func (m *metrics) collectIndex(e emitter) {
	c := m.s.x.Counts()
	e.gauge("blocks", "Different blocks in the index.", float64(c.Blocks))
	e.gauge("contexts", "Contexts in the index: tenant, model, LoRA, block size and salt.", float64(c.Scopes))
	e.counters([]counted{
		{"stored_blocks_total", "Blocks that engines said they have stored.", c.Stored},
		{"removed_blocks_total", "Blocks that engines said are gone.", c.Removed},
		{"unknown_removed_blocks_total", "Of these, blocks that were not known.", c.Unknown},
		{"orphaned_blocks_total", "Blocks that waited for what comes before them.", c.Orphaned},
		{"stitched_blocks_total", "Of these, blocks that have found it.", c.Stitched},
		{"lost_orphans_total", "Of these, blocks that had to make room for others.", c.Lost},
		{"refused_blocks_total", "Blocks that the index had no room for.", c.Refused},
		{"clears_total", "Clears of engines, or of some of their places.", c.Cleared},
		{"evicted_contexts_total", "Contexts that made room for others.", c.Evicted},
	})
}

func collectFeed(e emitter, s poolfeed.Stats) {
	synced := 0.0
	if s.Synced {
		synced = 1
	}
	e.gauge("pool_synced", "1 if the index follows the pool.", synced)
	e.counters([]counted{
		{"pool_members_followed_total", "Members of the pool that were followed, again included.", s.Members},
		{"pool_listings_total", "Times that all pooled blocks were listed.", s.Listings},
		{"pool_listed_blocks_total", "Blocks that were listed.", s.Listed},
		{"pool_events_total", "Events of the pool.", s.Events},
		{"pool_gaps_total", "Gaps in them, after which all is listed anew.", s.Gaps},
		{"pool_foreign_events_total", "Events of tenants that are not followed, or of blocks without a size.", s.Foreign},
		{"pool_bad_events_total", "Events that could not be read or applied.", s.Bad},
	})
}

func (m *metrics) collectSources(e emitter) {
	states := map[string]int{}
	for _, s := range m.s.sources.Services() {
		states[string(s.State)]++
		labels := []string{"instance", s.InstanceID, "tenant", s.TenantID, "dp_rank", strconv.Itoa(s.DPRank)}
		e.gauge("source_sequence", "Sequence number of the last batch.", float64(s.Sequence), labels...)
		e.counters([]counted{
			{"source_batches_total", "Batches of events received.", s.Batches},
			{"source_events_total", "Events applied.", s.Events},
			{"source_bad_total", "Events and batches that could not be read.", s.Bad},
			{"source_gaps_total", "Gaps in the sequence.", s.Gaps},
			{"source_replays_total", "Replays asked for.", s.Replays},
			{"source_replayed_batches_total", "Batches that replays brought.", s.Replayed},
			{"source_stale_total", "Times that a gap was not covered and the source's blocks were dropped.", s.Stale},
			{"source_mismatched_total", "Blocks whose hash is not what the engine's type and seed give.", s.Mismatched},
			{"source_restarts_total", "Times that the sequence went back: the engine had been restarted.", s.Restarts},
		}, labels...)
	}
	for _, state := range []source.State{source.Connecting, source.Replaying, source.Live, source.Stale, source.Disconnected} {
		e.gauge("sources", "Sources of events, by what they are at.", float64(states[string(state)]), "state", string(state))
	}
}
