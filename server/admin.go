package server

import (
	"bytes"
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"larder/internal/httpd"
	"larder/protocol"
	"larder/raft"
)

// Limits of the admin listener. It serves a few people and scrapers, so they are small. There is no limit per address:
// most come from this host, and fasthttp's counting connections race with its Shutdown.
const (
	adminConcurrency  = 64                     // requests at once; more are told to come back
	adminBody         = 8 << 20                // a request to pin protocol.MaxBatch keys of the longest kind, hexadecimal
	adminHeader       = 16 << 10               // request line and headers; a key prefix is part of the line
	adminReadTimeout  = 10 * time.Second       // to send a request
	adminWriteTimeout = time.Minute            // to take a reply
	adminIdleTimeout  = 2 * time.Minute        // above the usual scrape interval
	adminIdleWorker   = 100 * time.Millisecond // a goroutine is kept without work, and so the longest that one outlives Stop
	adminTimeout      = 30 * time.Second       // for a request to be decided
	adminLongTimeout  = time.Hour              // for a deep check or a snapshot
)

// Admin is the HTTP listener for operators and scrapers. See [adminRoutes] for what it serves.
type Admin struct {
	server   *Server
	metrics  *metrics
	logger   *slog.Logger
	token    string
	http     *fasthttp.Server
	listener net.Listener
	base     context.Context //nolint:containedctx // ends every request's work when the admin is stopped
	cancel   context.CancelFunc
	done     sync.WaitGroup
}

// StartAdmin listens on the server's admin_listen, if that is not [Off], and serves until Stop. The result is nil when
// it is off; a nil Admin can be stopped.
func StartAdmin(s *Server, logger *slog.Logger) (*Admin, error) {
	cfg := s.Config()
	if cfg.AdminListen == Off {
		return nil, nil //nolint:nilnil // described above
	}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", cfg.AdminListen)
	if err != nil {
		return nil, fmt.Errorf("admin: %w; set admin_listen to a free port, or to %s", err, Off)
	}
	a := newAdmin(s, string(cfg.AdminToken), logger)
	a.listener = listener
	a.done.Go(func() {
		if err := a.http.Serve(listener); err != nil && a.base.Err() == nil {
			logger.LogAttrs(a.base, slog.LevelError, "admin listener ended", slog.Any("error", err))
		}
	})
	return a, nil
}

// newAdmin makes an Admin that does not listen yet.
func newAdmin(s *Server, token string, logger *slog.Logger) *Admin {
	a := &Admin{server: s, metrics: newMetrics(s), logger: logger, token: token}
	a.base, a.cancel = context.WithCancel(context.Background())
	a.http = &fasthttp.Server{
		Handler:               a.serve,
		ErrorHandler:          refuse,
		Name:                  "larder",
		Concurrency:           adminConcurrency,
		MaxRequestBodySize:    adminBody,
		ReadBufferSize:        adminHeader,
		ReadTimeout:           adminReadTimeout,
		WriteTimeout:          adminWriteTimeout,
		IdleTimeout:           adminIdleTimeout,
		MaxIdleWorkerDuration: adminIdleWorker,
		CloseOnShutdown:       true,
		NoDefaultServerHeader: true,
		NoDefaultDate:         true, // its clock would be a goroutine that never ends
		NoDefaultContentType:  true,
		SecureErrorLogMessage: true,
		Logger:                httpd.Logger{Logger: logger},
	}
	return a
}

// refuse answers what is not a request that the handler could be given.
func refuse(c *fasthttp.RequestCtx, err error) {
	status := httpd.RefusalStatus(err)
	writeError(c, status, badRequest("not a request that larder takes: %s", fasthttp.StatusMessage(status)))
}

// Collect has /metrics show what else this process counts. It may be called once for each collector; a nil Admin has no
// metrics.
func (a *Admin) Collect(c prometheus.Collector) {
	if a != nil {
		a.metrics.registry.MustRegister(c)
	}
}

// Addr is the address that the admin listens on, "" if it is off.
func (a *Admin) Addr() string {
	if a == nil {
		return ""
	}
	return a.listener.Addr().String()
}

// Stop ends running requests, closes the listener and waits for both, until ctx ends.
func (a *Admin) Stop(ctx context.Context) error {
	if a == nil {
		return nil
	}
	a.cancel()
	// Shutdown alone does nothing if Serve has not run yet; on a closed listener Serve then ends by itself.
	a.listener.Close() //nolint:errcheck,gosec // a second closing, by Shutdown or by a second Stop, does not matter
	err := a.http.ShutdownWithContext(ctx)
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	a.done.Wait()
	if err != nil {
		return fmt.Errorf("admin: stop: %w", err)
	}
	return nil
}

// adminCall is what a handler is given. Nothing of it may be kept after the handler returns: fasthttp reuses it all.
type adminCall struct {
	*fasthttp.RequestCtx

	admin *Admin
	ctx   context.Context //nolint:containedctx // lives as long as the request
}

// adminHandler answers a request with a value that becomes JSON. A nil value says that the handler has written the reply.
type adminHandler func(r *adminCall) (any, error)

// adminRoute is what one path serves.
type adminRoute struct {
	get, post adminHandler
	long      bool   // may take adminLongTimeout
	guarded   bool   // needs the token even to read
	about     string // for the index
}

// serve answers one request.
func (a *Admin) serve(c *fasthttp.RequestCtx) {
	defer func() {
		if p := recover(); p != nil {
			a.logger.LogAttrs(a.base, slog.LevelError, "admin request failed",
				slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			c.Response.Reset()
			writeError(c, fasthttp.StatusInternalServerError, errors.New("internal error; the server's log says more"))
		}
	}()
	path := string(c.Path())
	rt, ok := adminRoutes[path]
	if !ok && strings.HasPrefix(path+"/", pprofPrefix) {
		rt, ok = adminRoutes[pprofPrefix], true
	}
	if !ok {
		writeError(c, fasthttp.StatusNotFound, &protocol.Error{
			Code: protocol.CodeNotFound, Message: "no such path: GET / lists them",
		})
		return
	}
	h, status, err := a.admit(c, &rt)
	if err != nil {
		writeError(c, status, err)
		return
	}
	timeout := adminTimeout
	if rt.long {
		timeout = adminLongTimeout
	}
	ctx, cancel := context.WithTimeout(a.base, timeout)
	defer cancel()
	reply, err := h(&adminCall{RequestCtx: c, admin: a, ctx: ctx})
	if err != nil {
		writeError(c, statusOf(err), err)
		return
	}
	if reply != nil {
		writeJSON(c, fasthttp.StatusOK, reply)
	}
}

// admit picks the handler of a request's method and checks that the sender may use it.
func (a *Admin) admit(c *fasthttp.RequestCtx, rt *adminRoute) (adminHandler, int, error) {
	var h adminHandler
	var allow []string
	if rt.get != nil {
		allow = append(allow, "GET", "HEAD")
		if c.IsGet() || c.IsHead() {
			h = rt.get
		}
	}
	if rt.post != nil {
		allow = append(allow, "POST")
		if c.IsPost() {
			h = rt.post
		}
	}
	if h == nil {
		c.Response.Header.Set("Allow", strings.Join(allow, ", "))
		return nil, fasthttp.StatusMethodNotAllowed, &protocol.Error{
			Code: protocol.CodeUnsupported, Message: "method not allowed: use " + strings.Join(allow, " or "),
		}
	}
	// A page in a browser can send simple POSTs to loopback addresses, but none of this type without being asked about.
	if c.IsPost() && !bytes.HasPrefix(c.Request.Header.ContentType(), []byte("application/json")) {
		return nil, fasthttp.StatusUnsupportedMediaType, &protocol.Error{
			Code: protocol.CodeBadRequest, Message: "send Content-Type: application/json",
		}
	}
	if a.token != "" && (c.IsPost() || rt.guarded) && !a.authorized(c) {
		c.Response.Header.Set("WWW-Authenticate", "Bearer")
		return nil, fasthttp.StatusUnauthorized, &protocol.Error{
			Code: protocol.CodeForbidden, Message: "send Authorization: Bearer with the server's admin_token",
		}
	}
	return h, 0, nil
}

// authorized compares the request's token in constant time.
func (a *Admin) authorized(c *fasthttp.RequestCtx) bool {
	given, ok := bytes.CutPrefix(c.Request.Header.Peek("Authorization"), []byte("Bearer "))
	return ok && subtle.ConstantTimeCompare(given, []byte(a.token)) == 1
}

// decode reads the request's JSON body into v. Unknown fields are refused, so that a misspelt one is not lost.
func (r *adminCall) decode(v any) error {
	body := r.PostBody()
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	if !utf8.Valid(body) || halfPair(body) { // the decoder would put U+FFFD in its place, and so mean another name
		return badRequest("the body is not UTF-8: give keys that are not text in the fields whose names end in _hex")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return badRequest("the body is not what is expected: %v", err)
	}
	if d.More() {
		return badRequest("the body holds more than one value")
	}
	return nil
}

// badRequest makes an error that is answered with 400.
func badRequest(format string, args ...any) error {
	return &protocol.Error{Code: protocol.CodeBadRequest, Message: fmt.Sprintf(format, args...)}
}

// AdminError is the body of every reply that is not 2xx.
type AdminError struct {
	Error     string `json:"error"`
	Code      string `json:"code"`             // name of a protocol code, or of the HTTP status
	Hint      string `json:"hint,omitempty"`   // what to do next
	Leader    uint64 `json:"leader,omitempty"` // id of the member to ask instead, when the code is NOT_LEADER
	Retryable bool   `json:"retryable"`
}

// failure describes errors of the raft package to clients.
var failures = []struct {
	err    error
	code   protocol.Code
	status int
	hint   string
}{
	{raft.ErrBusy, protocol.CodeBusy, fasthttp.StatusTooManyRequests, "retry in a moment"},
	{raft.ErrDiskFull, protocol.CodeDiskFull, fasthttp.StatusServiceUnavailable, "free space on the data directory's disk"},
	{raft.ErrStopped, protocol.CodeUnavailable, fasthttp.StatusServiceUnavailable, "ask another member"},
	{raft.ErrRemoved, protocol.CodeUnavailable, fasthttp.StatusServiceUnavailable, "ask another member"},
	{raft.ErrConfChangePending, protocol.CodeBusy, fasthttp.StatusConflict, "retry when the other change is done"},
	{raft.ErrNotCaughtUp, protocol.CodeBusy, fasthttp.StatusConflict, "wait until its lag in GET /members is small, then retry"},
	{raft.ErrUnknownMember, protocol.CodeNotFound, fasthttp.StatusNotFound, "GET /members lists the ids"},
	{raft.ErrIDReused, protocol.CodeBadRequest, fasthttp.StatusConflict, "choose another id, or 0 for a random one"},
	{raft.ErrQuorumLoss, protocol.CodeForbidden, fasthttp.StatusConflict, "bring the other members back first"},
	{raft.ErrTransferring, protocol.CodeUnavailable, fasthttp.StatusServiceUnavailable, "retry in a moment"},
	{context.DeadlineExceeded, protocol.CodeTimeout, fasthttp.StatusGatewayTimeout, "the outcome is not known: look before repeating"},
	{context.Canceled, protocol.CodeUnavailable, fasthttp.StatusServiceUnavailable, "the server is stopping: ask another member"},
}

// describe turns an error into its reply and HTTP status.
func describe(err error) (AdminError, int) {
	for _, f := range failures {
		if errors.Is(err, f.err) {
			return AdminError{Error: err.Error(), Code: f.code.String(), Hint: f.hint, Retryable: f.code.Retryable()}, f.status
		}
	}
	if e, ok := errors.AsType[*raft.NotLeaderError](err); ok {
		return AdminError{
			Error: err.Error(), Code: protocol.CodeNotLeader.String(), Leader: e.Leader, Retryable: true,
			Hint: "send the request to the leader's admin address: GET /members has it",
		}, fasthttp.StatusMisdirectedRequest
	}
	code := protocol.CodeOf(err)
	text := err.Error()
	if e, ok := err.(*protocol.Error); ok && e.Message != "" { //nolint:errorlint // a wrapped one has text around it that says more
		text = e.Message
	}
	reply := AdminError{Error: text, Code: code.String(), Retryable: code.Retryable()}
	switch code {
	case protocol.CodeNotLeader:
		reply.Hint = "send the request to the leader's admin address: GET /members has it"
	case protocol.CodeInternal:
		reply.Hint = "the server's log says more"
	default:
	}
	return reply, httpStatus(code)
}

// httpStatus maps protocol codes to HTTP.
func httpStatus(code protocol.Code) int {
	switch code {
	case protocol.CodeBadRequest, protocol.CodeKeyTooLong, protocol.CodeMisaligned:
		return fasthttp.StatusBadRequest
	case protocol.CodeNotLeader:
		return fasthttp.StatusMisdirectedRequest
	case protocol.CodeNotFound:
		return fasthttp.StatusNotFound
	case protocol.CodeForbidden:
		return fasthttp.StatusForbidden
	case protocol.CodeLimit, protocol.CodeBusy:
		return fasthttp.StatusTooManyRequests
	case protocol.CodeTimeout, protocol.CodePending:
		return fasthttp.StatusGatewayTimeout
	case protocol.CodeUnavailable, protocol.CodeDiskFull:
		return fasthttp.StatusServiceUnavailable
	case protocol.CodeUnsupported:
		return fasthttp.StatusNotImplemented
	case protocol.CodeInternal:
		return fasthttp.StatusInternalServerError
	default:
		return fasthttp.StatusConflict
	}
}

// statusOf is the HTTP status of an error.
func statusOf(err error) int {
	_, status := describe(err)
	return status
}

// writeError answers with an AdminError.
func writeError(c *fasthttp.RequestCtx, status int, err error) {
	reply, _ := describe(err)
	writeJSON(c, status, reply)
}

// writeJSON answers with a value as JSON.
func writeJSON(c *fasthttp.RequestCtx, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		c.Error(`{"error":"the reply cannot be written as JSON","code":"INTERNAL"}`, fasthttp.StatusInternalServerError)
		return
	}
	c.SetStatusCode(status)
	c.SetContentType("application/json")
	c.SetBody(append(b, '\n'))
}

// halfPair reports whether JSON has an escape that is half of a surrogate pair, as Python makes of a byte that is not text.
func halfPair(body []byte) bool {
	for i := 0; i+1 < len(body); i++ {
		if body[i] != '\\' {
			continue
		}
		i++
		switch r := escaped(body[i:]); {
		case !utf16.IsSurrogate(r):
		case i+5 >= len(body) || body[i+5] != '\\' || utf16.DecodeRune(r, escaped(body[i+6:])) == utf8.RuneError:
			return true
		default:
			i += 6 // the other half
		}
	}
	return false
}

// escaped is the number of an escape that begins with u, or 0.
func escaped(b []byte) rune {
	if len(b) < 5 || b[0] != 'u' {
		return 0
	}
	r, err := strconv.ParseUint(string(b[1:5]), 16, 16)
	if err != nil {
		return 0
	}
	return rune(r)
}
