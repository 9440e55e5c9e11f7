package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/protocol"
)

// staleKeys are few, so that each changes often.
const staleKeys = 16

// StaleWatch asks masters over connections that follow no redirection, and checks what they answer: it must not be
// older than what was acknowledged when the question was sent, and the bytes of a lease must stay as they are for as
// long as it lasts, counted from the sending.
type StaleWatch struct {
	t      *testing.T
	ledger *Ledger
	pool   *os.File

	found, absent, refused, copied, late atomic.Uint64

	mu       sync.Mutex
	failures []string
}

// WatchStale has l write a few keys again and again through x, and returns what watches them. The cluster's pool should
// have little more room than these need, so that pages are used again as soon as that is allowed.
func WatchStale(l *Load, x *client.Client) *StaleWatch {
	l.t.Helper()
	w := &StaleWatch{t: l.t, ledger: l.Ledger}
	Within(l.t, "the leader makes the pool's file", func() (err error) {
		w.pool, err = os.Open(l.c.Pool)
		return err
	})
	l.t.Cleanup(func() { require.NoError(l.t, w.pool.Close()) })
	l.GoPaced(func(r *rand.Rand) {
		key := fmt.Sprintf("stale/%d", r.IntN(staleKeys))
		if version, _ := w.ledger.Of(key).Now(); version != 0 {
			l.Remove(x, key)
			if r.IntN(4) == 0 {
				return
			}
		}
		l.Put(x, key, nil)
	})
	return w
}

// Watch asks one member by some connections until ctx ends, and returns what ends when all answers have been checked.
func (w *StaleWatch) Watch(ctx context.Context, n *Node, name string, conns int) *sync.WaitGroup {
	w.t.Helper()
	wg := new(sync.WaitGroup)
	for k := range conns {
		conn := DialRaw(w.t, n.Client)
		conn.Handshake(fmt.Sprintf("watch-%s-%d", name, k)) // leases are named in sessions only
		wg.Go(func() { w.ask(ctx, conn) })
	}
	return wg
}

// Check fails the test if any answer was wrong, or none was seen, and returns how many were checked.
func (w *StaleWatch) Check() (answers uint64) {
	w.t.Helper()
	w.t.Logf("%d answers with a location, %d without, %d refused; %d leases used for a copy, %d ended before",
		w.found.Load(), w.absent.Load(), w.refused.Load(), w.copied.Load(), w.late.Load())
	require.Empty(w.t, w.failures)
	require.NotZero(w.t, w.found.Load())
	require.NotZero(w.t, w.copied.Load())
	return w.found.Load() + w.absent.Load()
}

func (w *StaleWatch) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.failures) < maxFailures {
		w.failures = append(w.failures, clock(now())+": "+fmt.Sprintf(format, args...))
	}
}

// ask sends lookups on one connection for as long as it lasts, without waiting for the answers, so that some are on
// their way whenever the master stops.
func (w *StaleWatch) ask(ctx context.Context, conn *RawConn) {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer conn.Close()
	r := rand.New(rand.NewPCG(rand.Uint64(), 2))
	inFlight := make(chan struct{}, 256) // what piles up while the master is paused
	for ctx.Err() == nil {
		key := fmt.Sprintf("stale/%d", r.IntN(staleKeys))
		req := protocol.LookupRequest{Keys: [][]byte{[]byte(key)}, LeaseMS: uint64(MaxLease / time.Millisecond)}
		sent := now()
		reply, err := conn.Send(protocol.TypeLookup, As(protocol.TypeLookup, req.AppendAs))
		if err != nil {
			return
		}
		select {
		case inFlight <- struct{}{}:
		case <-ctx.Done():
			return
		}
		wg.Go(func() {
			defer func() { <-inFlight }()
			if answer, ok := <-reply; ok {
				w.check(key, sent, answer)
			}
		})
		sleep(time.Duration(r.Int64N(int64(4 * time.Millisecond))))
	}
}

// check judges one answer. Values are told apart by their checksums.
func (w *StaleWatch) check(key string, sent time.Time, answer RawReply) {
	answered := now()
	var reply protocol.LookupReply
	if err := reply.DecodeAs(answer.Payload, protocol.TypeLookup); err != nil {
		w.fail("%s: %v", key, err)
		return
	}
	if err := reply.Err(); err != nil {
		if code := protocol.CodeOf(err); !code.Retryable() {
			w.fail("%s: %v", key, err)
		}
		w.refused.Add(1)
		return
	}
	h := w.ledger.Of(key)
	var version uint64
	found := reply.Results[0]
	if found.Found {
		version = h.VersionOf(key, found.Checksum)
		if version == 0 {
			w.fail("%s: a checksum that was never stored", key)
			return
		}
		w.found.Add(1)
	} else {
		w.absent.Add(1)
	}
	if err := h.Allows(version, sent, answered, false); err != nil {
		w.fail("STALE: %s: %v", key, err)
	}
	if found.Found {
		w.use(key, version, sent, &found)
	}
}

// use copies the bytes as late as the lease allows, and verifies them.
func (w *StaleWatch) use(key string, version uint64, sent time.Time, found *protocol.LookupResult) {
	end := sent.Add(time.Duration(found.LeaseMS) * time.Millisecond)
	sleep(until(end) - 10*time.Millisecond)
	value := make([]byte, found.KVLength)
	_, err := w.pool.ReadAt(value, int64(found.Offset+found.KVOffset))
	if now().After(end) {
		w.late.Add(1)
		return
	}
	if err != nil {
		w.fail("%s: %v", key, err)
		return
	}
	w.copied.Add(1)
	if got, err := CheckValue(key, value); err != nil || got != version {
		w.fail("WRONG BYTES under a lease: %s: version %d, want %d: %v; lookup sent %s, lease %d ms, history %v",
			key, got, version, err, clock(sent), found.LeaseMS, w.ledger.Of(key).text(0))
	}
}
