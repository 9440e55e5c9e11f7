package simtest

import (
	"container/heap"
	"iter"
	"time"
)

// Durations of the simulated world.
const (
	ms  = int64(time.Millisecond)
	sec = int64(time.Second)
	// tick is raft's tick, and what runs are measured in.
	tick = 100 * ms
)

// event is something that happens to an actor at a time; those of one time happen in the order they were made.
type event struct {
	at  int64
	seq uint64
	a   *actor
	fn  func()
	// peer says that it is a message of another member.
	peer bool
}

type eventHeap []event

func (h *eventHeap) Len() int { return len(*h) }
func (h *eventHeap) Less(i, j int) bool {
	a, b := &(*h)[i], &(*h)[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}
func (h *eventHeap) Swap(i, j int) { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }
func (h *eventHeap) Push(x any)    { *h = append(*h, x.(event)) }
func (h *eventHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*h = old[:len(old)-1]
	return e
}

// sched is virtual time: a queue of events.
type sched struct {
	now   int64
	queue eventHeap
	seq   uint64
	world *actor // what is never paused and never dies
}

// actor is one life of a process. While it is paused, what happens to it waits, in order; when it is dead, nothing
// happens to it any more.
type actor struct {
	s       *sched
	name    string
	dead    bool
	paused  bool
	backlog []event
	procs   []*proc
}

func newSched() *sched {
	s := &sched{}
	s.world = &actor{s: s, name: "world"}
	return s
}

func (s *sched) newActor(name string) *actor { return &actor{s: s, name: name} }

// after makes fn happen to a in d nanoseconds.
func (s *sched) after(d int64, a *actor, fn func()) { s.at(s.now+max(d, 0), a, fn) }

func (s *sched) at(at int64, a *actor, fn func()) { s.push(event{at: at, a: a, fn: fn}) }

func (s *sched) push(e event) {
	s.seq++
	e.seq = s.seq
	heap.Push(&s.queue, e)
}

// step lets the next event before limit happen.
func (s *sched) step(limit int64) bool {
	if len(s.queue) == 0 || s.queue[0].at > limit {
		s.now = max(s.now, limit)
		return false
	}
	e := heap.Pop(&s.queue).(event)
	s.now = e.at
	switch {
	case e.a.dead:
	case e.a.paused:
		e.a.backlog = append(e.a.backlog, e)
	default:
		e.fn()
	}
	return true
}

// resume ends a pause: what waited happens now, in order.
func (a *actor) resume() { a.wakeUp(0) }

// wakeUp is resume where messages of other members wait for a while more: which of a process's sockets is read first is
// not known.
func (a *actor) wakeUp(late int64) {
	if !a.paused || a.dead {
		return
	}
	a.paused = false
	backlog := a.backlog
	a.backlog = nil
	for _, e := range backlog {
		if e.at = a.s.now; e.peer {
			e.at += late
		}
		a.s.push(e)
	}
}

// kill ends the actor and everything that runs for it.
func (a *actor) kill() {
	if a.dead {
		return
	}
	a.dead = true
	a.backlog = nil
	for _, p := range a.procs {
		p.end()
	}
	a.procs = nil
}

// proc is straight-line code of an actor that waits for events. It runs only inside of them.
type proc struct {
	a       *actor
	yield   func(struct{}) bool
	resumed func() (struct{}, bool)
	stop    func()
	over    bool
	running bool
	woken   bool // an event that resumes it is on its way
}

// killed unwinds a proc whose actor is dead.
type killed struct{}

// spawn starts fn as a proc of a. fn must wait only by the proc's own methods.
func (a *actor) spawn(fn func(p *proc)) *proc {
	p := &proc{a: a}
	p.resumed, p.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if r := recover(); r != nil {
				if _, ok := r.(killed); !ok {
					panic(r)
				}
			}
		}()
		p.yield = yield
		fn(p)
	})
	if a.dead {
		p.over = true
		return p
	}
	a.procs = append(a.procs, p)
	if len(a.procs) > 64 {
		a.prune()
	}
	p.wake()
	return p
}

func (a *actor) prune() {
	n := 0
	for _, p := range a.procs {
		if !p.over {
			a.procs[n] = p
			n++
		}
	}
	clear(a.procs[n:])
	a.procs = a.procs[:n]
}

// wake makes the proc run on at this time, if it waits.
func (p *proc) wake() {
	if p.over || p.woken {
		return
	}
	p.woken = true
	p.a.s.at(p.a.s.now, p.a, p.run)
}

func (p *proc) run() {
	p.woken = false
	if p.over || p.running {
		return
	}
	p.running = true
	_, more := p.resumed()
	p.running = false
	if !more {
		p.over = true
	} else if p.a.dead {
		p.end()
	}
}

// end unwinds the proc. If it is the one that runs now, it is unwound at its next wait.
func (p *proc) end() {
	if p.over || p.running {
		return
	}
	p.over = true
	p.stop()
}

// park waits until somebody wakes the proc. It may return early: look at what was waited for.
func (p *proc) park() {
	if p.a.dead || !p.yield(struct{}{}) {
		panic(killed{})
	}
}

// sleep waits for d nanoseconds of true time.
func (p *proc) sleep(d int64) {
	until := p.a.s.now + d
	done := false
	p.a.s.at(until, p.a, func() {
		done = true
		p.run()
	})
	for !done {
		p.park()
	}
}

// wait parks until cond holds; whoever changes it must wake the proc.
func (p *proc) wait(cond func() bool) {
	for !cond() {
		p.park()
	}
}

// waitFor is wait with a limit in time. It reports whether cond holds.
func (p *proc) waitFor(cond func() bool, d int64) bool {
	until := p.a.s.now + d
	p.a.s.at(until, p.a, p.run)
	for !cond() {
		if p.a.s.now >= until {
			return false
		}
		p.park()
	}
	return true
}
