package main

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"
)

const (
	pathCompletion = "/v1/completions"
	pathChat       = "/v1/chat/completions"

	dialTimeout = 2 * time.Second  // to engines and the conductor, which are near
	idleConns   = 64               // to each of them
	idleTimeout = 4 * time.Second  // uvicorn, which vLLM is served by, closes connections that were idle for 5 s
	maxHeader   = 64 << 10         // bytes of an answer's
	warnAgain   = 10 * time.Second // the same warning is not written more often
)

// Proxy gives requests to the engines that have most of their prompts. Its methods may be called concurrently.
type Proxy struct {
	cfg       config
	log       *slog.Logger
	fleet     *fleet
	conductor *conductor
	client    *http.Client // to the engines
	metrics   *metrics
	slots     chan struct{}
	warned    cooloff
	reporter  *reporter
	stop      context.CancelFunc
}

// New makes a proxy of a configuration that is complete.
func New(ctx context.Context, cfg config, log *slog.Logger) *Proxy {
	transport := &http.Transport{ // no proxy of the environment's: the engines are near
		DialContext:            (&net.Dialer{Timeout: dialTimeout}).DialContext,
		MaxIdleConnsPerHost:    idleConns,
		IdleConnTimeout:        idleTimeout,
		DisableCompression:     true, // answers go on as they come
		MaxResponseHeaderBytes: maxHeader,
	}
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	p := &Proxy{cfg: cfg, log: log, fleet: newFleet(cfg.Engines), client: client, slots: make(chan struct{}, cfg.MaxOutstanding)}
	p.conductor = &conductor{url: cfg.Conductor, token: cfg.ConductorToken, timeout: cfg.ConductorTimeout, http: client}
	p.metrics = newMetrics(p.fleet)
	ctx, p.stop = context.WithCancel(ctx)
	p.reporter = newReporter(ctx, p)
	return p
}

// Close ends what runs beside requests, which must be through.
func (p *Proxy) Close() {
	p.stop()
	<-p.reporter.done
	p.client.CloseIdleConnections()
}

// Handler serves OpenAI's completions and chats, and tells how the proxy is.
func (p *Proxy) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathCompletion, p.serveCompletion)
	mux.HandleFunc("POST "+pathChat, p.serveCompletion)
	mux.HandleFunc("GET /v1/models", p.serveModels)
	mux.HandleFunc("GET /health", p.serveHealth)
	mux.Handle("GET /metrics", p.metrics.handler())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.deadline(http.NewResponseController(w)) // the last request's is past
		mux.ServeHTTP(w, r)
	})
}

func (p *Proxy) serveModels(w http.ResponseWriter, _ *http.Request) {
	list := make([]map[string]any, 0, 1+len(p.cfg.LoRAs))
	for _, id := range append([]string{p.cfg.Model}, p.cfg.LoRAs...) {
		list = append(list, map[string]any{"id": id, "object": "model", "created": 0, "owned_by": "larder"})
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": list})
}

// serveHealth says who could be reached lately. The proxy is well as long as some engine is.
func (p *Proxy) serveHealth(w http.ResponseWriter, _ *http.Request) {
	state := map[bool]string{false: "up", true: "down"}
	engines, status := map[string]string{}, http.StatusServiceUnavailable
	for _, x := range p.fleet.list {
		down := x.down.on()
		if engines[x.id] = state[down]; !down {
			status = http.StatusOK
		}
	}
	writeJSON(w, status, map[string]any{"engines": engines, "conductor": state[p.conductor.down.on()]})
}
