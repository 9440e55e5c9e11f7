package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/protocol"
)

// staleKeys are few, so that each changes often.
const staleKeys = 16

// TestPausedLeaderServesNothingStale pauses leaders while clients keep asking them, by connections that follow no
// redirection. Whatever a leader answers before, while and after it finds out that it was replaced must not be older
// than what was acknowledged when the question was sent, and the bytes of a lease must stay as they are for as long as
// it lasts, counted from the sending.
func TestPausedLeaderServesNothingStale(t *testing.T) {
	skipShort(t)
	// A pool with little more room than the keys need, so that pages are used again as soon as that is allowed.
	c := startCluster(t, clusterOptions{members: 3, pool: "16MiB"})
	w := &staleWatch{t: t, ledger: newLedger()}
	var err error
	w.pool, err = os.Open(c.pool)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.pool.Close()) })

	l := newLoad(t, c)
	l.ledger = w.ledger
	x := c.open(client.Config{Checksums: true})
	l.goPaced(func(r *rand.Rand) {
		key := fmt.Sprintf("stale/%d", r.IntN(staleKeys))
		if version, _ := w.ledger.of(key).now(); version != 0 {
			l.remove(x, key)
			if r.IntN(4) == 0 {
				return
			}
		}
		l.put(x, key, nil)
	})

	begun := time.Now()
	for i := 0; i < 8 || time.Since(begun) < chaosTime(t); i++ {
		leader := c.leader()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for k := range 3 {
			conn := dialRaw(t, leader.client)
			conn.handshake(fmt.Sprintf("watch-%d-%d", i, k)) // leases are named in sessions only
			wg.Go(func() { w.ask(ctx, conn) })
		}
		time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(200*time.Millisecond))))
		leader.signal(syscall.SIGSTOP)
		time.Sleep(100*time.Millisecond + time.Duration(rand.Int64N(int64(2900*time.Millisecond))))
		leader.signal(syscall.SIGCONT)
		time.Sleep(500 * time.Millisecond)
		cancel()
		wg.Wait()
	}
	l.stop()
	t.Logf("%d answers with a location, %d without, %d refused; %d leases used for a copy, %d ended before",
		w.found.Load(), w.absent.Load(), w.refused.Load(), w.copied.Load(), w.late.Load())
	require.Empty(t, w.failures)
	require.NotZero(t, w.found.Load())
	require.NotZero(t, w.copied.Load())
	l.verifyAll(c.open(client.Config{}))
	c.settled()
}

// staleWatch checks what masters answer.
type staleWatch struct {
	t      *testing.T
	ledger *ledger
	pool   *os.File

	found, absent, refused, copied, late atomic.Uint64

	mu       sync.Mutex
	failures []string
}

func (w *staleWatch) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.failures) < maxFailures {
		w.failures = append(w.failures, clock(time.Now())+": "+fmt.Sprintf(format, args...))
	}
}

// ask sends lookups on one connection for as long as it lasts, without waiting for the answers, so that some are on
// their way whenever the master stops.
func (w *staleWatch) ask(ctx context.Context, conn *rawConn) {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer conn.close()
	r := rand.New(rand.NewPCG(rand.Uint64(), 2))
	inFlight := make(chan struct{}, 256) // what piles up while the master is paused
	for ctx.Err() == nil {
		key := fmt.Sprintf("stale/%d", r.IntN(staleKeys))
		req := protocol.LookupRequest{Keys: [][]byte{[]byte(key)}, LeaseMS: uint64(maxLease / time.Millisecond)}
		sent := time.Now()
		reply, err := conn.send(protocol.TypeLookup, as(protocol.TypeLookup, req.AppendAs))
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
		time.Sleep(time.Duration(r.Int64N(int64(4 * time.Millisecond))))
	}
}

// check judges one answer. Values are told apart by their checksums.
func (w *staleWatch) check(key string, sent time.Time, answer rawReply) {
	answered := time.Now()
	var reply protocol.LookupReply
	if err := reply.DecodeAs(answer.payload, protocol.TypeLookup); err != nil {
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
	h := w.ledger.of(key)
	var version uint64
	found := reply.Results[0]
	if found.Found {
		version = h.versionOf(key, found.Checksum)
		if version == 0 {
			w.fail("%s: a checksum that was never stored", key)
			return
		}
		w.found.Add(1)
	} else {
		w.absent.Add(1)
	}
	if err := h.allows(version, sent, answered, false); err != nil {
		w.fail("STALE: %s: %v", key, err)
	}
	if found.Found {
		w.use(key, version, sent, &found)
	}
}

// use copies the bytes as late as the lease allows, and verifies them.
func (w *staleWatch) use(key string, version uint64, sent time.Time, found *protocol.LookupResult) {
	end := sent.Add(time.Duration(found.LeaseMS) * time.Millisecond)
	time.Sleep(time.Until(end) - 10*time.Millisecond)
	value := make([]byte, found.KVLength)
	_, err := w.pool.ReadAt(value, int64(found.Offset+found.KVOffset))
	if time.Now().After(end) {
		w.late.Add(1)
		return
	}
	if err != nil {
		w.fail("%s: %v", key, err)
		return
	}
	w.copied.Add(1)
	if got, err := checkValue(key, value); err != nil || got != version {
		w.fail("WRONG BYTES under a lease: %s: version %d, want %d: %v; lookup sent %s, lease %d ms, history %v",
			key, got, version, err, clock(sent), found.LeaseMS, w.ledger.of(key).text(0))
	}
}
