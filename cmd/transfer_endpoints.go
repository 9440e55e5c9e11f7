package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"larder/server"
	"larder/transfer"
	"larder/transfer/verbs"
)

// nicFlags are the flags of commands that use NICs.
type nicFlags struct {
	NICs []string `name:"nics" placeholder:"NAME" help:"NICs for RDMA, as mlx5_0 or mlx5_0/2; none for none (default: all)."`
}

// open opens the NICs. stop closes them, after the engine that uses them.
func (f *nicFlags) open() (nics []transfer.NIC, stop func() error, err error) {
	nics, stop, err = verbs.OpenNICs(f.NICs)
	if err != nil {
		return nil, nil, usageError(err)
	}
	return nics, stop, nil
}

// transferEndpoints is larder transfer endpoints.
type transferEndpoints struct {
	To    string `arg:"" name:"address" help:"An address of an engine."`
	Token string `env:"LARDER_TRANSFER_TOKEN" help:"What the engine was given."`
	JSON  bool   `help:"Print JSON."`
}

const (
	// endpointsTimeout is how long an engine may take to answer, or a scrape.
	endpointsTimeout = 5 * time.Second
	// maxScrape bounds the headers of a scrape, in bytes.
	maxScrape = 16 << 10
)

// Run implements the command.
func (c *transferEndpoints) Run(e *env) (err error) {
	engine, err := transfer.New(transfer.Config{Token: c.Token})
	if err != nil {
		return err //nolint:wrapcheck // says all
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	ctx, cancel := context.WithTimeout(e.ctx, endpointsTimeout)
	defer cancel()
	all, err := engine.PeerEndpointStats(ctx, c.To)
	if err != nil {
		return fmt.Errorf("transfer endpoints: %w", err)
	}
	if c.JSON {
		return printJSON(e.stdout, all)
	}
	return printEndpoints(e.stdout, all)
}

// printEndpoints prints a table of NICs, and below it what an operator should look at.
func printEndpoints(w io.Writer, all []transfer.EndpointStats) error {
	if len(all) == 0 {
		fmt.Fprintln(w, "The engine uses no NIC.")
		return nil
	}
	t := newTable("NIC", "STATE", "-QUEUE PAIRS", "-LIMIT", "-ENDPOINTS", "-SERVED", "-CONNECTING", "-EVICTED", "-YIELDED", "-RECALLED",
		"-DELETED", "-FAILED", "-WAITING", "-OLDEST", "-LAST RECLAIM")
	for i := range all {
		s := &all[i]
		t.row(s.NIC, s.State, s.QPs, s.QPLimit, fmt.Sprintf("%d/%d", s.Endpoints, s.MaxEndpoints),
			fmt.Sprintf("%d/%d", s.Served, s.MaxServed), s.Connecting, s.Evictions, s.Yields, s.Recalls, s.Deletions,
			s.CreationsFailed+s.AcceptsFailed, s.Waiting+s.Parked, secondsText(s.WaitingOldestSeconds), secondsText(s.LastReclaimSeconds))
	}
	if err := t.print(w); err != nil {
		return err
	}
	for i := range all {
		for _, note := range endpointNotes(&all[i]) {
			fmt.Fprintf(w, "\n%s: %s\n", all[i].NIC, note)
		}
	}
	return nil
}

func secondsText(s float64) string { return fmt.Sprintf("%.1f s", s) }

// A retired endpoint drains within seconds, and retired endpoints are looked after every second.
const (
	longWait    = 10 * time.Second
	longReclaim = 5 * time.Second
)

// endpointNotes are what is wrong with a NIC, in words.
func endpointNotes(s *transfer.EndpointStats) (notes []string) {
	say := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	if s.Why != "" {
		say("it is %s: %s", s.State, s.Why)
	}
	if s.WaitingOldestSeconds > longWait.Seconds() {
		say("%d retired endpoints are not destroyed, with %d work requests outstanding: their peers, or the device, do not answer",
			s.Waiting+s.Parked, s.Outstanding)
	}
	if s.LastReclaimSeconds > longReclaim.Seconds() {
		say("nobody looks after retired endpoints: its monitor hangs in a call of the device")
	}
	if s.QPLimit < s.QPBudget {
		say("it has %d queue pairs of the %d that may be: other processes hold the rest", s.QPLimit, s.QPBudget)
	}
	if s.Blocked > 0 {
		say("%d peers wait for room: raise the bounds of endpoints if that is so for long", s.Blocked)
	}
	return notes
}

// serveMetrics answers scrapes at an address until stop is called.
func serveMetrics(addr string, engine *transfer.Engine) (at string, stop func() error, err error) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return "", nil, fmt.Errorf("listen for scrapes: %w", err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(transfer.NewEndpointCollector(engine.EndpointStats))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", server.MetricsType)
		_ = server.WriteMetrics(w, registry) // whoever scrapes has gone, if it fails
	})
	s := &http.Server{Handler: mux, ReadTimeout: endpointsTimeout, WriteTimeout: endpointsTimeout, MaxHeaderBytes: maxScrape}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // it ends when it is closed
	}()
	return l.Addr().String(), func() error {
		err := s.Close()
		<-done
		return err
	}, nil
}
