package sched

import "time"

// nic is one direction of an instance's network, as a line of bytes that are predicted to be under way: when it will be free.
// In truth transfers share a NIC; the last of them is through at the same time.
type nic struct {
	bandwidth float64
	free      time.Duration
}

// waiting is how long what is under way still takes.
func (x *nic) waiting(now time.Duration) time.Duration { return max(0, x.free-now) }

// time is how long a transfer takes here that is begun now: what is under way, and itself.
func (x *nic) time(now time.Duration, m *Model, bytes float64) time.Duration {
	return x.waiting(now) + m.Transfer(bytes, x.bandwidth)
}

// begin has a transfer under way.
func (x *nic) begin(now time.Duration, m *Model, bytes float64) {
	x.free = max(x.free, now) + m.Transfer(bytes, x.bandwidth)
}

// source is the NIC that a prefix is sent by: a peer's or the pool's.
func (s *Scheduler) source(from InstanceID) *nic {
	if from == FromPool {
		return &s.pool
	}
	return &s.instances[from].out
}

// transferTime is T_transfer: the end that takes longer decides.
func (s *Scheduler) transferTime(now time.Duration, from, to InstanceID, bytes float64) time.Duration {
	return min(longest, max(s.source(from).time(now, s.model, bytes), s.instances[to].in.time(now, s.model, bytes)))
}

// send has a transfer under way at both ends.
func (s *Scheduler) send(now time.Duration, from, to InstanceID, bytes float64) {
	s.source(from).begin(now, s.model, bytes)
	s.instances[to].in.begin(now, s.model, bytes)
}

// slower is the bandwidth that bounds a transfer; 0 is none.
func (s *Scheduler) slower(from, to InstanceID) float64 {
	a, b := s.source(from).bandwidth, s.instances[to].in.bandwidth
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}
