package cluster

import (
	"sync"
	"time"

	"go.uber.org/goleak"
)

// A machine that gives this process no processor for a while looks like a fault of what is tested: sessions expire,
// times grow. So that the two can be told apart, the process watches itself.
const (
	stallStep = 50 * time.Millisecond
	stallMin  = 250 * time.Millisecond // more than a busy machine's delays
)

// Stall is a time in which this process did not run.
type Stall struct {
	From time.Time
	Took time.Duration
}

// stalls are those of this process.
var stalls struct {
	mu   sync.Mutex
	list []Stall
}

// Stalls lists when this process has been given no processor since a time.
func Stalls(t time.Time) (list []Stall) {
	stalls.mu.Lock()
	defer stalls.mu.Unlock()
	for _, s := range stalls.list {
		if s.From.Add(s.Took).After(t) {
			list = append(list, s)
		}
	}
	return list
}

// Stalled is for how long this process has been given no processor since a time.
func Stalled(t time.Time) (sum time.Duration) {
	for _, s := range Stalls(t) {
		sum += s.Took
	}
	return sum
}

// watched is a run of tests in a process that watches itself.
type watched struct{ m goleak.TestingM }

// Run runs the tests.
func (w watched) Run() int {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { watchStalls(stop) })
	defer wg.Wait()
	defer close(stop)
	return w.m.Run()
}

func watchStalls(stop <-chan struct{}) {
	for last := now(); ; last = now() {
		select {
		case <-stop:
			return
		case <-after(stallStep):
		}
		if took := since(last) - stallStep; took >= stallMin {
			stalls.mu.Lock()
			stalls.list = append(stalls.list, Stall{last, took})
			stalls.mu.Unlock()
		}
	}
}
