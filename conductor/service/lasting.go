package service

import (
	"sync"
	"time"

	"larder/conductor"
)

const (
	lastingEvery = 5 * time.Second // between two looks at what engines have let go
	lastingFade  = 0.8             // what each look leaves of the rate before it: half a minute counts
)

// lasting estimates how long a prefix that an engine holds will still be there: half of the time in which the engine turns its cache
// over at its present rate of evictions. Nobody tells when a block was used last; in the mean half of that time is left. What an
// engine that evicts nothing holds, stays.
type lasting struct {
	mu sync.Mutex
	at time.Duration
	by map[engine]*turnover
}

// turnover is how fast an engine lets blocks go.
type turnover struct {
	removed uint64  // until the last look
	held    int     // then
	rate    float64 // blocks per second
}

// look takes note of what engines have let go since the last one.
func (l *lasting) look(now time.Duration, views []conductor.ScopeView) {
	l.mu.Lock()
	defer l.mu.Unlock()
	passed := (now - l.at).Seconds()
	seen := map[engine]*turnover{}
	for i := range views {
		for k := range views[i].Instances {
			v := &views[i].Instances[k]
			key := engine{views[i].Tenant, v.Instance}
			t := seen[key]
			if t == nil {
				t = &turnover{}
				seen[key] = t
			}
			t.removed += v.Removed
			t.held += v.Blocks
		}
	}
	for key, t := range seen {
		if old := l.by[key]; old != nil && t.removed >= old.removed && passed > 0 {
			t.rate = lastingFade*old.rate + (1-lastingFade)*float64(t.removed-old.removed)/passed
		}
	}
	l.at, l.by = now, seen
}

// of is how long what an engine holds will last, 0 if it stays.
func (l *lasting) of(e engine) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.by[e]
	if t == nil || t.rate < 1e-3 || t.held == 0 {
		return 0
	}
	return duration(min(float64(t.held)/t.rate/2, lastingMost))
}

// lastingMost bounds an estimate, in seconds: beyond it nothing is gone before it is used.
const lastingMost = 24 * 3600
