package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"larder/node"
	"larder/server"
)

// nodeAdmin is the HTTP listener of a node, for scrapers and whoever watches it. It changes nothing.
type nodeAdmin struct {
	http *http.Server
	addr string
	done sync.WaitGroup
}

// startNodeAdmin listens, unless addr is [server.Off]; a nil nodeAdmin can be stopped.
func startNodeAdmin(n *node.Node, addr string, logger *slog.Logger) (*nodeAdmin, error) {
	if addr == server.Off || addr == "" {
		return nil, nil //nolint:nilnil // described above
	}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("admin: %w; set --admin-listen to a free port, or to %s", err, server.Off)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(n.Collector(), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeHealth(w, n) })
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { writeNodeStatus(w, http.StatusOK, n.Status()) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	a := &nodeAdmin{addr: listener.Addr().String(), http: &http.Server{
		// A few scrapers: what is slower than this has gone.
		Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}}
	a.done.Go(func() {
		if err := a.http.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			logger.Error("the admin listener ended", slog.Any("error", err))
		}
	})
	logger.Info("admin", slog.String("addr", a.addr))
	return a, nil
}

// writeHealth answers whether all devices serve.
func writeHealth(w http.ResponseWriter, n *node.Node) {
	status := n.Status()
	code := http.StatusOK
	if !status.Ready() {
		code = http.StatusServiceUnavailable
	}
	writeNodeStatus(w, code, status)
}

func writeNodeStatus(w http.ResponseWriter, code int, status node.Status) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(status) // who has gone needs no answer
}

// stop ends running requests and closes the listener.
func (a *nodeAdmin) stop() error {
	if a == nil {
		return nil
	}
	ctx, cancel := background(nodeStop)
	defer cancel()
	err := a.http.Shutdown(ctx)
	a.done.Wait()
	if err != nil {
		return fmt.Errorf("admin: stop: %w", err)
	}
	return nil
}
