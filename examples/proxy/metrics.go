package main

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// metrics are what the proxy counts.
type metrics struct {
	registry *prometheus.Registry

	requests    *prometheus.CounterVec // by status
	routes      *prometheus.CounterVec // by how the instance was chosen
	rejections  prometheus.Counter
	retries     *prometheus.CounterVec // by the instance that failed
	lostReports prometheus.Counter
	predicted   *prometheus.CounterVec // tokens, by instance
	cached      *prometheus.CounterVec
	firstByte   prometheus.Histogram
}

func newMetrics(f *fleet) *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "larder_proxy_" + name, Help: help}, labels)
		m.registry.MustRegister(v)
		return v
	}
	m.requests = vec("requests_total", "Completions that were asked for, by the status of the answer; 499: the client went away.", "status")
	m.routes = vec("routes_total", "How instances were chosen: by query, schedule, or, where that failed (fallback_tokenize, "+
		"fallback_conductor, fallback_instance), by the fewest outstanding requests.", "by")
	m.retries = vec("retries_total", "Requests that went to another instance since this one failed before the first byte.", "instance")
	m.predicted = vec("predicted_tokens_total", "Tokens of prompts that the conductor expects an instance to have.", "instance")
	m.cached = vec("cached_tokens_total", "Tokens of the same prompts that the instance says it had.", "instance")
	m.rejections = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "larder_proxy_rejections_total", Help: "Requests that the conductor rejected.",
	})
	m.lostReports = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "larder_proxy_lost_reports_total", Help: "Reports that the conductor did not get.",
	})
	m.firstByte = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "larder_proxy_first_byte_seconds", Help: "From a request to the first byte of its answer.",
		Buckets: prometheus.ExponentialBuckets(0.005, 2, 15),
	})
	m.registry.MustRegister(m.rejections, m.lostReports, m.firstByte)
	for _, x := range f.list {
		labels := prometheus.Labels{"instance": x.id}
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "larder_proxy_outstanding_requests", Help: "Requests that an instance has not answered in full.", ConstLabels: labels,
		}, func() float64 { return float64(x.outstanding.Load()) }))
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "larder_proxy_instance_up", Help: "0 for some seconds after an instance could not be reached.", ConstLabels: labels,
		}, func() float64 {
			if x.down.on() {
				return 0
			}
			return 1
		}))
	}
	return m
}

// handler serves the metrics to Prometheus.
func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// answered counts a request.
func (m *metrics) answered(status int) { m.requests.WithLabelValues(strconv.Itoa(status)).Inc() }

// began counts an answer that begins.
func (m *metrics) began(after time.Duration) { m.firstByte.Observe(after.Seconds()) }
