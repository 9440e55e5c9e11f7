package service

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"larder/internal/httpd"
)

// Limits of the listener. Routers keep some connections each, and ask on all of them at once.
const (
	httpConcurrency  = 4096                   // connections; more are told to come back
	httpBody         = 16 << 20               // a prompt of maxTokens tokens of up to 10 digits, and what goes with it
	httpHeader       = 16 << 10               // request line and headers
	httpReadTimeout  = 10 * time.Second       // to send a request
	httpWriteTimeout = 30 * time.Second       // to take a reply
	httpIdleTimeout  = 2 * time.Minute        // above the usual scrape interval
	httpIdleWorker   = 100 * time.Millisecond // a goroutine is kept without work, and so the longest that one outlives Close
	httpStop         = 5 * time.Second        // for running requests to end at Close
)

// listener is the HTTP side of a service.
type listener struct {
	s    *Service
	http *fasthttp.Server
	l    net.Listener
	done sync.WaitGroup
}

// listen begins to serve.
func (s *Service) listen(addr string) (*listener, error) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("conductor: %w; choose a free port with --listen or http_server_port", err)
	}
	h := &listener{s: s, l: l}
	h.http = &fasthttp.Server{
		Handler:               h.serve,
		ErrorHandler:          refuse,
		Name:                  "larder-conductor",
		Concurrency:           httpConcurrency,
		MaxRequestBodySize:    httpBody,
		ReadBufferSize:        httpHeader,
		ReadTimeout:           httpReadTimeout,
		WriteTimeout:          httpWriteTimeout,
		IdleTimeout:           httpIdleTimeout,
		MaxIdleWorkerDuration: httpIdleWorker,
		CloseOnShutdown:       true,
		NoDefaultServerHeader: true,
		NoDefaultDate:         true, // its clock would be a goroutine that never ends
		NoDefaultContentType:  true,
		SecureErrorLogMessage: true,
		Logger:                httpd.Logger{Logger: s.cfg.Logger},
	}
	h.done.Go(func() {
		if err := h.http.Serve(l); err != nil && s.ctx.Err() == nil {
			s.cfg.Logger.LogAttrs(s.ctx, slog.LevelError, "the listener ended", slog.Any("error", err))
		}
	})
	return h, nil
}

// close ends running requests and closes the listener.
func (h *listener) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), httpStop)
	defer cancel()
	_ = h.l.Close() // Shutdown does it a second time, and alone does nothing if Serve has not run yet
	err := h.http.ShutdownWithContext(ctx)
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	h.done.Wait()
	return err
}

// refuse answers what is not a request that a handler could be given.
func refuse(c *fasthttp.RequestCtx, err error) {
	status := httpd.RefusalStatus(err)
	writeError(c, &apiError{status: status, Reason: "bad_request", Message: fasthttp.StatusMessage(status)})
}

// route is what one path serves.
type route struct {
	method   string
	open     bool // needs no token
	operator bool // is not for tenants
	handle   func(s *Service, r *call) (any, error)
}

// routes are what the listener serves; openapi.json describes them.
var routes map[string]route

func init() { //nolint:gochecknoinits // the index names the routes, one of which it is
	routes = map[string]route{
		"/query":         {method: "POST", handle: (*Service).query},
		"/query_by_hash": {method: "POST", handle: (*Service).queryByHash},
		"/schedule":      {method: "POST", handle: (*Service).schedule},
		"/report":        {method: "POST", handle: (*Service).report},
		"/register":      {method: "POST", handle: (*Service).register},
		"/unregister":    {method: "POST", handle: (*Service).unregister},
		"/resync":        {method: "POST", operator: true, handle: (*Service).resync},
		"/services":      {method: "GET", handle: (*Service).services},
		"/global_view":   {method: "GET", handle: (*Service).globalView},
		"/metrics":       {method: "GET", operator: true, handle: (*Service).writeMetrics},
		"/openapi.json":  {method: "GET", open: true, handle: (*Service).openAPI},
		"/healthz":       {method: "GET", open: true, handle: (*Service).healthz},
		"/readyz":        {method: "GET", open: true, handle: (*Service).readyz},
		"/":              {method: "GET", open: true, handle: (*Service).index},
	}
}

// call is what a handler is given. Nothing of it may be kept after the handler returns: fasthttp uses it again.
type call struct {
	*fasthttp.RequestCtx

	tenant string // whose token came with it; "" for an operator's, or if there are no tokens
}

// cut reads the body as an object with some of these fields.
func (r *call) cut(known ...string) (*request, error) { return cut(r.PostBody(), known) }

// begin reads the body as an object with some of these fields, all that are needed among them, and says whose it is.
func (r *call) begin(needed []string, known ...string) (req *request, tenant string, err error) {
	if req, err = r.cut(known...); err != nil {
		return nil, "", err
	}
	if err = req.need(needed...); err != nil {
		return nil, "", err
	}
	tenant, err = r.tenantOf(req)
	return req, tenant, err
}

// tenantOf is the tenant that a request is for: what it names, which must be the token's if that is a tenant's.
func (r *call) tenantOf(req *request) (string, error) {
	named, err := req.text("tenant_id")
	if err != nil {
		return "", err
	}
	switch {
	case r.tenant != "" && named != "" && named != r.tenant:
		return "", &apiError{
			status: fasthttp.StatusForbidden, Reason: "forbidden", Field: "tenant_id",
			Message: "the token is another tenant's: leave tenant_id out, or send that tenant's token",
		}
	case r.tenant != "":
		return r.tenant, nil
	case named != "":
		return named, nil
	}
	return DefaultTenant, nil
}

// DefaultTenant is whose a request or an engine is that names no tenant.
const DefaultTenant = "default"

// serve answers one request.
func (h *listener) serve(c *fasthttp.RequestCtx) {
	from := nowNanos()
	path := string(c.Path())
	rt, ok := routes[path]
	defer func() {
		if p := recover(); p != nil {
			h.s.cfg.Logger.LogAttrs(h.s.ctx, slog.LevelError, "request failed",
				slog.String("path", path), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			c.Response.Reset()
			writeError(c, &apiError{status: 500, Reason: "internal", Message: "internal error; the conductor's log says more"})
		}
		if ok {
			h.s.metrics.request(path, c.Response.StatusCode(), nowNanos()-from)
		}
	}()
	if !ok {
		writeError(c, &apiError{status: fasthttp.StatusNotFound, Reason: "not_found", Message: "no such path: GET / lists them"})
		return
	}
	r := &call{RequestCtx: c}
	var reply any
	err := h.s.admit(r, &rt)
	if err == nil {
		reply, err = rt.handle(h.s, r)
	}
	switch {
	case err != nil:
		writeError(c, err)
	case reply != nil:
		writeJSON(c, fasthttp.StatusOK, reply)
	}
}

// admit checks that the sender may ask this.
func (s *Service) admit(r *call, rt *route) error {
	if method := string(r.Method()); method != rt.method && (rt.method != "GET" || method != "HEAD") {
		r.Response.Header.Set("Allow", rt.method)
		return &apiError{
			status: fasthttp.StatusMethodNotAllowed, Reason: "method_not_allowed", Message: "method not allowed: use " + rt.method,
		}
	}
	if rt.open || len(s.tokens) == 0 {
		return nil
	}
	given, ok := bytes.CutPrefix(r.Request.Header.Peek("Authorization"), []byte("Bearer "))
	tenant, known := s.tokens[sha256.Sum256(given)] // of the hash, so that the time says nothing about the token
	if !ok || !known {
		r.Response.Header.Set("WWW-Authenticate", "Bearer")
		return &apiError{
			status: fasthttp.StatusUnauthorized, Reason: "unauthorized", Message: "send Authorization: Bearer with your tenant's token",
		}
	}
	if tenant != operator && rt.operator {
		return &apiError{
			status: fasthttp.StatusForbidden, Reason: "forbidden", Message: "this is not for tenants: it takes the operator's token",
		}
	}
	if tenant != operator {
		r.tenant = tenant
	}
	return nil
}

// operator stands for whoever runs the conductor, among tokens; no tenant is called so.
const operator = "\x00operator"

// writeJSON answers with a value.
func writeJSON(c *fasthttp.RequestCtx, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		status, b = fasthttp.StatusInternalServerError, []byte(`{"error":"the answer is not JSON","reason":"internal"}`)
	}
	c.SetStatusCode(status)
	c.SetContentType("application/json")
	c.SetBody(append(b, '\n'))
}

// writeError answers with an error.
func writeError(c *fasthttp.RequestCtx, err error) {
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = &apiError{status: fasthttp.StatusInternalServerError, Reason: "internal", Message: err.Error()}
	}
	if e.retryAfter > 0 {
		c.Response.Header.Set("Retry-After", strconv.Itoa(e.retryAfter))
	}
	writeJSON(c, e.status, e)
}

// index lists what there is, and the seed of blocks' names, as a text: not everybody's JSON keeps 64 bits.
func (s *Service) index(*call) (any, error) {
	paths := map[string]string{}
	for path, rt := range routes {
		paths[path] = rt.method
	}
	return map[string]any{"paths": paths, "about": about, "seed": strconv.FormatUint(s.x.Seed(), 10)}, nil
}

const about = "larder conductor: which engine holds how much of a prompt, and which is to serve it; GET /openapi.json describes it"
