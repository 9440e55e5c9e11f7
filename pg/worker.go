package pg

import "time"

const (
	// smallBytes is how long a started call may be to be left to whoever waits for it: waking another thread would take longer
	// than the call.
	smallBytes = 64 << 10
	// laterTime is how long it is left so before the worker takes it up: the caller may never come back.
	laterTime = 100 * time.Microsecond
)

// background has the worker take up calls that were started: soon if they are long or many, after a moment otherwise.
func (g *Group) background(bytes int) {
	g.mu.Lock()
	many := len(g.queue)+g.waiting > 1
	g.mu.Unlock()
	if many || bytes > smallBytes {
		g.kick()
		return
	}
	g.later.Reset(laterTime)
}

func (g *Group) kick() {
	select {
	case g.kicked <- struct{}{}:
	default: // it is told already
	}
}

// carry waits as [shm.Bell.Wait] does for what ready says, which helps. While somebody does so the worker does not: two threads
// would be woken for what one of them can do.
func (g *Group) carry(ready func() bool, limit time.Duration) bool {
	g.waiters.Add(1)
	done := g.bell.Wait(ready, g.spin(), limit)
	if g.waiters.Add(-1) == 0 && !g.idle() {
		g.later.Reset(laterTime) // what others have started, or what has not ended
	}
	return done
}

// work is the worker: it helps until no call is under way, or somebody waits, and sleeps meanwhile as those do who wait.
func (g *Group) work() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.kicked:
		}
		ready := func() bool { g.help(); return g.idle() || g.waiters.Load() > 0 || g.ctx.Err() != nil }
		for !g.bell.Wait(ready, 0, time.Hour) { // it ends with the calls
		}
	}
}
