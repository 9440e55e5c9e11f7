package maru

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"larder/zmtp"
)

// Limits of a listener. What a client sends beyond them waits in its socket.
const (
	// MaxBody bounds a request: a batch of 65,536 keys of a hundred bytes fits.
	MaxBody = 8 << 20
	// maxBurst is how many requests of one connection are served at a time: four times as many as Maru's client has under
	// way.
	maxBurst = 256
	// maxBurstBytes of requests and of what their replies may take are, too, unless it is one alone.
	maxBurstBytes = 16 << 20
	// maxParts of a message: a peer behind proxies has one more for each.
	maxParts = 8
	// Patience is how long a request may wait, from when it arrived, for a leader and for the log. Maru's clients give up
	// after 2 s, unless told otherwise, and use the page of a REGISTER_KV that they have given up on for something else:
	// it must not be applied after that.
	Patience = 1500 * time.Millisecond
	// leaderRetry is how long a request rests that found no leader.
	leaderRetry = 20 * time.Millisecond
	// quiet is for how long nothing comes, after a DEALER has connected again, before its requests count as new.
	quiet = 50 * time.Millisecond
	// staleFor is the longest that they do not, in which a client that is never quiet has sent all that it had queued.
	staleFor = time.Second
)

// Index is what a listener serves from. All methods may be called concurrently.
type Index interface {
	// Term is that in which this member leads and serves, 0 while it does not.
	Term() uint64
	// Confirm reports whether what was read since it led in a term may be told: whether it still led then.
	Confirm(ctx context.Context, term uint64) bool
	// Leader is the address of the leader's own listener, "" if none is known.
	Leader() string
	// ResourceManager is the address that HANDSHAKE names.
	ResourceManager() string
	// Read appends the reply's payload to a request that changes nothing, as of now: what was read in the log's order
	// before that is in it. It reports Later for what the log has to decide first, and Failed for what Maru fails at.
	Read(q *Request, b []byte) ([]byte, Outcome)
	// Log has a request decided in the log's order, behind what was logged before, unless that takes longer than a time
	// from now on. done is called once, from any goroutine, and must not block: with a function that appends the reply's
	// payload, which is to be called at once. Requests have no more use for q when Log returns.
	Log(q *Request, again bool, within time.Duration, done func(o Outcome, reply func(b []byte) []byte))
	// Alloc carries out a REQUEST_ALLOC of a client, within a time, and reports Done, Refused, Failed or Doubt.
	Alloc(ctx context.Context, c *Client, q *Request, within time.Duration) (Handle, Outcome)
	// Heard takes note that a client owns a region, or claims to be an instance.
	Heard(c *Client, q *Request)
	// Joined and Left take note of the connections that there are.
	Joined(c *Client)
	Left(c *Client)
}

// Outcome is what became of a request.
type Outcome uint8

// Outcomes.
const (
	Done      Outcome = iota // it was carried out
	Refused                  // there is no room
	Failed                   // it was not carried out, and will not be
	Elsewhere                // it was not carried out: another member leads
	Doubt                    // another member leads, and it may have been carried out, or will be
	Later                    // the log has to decide first
)

// Client is one connection, as an Index sees it.
type Client struct {
	Host     string                 // where it comes from
	Identity string                 // what a DEALER calls itself, of all its connections; "" of others
	Instance atomic.Pointer[string] // as which it was last heard; nil = none yet
}

// Counters count what a listener did. Read them at any time.
type Counters struct {
	Connections atomic.Int64 // at present
	Accepted    atomic.Uint64
	Requests    [256]atomic.Uint64 // by type
	Failures    [256]atomic.Uint64 // of them answered with an error; [0]: what could not be decoded
	Forwarded   atomic.Uint64      // to the leader
	Late        atomic.Uint64      // refused since they had waited for too long, or may have
	Stats       Stats
}

// Server is a listener.
type Server struct {
	Counters
	index  Index
	logger *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc
	zmtp   *zmtp.Server
	start  chan struct{} // closed when the index can be asked
	once   sync.Once
	wg     sync.WaitGroup

	mu    sync.Mutex
	conns map[*conn]struct{}

	beat    atomic.Pointer[time.Time] // when the process was last seen to run
	stalled atomic.Pointer[stall]     // when it last did not; nil = never
}

// Listen listens for Maru's clients at an address, host:port, for at most a number of them at a time. They are served from
// Start on.
func Listen(ctx context.Context, addr string, maxPeers int, index Index, logger *slog.Logger) (*Server, error) {
	s := &Server{index: index, logger: logger, start: make(chan struct{}), conns: map[*conn]struct{}{}}
	begun := now()
	s.beat.Store(&begun)
	s.ctx, s.cancel = context.WithCancel(ctx)
	cfg := zmtp.Config{Type: zmtp.ROUTER, MaxMessage: MaxBody, MaxParts: maxParts, MaxPeers: maxPeers}
	l, err := zmtp.Listen(ctx, "tcp://"+addr, cfg, s.serve)
	if err != nil {
		s.cancel()
		return nil, fmt.Errorf("maru: %w", err)
	}
	s.zmtp = l
	s.wg.Go(s.keep)
	s.wg.Go(s.watch)
	return s, nil
}

// Start begins to serve.
func (s *Server) Start() { s.once.Do(func() { close(s.start) }) }

// started waits for Start. It returns false if the server was closed first.
func (s *Server) started() bool {
	select {
	case <-s.start:
		return true
	case <-s.ctx.Done():
		return false
	}
}

// Addr is where the server listens.
func (s *Server) Addr() string { return s.zmtp.Endpoint()[len("tcp://"):] }

// Close ends all connections. What they have asked for may still be carried out.
func (s *Server) Close() error {
	s.cancel()
	s.wg.Wait()
	return s.zmtp.Close()
}

// TypeName is the name of a type for metrics, "" if it is not known; of 0 that of what could not be decoded.
func TypeName(t int) string {
	if t == 0 {
		return "undecodable"
	}
	return typeNames[t]
}

// waiting counts requests that are in the log, for the one goroutine that waits for them.
type waiting struct {
	mu   sync.Mutex
	n    int
	none chan struct{} // 1
}

func (w *waiting) add() {
	w.mu.Lock()
	w.n++
	w.mu.Unlock()
}

func (w *waiting) done() {
	w.mu.Lock()
	w.n--
	if w.n == 0 {
		select {
		case w.none <- struct{}{}:
		default:
		}
	}
	w.mu.Unlock()
}

// wait returns when nothing is waited for, or false when ctx ends.
func (w *waiting) wait(ctx context.Context) bool {
	for {
		w.mu.Lock()
		n := w.n
		w.mu.Unlock()
		if n == 0 {
			return true
		}
		select {
		case <-w.none:
		case <-ctx.Done():
			return false
		}
	}
}
