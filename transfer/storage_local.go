package transfer

import (
	"context"
	"time"
)

// newLocalStorageLane is the way to this process's own storage.
func newLocalStorageLane(s *Segment) *lane {
	l := newLane(s, TransportLocal, storageRequests, storeLocal)
	l.storage = true
	l.add("", "self")
	return l
}

// storeLocal carries slices until the lane is closed.
func storeLocal(r *rail) {
	var out [1]*slice
	forEver := func() bool { return false }
	for r.lane.take(r, out[:], windowBytes, forEver) > 0 {
		r.lane.seg.e.storeSlice(r, out[0])
	}
}

// storeSlice moves a slice between local memory and storage of this process. A storage that hangs costs it its deadline.
func (e *Engine) storeSlice(r *rail, s *slice) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(s.batch.deadline-e.now()))
	defer cancel()
	mem, err := e.staging.get(int(s.length), ctx.Done()) //nolint:gosec // at most maxSlice
	if err != nil {
		s.end(err)
		return
	}
	if s.request.Op == Write {
		err = copyPieces(Write, mem, s.pieces(nil), 0)
	}
	var j *storageJob
	if err == nil {
		j, err = e.store(s.request.Op, s.request.Buffer, s.offset(), mem)
	}
	if err != nil {
		e.staging.put(mem)
		s.end(err)
		return
	}
	select {
	case <-j.done:
		err = j.err
	case <-ctx.Done():
		e.leave(s, j)
		return
	}
	if err == nil && j.op == Read {
		err = copyPieces(Read, mem, s.pieces(nil), 0)
	}
	e.staging.put(mem)
	if err != nil {
		s.end(err)
	} else {
		r.carried(s)
	}
}

// leave ends a slice whose storage does not answer. What is read goes nowhere; a write may still come.
func (e *Engine) leave(s *slice, j *storageJob) {
	if j.op == Write {
		s.endLoose(ErrTimeout)
	} else {
		s.end(ErrTimeout)
	}
	go func() {
		<-j.done
		e.staging.put(j.mem)
		if j.op == Write {
			s.settle()
		}
	}()
}
