package transfer

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// evictionPolicy chooses which endpoint makes room for another. The store's mu guards it.
type evictionPolicy interface {
	insert(e *Endpoint)
	remove(e *Endpoint)
	// victim is an endpoint that is not busy, nil if all are. It stays where it is until it is removed.
	victim() *Endpoint
}

// evictionPolicies are those that may be asked for, by name.
var evictionPolicies = map[string]func() evictionPolicy{
	"fifo":  func() evictionPolicy { return new(fifo) },
	"sieve": func() evictionPolicy { return new(sieve) },
}

func newEvictionPolicy(name string) (evictionPolicy, error) {
	construct, ok := evictionPolicies[name]
	if !ok {
		known := strings.Join(slices.Sorted(maps.Keys(evictionPolicies)), ", ")
		return nil, fmt.Errorf("transfer: no eviction policy for endpoints is named %q: take one of %s", name, known)
	}
	return construct(), nil
}

// fifo evicts the endpoint that was connected first.
type fifo struct{ order endpointList }

func (f *fifo) insert(e *Endpoint) { f.order.push(e) }
func (f *fifo) remove(e *Endpoint) { f.order.remove(e) }

func (f *fifo) victim() *Endpoint {
	for e := f.order.oldest; e != nil; e = e.next {
		if !e.busy() {
			return e
		}
	}
	return nil
}

// sieve is the SIEVE algorithm: a hand goes from the oldest to the newest endpoint and around again, spares each that was
// acquired since it last came by, and evicts the first that was not.
type sieve struct {
	order endpointList
	hand  *Endpoint // where it looks next; nil for the oldest
}

func (s *sieve) insert(e *Endpoint) { s.order.push(e) }

func (s *sieve) remove(e *Endpoint) {
	if s.hand == e {
		s.hand = e.next
	}
	s.order.remove(e)
}

func (s *sieve) victim() *Endpoint {
	for range 2 * s.order.n { // the first time around may only clear marks
		e := s.hand
		if e == nil {
			e = s.order.oldest
		}
		if !e.busy() && !e.visited.Swap(false) {
			s.hand = e
			return e
		}
		s.hand = e.next
	}
	return nil
}
