package node

import (
	"context"
	"sync"
	"time"
)

// bucket bounds the bytes per second of tier work, of all devices of a node together. Whoever takes more than is there
// waits until it has come in, so that a second never has more than the rate and what was saved up: half a second's.
type bucket struct {
	clock clock
	rate  float64 // bytes per second; 0 = no bound

	mu   sync.Mutex
	have float64 // less than 0: promised to those that wait
	at   int64   // when have was true
}

// saved is for how long an idle bucket fills.
const saved = 500 * time.Millisecond

func newBucket(c clock, rate uint64) *bucket {
	return &bucket{clock: c, rate: float64(rate), at: c.now(), have: float64(rate) * saved.Seconds()}
}

// take waits until n bytes may be moved.
func (b *bucket) take(ctx context.Context, n uint64) error {
	if b.rate == 0 {
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
	b.mu.Lock()
	now := b.clock.now()
	b.have = min(b.have+float64(now-b.at)/float64(time.Second)*b.rate, b.rate*saved.Seconds())
	b.at = now
	b.have -= float64(n)
	debt := -b.have
	b.mu.Unlock()
	if debt <= 0 {
		return ctx.Err() //nolint:wrapcheck // callers wrap
	}
	err := sleep(ctx, b.clock, time.Duration(debt/b.rate*float64(time.Second)))
	if err != nil {
		b.mu.Lock()
		b.have += float64(n)
		b.mu.Unlock()
	}
	return err
}
