package simtest

import (
	"fmt"
	"maps"
	"testing"
	"time"
)

// minimiseTime is how long making one failure smaller may take: a failing seed repeats in any case.
const minimiseTime = 60 * time.Second

// minimise makes a failing run smaller, as long as the same oracle finds something: it shortens the run, leaves classes
// of faults out, and then single faults. It returns what the smallest run that it finds says, and its line.
func minimise(t *testing.T, o options, r result) string {
	t.Helper()
	until := time.Now().Add(minimiseTime)
	tries := 0
	fails := func(o options) (result, bool) {
		tries++
		again := simulate(t, o)
		return again, again.violation != nil && again.violation.oracle == r.violation.oracle
	}
	o, r = shrink(o, r, fails, func() bool { return time.Now().Before(until) })
	return fmt.Sprintf("smallest of %d tries: %v\n%s", tries, r.violation, o.line(commit()))
}

// shrink is minimise with a way to run and a way to stop.
func shrink(o options, r result, fails func(options) (result, bool), more func() bool) (options, result) {
	try := func(n options) bool {
		if !more() {
			return false
		}
		again, ok := fails(n)
		if ok {
			o, r = n, again
		}
		return ok
	}
	cut := func() { // nothing after the violation matters
		n := o
		if n.ticks = int(r.violation.at/tick) + 1; n.ticks < o.ticks {
			try(n)
		}
	}
	cut()
	for c := range classes {
		if n := o; o.faults.has(c) && r.faults.has(c) {
			n.faults = n.faults.without(c)
			try(n)
		}
	}
	n := o
	n.faults &= r.faults
	try(n)
	cut()
	for size := max(1, r.fired/2); ; size /= 2 {
		for from := 1; from <= r.fired; from += size {
			n := o
			n.skip = maps.Clone(o.skip)
			if n.skip == nil {
				n.skip = map[int]bool{}
			}
			for i := from; i < from+size && i <= r.fired; i++ {
				n.skip[i] = true
			}
			if len(n.skip) > len(o.skip) {
				try(n)
			}
		}
		if size <= 1 || !more() {
			break
		}
	}
	cut()
	return o, r
}
