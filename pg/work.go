package pg

import (
	"context"
	"sync/atomic"
	"time"

	"larder/pg/collective"
	"larder/pg/member"
	"larder/pg/p2p"
)

// Result is how a call ended.
type Result struct {
	// Failed are ranks that were lost while it ran, or that are active but have failed, under the policy Manual. Without an error
	// those that are left have carried it out.
	Failed member.Mask
	// From, Tag and Bytes are of the message that a Recv has received.
	From  int
	Tag   uint64
	Bytes int
}

// Work is a call that was started. Its methods may be called concurrently.
type Work struct {
	g    *Group
	call Call
	seq  uint64

	over atomic.Bool // res and err are set
	res  Result
	err  error

	given error // why it was given up: under the group's mu

	// What follows is used by who has the group's turn.
	op      collective.Op // it runs, in plane
	plane   *plane
	message *p2p.Op
	ready   func() bool // for Do, which reuses Works
	saved   []byte      // what Src held, if the call is in place and may be run again
	lost    error       // why it does not run on in its plane
	one     [2][1][]byte
	src     [][]byte
	dst     [][]byte
}

// Done tells whether the call is over.
func (w *Work) Done() bool { return w.over.Load() }

// Wait waits for the call to end, and helps it along in the caller's thread. If ctx ends first, the call goes on.
func (w *Work) Wait(ctx context.Context) (Result, error) {
	if !w.over.Load() {
		if err := w.g.wait(ctx, w); err != nil {
			return Result{}, err
		}
	}
	return w.res, w.err
}

// WaitFor waits as Wait does, but for no longer than that, and tells whether the call is over.
func (w *Work) WaitFor(d time.Duration) bool {
	return w.over.Load() || w.g.carry(func() bool { w.g.help(); return w.over.Load() }, d)
}

// Leave leaves the call to the group's own thread: at once if it is long, or not the only one, and after a moment otherwise, in which
// the caller may still wait for it. A second call does nothing more.
func (w *Work) Leave() {
	if !w.over.Load() {
		w.g.background(w.call.bytes())
	}
}

// reset makes it another call's.
func (w *Work) reset(g *Group, c Call) {
	w.g, w.call, w.res, w.err, w.given = g, c, Result{}, nil, nil
	w.over.Store(false)
}

// finish ends the call. Whoever waits learns of it by the bell.
func (w *Work) finish(res Result, err error) {
	bell := w.g.bell
	w.res, w.err, w.lost = res, err, nil
	w.op, w.plane, w.message, w.saved = nil, nil, nil, nil
	clear(w.src)
	clear(w.dst)
	w.one = [2][1][]byte{}
	w.over.Store(true) // from here on it may be another call's
	bell.Ring()
}
