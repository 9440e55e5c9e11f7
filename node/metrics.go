package node

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"larder/tiering/ssd"
	"larder/transfer"
)

// collector exports what a node counts, whenever it is scraped.
type collector struct{ n *Node }

// Collector exports the node's counters to Prometheus.
func (n *Node) Collector() prometheus.Collector { return collector{n} }

// Describe implements prometheus.Collector. It describes nothing, which makes the collector an unchecked one.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) {
	s := c.n.Status()
	for i := range s.Devices {
		d := &s.Devices[i]
		e := emitter{out, []string{d.Name, d.Tier, strconv.FormatUint(d.ID, 10)}}
		e.device(d)
		if d.Store != nil {
			e.store(d.Store)
		}
	}
	transfer.NewCollector(c.n.engine).Collect(out)
	transfer.NewEndpointCollector(c.n.engine.EndpointStats).Collect(out)
}

// emitter sends metrics of one device.
type emitter struct {
	out    chan<- prometheus.Metric
	labels []string
}

func (e emitter) send(kind prometheus.ValueType, name, help string, value float64) {
	desc := prometheus.NewDesc("larder_node_"+name, help, []string{"device", "tier", "id"}, nil)
	e.out <- prometheus.MustNewConstMetric(desc, kind, value, e.labels...)
}

func (e emitter) device(d *DeviceStatus) {
	ready := 0.0
	if d.State == StateReady {
		ready = 1
	}
	for _, v := range []struct {
		name, help string
		value      float64
	}{
		{"device_ready", "1 if the leader knows how to reach the device, and it shows what it should.", ready},
		{"device_bytes", "Size of the device.", float64(d.Size)},
		{"regions_granted", "Regions that their owners write to by transfer.", float64(d.Granted)},
		{"regions_retiring", "Regions that were taken back, and may still be written to.", float64(d.Retiring)},
	} {
		e.send(prometheus.GaugeValue, v.name, v.help, v.value)
	}
	for _, v := range []struct {
		name, help string
		value      uint64
	}{
		{"attached_total", "Times that a leader was told all of the device.", d.Attached},
		{"grants_total", "Regions registered for their owners, repetitions included.", d.Grants},
		{"grants_refused_total", "Grants refused, as their epoch was fenced or the region was not free of writers.", d.GrantsRefused},
		{"fences_total", "Fences confirmed.", d.Fences},
		{"leaked_total", "Memories that stay mapped, since a process of this host may still write there.", d.Leaked},
		{"copied_total", "Entries copied by tasks.", d.Copied},
		{"copied_bytes_total", "Bytes copied by tasks.", d.CopiedBytes},
		{"copies_skipped_total", "Entries of tasks that were gone, had changed, or were there already.", d.Skipped},
		{"copies_failed_total", "Entries of tasks that could not be read or written.", d.FailedCopies},
		{"undiscarded_total", "Free stretches of own regions that could not be discarded: the next write replaces them.", d.Undiscarded},
	} {
		e.send(prometheus.CounterValue, v.name, v.help, float64(v.value))
	}
}

func (e emitter) store(s *ssd.Stats) {
	for _, v := range []struct {
		name, help string
		value      int64
	}{
		{"ssd_capacity_bytes", "Bytes of disk that the store takes.", s.Capacity},
		{"ssd_live_bytes", "Bytes of disk that live pieces take.", s.LiveBytes},
		{"ssd_used_bytes", "Bytes of the segments in use.", s.UsedBytes},
		{"ssd_index_bytes", "Memory of the index.", s.IndexBytes},
	} {
		e.send(prometheus.GaugeValue, v.name, v.help, float64(v.value))
	}
	for _, v := range []struct {
		name, help string
		value      int64
	}{
		{"ssd_reads_total", "Reads.", s.Reads},
		{"ssd_read_bytes_total", "Bytes read.", s.ReadBytes},
		{"ssd_writes_total", "Records written.", s.Writes},
		{"ssd_written_bytes_total", "Bytes written, before compression.", s.WrittenBytes},
		{"ssd_discards_total", "Records of discards written, compaction's included.", s.Discards},
		{"ssd_discarded_bytes_total", "Bytes forgotten since nobody wants them any more, before compression.", s.DiscardedBytes},
		{"ssd_stored_bytes_total", "Bytes of payload written, compaction's included.", s.StoredBytes},
		{"ssd_syncs_total", "Flushes of the disk.", s.Syncs},
		{"ssd_compactions_total", "Segments emptied.", s.Compactions},
		{"ssd_compacted_bytes_total", "Payload that compaction wrote.", s.CompactedBytes},
		{"ssd_no_space_total", "Writes refused for want of space.", s.NoSpace},
		{"ssd_damaged_total", "Reads that found something else than was written.", s.Damaged},
	} {
		e.send(prometheus.CounterValue, v.name, v.help, float64(v.value))
	}
}
