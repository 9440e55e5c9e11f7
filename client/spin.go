package client

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// spinKey is under which a context says how long a call looks for its answer.
type spinKey struct{}

// WithSpin has calls with this context look for the master's answer for as long as d before their goroutine sleeps. That is for
// goroutines that are tied to their threads, as those are that C code calls: to have one sleep and to wake it are two changes of
// threads, which cost about as much as the answer takes. Where answers take longer, calls soon look for few of them.
func WithSpin(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, spinKey{}, d)
}

// spinRest bounds how many calls sleep at once after one that has looked in vain: none after the first such one, then 1, then 3, and
// so on, until one finds its answer in time.
const spinRest = 63

// oneProc says that whoever looks for an answer keeps the one from running that brings it.
var oneProc = runtime.GOMAXPROCS(0) < 2

// spinner looks for answers.
type spinner struct {
	rest atomic.Int32 // calls that do not
	next atomic.Int32 // what rest is after the next one in vain
}

// wait returns when done has a token, or after the time that ctx says, or at once. look may bring the token.
func (s *spinner) wait(ctx context.Context, done <-chan struct{}, look func(), clock func() int64) {
	d, _ := ctx.Value(spinKey{}).(time.Duration)
	if d <= 0 || oneProc {
		return
	}
	if s.rest.Load() > 0 {
		s.rest.Add(-1)
		return
	}
	for until := clock() + int64(d); ; {
		if look(); len(done) > 0 {
			break
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
	s.next.Store(0)
}
