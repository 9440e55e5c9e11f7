package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
)

// Load is a set of clients that store, read, delete and verify for as long as a test wants.
type Load struct {
	t       *testing.T
	c       *Cluster
	Ledger  *Ledger
	MayLose bool // entries may be evicted

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	Puts, Gets, Deletes, Misses atomic.Uint64
	mu                          sync.Mutex
	failures                    []error
}

// NewLoad prepares a load. It is stopped at the test's end, if not before.
func NewLoad(t *testing.T, c *Cluster) *Load {
	t.Helper()
	l := &Load{t: t, c: c, Ledger: NewLedger()}
	l.ctx, l.cancel = context.WithCancel(t.Context())
	t.Cleanup(l.end)
	return l
}

// end stops the goroutines. Operations that run are awaited, not cut off, so that nothing is left uncertain.
func (l *Load) end() {
	l.cancel()
	l.wg.Wait()
}

// Stop ends the load and fails the test if any call failed or any read was wrong.
func (l *Load) Stop() {
	l.t.Helper()
	l.end()
	l.t.Logf("load: %d puts, %d gets (%d misses), %d deletes", l.Puts.Load(), l.Gets.Load(), l.Misses.Load(), l.Deletes.Load())
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Empty(l.t, l.failures)
}

// maxFailures bounds what a failed test shows.
const maxFailures = 10

// Fail notes a failure.
func (l *Load) Fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.failures) < maxFailures {
		l.failures = append(l.failures, fmt.Errorf("%s: %w", clock(now()), err))
	}
}

// Call runs one operation with the bound that makes it a failure, whatever becomes of the load meanwhile.
func (l *Load) Call(f func(ctx context.Context) error) error {
	_, err := l.repeat(f)
	return err
}

// calm is for how long this process may stand still without its clients' sessions and deadlines being at risk.
const calm = SessionTTL / 2

// repeat is Call for a change. A failure is repeated, as its user would, if this process has been given no processor for
// so long that sessions had to expire and deadlines to pass: again says that it was.
func (l *Load) repeat(f func(ctx context.Context) error) (again bool, err error) {
	for {
		begun := now()
		err = l.once(f)
		if !errors.Is(err, client.ErrSessionExpired) && !errors.Is(err, client.ErrTimeout) {
			return again, err
		}
		sleep(2 * stallStep) // until a stall that has just ended is known
		if Stalled(begun.Add(-SessionTTL)) < calm {
			return again, err
		}
		again = true
	}
}

func (l *Load) once(f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), Hang)
	defer cancel()
	return f(ctx)
}

// pace is the mean pause between operations of one goroutine: the point is faults, not to saturate the machine.
const pace = 2 * time.Millisecond

// GoPaced runs f until the load is stopped.
func (l *Load) GoPaced(f func(r *rand.Rand)) {
	l.wg.Go(func() {
		r := rand.New(rand.NewPCG(rand.Uint64(), 1))
		for l.ctx.Err() == nil {
			f(r)
			sleep(time.Duration(r.Int64N(2 * int64(pace))))
		}
	})
}

// Writer stores keys of its own through x, at most live at a time, deletes the oldest, and stores some again.
func (l *Load) Writer(x *client.Client, name string, live int) {
	var keys []string
	var buf []byte
	next := 0
	l.GoPaced(func(r *rand.Rand) {
		switch {
		case len(keys) < live && (next < 2*live || r.IntN(2) == 0):
			key := fmt.Sprintf("%s/%d", name, next)
			next++
			keys = append(keys, key)
			buf = l.Put(x, key, buf)
		case r.IntN(3) == 0 && len(keys) > 0:
			i := r.IntN(len(keys)) // again, with new content
			l.Remove(x, keys[i])
			buf = l.Put(x, keys[i], buf)
		default:
			if len(keys) > 0 {
				l.Remove(x, keys[0])
				keys = keys[1:]
			}
		}
	})
}

// Put stores the next version of a key that is absent.
func (l *Load) Put(x *client.Client, key string, buf []byte) []byte {
	h := l.Ledger.Of(key)
	version := h.Next()
	buf = ValueOf(buf, key, version)
	h.Begin(version)
	var res client.PutResult
	again, err := l.repeat(func(ctx context.Context) (err error) {
		res, err = x.Put(ctx, []byte(key), buf)
		return err
	})
	switch {
	case err != nil:
		l.Fail(fmt.Errorf("put %s version %d: %w", key, version, err))
		return buf
	case !res.Stored && !again:
		l.Fail(fmt.Errorf("put %s version %d: the key is held, and should not be", key, version))
	}
	h.Ack()
	l.Puts.Add(1)
	return buf
}

// Remove deletes a key.
func (l *Load) Remove(x *client.Client, key string) {
	h := l.Ledger.Of(key)
	version, _ := h.Now()
	h.Begin(0)
	var found []bool
	again, err := l.repeat(func(ctx context.Context) (err error) {
		found, err = x.Delete(ctx, []byte(key))
		return err
	})
	switch {
	case err != nil:
		l.Fail(fmt.Errorf("delete %s: %w", key, err))
		return
	case !found[0] && version != 0 && !l.MayLose && !again:
		l.Fail(fmt.Errorf("delete %s: not found, though version %d was acknowledged", key, version))
	}
	h.Ack()
	l.Deletes.Add(1)
}

// Reader reads keys of all writers at random, one or many at a time, and verifies every byte.
func (l *Load) Reader(x *client.Client) {
	var buf []byte
	l.GoPaced(func(r *rand.Rand) {
		keys := l.Ledger.All()
		if len(keys) == 0 {
			return
		}
		if r.IntN(4) == 0 {
			l.readMany(x, keys, r)
			return
		}
		// Most reads go to the newest keys, which change.
		key := keys[len(keys)-1-min(int(r.ExpFloat64()*100), len(keys)-1)]
		buf = l.Read(x, key, buf)
	})
}

// Read reads one key and verifies what came.
func (l *Load) Read(x *client.Client, key string, buf []byte) []byte {
	sent := now()
	var value []byte
	err := l.Call(func(ctx context.Context) (err error) {
		value, err = x.Get(ctx, []byte(key), buf)
		return err
	})
	switch {
	case errors.Is(err, client.ErrNotFound):
		l.Verify(key, nil, sent)
		return buf
	case err != nil:
		l.Fail(fmt.Errorf("get %s: %w", key, err))
		return buf
	}
	l.Verify(key, value, sent)
	return value
}

// readMany reads a batch, through views or copies.
func (l *Load) readMany(x *client.Client, keys []string, r *rand.Rand) {
	batch := make([][]byte, min(len(keys), 16))
	for i := range batch {
		batch[i] = []byte(keys[r.IntN(len(keys))])
	}
	sent := now()
	var values [][]byte
	err := l.Call(func(ctx context.Context) (err error) {
		values, err = x.GetBatch(ctx, batch, nil)
		return err
	})
	if err != nil {
		l.Fail(fmt.Errorf("get batch: %w", err))
		return
	}
	for i, key := range batch {
		l.Verify(string(key), values[i], sent)
	}
}

// Verify checks what a read returned; nil is absence.
func (l *Load) Verify(key string, value []byte, sent time.Time) {
	answered := now()
	l.Gets.Add(1)
	var version uint64
	if value != nil {
		var err error
		if version, err = CheckValue(key, value); err != nil {
			l.Fail(fmt.Errorf("WRONG BYTES: %w", err))
			return
		}
	} else {
		l.Misses.Add(1)
	}
	if err := l.Ledger.Of(key).Allows(version, sent, answered, l.MayLose); err != nil {
		l.Fail(fmt.Errorf("key %s: %w", key, err))
	}
}

// VerifyAll reads everything that the ledger is certain of: what was acknowledged must be there, and be right.
func (l *Load) VerifyAll(x *client.Client) {
	l.t.Helper()
	keys := l.Ledger.All()
	held := 0
	for chunk := range slices.Chunk(keys, 64) {
		batch := make([][]byte, len(chunk))
		for i, key := range chunk {
			batch[i] = []byte(key)
		}
		sent := now()
		var values [][]byte
		err := l.Call(func(ctx context.Context) (err error) {
			values, err = x.GetBatch(ctx, batch, nil)
			return err
		})
		require.NoError(l.t, err)
		for i, key := range chunk {
			l.Verify(key, values[i], sent)
			if values[i] != nil {
				held++
			}
		}
	}
	l.t.Logf("verified %d keys, of which %d are held", len(keys), held)
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Empty(l.t, l.failures)
}

// Prober measures how long writes stand still after faults: it stores one small value after the other.
type Prober struct {
	mu   sync.Mutex
	puts []span
}

// span is one store, from its call to its acknowledgement.
type span struct{ from, to time.Time }

// Prober starts measuring.
func (l *Load) Prober(x *client.Client) *Prober {
	p := new(Prober)
	n := 0
	l.GoPaced(func(*rand.Rand) {
		key := fmt.Sprintf("probe/%d", n%64)
		n++
		if _, certain := l.Ledger.Of(key).Now(); certain && n > 64 {
			l.Remove(x, key)
		}
		from := now()
		l.Put(x, key, nil)
		p.mu.Lock()
		p.puts = append(p.puts, span{from, now()})
		p.mu.Unlock()
	})
	return p
}

// After returns how long after at the first store was acknowledged that was called later than it; 0 if none was yet.
func (p *Prober) After(at time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, _ := slices.BinarySearchFunc(p.puts, at, func(s span, at time.Time) int { return s.from.Compare(at) })
	if i == len(p.puts) {
		return 0
	}
	return p.puts[i].to.Sub(at)
}

// Await waits for a store that was called after at, and returns how long after it that was acknowledged.
func (p *Prober) Await(t *testing.T, at time.Time) time.Duration {
	t.Helper()
	var d time.Duration
	Within(t, "writes again", func() error {
		if d = p.After(at); d == 0 {
			return errors.New("no store has been acknowledged since the fault")
		}
		return nil
	})
	return d
}

// Percentiles shows the spread of durations.
func Percentiles(list []time.Duration) string {
	if len(list) == 0 {
		return "none"
	}
	list = slices.Clone(list)
	slices.Sort(list)
	at := func(p float64) time.Duration {
		return list[min(int(p*float64(len(list))), len(list)-1)].Round(time.Millisecond)
	}
	return fmt.Sprintf("n=%d min=%v p50=%v p90=%v p95=%v max=%v", len(list), at(0), at(.5), at(.9), at(.95), at(1))
}

// Summary says how many stores were acknowledged since a time, and how long they took.
func (p *Prober) Summary(since time.Time) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var took []time.Duration
	for _, s := range p.puts {
		if s.from.After(since) {
			took = append(took, s.to.Sub(s.from))
		}
	}
	return "stores took " + Percentiles(took)
}

// Between returns how long the stores took that were called between two times, and acknowledged.
func (p *Prober) Between(from, to time.Time) (took []time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.puts {
		if s.from.After(from) && s.from.Before(to) {
			took = append(took, s.to.Sub(s.from))
		}
	}
	return took
}
