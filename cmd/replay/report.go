package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"text/tabwriter"
	"time"

	"larder/client"
	"larder/cxl"
	"larder/protocol"
)

// progressEvery is how often the progress line is written: to a terminal often, to a file rarely.
const (
	progressTerminal = 250 * time.Millisecond
	progressPlain    = 5 * time.Second
)

// Report is the outcome of a replay.
type Report struct {
	Requests    int     `json:"requests"` // replayed
	Of          int     `json:"of"`       // in the trace
	Clients     int     `json:"clients"`
	Pages       int     `json:"pages"` // usable; 0: not known
	PageBytes   uint64  `json:"page_bytes"`
	Seconds     float64 `json:"seconds"`
	Blocks      uint64  `json:"blocks"`       // hash ids of the requests
	BlockRatio  float64 `json:"block_ratio"`  // found by the walk or when stored, of all
	PrefixRatio float64 `json:"prefix_ratio"` // found by the walk, of all
	PrefixHits  uint64  `json:"prefix_hits"`
	StoreHits   uint64  `json:"store_hits"` // held when they were to be stored
	Stored      uint64  `json:"stored"`

	Failures     uint64   `json:"verification_failures"`
	FailureTexts []string `json:"failure_texts,omitempty"` // of the first few

	BytesRead     uint64  `json:"bytes_read"`
	BytesWritten  uint64  `json:"bytes_written"`
	Evictions     ByPhase `json:"evictions_by_phase"` // entries
	EvictionsOf   string  `json:"evictions_of"`       // whose they are: the "pool"'s, or the "clients"' own alone
	RequestsRate  float64 `json:"requests_per_second"`
	BlocksRate    float64 `json:"blocks_per_second"`
	Retries       uint64  `json:"retries"`        // calls, requests and stores begun again, by the replay and its clients
	Reconnects    uint64  `json:"reconnects"`     // connections lost and made again, of all clients
	LeaderChanges uint64  `json:"leader_changes"` // survived: those that the client that has seen most has seen

	ReadsByTier map[string]uint64 `json:"reads_by_tier"` // blocks that were read and checked
	Nodes       *Nodes            `json:"nodes,omitempty"`

	Latency   []Latency    `json:"latency"`
	Client    client.Stats `json:"client"` // sums over the clients
	Reference *Reference   `json:"reference,omitempty"`
}

// Nodes says what was done by, and to, the nodes that the replay was given.
type Nodes struct {
	Kills       uint64 `json:"kills"`
	Demoted     uint64 `json:"demoted"` // entries that were copied by their tasks, since each was started last
	FailedReads uint64 `json:"failed_transfers"`
}

// Latency says how long operations took, in microseconds.
type Latency struct {
	Operation string  `json:"operation"`
	Count     uint64  `json:"count"`
	P50       float64 `json:"p50_us"`
	P90       float64 `json:"p90_us"`
	P99       float64 `json:"p99_us"`
	P999      float64 `json:"p99_9_us"`
	Max       float64 `json:"max_us"`
}

// report sums up.
func (r *runner) report(ctx context.Context, took time.Duration, before *ByPhase) *Report {
	l := &r.live
	rep := &Report{
		Requests: int(r.done.Load()), Of: len(r.trace), Clients: len(r.workers), Pages: r.cfg.Pages,
		PageBytes: r.cfg.PageSize, Seconds: took.Seconds(), Blocks: l.blocks.Load(),
		PrefixHits: l.prefixHits.Load(), StoreHits: l.storeHits.Load(), Failures: l.failures.Load(),
		FailureTexts: r.failures,
	}
	rep.Retries, rep.Reconnects, rep.LeaderChanges = r.troubles()
	var hist [opCount]Histogram
	for _, w := range r.workers {
		rep.BytesRead += w.bytesRead
		rep.Stored += w.stored
		for i := range hist {
			hist[i].Merge(&w.hist[i])
		}
		s := w.c.Stats()
		addStats(&rep.Client, &s)
	}
	rep.BytesWritten = rep.Client.BytesWritten
	rep.ReadsByTier = map[string]uint64{}
	for i, tier := range protocol.Tiers {
		rep.ReadsByTier[tier] = rep.Client.ByTier[i]
	}
	if r.cfg.Nodes != nil {
		nodes := r.cfg.Nodes()
		nodes.FailedReads = rep.Client.RemoteFaults
		rep.Nodes = &nodes
	}
	if rep.Blocks > 0 {
		rep.BlockRatio = float64(rep.PrefixHits+rep.StoreHits) / float64(rep.Blocks)
		rep.PrefixRatio = float64(rep.PrefixHits) / float64(rep.Blocks)
	}
	if rep.Seconds > 0 {
		rep.RequestsRate = float64(rep.Requests) / rep.Seconds
		rep.BlocksRate = float64(rep.Blocks) / rep.Seconds
	}
	for i, name := range opNames {
		rep.Latency = append(rep.Latency, latency(name, &hist[i]))
	}
	r.countEvictions(context.WithoutCancel(ctx), rep, before)
	if r.cfg.Compare && rep.Pages > 0 {
		ref := Compare(r.trace[:min(rep.Requests, len(r.trace))], rep.Pages)
		rep.Reference = &ref
	}
	return rep
}

// troubles counts what went wrong and was mended, by the replay's own repetitions and inside its clients.
func (r *runner) troubles() (retries, reconnects, leaderChanges uint64) {
	retries = r.live.retries.Load()
	for _, w := range r.workers {
		s := w.c.Stats()
		retries += s.Retries + s.Restarts
		reconnects += s.Reconnects
		leaderChanges = max(leaderChanges, s.LeaderChanges) // each client sees the same ones
	}
	return retries, reconnects, leaderChanges
}

// Whose evictions a report counts.
const (
	ofPool    = "pool"
	ofClients = "clients"
)

// countEvictions takes the pool's word, or else the clients'.
func (r *runner) countEvictions(ctx context.Context, rep *Report, before *ByPhase) {
	rep.Evictions[1], rep.EvictionsOf = rep.Client.Evicted, ofClients
	if before == nil {
		return
	}
	after, err := r.evictions(ctx)
	if after == nil {
		r.cfg.Logger.Warn("the pool does not say any more what it has evicted", slog.Any("error", err))
		return
	}
	rep.EvictionsOf = ofPool
	for i := range after {
		rep.Evictions[i] = after[i] - min(before[i], after[i])
	}
}

func latency(name string, h *Histogram) Latency {
	us := func(q float64) float64 { return float64(h.Quantile(q).Nanoseconds()) / 1e3 }
	return Latency{
		Operation: name, Count: h.Count(), P50: us(0.5), P90: us(0.9), P99: us(0.99), P999: us(0.999), Max: us(1),
	}
}

// addStats adds one client's counters to a sum.
func addStats(sum, s *client.Stats) {
	sum.Hits += s.Hits
	sum.Misses += s.Misses
	sum.Stored += s.Stored
	sum.Deduplicated += s.Deduplicated
	sum.BytesRead += s.BytesRead
	sum.BytesWritten += s.BytesWritten
	sum.Allocs += s.Allocs
	for i := range s.ByPhase {
		sum.ByPhase[i] += s.ByPhase[i]
	}
	for i := range s.ByTier {
		sum.ByTier[i] += s.ByTier[i]
	}
	sum.Copied += s.Copied
	sum.Promoted += s.Promoted
	sum.NotPromoted += s.NotPromoted
	sum.Replicas += s.Replicas
	sum.RemoteReads += s.RemoteReads
	sum.RemoteFaults += s.RemoteFaults
	sum.Fallovers += s.Fallovers
	sum.Shortages += s.Shortages
	sum.Evicted += s.Evicted
	sum.Freed += s.Freed
	sum.Revoked += s.Revoked
	sum.Restarts += s.Restarts
	sum.Retries += s.Retries
	sum.Reconnects += s.Reconnects
	sum.LeaderChanges += s.LeaderChanges
	sum.ServerErrors += s.ServerErrors
	sum.Unknown += s.Unknown
	sum.Suspended += s.Suspended
	sum.SessionsLost += s.SessionsLost
	sum.Late += s.Late
	sum.ChecksumFaults += s.ChecksumFaults
	sum.GenerationMisses += s.GenerationMisses
	sum.Truncated += s.Truncated
	sum.Regions += s.Regions
	sum.Bytes += s.Bytes
	sum.FreePages += s.FreePages
	sum.InFlight += s.InFlight
}

// WriteJSON writes the report as one indented JSON object.
func (rep *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(rep); err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	return nil
}

// WriteTable writes the report for people.
func (rep *Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("requests", "%d of %d, %d clients, %.1f s", rep.Requests, rep.Of, rep.Clients, rep.Seconds)
	row("blocks", "%d of %s", rep.Blocks, Bytes(rep.PageBytes))
	if rep.Pages > 0 {
		row("usable pages", "%d", rep.Pages)
	}
	row("block hit ratio", "%.4f  (found by the walk or when stored)", rep.BlockRatio)
	row("prefix hit ratio", "%.4f  (found by the walk)", rep.PrefixRatio)
	if ref := rep.Reference; ref != nil {
		row("  exact LRU", "%.4f  block hit ratio, %d pages", ref.LRU, ref.Pages)
		row("  optimum", "%.4f  block hit ratio, %d pages", ref.Optimum, ref.Pages)
	}
	row("verification failures", "%d", rep.Failures)
	row("bytes", "%s read and checked, %s written", Bytes(rep.BytesRead), Bytes(rep.BytesWritten))
	row("blocks read from", "cxl %d, dram %d, ssd %d", rep.ReadsByTier["cxl"], rep.ReadsByTier["dram"], rep.ReadsByTier["ssd"])
	if n := rep.Nodes; n != nil {
		row("nodes", "%d kills, %d blocks copied by tasks, %d transfers failed, %d promoted", n.Kills, n.Demoted, n.FailedReads,
			rep.Client.Promoted)
	}
	if rep.EvictionsOf == ofPool {
		row("evicted entries", "%d of the requester's own, %d of departed owners, %d of other clients",
			rep.Evictions[1], rep.Evictions[2], rep.Evictions[3])
	} else {
		row("evicted entries", "%d of these clients' own; name the cluster's admins with --admin to count all", rep.Evictions[1])
	}
	row("rate", "%.1f requests/s, %.0f blocks/s", rep.RequestsRate, rep.BlocksRate)
	row("retries", "%d", rep.Retries)
	row("leader changes survived", "%d, connections lost %d", rep.LeaderChanges, rep.Reconnects)
	fmt.Fprintln(t, "\noperation\tcount\tp50\tp90\tp99\tp99.9\tmax")
	for _, l := range rep.Latency {
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%s\n", l.Operation, l.Count,
			micros(l.P50), micros(l.P90), micros(l.P99), micros(l.P999), micros(l.Max))
	}
	for _, f := range rep.FailureTexts {
		fmt.Fprintf(t, "WRONG\t%s\n", f)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	return nil
}

func micros(us float64) string {
	switch {
	case us < 1e3:
		return fmt.Sprintf("%.1f us", us)
	case us < 1e6:
		return fmt.Sprintf("%.2f ms", us/1e3)
	default:
		return fmt.Sprintf("%.2f s", us/1e6)
	}
}

// Bytes writes a number of bytes for people.
func Bytes(n uint64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n), -1
	for v >= unit && i < 4 {
		v /= unit
		i++
	}
	return fmt.Sprintf("%.4g %ciB", v, "KMGTP"[i])
}

// showProgress writes a line now and then until the function that it returns is called.
func (r *runner) showProgress() (stop func()) {
	if r.cfg.Progress == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	every := progressPlain
	if r.cfg.Terminal {
		every = progressTerminal
	}
	go func() {
		defer close(ended)
		for sleep(ctx, every) == nil {
			r.progressLine()
		}
		if r.cfg.Terminal {
			r.progressLine()
			_, _ = io.WriteString(r.cfg.Progress, "\n") // a progress line that is lost is no loss
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

func (r *runner) progressLine() {
	l := &r.live
	done, blocks := r.done.Load(), max(l.blocks.Load(), 1)
	took := max(time.Duration(cxl.Boottime()-r.start).Seconds(), 1e-3)
	retries, _, changes := r.troubles()
	line := fmt.Sprintf(
		"%d/%d requests  %.0f req/s  block ratio %.4f  prefix ratio %.4f  failures %d  retries %d  leader changes %d  leader %s",
		done, len(r.trace), float64(done)/took,
		float64(l.prefixHits.Load()+l.storeHits.Load())/float64(blocks), float64(l.prefixHits.Load())/float64(blocks),
		l.failures.Load(), retries, changes, r.workers[0].c.Leader())
	if r.cfg.Terminal {
		line = "\r\x1b[K" + line
	} else {
		line += "\n"
	}
	_, _ = io.WriteString(r.cfg.Progress, line) // a progress line that is lost is no loss
}
