package client

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Spin has calls look for the master's answer for a while before their goroutine sleeps. That is for goroutines that are tied to
// their threads, as those are that C code calls: to have one sleep and to wake it are two changes of threads, which cost about as
// much as the answer takes. One call looks at a time, and hands out what comes to the others too. Where answers take longer, calls
// soon look for few of them: a Spin is for those whose answers take about the same time. Any number of goroutines may use it.
type Spin struct {
	long time.Duration
	busy atomic.Bool  // a call is looking
	rest atomic.Int32 // calls that do not
	next atomic.Int32 // what rest is after the next one in vain
}

// NewSpin returns a Spin by which calls look for as long as d.
func NewSpin(d time.Duration) *Spin { return &Spin{long: d} }

// spinKey is under which a context has its Spin.
type spinKey struct{}

// WithSpin has calls with this context look for their answers.
func WithSpin(ctx context.Context, s *Spin) context.Context {
	return context.WithValue(ctx, spinKey{}, s)
}

// spinRest bounds how many calls sleep at once after one that has looked in vain: none after the first such one, then 1, then 3, and
// so on, until one finds its answer in time.
const spinRest = 63

// oneProc says that whoever looks for an answer keeps the one from running that brings it.
var oneProc = runtime.GOMAXPROCS(0) < 2

// spin returns when done has a token, or after the time that ctx has a Spin for, or at once. look may bring the token.
func spin(ctx context.Context, done <-chan struct{}, look func(), clock func() int64) {
	s, _ := ctx.Value(spinKey{}).(*Spin)
	if s == nil || oneProc {
		return
	}
	if s.rest.Load() > 0 {
		s.rest.Add(-1)
		return
	}
	if !s.busy.CompareAndSwap(false, true) {
		return
	}
	defer s.busy.Store(false)
	for until := clock() + int64(s.long); ; {
		if look(); len(done) > 0 {
			s.next.Store(0)
			return
		}
		// Who answers may have been put on this processor, and would wait for this thread's time to be over.
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		if clock() > until {
			rest := s.next.Load()
			s.rest.Store(rest)
			s.next.Store(min(2*rest+1, spinRest))
			return
		}
	}
}
