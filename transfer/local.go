package transfer

import "runtime"

// newLocalLane is the way to this process's own segment: the slices are copied, a few at a time.
func newLocalLane(s *Segment) *lane {
	l := newLane(s, TransportLocal, runtime.GOMAXPROCS(0), copyLocal)
	l.add("", "self")
	return l
}

// copyLocal carries slices until the lane is closed.
func copyLocal(r *rail) {
	l := r.lane
	var out [4]*slice
	var pieces [][]byte
	me := &copier{}
	forEver := func() bool { return false }
	for {
		n := l.take(r, out[:], 1<<20, forEver)
		if n == 0 {
			return
		}
		for _, s := range out[:n] {
			pieces = s.pieces(pieces[:0])
			if err := l.seg.e.copySlice(s, pieces, me); err != nil {
				s.end(err)
			} else {
				r.carried(s)
			}
		}
		clear(pieces)
	}
}

// copier is at work in a buffer for as long as one slice takes. There is nothing to interrupt: it ends soon.
type copier struct{ _ byte }

// interrupt implements interrupter.
func (*copier) interrupt() {}

// copySlice copies between local memory and a buffer of this process.
func (e *Engine) copySlice(s *slice, pieces [][]byte, by interrupter) error {
	b, mem, err := e.hold(s.request.Op, s.request.Buffer, s.offset(), s.length, by)
	if err != nil {
		return err
	}
	defer b.release(by)
	return copyPieces(s.request.Op, mem, pieces, s.batch.bytes)
}
