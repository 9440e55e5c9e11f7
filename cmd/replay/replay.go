// Package replay runs a trace of requests to a serving engine against a pool: with real clients, real pages and real
// bytes, all of which are checked. It is what `larder replay` does.
package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"larder/client"
	"larder/cxl"
	"larder/protocol"
)

// Config says what to replay and against what.
type Config struct {
	Addrs      []string  // masters, as in client.Config
	Trace      string    // path of the trace; "": Sample is generated
	Sample     Sample    // what to generate
	Requests   []Request // the trace itself, if it is not nil
	MaxRequest int       // replay at most so many requests; 0: all

	Clients    int     // clients at a time, each with its own session; 0: 1, which replays strictly in order
	PageSize   uint64  // bytes of a block, and of a page; 0: client.DefaultPageSize
	RegionSize uint64  // bytes; 0: client.DefaultRegionSize
	Checksums  bool    // store and verify checksums
	Prefault   bool    // map memory completely
	Speed      float64 // 0: as fast as possible; else times as fast as the timestamps say
	KeyPrefix  string  // in front of the keys, to keep runs apart; "": "replay/"
	Instance   string  // prefix of the clients' names; "": made from the process
	Tenant     string

	// Budget is how long one request may go on failing, with errors that a repetition may mend, before the replay
	// ends. 0: 60 s.
	Budget time.Duration
	// Pages is how many pages the clients can use, for the report and Compare. 0: what the pool says.
	Pages int
	// Compare adds what exact LRU and the optimum would have reached with Pages pages.
	Compare bool
	// Evictions reads how many entries the pool has evicted, by phase of REQUEST_ALLOC, if the caller can tell; it is
	// given the members that the clients know. nil, or an error that is ErrUntold: the report has the clients' own
	// count, and says so.
	Evictions func(context.Context, []protocol.Member) (ByPhase, error)

	// Nodes says what has become of nodes beside the server, for the report; nil: there are none.
	Nodes func() Nodes
	// Near, Tier and Replicas are those of the clients.
	Near     []string
	Tier     string
	Replicas int

	Progress io.Writer // where to show progress; nil: nowhere
	Terminal bool      // Progress is a terminal: one line, written over
	Logger   *slog.Logger
}

// ByPhase counts evicted entries by the phase of REQUEST_ALLOC: from free space (0, always none), the requester's own
// (1), with the region of an owner that is gone (2), with another client's region (3).
type ByPhase [4]uint64

// ErrUntold says that nobody can be asked what the pool has evicted.
var ErrUntold = errors.New("replay: no admin of this cluster can be reached")

const (
	// retryPause is the pause before a request that failed is tried again: the client has paused between its own
	// attempts already.
	retryPause = 20 * time.Millisecond
	// maxFailures bounds the verification failures that are reported in words.
	maxFailures = 16
)

// Run replays. The report is not nil if at least one request was replayed, even when an error ended the replay.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	trace, err := cfg.trace()
	if err != nil {
		return nil, err
	}
	cfg.defaults()
	if cfg.PageSize < MinBlock || cfg.PageSize%8 != 0 {
		return nil, fmt.Errorf("replay: a page of %d bytes holds no block: take a multiple of 4096", cfg.PageSize)
	}
	r := &runner{cfg: cfg, trace: trace, prefix: client.PrefixContext{Model: "replay", Salt: cfg.KeyPrefix}}
	if err := r.connect(ctx); err != nil {
		return nil, err
	}
	before, err := r.evictions(ctx)
	if err != nil {
		return nil, errors.Join(err, r.close(ctx))
	}
	r.pages(ctx)
	r.start = cxl.Boottime()
	stop := r.showProgress() //nolint:contextcheck // ends with the call, by stop
	err = r.run(ctx)
	duration := time.Duration(cxl.Boottime() - r.start)
	stop()
	rep := r.report(ctx, duration, before)
	return rep, errors.Join(err, r.close(ctx))
}

// trace reads or generates the requests.
func (cfg *Config) trace() (trace []Request, err error) {
	switch {
	case cfg.Requests != nil:
		trace = cfg.Requests
	case cfg.Trace == "":
		trace = cfg.Sample.Generate()
	default:
		f, err := os.Open(cfg.Trace)
		if err != nil {
			return nil, fmt.Errorf("replay: %w", err)
		}
		defer f.Close() //nolint:errcheck // opened for reading
		if trace, err = ReadTrace(f); err != nil {
			return nil, fmt.Errorf("replay: %s: %w", cfg.Trace, err)
		}
	}
	if cfg.MaxRequest > 0 && cfg.MaxRequest < len(trace) {
		trace = trace[:cfg.MaxRequest]
	}
	return trace, nil
}

func (cfg *Config) defaults() {
	if cfg.Clients <= 0 {
		cfg.Clients = 1
	}
	if cfg.PageSize == 0 {
		cfg.PageSize = client.DefaultPageSize
	}
	if cfg.KeyPrefix == "" {
		cfg.KeyPrefix = "replay/"
	}
	if cfg.Budget <= 0 {
		cfg.Budget = time.Minute
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
}

// runner is one replay.
type runner struct {
	cfg     Config
	trace   []Request
	prefix  client.PrefixContext // of all blocks
	workers []*worker
	start   int64 // BOOTTIME

	next atomic.Int64 // the next request to deal
	done atomic.Int64
	live live

	mu       sync.Mutex
	failures []string
}

// live are the counts that the progress line shows while the workers run.
type live struct {
	blocks, prefixHits, storeHits, failures, retries atomic.Uint64
}

// connect opens a client for each worker.
func (r *runner) connect(ctx context.Context) error {
	for i := range r.cfg.Clients {
		cfg := client.Config{
			Addrs: r.cfg.Addrs, Tenant: r.cfg.Tenant, PageSize: r.cfg.PageSize, RegionSize: r.cfg.RegionSize,
			Checksums: r.cfg.Checksums, Prefault: r.cfg.Prefault, Logger: r.cfg.Logger,
			Near: r.cfg.Near, Tier: r.cfg.Tier, Replicas: r.cfg.Replicas,
		}
		if r.cfg.Instance != "" {
			cfg.Instance = r.cfg.Instance + "-" + strconv.Itoa(i)
		}
		c, err := client.Open(ctx, cfg)
		if err != nil {
			return errors.Join(fmt.Errorf("replay: client %d: %w", i, err), r.close(ctx))
		}
		r.workers = append(r.workers, &worker{r: r, c: c})
	}
	return nil
}

// close ends the clients. Their entries stay in the pool.
func (r *runner) close(ctx context.Context) error {
	var all []error
	for _, w := range r.workers {
		if err := w.c.Close(context.WithoutCancel(ctx)); err != nil {
			all = append(all, fmt.Errorf("replay: %w", err))
		}
	}
	return errors.Join(all...)
}

// evictions asks the pool. It returns nil if it cannot be asked.
func (r *runner) evictions(ctx context.Context) (*ByPhase, error) {
	if r.cfg.Evictions == nil {
		return nil, nil //nolint:nilnil // nobody can tell, which is no error
	}
	n, err := r.cfg.Evictions(ctx, r.workers[0].c.Members())
	switch {
	case errors.Is(err, ErrUntold):
		return nil, nil //nolint:nilnil // nobody can tell, which is no error
	case err != nil:
		return nil, fmt.Errorf("replay: evictions of the pool: %w", err)
	}
	return &n, nil
}

// pages finds out how many pages the pool has, if nobody said so.
func (r *runner) pages(ctx context.Context) {
	if r.cfg.Pages > 0 {
		return
	}
	u, err := r.workers[0].c.Usage(ctx)
	if err != nil {
		r.cfg.Logger.Warn("the pool does not say how large it is", slog.Any("error", err))
		return
	}
	r.cfg.Pages = int(u.PoolTotal / r.cfg.PageSize) //nolint:gosec // far smaller
}

// run deals the requests in the order of the file to whichever worker is free.
func (r *runner) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, w := range r.workers {
		wg.Go(func() {
			if err := w.run(ctx); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx) //nolint:wrapcheck // a worker's, which says what failed
}

// fault notes bytes that were wrong.
func (r *runner) fault(err error) {
	r.live.failures.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.failures) < maxFailures {
		r.failures = append(r.failures, err.Error())
	}
	r.cfg.Logger.Error("wrong bytes", slog.Any("error", err))
}

// operations whose latency is measured.
const (
	opLookup  = iota // the walk: one batched lookup
	opRead           // reading and checking all hits of a request
	opStore          // storing all that missed
	opRequest        // all of it
	opCount
)

var opNames = [opCount]string{"lookup", "read", "store", "request"}

// worker replays one request at a time with a client of its own.
type worker struct {
	r     *runner
	c     *client.Client
	views client.Views

	keyBytes []byte
	keys     [][]byte
	values   []byte
	items    []client.Item
	results  []client.PutResult

	hist      [opCount]Histogram
	bytesRead uint64
	stored    uint64
}

func (w *worker) run(ctx context.Context) error {
	r := w.r
	for ctx.Err() == nil {
		i := int(r.next.Add(1) - 1)
		if i >= len(r.trace) {
			return nil
		}
		q := &r.trace[i]
		if r.cfg.Speed > 0 {
			due := r.start + int64(q.Timestamp/r.cfg.Speed*float64(time.Millisecond))
			if sleep(ctx, time.Duration(due-cxl.Boottime())) != nil {
				return nil //nolint:nilerr // whoever ended the replay says why
			}
		}
		if err := w.request(ctx, q); err != nil {
			return fmt.Errorf("replay: request %d: %w", i, err)
		}
		r.done.Add(1)
	}
	return nil
}

// request walks, reads and stores one request.
func (w *worker) request(ctx context.Context, q *Request) error {
	began := cxl.Boottime()
	w.makeKeys(q.HashIDs)
	w.r.live.blocks.Add(uint64(len(q.HashIDs)))
	hits := 0
	for hits < len(q.HashIDs) {
		part := min(len(q.HashIDs)-hits, protocol.MaxBatch)
		var n int
		err := w.again(ctx, func() (err error) {
			n, err = w.walk(ctx, q.HashIDs[hits:hits+part], w.keys[hits:hits+part])
			return err
		})
		if err != nil {
			return err
		}
		hits += n
		if n < part {
			break
		}
	}
	w.r.live.prefixHits.Add(uint64(hits)) //nolint:gosec // not negative
	if hits < len(q.HashIDs) {
		if err := w.store(ctx, q.HashIDs, hits); err != nil {
			return err
		}
	}
	w.hist[opRequest].Add(time.Duration(cxl.Boottime() - began))
	return nil
}

// makeKeys writes the keys of blocks into memory that is used again.
func (w *worker) makeKeys(ids []uint64) {
	w.keyBytes, w.keys = w.keyBytes[:0], w.keys[:0]
	for _, id := range ids {
		w.keyBytes = append(w.keyBytes, w.r.cfg.KeyPrefix...)
		w.keyBytes = strconv.AppendUint(w.keyBytes, id, 16)
	}
	from := 0
	for _, id := range ids { // now that the bytes do not move any more
		n := len(w.r.cfg.KeyPrefix) + hexDigits(id)
		w.keys = append(w.keys, w.keyBytes[from:from+n:from+n])
		from += n
	}
}

func hexDigits(v uint64) int {
	n := 1
	for v >>= 4; v > 0; v >>= 4 {
		n++
	}
	return n
}

// again repeats f while it fails in a way that passes, within the budget.
func (w *worker) again(ctx context.Context, f func() error) error {
	until := cxl.Boottime() + w.r.cfg.Budget.Nanoseconds()
	for {
		err := f()
		if err == nil || !client.Retryable(err) || ctx.Err() != nil || cxl.Boottime() > until {
			return err
		}
		w.r.live.retries.Add(1)
		w.r.cfg.Logger.Debug("again", slog.Any("error", err))
		if sleep(ctx, retryPause) != nil {
			return err
		}
	}
}

// walk looks blocks up until the first miss, and checks every byte of those that hit.
func (w *worker) walk(ctx context.Context, ids []uint64, keys [][]byte) (hits int, err error) {
	t0 := cxl.Boottime()
	if err := w.c.ViewInto(ctx, &w.views, keys, true); err != nil {
		return 0, err //nolint:wrapcheck // says what and which
	}
	t1 := cxl.Boottime()
	w.hist[opLookup].Add(time.Duration(t1 - t0))
	hits = w.views.Len()
	if hits == 0 {
		return 0, w.views.Close() //nolint:wrapcheck // says what
	}
	var wrong error
	size := int(w.r.cfg.PageSize) //nolint:gosec // checked by the client
	gone := w.views.Guard(func() {
		for i := range hits {
			if err := CheckBlock(w.views.Bytes(i), ids[i], size); err != nil && wrong == nil {
				wrong = err
			}
		}
	})
	if err := w.views.Close(); err != nil {
		return 0, err //nolint:wrapcheck // what was read does not count: the walk is repeated
	}
	if gone != nil {
		return 0, gone //nolint:wrapcheck // says what to do
	}
	if wrong != nil {
		w.r.fault(wrong)
	}
	w.bytesRead += uint64(hits) * w.r.cfg.PageSize //nolint:gosec // not negative
	w.hist[opRead].Add(time.Duration(cxl.Boottime() - t1))
	return hits, nil
}

// prefixHash is the rolling hash that a block is registered under: its id is one already. It is never 0, which stands
// for no block where a parent is named; traces begin with 0.
func prefixHash(id uint64) uint64 { return id + 1 }

// attrs says which block of its request one is, so that policies that go by prefixes have something to go by. The
// context is that of the run's keys: a block is never taken for one that another run has stored under another key.
func (w *worker) attrs(request []uint64, i int) client.Attrs {
	a := client.Attrs{Context: &w.r.prefix, HasPrefix: true, Hash: prefixHash(request[i]), Index: uint64(i)} //nolint:gosec // not negative
	if i > 0 {
		a.Parent = prefixHash(request[i-1])
	}
	return a
}

// store makes and stores the blocks of a request from one on. Those that turn out to be held count as hits of blocks,
// not of prefixes.
func (w *worker) store(ctx context.Context, request []uint64, from int) error {
	ids, keys := request[from:], w.keys[from:]
	size := int(w.r.cfg.PageSize) //nolint:gosec // checked by the client
	if need := size * len(ids); cap(w.values) < need {
		w.values = make([]byte, need)
	}
	w.items = w.items[:0]
	for i, id := range ids {
		b := w.values[:cap(w.values)][i*size : (i+1)*size : (i+1)*size]
		FillBlock(b, id)
		w.items = append(w.items, client.Item{Key: keys[i], Value: b, Attrs: w.attrs(request, from+i)})
	}
	if cap(w.results) < len(ids) {
		w.results = make([]client.PutResult, len(ids))
	}
	w.results = w.results[:len(ids)]
	t0 := cxl.Boottime()
	// A repetition would find what the first attempt stored: only what was never stored before counts as a hit.
	fresh := 0
	err := w.again(ctx, func() error {
		err := w.c.PutBatchInto(ctx, w.items, w.results)
		for i := range w.results {
			if w.results[i].Stored {
				fresh++
			}
		}
		return err //nolint:wrapcheck // says what and which
	})
	if err != nil {
		return err
	}
	w.hist[opStore].Add(time.Duration(cxl.Boottime() - t0))
	w.stored += uint64(fresh)
	w.r.live.storeHits.Add(uint64(max(len(ids)-min(fresh, len(ids)), 0)))
	return nil
}
