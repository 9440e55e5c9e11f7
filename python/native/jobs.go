//go:build cgo

package main

// #include "larder.h"
import "C"

import (
	"context"
	"time"
)

// sliceMost bounds how long a call waits, whatever its limit says: its caller wants to look for signals.
const sliceMost = time.Second

// job is something that takes its time and must not be done twice. It runs by itself, and is waited for in slices.
type job struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when it has ended
	handle uint64        // what it has made
	err    error
	undo   func(uint64) // gets rid of what it has made when nobody wants it any more; nil for nothing
}

var jobs = table[*job]{kind: "job"}

// begin begins a job, within timeout; 0 for no end.
func begin(timeout time.Duration, undo func(uint64), do func(ctx context.Context) (uint64, error)) (uint64, error) {
	ctx, cancel := context.WithCancel(context.Background())
	if timeout > 0 {
		ctx, cancel = context.WithTimeout(context.Background(), timeout)
	}
	j := &job{cancel: cancel, done: make(chan struct{}), undo: undo}
	h, err := jobs.add(j)
	if err != nil {
		cancel()
		return 0, err
	}
	go func() {
		defer close(j.done)
		defer cancel()
		j.err = protect(func() (err error) {
			j.handle, err = do(ctx)
			return err
		})
	}()
	return h, nil
}

// await waits until something is done, for a slice of limit; errAgain says that it is not.
func await(done <-chan struct{}, limit time.Duration) error {
	select {
	case <-done:
		return nil
	default:
	}
	if limit <= 0 {
		return errAgain
	}
	over, stop := timer(min(limit, sliceMost))
	defer stop()
	select {
	case <-done:
		return nil
	case <-over:
		return errAgain
	}
}

// abandon gives a job up: what it makes all the same goes away again.
func abandon(h uint64) error {
	j, err := jobs.take(h)
	if err != nil {
		return err
	}
	j.cancel()
	go func() {
		<-j.done
		if j.err == nil && j.undo != nil {
			j.undo(j.handle)
		}
	}()
	return nil
}

// larder_job_wait waits for a job. When it has ended its handle is closed, and made names what it has made.
//
//export larder_job_wait
func larder_job_wait(handle C.uint64_t, limit C.int64_t, made *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		j, err := jobs.of(uint64(handle))
		if err != nil {
			return err
		}
		if err := await(j.done, time.Duration(limit)); err != nil {
			return err
		}
		jobs.drop(uint64(handle))
		*made = C.uint64_t(j.handle)
		return j.err
	})
}

// larder_job_cancel gives a job up, which ends by itself: soon if it only asks something, when it is through if it closes.
//
//export larder_job_cancel
func larder_job_cancel(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error { return abandon(uint64(handle)) })
}
