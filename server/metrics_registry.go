package server

import (
	"fmt"
	"io"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/valyala/fasthttp"
)

// metricPrefix begins the name of every metric of this program.
const metricPrefix = "larder_"

// metrics gathers what a server counts whenever it is scraped.
type metrics struct {
	server   *Server
	registry *prometheus.Registry
}

// newMetrics makes the metrics of a server, with those of the Go runtime and of the process.
func newMetrics(s *Server) *metrics {
	m := &metrics{server: s, registry: prometheus.NewRegistry()}
	m.registry.MustRegister(m, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// write answers a scrape.
func (m *metrics) write(c *fasthttp.RequestCtx) error {
	c.SetContentType(MetricsType)
	return WriteMetrics(c, m.registry)
}

// MetricsType is the content type of what WriteMetrics writes.
const MetricsType = "text/plain; version=0.0.4; charset=utf-8"

// WriteMetrics writes what a registry gathers in Prometheus' text format.
func WriteMetrics(w io.Writer, from prometheus.Gatherer) error {
	families, err := from.Gather()
	if err != nil {
		return fmt.Errorf("gather metrics: %w", err)
	}
	for _, family := range families {
		if err := writeFamily(w, family); err != nil {
			return fmt.Errorf("write metrics: %w", err)
		}
	}
	return nil
}

// Describe implements prometheus.Collector. It describes nothing, which makes the collector an unchecked one: the
// metrics are what collect emits, and a test checks their names.
func (m *metrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) { m.collect(emitter{out}) }

// emitter sends metrics.
type emitter struct{ out chan<- prometheus.Metric }

// send emits one value. labels alternate between names and values.
func (e emitter) send(kind prometheus.ValueType, name, help string, value float64, labels ...string) {
	desc, values := describeMetric(name, help, labels)
	e.out <- prometheus.MustNewConstMetric(desc, kind, value, values...)
}

// counter emits a value that only grows.
func (e emitter) counter(name, help string, value uint64, labels ...string) {
	e.send(prometheus.CounterValue, name, help, float64(value), labels...)
}

// gauge emits a value that goes up and down.
func (e emitter) gauge(name, help string, value float64, labels ...string) {
	e.send(prometheus.GaugeValue, name, help, value, labels...)
}

// histogram emits a Histogram's buckets from 2^low to 2^high, each divided by unit.
func (e emitter) histogram(name, help string, h *Histogram, unit float64, low, high int, labels ...string) {
	counts := make([]uint64, len(h.Buckets))
	for i := range counts {
		counts[i] = h.Buckets[i].Load()
	}
	e.doubling(name, help, counts, float64(h.Sum.Load())/unit, unit, low, high, labels...)
}

// doubling emits a histogram whose bucket i counts values below 2^i, divided by unit.
func (e emitter) doubling(name, help string, counts []uint64, sum, unit float64, low, high int, labels ...string) {
	desc, values := describeMetric(name, help, labels)
	buckets := make(map[float64]uint64, high-low+1)
	total := uint64(0)
	for i, n := range counts {
		total += n
		if i >= low && i <= high {
			buckets[float64(uint64(1)<<i)/unit] = total
		}
	}
	e.out <- prometheus.MustNewConstHistogram(desc, total, sum, buckets, values...)
}

// describeMetric splits labels into names and values.
func describeMetric(name, help string, labels []string) (*prometheus.Desc, []string) {
	names := make([]string, 0, len(labels)/2)
	values := make([]string, 0, len(labels)/2)
	for i := 0; i+1 < len(labels); i += 2 {
		names = append(names, labels[i])
		values = append(values, labels[i+1])
	}
	return prometheus.NewDesc(metricPrefix+name, help, names, nil), values
}
