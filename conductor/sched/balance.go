package sched

import "time"

const (
	// flipRatio is how many times the load of one side has to be that of the other for an instance to change sides: at less
	// than twice it would be the other side's turn after it, of two instances each.
	flipRatio = 2.0
	// flipLoad is what the load of the busier side has to exceed: below half of its limit nobody waits for an instance.
	flipLoad = 0.5
	// flipAfter is how long it has to have been so, and how long the effect of a flip is waited for: some prefills and decodes.
	flipAfter = 15 * time.Second
)

// balance is since when the busier side has been that.
type balance struct {
	busier Role // 0: both are loaded alike
	since  time.Duration
}

// Rebalance proposes the role of an instance to be changed: of the one that has the least to do of the side that is loaded
// much less, when this has been so for some time; under load none is ever idle. It changes nothing; SetRole does, and the
// loads are watched anew from then on. What the instance has been given it has to end in its old role. The last instance of a
// side stays, and so does one with both roles.
func (s *Scheduler) Rebalance(now time.Duration) (InstanceID, Role, bool) {
	now = s.pass(now)
	l := s.Load(now)
	var busier Role
	switch {
	case l.Prefill > flipLoad && l.Prefill > flipRatio*l.Decode:
		busier = Prefill
	case l.Decode > flipLoad && l.Decode > flipRatio*l.Prefill:
		busier = Decode
	}
	if busier != s.balance.busier {
		s.balance = balance{busier, now}
	}
	other := Both &^ busier
	if busier == 0 || now-s.balance.since < flipAfter || s.count(other) < 2 {
		return NoInstance, 0, false
	}
	least := NoInstance
	for i := range s.instances {
		if x := &s.instances[i]; x.live && x.Role == other && (least == NoInstance || s.lessToDo(now, x, &s.instances[least])) {
			least = InstanceID(i)
		}
	}
	return least, busier, least != NoInstance
}

// lessToDo reports whether an instance would be through with what it has before another of the same role.
func (s *Scheduler) lessToDo(now time.Duration, x, y *instance) bool {
	p, q := x.queue.waiting(now, s.pipeline), y.queue.waiting(now, s.pipeline)
	a, b := x.decoding.batch+x.decoding.otherBatch+len(x.decoding.coming), y.decoding.batch+y.decoding.otherBatch+len(y.decoding.coming)
	return p < q || p == q && a < b
}
