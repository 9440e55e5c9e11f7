package main

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// role is what an instance does; roles can be added.
type role int

const (
	prefill role = 1 << iota
	decode
	both = prefill | decode
)

var roles = map[string]role{"prefill": prefill, "decode": decode, "both": both, "": both}

// instance is an engine. Its methods may be called concurrently.
type instance struct {
	id   string
	url  string
	role role

	outstanding atomic.Int64
	down        cooloff // it could not be reached, or broke off

	mu       sync.Mutex
	prefills map[*job]struct{}
}

// job is one request at an instance.
type job struct {
	at       *instance
	began    time.Time
	alone    bool          // no other prompt has been computed beside it
	computed time.Duration // until the first byte of the answer
}

// begin counts a request.
func (x *instance) begin() *job {
	x.outstanding.Add(1)
	j := &job{at: x, began: now(), alone: true}
	x.mu.Lock()
	defer x.mu.Unlock()
	for other := range x.prefills {
		other.alone, j.alone = false, false
	}
	x.prefills[j] = struct{}{}
	return j
}

// first says that the answer begins: the prompt has been computed.
func (j *job) first() {
	j.at.mu.Lock()
	defer j.at.mu.Unlock()
	j.computed = now().Sub(j.began)
	delete(j.at.prefills, j)
}

// end says that the request is through, for good or bad.
func (j *job) end() {
	j.at.outstanding.Add(-1)
	j.at.mu.Lock()
	defer j.at.mu.Unlock()
	delete(j.at.prefills, j)
}

// seconds is what the prompt took; 0, for not known, if others were computed beside it.
func (j *job) seconds() float64 {
	j.at.mu.Lock()
	defer j.at.mu.Unlock()
	if !j.alone {
		return 0
	}
	return j.computed.Seconds()
}

// fleet is all instances.
type fleet struct {
	list []*instance // by id
	byID map[string]*instance
	turn [both + 1]atomic.Uint64 // by role: what is picked for one does not shift the turns of another
}

func newFleet(engines map[string]engineConfig) *fleet {
	f := &fleet{byID: map[string]*instance{}}
	for _, id := range slices.Sorted(maps.Keys(engines)) {
		e := engines[id]
		x := &instance{id: id, url: e.URL, role: roles[e.Role], prefills: map[*job]struct{}{}}
		f.list = append(f.list, x)
		f.byID[id] = x
	}
	return f
}

// outstanding is the cost by which the least busy instance is picked.
func outstanding(x *instance) int64 { return x.outstanding.Load() }

// pick gives the instance of a role that costs least, of those that cost the same each in its turn. Those that could not be
// reached lately are for when there is no other. It gives nil if all have been tried.
func (f *fleet) pick(r role, tried []*instance, cost func(*instance) int64) *instance {
	turn := int(f.turn[r].Add(1) % uint64(len(f.list))) //nolint:gosec // less than the list's length
	for _, desperate := range []bool{false, true} {
		var best *instance
		var least int64
		for i := range f.list {
			x := f.list[(turn+i)%len(f.list)]
			if x.role&r != r || x.down.on() != desperate || slices.Contains(tried, x) {
				continue
			}
			if c := cost(x); best == nil || c < least {
				best, least = x, c
			}
		}
		if best != nil {
			return best
		}
	}
	return nil
}
