package member

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// This file is a world of processes that run the state machine against a store, in virtual time: what a seed does it does again.
// Messages are late, requests to the store fail with and without having been done, processes die, stop and go on, links between
// live ones break. The data plane is a loop of operations each of which needs all members of its view. sim_check_test.go says what
// must hold.

// simLease is that of the simulated store.
const simLease = 3 * time.Second

type sim struct {
	rng    *rand.Rand
	now    time.Duration
	queue  events
	serial int
	trace  *strings.Builder // nil: none

	spec   spec
	procs  []*proc       // all that ever were
	slots  map[int]*proc // the present one of each slot
	store  map[string]*entry
	rev    uint64
	cut    map[[2]int]bool // slots whose processes cannot reach each other
	views  map[uint64]View // that were committed
	latest uint64          // epoch of the last one
	wins   map[uint64][]win
	faults bool  // the store fails now and then
	pace   int64 // of operations: 1 is as fast as they go
	fault  error // the first promise that was broken
}

type entry struct {
	value []byte
	rev   uint64
	owner *proc // whose lease it ends with
}

// win is an operation that a process has completed.
type win struct {
	p     *proc
	epoch uint64
}

// proc is one life of a process.
type proc struct {
	s         *sim
	core      *core
	slot      int
	inc       uint64
	dead      bool
	paused    bool
	shut      bool     // nobody can make a channel to it, though it answers
	held      []func() // what has arrived while it was paused
	offline   bool     // it does not reach the store
	confirmed time.Duration
	leaseGone bool
	timer     int                      // serial of its timer
	heard     map[string]time.Duration // when the last change of each key arrives

	adopted  []uint64
	isolated bool
	views    []View // that it was told of
	mesh     map[uint64]bool
	holding  uint64 // epoch
	frozen   bool
	seq      uint64 // next operation to begin
	op       *op    // in progress
	done     uint64
	calls    map[int]*call
}

type op struct{ seq, epoch uint64 }

type call struct {
	kind callKind
	at   time.Duration
	took time.Duration
	resp Response
	err  error
	over bool
}

type event struct {
	at     time.Duration
	serial int
	fn     func()
}

type events []event

func (q *events) Len() int { return len(*q) }
func (q *events) Less(i, j int) bool {
	a, b := &(*q)[i], &(*q)[j]
	return a.at < b.at || a.at == b.at && a.serial < b.serial
}
func (q *events) Swap(i, j int) { (*q)[i], (*q)[j] = (*q)[j], (*q)[i] }
func (q *events) Push(x any)    { *q = append(*q, x.(event)) }
func (q *events) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

func newSim(seed uint64, sp spec) *sim {
	return &sim{
		rng: rand.New(rand.NewPCG(seed, 1)), spec: sp, slots: map[int]*proc{}, store: map[string]*entry{},
		cut: map[[2]int]bool{}, views: map[uint64]View{}, wins: map[uint64][]win{}, pace: 1,
	}
}

func (s *sim) logf(format string, args ...any) {
	if s.trace != nil {
		fmt.Fprintf(s.trace, "%10.3f "+format+"\n", append([]any{s.now.Seconds() * 1000}, args...)...)
	}
}

func (s *sim) failf(format string, args ...any) {
	if s.fault == nil {
		s.fault = fmt.Errorf("at %v: "+format, append([]any{s.now}, args...)...)
		s.logf("BROKEN: %v", s.fault)
	}
}

func (s *sim) after(d time.Duration, fn func()) {
	s.serial++
	heap.Push(&s.queue, event{s.now + d, s.serial, fn})
}

// between is a duration that is mostly near lo.
func (s *sim) between(lo, hi time.Duration) time.Duration {
	x := s.rng.Float64()
	return lo + time.Duration(x*x*x*float64(hi-lo))
}

// run lets time pass.
func (s *sim) run(d time.Duration) {
	end := s.now + d
	for len(s.queue) > 0 && s.queue[0].at <= end && s.fault == nil {
		e := heap.Pop(&s.queue).(event)
		s.now = e.at
		e.fn()
	}
	s.now = end
}

// alive are the processes that run, by slot.
func (s *sim) alive() (list []*proc) {
	for slot := range s.spec.Cap {
		if p := s.slots[slot]; p != nil && !p.dead {
			list = append(list, p)
		}
	}
	return list
}

// spawn starts a process in a slot.
func (s *sim) spawn(slot int) *proc {
	p := &proc{
		s: s, slot: slot, inc: uint64(1000*(slot+1) + len(s.procs)), heard: map[string]time.Duration{}, mesh: map[uint64]bool{},
		calls: map[int]*call{}, confirmed: s.now,
	}
	p.core = newCore(coreConfig{group: "g", rank: slot, incarnation: p.inc, generation: 1, lease: simLease}, s.spec, s.now)
	p.core.joining = slot < s.spec.Founders && len(s.views) == 0 // others are extensions: they wait outside
	s.procs = append(s.procs, p)
	s.slots[slot] = p
	s.logf("%v starts", p)
	for _, key := range s.keys() {
		s.tell(p, key, s.store[key].value, s.store[key].rev, false)
	}
	for _, q := range s.alive() {
		s.connect(p, q)
	}
	p.beat()
	p.input(func() {})
	s.after(time.Millisecond, p.work)
	return p
}

func (s *sim) keys() []string {
	var keys []string
	for key := range s.store {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

func (p *proc) String() string { return fmt.Sprintf("%d(%d)", p.slot, p.inc) }

func pair(a, b int) [2]int { return [2]int{min(a, b), max(a, b)} }

// both are the two ends of a connection: who sees whom.
func both(p, q *proc) [][2]*proc { return [][2]*proc{{p, q}, {q, p}} }

// connect has two processes learn of their connection, if there is one then.
func (s *sim) connect(p, q *proc) {
	if p == q {
		return
	}
	for _, x := range both(p, q) {
		s.after(s.between(time.Millisecond, 30*time.Millisecond), func() {
			if !q.dead && !p.dead && !s.cut[pair(p.slot, q.slot)] {
				x[0].deliver(func() { x[0].core.linked(x[1].slot, x[1].inc) })
			}
		})
	}
}

// deliver is an input to a process: at once, when it goes on, or never.
func (p *proc) deliver(fn func()) {
	switch {
	case p.dead:
	case p.paused:
		p.held = append(p.held, fn)
	default:
		p.input(fn)
	}
}

// input gives the state machine something and does what it says.
func (p *proc) input(fn func()) {
	p.core.tick(p.s.now, p.s.now-p.confirmed)
	fn()
	for {
		p.core.step()
		outs := p.core.take()
		if len(outs) == 0 {
			break
		}
		for _, o := range outs {
			p.do(o)
		}
	}
	p.s.serial++
	timer := p.s.serial
	p.timer = timer
	d := 200 * time.Millisecond
	if p.core.wake != 0 {
		d = min(d, max(p.core.wake-p.s.now, time.Microsecond))
	}
	p.s.after(d, func() {
		if p.timer == timer {
			p.deliver(func() {})
		}
	})
}

// pause stops a process for a while.
func (p *proc) pause(d time.Duration) {
	if p.dead || p.paused {
		return
	}
	p.s.logf("%v stops for %v", p, d)
	p.paused = true
	p.s.after(d, func() {
		if p.dead {
			return
		}
		p.s.logf("%v goes on", p)
		p.paused = false
		held := p.held
		p.held = nil
		p.input(func() {})
		for _, fn := range held {
			p.deliver(fn)
		}
	})
}

// kill ends a process; peers learn it soon, if it is loud.
func (p *proc) kill(loud bool) {
	if p.dead {
		return
	}
	p.s.logf("%v dies", p)
	p.dead = true
	if loud {
		for _, q := range p.s.alive() {
			p.s.after(p.s.between(0, 4*time.Millisecond), func() {
				q.deliver(func() { q.core.suspect(p.slot, p.inc, "connection lost", 0) })
			})
		}
	}
	p.s.after(simLease+p.s.between(0, time.Second), p.endLease)
}

// leave ends a process that says so.
func (p *proc) leave() {
	p.kill(true)
	p.endLease()
}

func (p *proc) endLease() {
	p.leaseGone = true
	for _, key := range p.s.keys() {
		if p.s.store[key].owner == p {
			p.s.set(key, nil, nil)
		}
	}
}

// cutLink breaks or mends the connection of two slots; each end learns it within late.
func (s *sim) cutLink(a, b int, broken bool, late time.Duration) {
	if a == b {
		return
	}
	s.logf("link %d-%d: cut %v", a, b, broken)
	s.cut[pair(a, b)] = broken
	p, q := s.slots[a], s.slots[b]
	if p == nil || q == nil {
		return
	}
	if !broken {
		s.connect(p, q)
		return
	}
	for _, x := range both(p, q) {
		s.after(s.between(0, late), func() {
			x[0].deliver(func() { x[0].core.suspect(x[1].slot, x[1].inc, "link cut", 0) })
			if !s.cut[pair(a, b)] {
				s.connect(p, q)
			}
		})
	}
}

// beat renews a lease, or finds it ended.
func (p *proc) beat() {
	if p.dead {
		return
	}
	if !p.paused && !p.offline {
		if p.leaseGone {
			p.s.logf("%v has lost its lease", p)
			p.leaseGone = false
			p.input(p.core.leaseLost)
			p.s.after(p.s.between(time.Millisecond, time.Second), func() { p.deliver(p.core.announced) })
		}
		p.confirmed = p.s.now
	} else if !p.leaseGone && p.s.now-p.confirmed > simLease+time.Second/2 {
		p.s.logf("%v: the store ends its lease", p)
		p.endLease()
	}
	p.s.after(time.Second/2, p.beat)
}

// set changes the store and tells everybody.
func (s *sim) set(key string, value []byte, owner *proc) uint64 {
	s.rev++
	if value == nil {
		delete(s.store, key)
	} else {
		s.store[key] = &entry{value, s.rev, owner}
	}
	if key == keyView {
		s.checkRecord(value)
	}
	for _, p := range s.alive() {
		s.tell(p, key, value, s.rev, value == nil)
	}
	return s.rev
}

// tell brings a change to a process: changes of one key in their order.
func (s *sim) tell(p *proc, key string, value []byte, rev uint64, deleted bool) {
	at := s.now + s.between(time.Millisecond/2, 5*time.Millisecond)
	if s.faults && s.rng.IntN(50) == 0 {
		at += s.between(0, 300*time.Millisecond)
	}
	at = max(at, p.heard[key])
	p.heard[key] = at
	var arrive func()
	arrive = func() {
		if p.offline && !p.dead {
			s.after(50*time.Millisecond, arrive)
			return
		}
		p.deliver(func() { p.core.change(key, value, rev, deleted) })
	}
	s.after(at-s.now, arrive)
}

// request is a put or a get: it may never arrive, or be done, now or later, without an answer.
func (p *proc) request(o output) {
	s := p.s
	answer := func(f fate, value []byte, rev uint64) {
		s.after(s.between(time.Millisecond/4, 3*time.Millisecond), func() {
			p.deliver(func() { p.core.stored(o.id, f, value, rev) })
		})
	}
	chance := 100
	if s.faults {
		chance = s.rng.IntN(20)
	}
	switch {
	case p.offline || chance == 0:
		answer(fateUnknown, nil, 0)
	case chance == 1 && o.kind == outPut:
		s.after(s.between(0, 400*time.Millisecond), func() { p.perform(o) })
		answer(fateUnknown, nil, 0)
	default:
		s.after(s.between(time.Millisecond/4, 3*time.Millisecond), func() { answer(p.perform(o)) })
	}
}

// perform is a request at the store.
func (p *proc) perform(o output) (f fate, value []byte, rev uint64) {
	e := p.s.store[o.key]
	switch {
	case o.kind == outGet && e == nil:
		return fateAbsent, nil, 0
	case o.kind == outGet:
		return fateDone, e.value, e.rev
	case e == nil && o.rev != 0 || e != nil && o.rev != e.rev || o.leased && p.leaseGone:
		return fateConflict, nil, 0
	}
	var owner *proc
	if o.leased {
		owner = p
	}
	return fateDone, o.value, p.s.set(o.key, o.value, owner)
}

// do does what a state machine says.
func (p *proc) do(o output) {
	s := p.s
	switch o.kind {
	case outPut, outGet:
		if o.kind == outPut {
			s.logf("%v puts %s@%d %s", p, o.key, o.rev, o.value)
		}
		p.request(o)
	case outHold:
		p.holding, p.frozen = o.view.Epoch, o.view.Retry
		p.core.held(o.view.Epoch, p.done, p.seq)
	case outConnect:
		s.after(s.between(time.Millisecond, 20*time.Millisecond), func() { p.connect(o.view) })
	case outAbandon:
		if p.holding == o.epoch {
			p.holding, p.frozen = 0, false
		}
		delete(p.mesh, o.epoch)
	case outCommit:
		p.commit(o.view)
	case outIsolated:
		p.isolated = o.err != nil
		s.logf("%v isolated: %v", p, o.err)
	case outDone:
		if p.calls[o.id] == nil { // it is over before it has begun
			p.calls[o.id] = &call{at: s.now}
		}
		c := p.calls[o.id]
		c.resp, c.err, c.over, c.took = o.resp, o.err, true, s.now-c.at
		s.logf("%v call %d over: %+v %v", p, o.id, o.resp, o.err)
	}
}

// connect builds channels: it fails if a member cannot be reached, and takes as long as one is stopped.
func (p *proc) connect(v View) {
	s := p.s
	if p.dead || p.core.told != v.Epoch {
		return
	}
	for _, m := range v.Members {
		q := s.slots[m.Rank]
		if m.Rank == p.slot {
			continue
		}
		if q.inc != m.Incarnation || q.dead || s.cut[pair(p.slot, m.Rank)] {
			err := &ConnectError{[]int{m.Rank}, errors.New("no answer")}
			p.deliver(func() { p.core.connected(v.Epoch, nil, err) })
			return
		}
		if q.paused || p.paused {
			s.after(20*time.Millisecond, func() { p.connect(v) })
			return
		}
		if q.shut || p.shut {
			p.refused(v, q)
			return
		}
	}
	p.mesh[v.Epoch] = true
	p.deliver(func() { p.core.connected(v.Epoch, nil, nil) })
}

// refused has a process find out that it has no channel to another one, the higher its rank the later; or hear that there is none to
// itself, which is nobody's fault that it knows of.
func (p *proc) refused(v View, by *proc) {
	var err error = &ConnectError{[]int{by.slot}, errors.New("no lane")}
	late := time.Duration(p.slot) * 50 * time.Millisecond
	if p.shut {
		err, late = errors.New("refused"), 75*time.Millisecond
	}
	p.s.after(late, func() {
		p.deliver(func() { p.core.connected(v.Epoch, nil, err) })
	})
}

// start begins a call.
func (p *proc) start(kind callKind, ranks ...int) *call {
	c := &call{kind: kind, at: p.s.now}
	if p.dead || p.paused {
		c.over = true
		return c
	}
	p.input(func() {
		id := p.core.begin(kind, ranks)
		p.s.logf("%v call %d: %d %v", p, id, kind, ranks)
		p.calls[id] = c
	})
	return c
}

// commit adopts a view.
func (p *proc) commit(v View) {
	s := p.s
	s.logf("%v adopts %d: %v from %d", p, v.Epoch, v.Members, v.StartSeq)
	p.checkView(v)
	p.adopted = append(p.adopted, v.Epoch)
	member := v.Has(p.slot, p.inc)
	if member && !p.mesh[v.Epoch] {
		s.failf("%v is in view %d without channels", p, v.Epoch)
	}
	was := len(p.views) > 0 && p.views[len(p.views)-1].Has(p.slot, p.inc)
	p.views = append(p.views, v)
	p.holding, p.frozen = 0, false
	switch {
	case member && !was:
		p.seq, p.done, p.op = v.StartSeq, v.StartSeq, nil
	case !member:
		p.op = nil
	case p.op != nil && p.op.seq >= v.StartSeq:
		p.op.epoch = v.Epoch // it is run again
	}
}

// viewOf is the view that an operation belongs to.
func (p *proc) viewOf(seq uint64) *View {
	for i := len(p.views) - 1; i >= 0; i-- {
		if p.views[i].StartSeq <= seq {
			return &p.views[i]
		}
	}
	return nil
}

// work is the process's loop of operations.
func (p *proc) work() {
	if p.dead {
		return
	}
	if !p.paused {
		p.progress()
	}
	p.s.after(p.s.between(time.Duration(p.s.pace)*time.Millisecond, 8*time.Duration(p.s.pace)*time.Millisecond), p.work)
}

// progress begins an operation, or sees whether the one in progress has ended: all members of its view have begun it there, or one
// of them is lost.
func (p *proc) progress() {
	if !p.core.member {
		p.op = nil
		return
	}
	if p.op == nil {
		last := &p.views[len(p.views)-1]
		for p.seq < last.StartSeq && len(leavers(p.viewOf(p.seq).Members, last)) > 0 {
			p.seq++ // it fails at once
		}
		if p.holding == 0 && !p.isolated {
			p.op = &op{p.seq, p.viewOf(p.seq).Epoch}
			p.seq++
		}
		return
	}
	if p.frozen {
		return
	}
	last, v, all := &p.views[len(p.views)-1], p.viewOf(p.op.seq), true
	for _, m := range v.Members {
		q, l := p.s.slots[m.Rank], p.core.links[m.Rank]
		if q == p {
			continue
		}
		if !last.Has(m.Rank, m.Incarnation) || l.incarnation != m.Incarnation || !l.up || p.isolated {
			p.op = nil
			return
		}
		its := q.viewOf(p.op.seq)
		all = all && q.inc == m.Incarnation && q.seq > p.op.seq && its != nil && its.Epoch == v.Epoch && !p.s.cut[pair(p.slot, m.Rank)]
	}
	if all {
		p.done = max(p.done, p.op.seq+1)
		p.s.wins[p.op.seq] = append(p.s.wins[p.op.seq], win{p, p.op.epoch})
		p.op = nil
	}
}

// mischief is one random thing that happens.
func (s *sim) mischief() {
	live := s.alive()
	if len(live) == 0 {
		return
	}
	p, q := live[s.rng.IntN(len(live))], live[s.rng.IntN(len(live))]
	some := s.rng.Perm(s.spec.Cap)[:1+s.rng.IntN(2)]
	switch s.rng.IntN(12) {
	case 0:
		p.kill(s.rng.IntN(2) == 0)
	case 1:
		p.kill(true)
		s.after(s.between(0, 50*time.Millisecond), func() { q.kill(true) })
	case 2:
		p.leave()
	case 3:
		p.pause(s.between(10*time.Millisecond, 8*time.Second))
	case 4:
		s.cutLink(p.slot, q.slot, true, 200*time.Millisecond)
	case 5:
		s.cutLink(p.slot, q.slot, false, 0)
	case 6:
		p.offline = !p.offline
	case 7, 8:
		for _, slot := range some {
			if o := s.slots[slot]; o == nil || o.dead && o.leaseGone {
				n := s.spawn(slot)
				s.after(s.between(0, time.Second), func() { n.start(callJoin) })
			}
		}
	case 9:
		p.start(callActivate, some...)
		q.start(callActivate, some...)
	case 10:
		p.start(callDeactivate, some...)
	case 11:
		p.start([]callKind{callSync, callJoin}[s.rng.IntN(2)])
	}
}

// recover mends all that is broken.
func (s *sim) recover() {
	s.faults, s.pace = false, 20
	for _, p := range s.alive() {
		p.offline = false
	}
	for a := range s.spec.Cap {
		for b := range a {
			if s.cut[pair(a, b)] {
				s.cutLink(a, b, false, 0)
			}
		}
	}
}

// rejoin has all who are outside join, and all let them.
func (s *sim) rejoin() {
	var out []int
	for _, p := range s.alive() {
		if !p.core.member {
			out = append(out, p.slot)
			p.start(callJoin)
		}
	}
	for _, p := range s.alive() {
		if len(out) > 0 {
			p.start(callActivate, out...)
		}
	}
}
