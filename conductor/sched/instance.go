package sched

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// instance is an instance's state.
type instance struct {
	Instance
	live     bool
	queue    queue
	out, in  nic
	decoding decoding
}

// ErrInstance says that an instance cannot be, or that there are too many.
var ErrInstance = errors.New("sched: bad instance")

// Add makes an instance known, with nothing to do.
func (s *Scheduler) Add(x Instance) (InstanceID, error) {
	x.Role = either(x.Role, Both)
	if x.Role > Both || !(x.Bandwidth >= 0) || math.IsInf(x.Bandwidth, 1) || x.KVCapacity < 0 || x.MaxBatch < 0 {
		return NoInstance, fmt.Errorf("%w: %q: its role is %d, its bandwidth %v, its KV capacity %d and its batch %d: give 0 for no bound",
			ErrInstance, x.Name, x.Role, x.Bandwidth, x.KVCapacity, x.MaxBatch)
	}
	id := InstanceID(len(s.instances)) //nolint:gosec // bounded by MaxInstances
	switch {
	case len(s.gone) > 0:
		id, s.gone = s.gone[0], s.gone[1:] // the one that has been unused for longest
	case len(s.instances) >= s.cfg.MaxInstances:
		return NoInstance, fmt.Errorf("%w: %q is one more than max_instances, %d", ErrInstance, x.Name, s.cfg.MaxInstances)
	default:
		s.instances, s.holdings = append(s.instances, instance{}), append(s.holdings, holding{})
	}
	s.instances[id] = instance{Instance: x, live: true, out: nic{bandwidth: x.Bandwidth}, in: nic{bandwidth: x.Bandwidth}}
	s.tally(x.Role, 1)
	return id, nil
}

// Remove forgets an instance, and all requests that it was to serve or serves.
func (s *Scheduler) Remove(now time.Duration, id InstanceID) {
	now = s.pass(now)
	if !s.known(id) {
		return
	}
	for slot := range s.book.slots {
		if r := &s.book.slots[slot]; r.phase != free && (r.prefill == id || r.decode == id) {
			s.drop(now, int32(slot))
		}
	}
	s.tally(s.instances[id].Role, -1)
	s.instances[id] = instance{}
	s.gone = append(s.gone, id)
}

// SetRole gives an instance another role. What it has been given already it still does.
func (s *Scheduler) SetRole(now time.Duration, id InstanceID, role Role) {
	now = s.pass(now)
	if !s.known(id) || role == 0 || role > Both || s.instances[id].Role == role {
		return
	}
	s.tally(s.instances[id].Role, -1)
	s.instances[id].Role = role
	s.tally(role, 1)
	s.balance.since = now // what was out of balance was with the old roles
}

func (s *Scheduler) tally(role Role, n int) {
	if role&Prefill != 0 {
		s.counts[0] += n
	}
	if role&Decode != 0 {
		s.counts[1] += n
	}
}

// count is how many instances have one role.
func (s *Scheduler) count(role Role) int { return s.counts[role-Prefill] }

func (s *Scheduler) known(id InstanceID) bool {
	return id >= 0 && int(id) < len(s.instances) && s.instances[id].live
}

func (s *Scheduler) is(id InstanceID, role Role) bool {
	return s.known(id) && s.instances[id].Role&role != 0
}
