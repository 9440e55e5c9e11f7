//go:build cgo

package main

import (
	"sync"
	"sync/atomic"
)

// maxObjects bounds the objects of a kind that a caller has open. One that reaches it leaks: a batch is the kind of which
// there are most, and 65,536 of them under way are far more than any queue needs.
const maxObjects = 64 << 10

// lastHandle numbers all objects, so that a handle of one kind is none of another.
var lastHandle atomic.Uint64

// table has the objects of a kind, by handle.
type table[T any] struct {
	kind string

	mu sync.RWMutex
	m  map[uint64]T
}

// add makes a handle for an object.
func (t *table[T]) add(object T) (uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.m) >= maxObjects {
		return 0, invalid("%d objects of kind %s are open, which is the most: close some", len(t.m), t.kind)
	}
	if t.m == nil {
		t.m = make(map[uint64]T)
	}
	h := lastHandle.Add(1)
	t.m[h] = object
	return h, nil
}

// set gives a handle that nobody knows yet another object.
func (t *table[T]) set(h uint64, object T) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.m[h] = object
}

// of finds an object.
func (t *table[T]) of(h uint64) (T, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	object, there := t.m[h]
	if !there {
		return object, &handleError{t.kind, h}
	}
	return object, nil
}

// take finds an object, and closes the handle.
func (t *table[T]) take(h uint64) (T, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	object, there := t.m[h]
	if !there {
		return object, &handleError{t.kind, h}
	}
	delete(t.m, h)
	return object, nil
}

// drop closes the handle of an object, if it is open.
func (t *table[T]) drop(h uint64) { _, _ = t.take(h) }
