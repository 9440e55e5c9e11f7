package node

import (
	"path/filepath"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

func TestMetrics(t *testing.T) {
	m := newMasters(t)
	n, _ := m.start(Config{DRAM: 8 * mib, SSD: []SSD{{Dir: filepath.Join(t.TempDir(), "ssd"), Size: 16 * mib}}})
	ready(t, n)
	r := prometheus.NewRegistry()
	r.MustRegister(n.Collector())
	families, err := r.Gather()
	require.NoError(t, err)
	got := map[string]int{}
	for _, f := range families {
		got[f.GetName()] = len(f.GetMetric())
		require.NotEmpty(t, f.GetHelp())
	}
	require.Equal(t, 2, got["larder_node_device_ready"], "of each device")
	require.Equal(t, 1, got["larder_node_ssd_live_bytes"], "of the store alone")
	require.Equal(t, 2, got["larder_transfer_buffers"], "in memory and on storage")
}
