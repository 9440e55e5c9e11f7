package pg

import (
	"cmp"
	"errors"
	"slices"

	"larder/pg/collective"
)

// Collectives run one after the other. Whoever waits for one takes the group's turn, if nobody has it, and moves on the one
// that is first. turn guards what is running and how far it is; mu guards the queue, the planes and the counters, for a moment
// at a time, and is taken second.

// help moves what can be moved, unless somebody else is at it: then it is that one's work to see what this one would.
func (g *Group) help() {
	if !g.turn.TryLock() {
		return
	}
	g.move()
	g.turn.Unlock()
}

// move is help with the turn.
func (g *Group) move() {
	for g.step() {
	}
	g.moveMessages()
	g.closeOld()
}

// step moves the first collective, and tells whether the next may be looked at.
func (g *Group) step() bool {
	w, may, err := g.first()
	switch {
	case err != nil:
		return g.end(w, err)
	case !may:
		return false
	case w.op == nil:
		runs, err := g.begin(w)
		if err != nil {
			return g.end(w, err)
		}
		if !runs {
			return false
		}
	}
	done, err := w.op.Poll()
	if err != nil {
		err = g.failed(w, err)
		return err != nil && g.end(w, err)
	}
	return done && g.end(w, nil)
}

// first is the collective that is first in the queue, and whether it may move: not while a proposed view waits to know how far this
// rank is and may have it run again. If it belongs to a newer view than the one that it runs in, or that one was given up, it does not
// run there any more.
func (g *Group) first() (w *Work, may bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.queue) == 0 {
		return nil, false, nil
	}
	w = g.queue[0]
	if g.stopped != nil || w.given != nil {
		return w, false, cmp.Or(w.given, g.stopped)
	}
	if len(g.planes) > 1 && g.planes[1].view.StartSeq <= w.seq || !slices.Contains(g.planes, w.plane) {
		w.op = nil // its channels are closed, or soon will be
	}
	return w, !g.frozen && (!g.held || w.op != nil), nil
}

// end takes a collective out of the queue. Then, and not before, its caller may use it for another one.
func (g *Group) end(w *Work, err error) bool {
	g.mu.Lock()
	g.queue[0] = nil
	if g.queue = g.queue[1:]; len(g.queue) == 0 {
		g.queue = g.room[:0]
	}
	g.done = max(g.done, w.seq+1)
	g.begun = max(g.begun, g.done)
	g.mark = newMark()
	g.mu.Unlock()
	if cap(w.saved) > cap(g.spare) {
		g.spare = w.saved[:0]
	}
	w.finish(w.res, err)
	return true
}

// begin has a collective run in the plane that it belongs to, or says that it has to wait for one, or why it cannot run.
func (g *Group) begin(w *Work) (runs bool, err error) {
	p, err := g.planeOf(w)
	if err != nil || p == nil {
		return false, err
	}
	if w.plane != nil && w.plane != p {
		w.restore()
		w.res.Failed = p.lacks(w.plane)
	}
	a, err := p.args(w)
	if err != nil {
		g.resync(p, err) // others may wait for this rank
		return false, err
	}
	for _, rank := range p.view.Absent.Ranks() { // active to its user, and not there
		w.res.Failed.Set(rank)
	}
	w.plane, w.lost = p, nil
	if g.cfg.Retry {
		w.save(a)
	}
	w.op = p.comm.Start(a)
	return true, nil
}

// planeOf is the plane that a collective runs in; nil and no error if it has to wait for another one.
func (g *Group) planeOf(w *Work) (*plane, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case len(g.planes) > 0:
	case g.leaving:
		return nil, ErrClosed
	default:
		return nil, ErrInactive
	}
	for len(g.planes) > 1 && g.planes[1].view.StartSeq <= w.seq {
		g.dropPlane()
	}
	p := g.planes[0]
	switch {
	case w.seq < p.view.StartSeq, p.broken != nil && len(g.planes) > 1: // the others have gone on without this collective
		return nil, g.lost(w, p)
	case p.broken != nil && g.cfg.Failures == Deferred:
		return nil, g.lost(w, p)
	case p.broken != nil:
		return nil, nil
	}
	g.begun = max(g.begun, w.seq+1)
	return p, nil
}

// lost is the error of a collective that was not carried through in its plane, and is not run in a later one.
func (g *Group) lost(w *Work, p *plane) error {
	from, why := w.plane, w.lost
	if from == nil {
		from = p
	}
	last := g.planes[len(g.planes)-1]
	if why == nil && from == last {
		why = from.broken // nobody has gone on yet
	}
	if why == nil {
		why = errMovedOn
	}
	ranks := last.lacks(from).Ranks()
	var down *collective.DownError
	if len(ranks) == 0 && errors.As(why, &down) {
		ranks = []int{from.ranks[down.Member]}
	}
	return &PeerError{g.cfg.ID, w.call.String(), w.seq, ranks, why}
}

// failed is what a collective ends with that has failed in its plane. One that was left in the lurch does not end, but waits for a view
// without those who are gone, to run there or to fail.
func (g *Group) failed(w *Work, err error) error {
	p := w.plane
	w.op, w.lost = nil, err
	var mismatch *collective.MismatchError
	var down *collective.DownError
	switch {
	case errors.As(err, &mismatch):
		g.resync(p, err)
		return g.mismatch(p, mismatch)
	case errors.Is(err, collective.ErrArgs):
		g.resync(p, err)
		return wrong("%s: %v", w.call.String(), err)
	case errors.As(err, &down) && !g.w.node.Connected(p.view.Members[down.Member].Global, p.view.Members[down.Member].Incarnation):
		p.broken = err // whoever has lost the connection has told the members
	default: // the peer is there, but not what leads to it: it has gone on, or a lane has failed
		g.resync(p, err)
	}
	return nil
}

// mismatch is what members found, in ranks. What others have found about this rank comes to it as a notice.
func (g *Group) mismatch(p *plane, e *collective.MismatchError) error {
	rank, mine, theirs := p.ranks[e.Member], e.Want, e.Got
	if rank == g.rank {
		rank, mine, theirs = -1, theirs, mine
	}
	mine.Seq -= p.base
	theirs.Seq -= p.base
	return &MismatchError{Group: g.cfg.ID, Rank: rank, Seq: mine.Seq, Mine: mine.String(), Theirs: theirs.String()}
}

// resync asks for a view of the same ranks with channels of its own: these may be out of step, unless this rank is alone.
func (g *Group) resync(p *plane, err error) {
	if p.mesh != nil {
		p.broken = err
		g.members.Resync(p.view.Epoch, err)
	}
}

// save keeps the operand of a call in place, which would be gone when it is run again. restore brings it back.
func (w *Work) save(a collective.Args) {
	if own := w.overwritten(a); len(own) > 0 && len(w.saved) == 0 {
		w.saved, w.g.spare = w.g.spare[:0], nil
		w.saved = append(w.saved, own...)
	}
}

func (w *Work) restore() {
	if len(w.saved) > 0 {
		copy(w.call.Dst, w.saved)
	}
}

// overwritten is the operand, or the part of it, that has the same memory as the result of a reduction.
func (w *Work) overwritten(a collective.Args) []byte {
	if len(w.call.Dst) == 0 || a.Kind == collective.Broadcast {
		return nil
	}
	for _, src := range a.Src {
		if len(src) > 0 && &src[0] == &w.call.Dst[0] {
			return src
		}
	}
	return nil
}

// dropPlane takes away the first plane: nothing runs there any more. It holds mu.
func (g *Group) dropPlane() {
	g.old = append(g.old, g.planes[0])
	g.planes = g.planes[1:]
}

// dropPlanes takes away all planes. It holds mu.
func (g *Group) dropPlanes() {
	g.old = append(g.old, g.planes...)
	g.planes = nil
}

// closeOld closes planes where nothing runs any more, and nothing will: peers that still wait there are told so.
func (g *Group) closeOld() {
	g.mu.Lock()
	for len(g.planes) > 1 && (len(g.queue) == 0 || g.queue[0].op == nil) &&
		(g.planes[0].broken != nil || g.planes[1].view.StartSeq <= g.done) {
		g.dropPlane()
	}
	old := g.old
	g.old = nil
	g.mu.Unlock()
	for _, p := range old {
		p.close()
	}
}
