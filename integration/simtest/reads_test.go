package simtest

import (
	"larder/raft"
)

// confirmCap bounds a confirmation, as raft.Node does.
const confirmCap = 250 * ms

// reads is what raft.Node keeps of its read rounds: one is on its way, and one collects those who came since. The
// deadlines and the order of steps are those of raft.Node.Confirm and raft.Node.ReadIndex.
type reads struct {
	ctx           uint64
	current, next *readRound
	waiting       []*readRound // answered, and not applied yet
	fenced        bool
	deadline      int64
}

type readRound struct {
	ctx, leadTerm uint64
	started       int64
	age           int
	answered      bool
	confirmed     bool
	index         uint64
	ready         bool
	procs         []*proc
}

func (r *reads) join(m *member, p *proc) *readRound {
	if r.next == nil {
		r.next = &readRound{}
	}
	x := r.next
	x.procs = append(x.procs, p)
	if r.current == nil {
		r.put(m)
	}
	return x
}

func (r *reads) put(m *member) {
	r.current, r.next = r.next, nil
	if r.current != nil {
		r.ask(m)
	}
}

func (r *reads) ask(m *member) {
	x := r.current
	r.ctx++
	x.ctx, x.age = r.ctx, 0
	x.leadTerm = m.core.LeadTerm()
	x.started = m.clock.Boottime()
	m.core.ReadIndex(x.ctx)
	m.poke()
}

func (r *reads) tick(m *member) {
	x := r.current
	if x == nil {
		return
	}
	x.age++
	if x.age >= max(electionTicks/2, 2) || x.leadTerm != m.core.LeadTerm() {
		r.ask(m)
	}
}

// readDone is raft's answer.
func (m *member) readDone(ctx, index uint64) {
	r := &m.reads
	x := r.current
	if x == nil || x.ctx != ctx {
		return
	}
	x.index, x.answered = index, true
	x.confirmed = x.leadTerm != 0 && x.leadTerm == m.core.LeadTerm()
	r.waiting = append(r.waiting, x)
	r.current = nil
	r.put(m)
}

// applied lets rounds go on whose index is applied now.
func (r *reads) applied(m *member) {
	at := m.at
	rest := r.waiting[:0]
	for _, x := range r.waiting {
		if x.index > at && x.index > 1 {
			rest = append(rest, x)
			continue
		}
		x.ready = true
		for _, p := range x.procs {
			p.wake()
		}
	}
	r.waiting = rest
	// Those who wait for a confirmation give up when leadership is lost.
	if m.core.LeadTerm() == 0 {
		for _, x := range [...]*readRound{r.current, r.next} {
			if x != nil {
				for _, p := range x.procs {
					p.wake()
				}
			}
		}
	}
}

// confirm proves that the member leads, as raft.Node.Confirm.
func (m *member) confirm(p *proc) (deadline int64, err error) {
	r := &m.reads
	for {
		switch {
		case m.core.LeadTerm() == 0:
			return 0, &raft.NotLeaderError{}
		case r.fenced:
			return 0, raft.ErrTransferring
		}
		x := r.join(m, p)
		p.wait(func() bool { return x.ready || m.core.LeadTerm() == 0 })
		if m.core.LeadTerm() == 0 {
			return 0, &raft.NotLeaderError{}
		}
		deadline = x.started + min(electionSpan/2, confirmCap)
		again := !x.confirmed || m.clock.Boottime() >= deadline
		if again {
			continue
		}
		if r.fenced {
			return 0, raft.ErrTransferring
		}
		r.deadline = max(r.deadline, deadline)
		return deadline, nil
	}
}

// readIndex makes sure that the member has applied all that was acknowledged before, as raft.Node.ReadIndex.
func (m *member) readIndex(p *proc) bool {
	x := m.reads.join(m, p)
	return p.waitFor(func() bool { return x.ready }, 5*sec)
}
