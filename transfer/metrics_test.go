package transfer

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
)

// scrape gathers an engine's metrics: the value of each that has these labels, by name.
func scrape(t *testing.T, e *Engine, labels map[string]string) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(NewCollector(e)))
	families, err := registry.Gather()
	require.NoError(t, err)
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if hasLabels(m, labels) {
				all[f.GetName()] += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return all
}

func hasLabels(m *dto.Metric, want map[string]string) bool {
	got := map[string]string{}
	for _, l := range m.GetLabel() {
		got[l.GetName()] = l.GetValue()
	}
	for name, value := range want {
		if got[name] != value {
			return false
		}
	}
	return true
}

// TestMetrics moves known amounts each way, and finds them counted at both ends.
func TestMetrics(t *testing.T) {
	here := engine(t, Config{SliceSize: 4 << 10})
	there := engine(t, Config{Name: "n1", Listen: []string{anyPort}, Transports: []string{TransportTCP}})
	b := register(t, there, make([]byte, 1<<20), BufferOptions{})
	stored := onStorage(t, there, newDisk(t, 1<<20), 1<<20, BufferOptions{})
	seg, again := open(t, here, there.Addresses()...), open(t, here, there.Addresses()...)
	local := make([]byte, 40<<10)
	for _, s := range []*Segment{seg, again} {
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: s, Buffer: b.Info().Handle, Local: local}))
	}
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: stored.Info().Handle, Local: local[:8<<10]}))
	require.Error(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: Handle{ID: 77}, Local: local}))
	require.NoError(t, seg.Notify(t.Context(), "a", nil))

	own := scrape(t, here, nil)
	require.InDelta(t, 4, own["larder_transfer_batches_total"], 0)
	require.InDelta(t, 0, own["larder_transfer_batches_open"], 0)
	require.InDelta(t, 32, own["larder_transfer_batch_slices_total"], 0)
	require.InDelta(t, 4, own["larder_transfer_batch_duration_seconds"], 0)
	require.InDelta(t, 2, own["larder_transfer_segments"], 0)
	require.InDelta(t, 1, scrape(t, here, map[string]string{"outcome": "failed"})["larder_transfer_batches_total"], 0)
	require.InDelta(t, 1, scrape(t, here, map[string]string{"outcome": "delivered"})["larder_transfer_notifications_sent_total"], 0)
	tcp := scrape(t, here, map[string]string{"transport": "tcp", "op": "read"})
	require.InDelta(t, 20, tcp["larder_transfer_slices_total"], 0)
	require.InDelta(t, 80<<10, tcp["larder_transfer_bytes_total"], 0)
	rail := scrape(t, here, map[string]string{"peer": "n1", "transport": "tcp", "on": "memory", "from": "any", "to": there.Addresses()[0]})
	require.InDelta(t, 20, rail["larder_transfer_rail_slices_total"], 0)
	require.InDelta(t, 80<<10, rail["larder_transfer_rail_bytes_total"], 0)
	require.InDelta(t, 0, rail["larder_transfer_rail_errors_total"], 0)
	require.Positive(t, rail["larder_transfer_rail_latency_seconds"])
	rail = scrape(t, here, map[string]string{"on": "storage"})
	require.InDelta(t, 8<<10, rail["larder_transfer_rail_bytes_total"], 0)

	peers := scrape(t, there, map[string]string{"op": "write"})
	require.InDelta(t, 8<<10, peers["larder_transfer_served_bytes_total"], 0)
	peers = scrape(t, there, map[string]string{"op": "read"})
	require.InDelta(t, 20, peers["larder_transfer_served_slices_total"], 0)
	peers = scrape(t, there, map[string]string{"on": "storage"})
	require.InDelta(t, 1<<20, peers["larder_transfer_buffer_bytes"], 0)
	peers = scrape(t, there, nil)
	require.InDelta(t, 1, peers["larder_transfer_notifications_waiting"], 0)
	require.Positive(t, peers["larder_transfer_served_connections"])
}
