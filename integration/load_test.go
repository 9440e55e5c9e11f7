package integration

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

// load is a set of clients that store, read, delete and verify for as long as a test wants.
type load struct {
	t       *testing.T
	c       *cluster
	ledger  *ledger
	mayLose bool // entries may be evicted

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	puts, gets, deletes, misses atomic.Uint64
	mu                          sync.Mutex
	failures                    []error
}

// newLoad prepares a load. It is stopped at the test's end, if not before.
func newLoad(t *testing.T, c *cluster) *load {
	t.Helper()
	l := &load{t: t, c: c, ledger: newLedger()}
	l.ctx, l.cancel = context.WithCancel(t.Context())
	t.Cleanup(l.end)
	return l
}

// end stops the goroutines. Operations that run are awaited, not cut off, so that nothing is left uncertain.
func (l *load) end() {
	l.cancel()
	l.wg.Wait()
}

// stop ends the load and fails the test if any call failed or any read was wrong.
func (l *load) stop() {
	l.t.Helper()
	l.end()
	l.t.Logf("load: %d puts, %d gets (%d misses), %d deletes", l.puts.Load(), l.gets.Load(), l.misses.Load(), l.deletes.Load())
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Empty(l.t, l.failures)
}

// maxFailures bounds what a failed test shows.
const maxFailures = 10

// fail notes a failure.
func (l *load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.failures) < maxFailures {
		l.failures = append(l.failures, fmt.Errorf("%s: %w", clock(time.Now()), err))
	}
}

// call runs one operation with the bound that makes it a failure, whatever becomes of the load meanwhile.
func (l *load) call(f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	defer cancel()
	return f(ctx)
}

// pace is the mean pause between operations of one goroutine: the point is faults, not to saturate the machine.
const pace = 2 * time.Millisecond

// goPaced runs f until the load is stopped.
func (l *load) goPaced(f func(r *rand.Rand)) {
	l.wg.Go(func() {
		r := rand.New(rand.NewPCG(rand.Uint64(), 1))
		for l.ctx.Err() == nil {
			f(r)
			time.Sleep(time.Duration(r.Int64N(2 * int64(pace))))
		}
	})
}

// writer stores keys of its own through x, at most live at a time, deletes the oldest, and stores some again.
func (l *load) writer(x *client.Client, name string, live int) {
	var keys []string
	var buf []byte
	next := 0
	l.goPaced(func(r *rand.Rand) {
		switch {
		case len(keys) < live && (next < 2*live || r.IntN(2) == 0):
			key := fmt.Sprintf("%s/%d", name, next)
			next++
			keys = append(keys, key)
			buf = l.put(x, key, buf)
		case r.IntN(3) == 0 && len(keys) > 0:
			i := r.IntN(len(keys)) // again, with new content
			l.remove(x, keys[i])
			buf = l.put(x, keys[i], buf)
		default:
			if len(keys) > 0 {
				l.remove(x, keys[0])
				keys = keys[1:]
			}
		}
	})
}

// put stores the next version of a key that is absent.
func (l *load) put(x *client.Client, key string, buf []byte) []byte {
	h := l.ledger.of(key)
	version := h.next()
	buf = valueOf(buf, key, version)
	h.begin(version)
	var res client.PutResult
	err := l.call(func(ctx context.Context) (err error) {
		res, err = x.Put(ctx, []byte(key), buf)
		return err
	})
	switch {
	case err != nil:
		l.fail(fmt.Errorf("put %s version %d: %w", key, version, err))
		return buf
	case !res.Stored:
		l.fail(fmt.Errorf("put %s version %d: the key is held, and should not be", key, version))
	}
	h.ack()
	l.puts.Add(1)
	return buf
}

// remove deletes a key.
func (l *load) remove(x *client.Client, key string) {
	h := l.ledger.of(key)
	version, _ := h.now()
	h.begin(0)
	var found []bool
	err := l.call(func(ctx context.Context) (err error) {
		found, err = x.Delete(ctx, []byte(key))
		return err
	})
	switch {
	case err != nil:
		l.fail(fmt.Errorf("delete %s: %w", key, err))
		return
	case !found[0] && version != 0 && !l.mayLose:
		l.fail(fmt.Errorf("delete %s: not found, though version %d was acknowledged", key, version))
	}
	h.ack()
	l.deletes.Add(1)
}

// reader reads keys of all writers at random, one or many at a time, and verifies every byte.
func (l *load) reader(x *client.Client) {
	var buf []byte
	l.goPaced(func(r *rand.Rand) {
		keys := l.ledger.all()
		if len(keys) == 0 {
			return
		}
		if r.IntN(4) == 0 {
			l.readMany(x, keys, r)
			return
		}
		// Most reads go to the newest keys, which change.
		key := keys[len(keys)-1-min(int(r.ExpFloat64()*100), len(keys)-1)]
		buf = l.read(x, key, buf)
	})
}

// read reads one key and verifies what came.
func (l *load) read(x *client.Client, key string, buf []byte) []byte {
	sent := time.Now()
	var value []byte
	err := l.call(func(ctx context.Context) (err error) {
		value, err = x.Get(ctx, []byte(key), buf)
		return err
	})
	switch {
	case errors.Is(err, client.ErrNotFound):
		l.verify(key, nil, sent)
		return buf
	case err != nil:
		l.fail(fmt.Errorf("get %s: %w", key, err))
		return buf
	}
	l.verify(key, value, sent)
	return value
}

// readMany reads a batch, through views or copies.
func (l *load) readMany(x *client.Client, keys []string, r *rand.Rand) {
	batch := make([][]byte, min(len(keys), 16))
	for i := range batch {
		batch[i] = []byte(keys[r.IntN(len(keys))])
	}
	sent := time.Now()
	var values [][]byte
	err := l.call(func(ctx context.Context) (err error) {
		values, err = x.GetBatch(ctx, batch, nil)
		return err
	})
	if err != nil {
		l.fail(fmt.Errorf("get batch: %w", err))
		return
	}
	for i, key := range batch {
		l.verify(string(key), values[i], sent)
	}
}

// verify checks what a read returned; nil is absence.
func (l *load) verify(key string, value []byte, sent time.Time) {
	answered := time.Now()
	l.gets.Add(1)
	var version uint64
	if value != nil {
		var err error
		if version, err = checkValue(key, value); err != nil {
			l.fail(fmt.Errorf("WRONG BYTES: %w", err))
			return
		}
	} else {
		l.misses.Add(1)
	}
	if err := l.ledger.of(key).allows(version, sent, answered, l.mayLose); err != nil {
		l.fail(fmt.Errorf("key %s: %w", key, err))
	}
}

// verifyAll reads everything that the ledger is certain of: what was acknowledged must be there, and be right.
func (l *load) verifyAll(x *client.Client) {
	l.t.Helper()
	keys := l.ledger.all()
	held := 0
	for chunk := range slices.Chunk(keys, 64) {
		batch := make([][]byte, len(chunk))
		for i, key := range chunk {
			batch[i] = []byte(key)
		}
		sent := time.Now()
		var values [][]byte
		err := l.call(func(ctx context.Context) (err error) {
			values, err = x.GetBatch(ctx, batch, nil)
			return err
		})
		require.NoError(l.t, err)
		for i, key := range chunk {
			l.verify(key, values[i], sent)
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

// resume measures how long writes stand still after faults: it stores one small value after the other.
type resume struct {
	mu   sync.Mutex
	puts []span
}

// span is one store, from its call to its acknowledgement.
type span struct{ from, to time.Time }

// prober starts measuring.
func (l *load) prober(x *client.Client) *resume {
	p := new(resume)
	n := 0
	l.goPaced(func(*rand.Rand) {
		key := fmt.Sprintf("probe/%d", n%64)
		n++
		if _, certain := l.ledger.of(key).now(); certain && n > 64 {
			l.remove(x, key)
		}
		from := time.Now()
		l.put(x, key, nil)
		p.mu.Lock()
		p.puts = append(p.puts, span{from, time.Now()})
		p.mu.Unlock()
	})
	return p
}

// after returns how long after at the first store was acknowledged that was called later than it; 0 if none was yet.
func (p *resume) after(at time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, _ := slices.BinarySearchFunc(p.puts, at, func(s span, at time.Time) int { return s.from.Compare(at) })
	if i == len(p.puts) {
		return 0
	}
	return p.puts[i].to.Sub(at)
}

// await waits for a store that was called after at, and returns how long after it that was acknowledged.
func (p *resume) await(t *testing.T, at time.Time) time.Duration {
	t.Helper()
	var d time.Duration
	within(t, "writes again", func() error {
		if d = p.after(at); d == 0 {
			return errors.New("no store has been acknowledged since the fault")
		}
		return nil
	})
	return d
}

// percentiles shows the spread of durations.
func percentiles(list []time.Duration) string {
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
