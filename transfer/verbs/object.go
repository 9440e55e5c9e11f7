//go:build rdma && cgo && linux

package verbs

import (
	"sync"
	"sync/atomic"
)

// object is what keeps Go from reaching a device through what was closed, which would be a use after free in C.
type object struct {
	mu     sync.RWMutex // read: a verb is being called with the object
	closed bool
	uses   atomic.Int32 // objects that were made from it and are open
}

// enter is called before a verb, and leave after it, unless there is an error.
func (o *object) enter() error {
	o.mu.RLock()
	if o.closed {
		o.mu.RUnlock()
		return ErrClosed
	}
	return nil
}

func (o *object) leave() { o.mu.RUnlock() }

// adopt counts an object that is made from this one. release is called when that is closed, or was not made after all.
func (o *object) adopt() error {
	if err := o.enter(); err != nil {
		return err
	}
	o.uses.Add(1)
	o.leave()
	return nil
}

func (o *object) release() { o.uses.Add(-1) }

// shut says that the object is closed, and reports whether it was not yet: the caller then destroys it. It is for objects
// somebody may be waiting on, who has to be woken in between without the lock.
func (o *object) shut() (first bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closed && o.uses.Load() > 0 {
		return false, ErrInUse
	}
	first, o.closed = !o.closed, true
	return first, nil
}

// close destroys the object once, when no verb is being called with it. A second call does nothing.
func (o *object) close(destroy func() error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return nil
	}
	if o.uses.Load() > 0 {
		return ErrInUse
	}
	if err := destroy(); err != nil {
		return err
	}
	o.closed = true
	return nil
}
