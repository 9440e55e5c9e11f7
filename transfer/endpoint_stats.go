package transfer

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// counts are the totals of a store. Its mu guards them.
type counts struct {
	creations, creationsFailed, noMemory, backedOff uint64
	evictions, deletions, yields                    uint64
	accepted, acceptsFailed, recalls                uint64
	qpsCreated, qpsDestroyed, qpsReset              uint64
	stuck, fences, resets                           uint64
}

// EndpointStats are what an endpoint store has and has done, at one moment. Totals are since its beginning.
//
// Queue pairs leak if QPs stays far above QPs of an endpoint times Endpoints. Then Waiting says that retired endpoints are
// not destroyed, LastReclaimSeconds whether nobody looks after them or they do not drain, and Deletions against
// Evictions, compared between NICs, whose peers they were.
type EndpointStats struct {
	NIC   string `json:"nic"`
	State string `json:"state"`         // active, down, fenced or closed
	Why   string `json:"why,omitempty"` // it is not active

	QPs          int `json:"qps"`              // allocated, whatever their state
	QPBudget     int `json:"qp_budget"`        // how many may be
	QPLimit      int `json:"qp_limit"`         // the same, or less if the NIC turned out to have fewer
	QPsPerEP     int `json:"qps_per_endpoint"` // as configured
	Endpoints    int `json:"endpoints"`        // connected
	MaxEndpoints int `json:"max_endpoints"`
	Served       int `json:"served"` // endpoints that peers have connected to
	MaxServed    int `json:"max_served"`
	Connecting   int `json:"connecting"` // peers that wait for room or for their peer's answer
	Blocked      int `json:"blocked"`    // those among them that wait for room, and peers that connect to this process
	BackingOff   int `json:"backing_off"`

	Waiting              int     `json:"waiting"` // retired, not destroyed yet
	MaxWaiting           int     `json:"max_waiting"`
	Parked               int     `json:"parked"`                 // the same, when the waiting list was full
	WaitingOldestSeconds float64 `json:"waiting_oldest_seconds"` // since the oldest of them was retired
	Outstanding          int     `json:"waiting_outstanding"`    // work requests on them

	Creations       uint64 `json:"creations"`
	CreationsFailed uint64 `json:"creations_failed"`
	NoMemory        uint64 `json:"no_memory"`  // how often the NIC had no queue pair left
	BackedOff       uint64 `json:"backed_off"` // refused, for the peer had just failed
	Evictions       uint64 `json:"evictions"`  // idle endpoints that made room
	Deletions       uint64 `json:"deletions"`  // endpoints that failed, or were stale
	Yields          uint64 `json:"yields"`     // busy endpoints that made room
	Accepted        uint64 `json:"accepted"`   // endpoints that peers have connected to, ever
	AcceptsFailed   uint64 `json:"accepts_failed"`
	Recalls         uint64 `json:"recalls"` // peers that were asked to let go of one
	QPsCreated      uint64 `json:"qps_created"`
	QPsDestroyed    uint64 `json:"qps_destroyed"`
	QPsReset        uint64 `json:"qps_reset"` // ended by a reset of the NIC
	Stuck           uint64 `json:"stuck"`     // retired endpoints that did not drain in time
	Fences          uint64 `json:"fences"`
	Resets          uint64 `json:"resets"`

	LastReclaimSeconds float64 `json:"last_reclaim_seconds"` // ago
}

// Stats tells how the store is. It walks the retired endpoints.
func (s *EndpointStore) Stats() EndpointStats {
	s.mu.RLock()
	defer s.mu.RUnlock()
	now, n := s.cfg.Now(), &s.count
	t := EndpointStats{
		NIC: s.name, State: s.state.String(), QPs: s.qps, QPBudget: s.cfg.QPBudget, QPLimit: s.limit, QPsPerEP: s.cfg.QPsPerEndpoint,
		Endpoints: len(s.live), MaxEndpoints: s.cfg.MaxEndpoints, Connecting: len(s.peers),
		Served: len(s.served), MaxServed: s.cfg.MaxServed, Blocked: len(s.blocked) + len(s.refused),
		BackingOff: s.fails.order.Len(), Waiting: s.waiting.n, MaxWaiting: s.cfg.MaxWaiting, Parked: s.parked.n,
		Creations: n.creations, CreationsFailed: n.creationsFailed, NoMemory: n.noMemory, BackedOff: n.backedOff,
		Evictions: n.evictions, Deletions: n.deletions,
		Yields: n.yields, Accepted: n.accepted, AcceptsFailed: n.acceptsFailed, Recalls: n.recalls,
		QPsCreated: n.qpsCreated, QPsDestroyed: n.qpsDestroyed, QPsReset: n.qpsReset,
		Stuck: n.stuck, Fences: n.fences, Resets: n.resets, LastReclaimSeconds: seconds(now - s.lastReclaim.Load()),
	}
	if s.why != nil {
		t.Why = s.why.Error()
	}
	for _, list := range []*endpointList{&s.waiting, &s.parked} {
		for e := list.oldest; e != nil; e = e.next {
			t.WaitingOldestSeconds = max(t.WaitingOldestSeconds, seconds(now-e.since))
			t.Outstanding += e.outstanding()
		}
	}
	return t
}

func seconds(nanos int64) float64 { return time.Duration(nanos).Seconds() }

// NewEndpointCollector exports what list returns at each scrape: one EndpointStats for each NIC.
func NewEndpointCollector(list func() []EndpointStats) prometheus.Collector {
	return endpointCollector{list: list}
}

type endpointCollector struct{ list func() []EndpointStats }

// endpointMetric is one of the metrics of a NIC.
type endpointMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(t *EndpointStats) float64
}

func endpointGauge(name, help string, value func(t *EndpointStats) float64) endpointMetric {
	return endpointMetric{prometheus.NewDesc("larder_transfer_"+name, help, []string{"nic"}, nil), prometheus.GaugeValue, value}
}

func endpointCounter(name, help string, value func(t *EndpointStats) uint64) endpointMetric {
	m := endpointGauge(name+"_total", help, func(t *EndpointStats) float64 { return float64(value(t)) })
	m.kind = prometheus.CounterValue
	return m
}

var endpointMetrics = []endpointMetric{
	endpointGauge("nic_active", "Whether the NIC hands out endpoints: 1, or 0 if it is down, fenced off or closed.",
		func(t *EndpointStats) float64 {
			if t.State == NICActive.String() {
				return 1
			}
			return 0
		}),
	endpointGauge("queue_pairs", "Queue pairs that are allocated, whatever their state.",
		func(t *EndpointStats) float64 { return float64(t.QPs) }),
	endpointGauge("queue_pairs_limit", "Queue pairs that may be allocated: the budget, or what the NIC turned out to have.",
		func(t *EndpointStats) float64 { return float64(t.QPLimit) }),
	endpointGauge("endpoints", "Endpoints that are connected.",
		func(t *EndpointStats) float64 { return float64(t.Endpoints) }),
	endpointGauge("endpoints_limit", "Endpoints that may be connected.",
		func(t *EndpointStats) float64 { return float64(t.MaxEndpoints) }),
	endpointGauge("endpoints_served", "Endpoints that peers have connected to.",
		func(t *EndpointStats) float64 { return float64(t.Served) }),
	endpointGauge("endpoints_served_limit", "Endpoints that peers may have connected to.",
		func(t *EndpointStats) float64 { return float64(t.MaxServed) }),
	endpointGauge("endpoints_connecting", "Peers that wait for room or for their peer's answer.",
		func(t *EndpointStats) float64 { return float64(t.Connecting) }),
	endpointGauge("endpoints_backing_off", "Peers that have failed and are remembered.",
		func(t *EndpointStats) float64 { return float64(t.BackingOff) }),
	endpointGauge("endpoints_waiting", "Retired endpoints whose queue pairs are not destroyed yet.",
		func(t *EndpointStats) float64 { return float64(t.Waiting + t.Parked) }),
	endpointGauge("endpoints_waiting_oldest_seconds", "Time since the oldest of them was retired.",
		func(t *EndpointStats) float64 { return t.WaitingOldestSeconds }),
	endpointGauge("endpoints_waiting_outstanding", "Work requests that are outstanding on them.",
		func(t *EndpointStats) float64 { return float64(t.Outstanding) }),
	endpointGauge("endpoints_last_reclaim_seconds", "Time since retired endpoints were last looked after.",
		func(t *EndpointStats) float64 { return t.LastReclaimSeconds }),
	endpointCounter("endpoints_created", "Endpoints that were connected.",
		func(t *EndpointStats) uint64 { return t.Creations }),
	endpointCounter("endpoints_creation_failures", "Endpoints that could not be connected.",
		func(t *EndpointStats) uint64 { return t.CreationsFailed }),
	endpointCounter("queue_pairs_exhausted", "How often the NIC had no queue pair left (ENOMEM).",
		func(t *EndpointStats) uint64 { return t.NoMemory }),
	endpointCounter("endpoints_backed_off", "Requests for an endpoint that were refused because its peer had just failed.",
		func(t *EndpointStats) uint64 { return t.BackedOff }),
	endpointCounter("endpoints_evicted", "Idle endpoints that made room for others.",
		func(t *EndpointStats) uint64 { return t.Evictions }),
	endpointCounter("endpoints_deleted", "Endpoints that were retired because they failed or were stale.",
		func(t *EndpointStats) uint64 { return t.Deletions }),
	endpointCounter("endpoints_yielded", "Busy endpoints that made room for others.",
		func(t *EndpointStats) uint64 { return t.Yields }),
	endpointCounter("endpoints_accepted", "Endpoints that peers have connected to.",
		func(t *EndpointStats) uint64 { return t.Accepted }),
	endpointCounter("endpoints_accept_failures", "Peers to which no endpoint could be given.",
		func(t *EndpointStats) uint64 { return t.AcceptsFailed }),
	endpointCounter("endpoints_recalled", "Endpoints that peers were asked to let go of.",
		func(t *EndpointStats) uint64 { return t.Recalls }),
	endpointCounter("queue_pairs_created", "Queue pairs that were created.",
		func(t *EndpointStats) uint64 { return t.QPsCreated }),
	endpointCounter("queue_pairs_destroyed", "Queue pairs that were destroyed.",
		func(t *EndpointStats) uint64 { return t.QPsDestroyed }),
	endpointCounter("queue_pairs_reset", "Queue pairs that a reset of the NIC has ended.",
		func(t *EndpointStats) uint64 { return t.QPsReset }),
	endpointCounter("endpoints_stuck", "Retired endpoints that did not drain in time.",
		func(t *EndpointStats) uint64 { return t.Stuck }),
	endpointCounter("nic_fences", "How often the NIC was fenced off.",
		func(t *EndpointStats) uint64 { return t.Fences }),
	endpointCounter("nic_resets", "How often the NIC was reset.",
		func(t *EndpointStats) uint64 { return t.Resets }),
}

// Describe implements prometheus.Collector.
func (c endpointCollector) Describe(out chan<- *prometheus.Desc) {
	for i := range endpointMetrics {
		out <- endpointMetrics[i].desc
	}
}

// Collect implements prometheus.Collector.
func (c endpointCollector) Collect(out chan<- prometheus.Metric) {
	list := c.list()
	for i := range list {
		for _, m := range endpointMetrics {
			out <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(&list[i]), list[i].NIC)
		}
	}
}
