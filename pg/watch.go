package pg

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"larder/pg/member"
)

const (
	// watchTime is how often calls are looked at that do not end.
	watchTime = time.Second
	// askTime is how long a process may take to say how far it is: a goroutine of its own answers, whatever its calls do.
	askTime = 2 * time.Second
)

// mark is when the first collective has last been seen to move, and how far it was.
type mark struct {
	at       time.Time // it has moved
	progress uint64
	first    time.Time // it became the first
	asking   bool
	late     []int
}

func newMark() mark {
	now := moment()
	return mark{at: now, first: now}
}

// watch looks at all groups once in a while.
func (w *World) watch() {
	tick, stop := every(watchTime)
	defer stop()
	for {
		select {
		case <-w.ctx.Done():
			return
		case <-tick:
		}
		w.mu.Lock()
		groups := slices.Clone(w.groups)
		w.mu.Unlock()
		for _, g := range groups {
			g.look()
		}
	}
}

// look asks the others how they are if the first collective has not moved for long, and gives it up when its time is over.
func (g *Group) look() {
	if !g.turn.TryLock() {
		return // it moves
	}
	defer g.turn.Unlock()
	w, ask, over := g.overdue()
	switch {
	case over:
		if w.plane != nil {
			g.resync(w.plane, w.given)
		}
		g.bell.Ring()
	case ask:
		p, seq := w.plane, w.seq
		g.wg.Go(func() { g.probe(p, seq) })
	}
}

// overdue tells whether it is time to ask after the first collective, or to give it up.
func (g *Group) overdue() (w *Work, ask, over bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.queue) == 0 {
		return nil, false, false
	}
	w, m := g.queue[0], &g.mark
	if w.op != nil {
		if p := w.plane.comm.Progress(); p != m.progress {
			m.progress, m.at, m.late = p, moment(), nil
		}
	}
	if w.given == nil && since(m.first) > g.cfg.Timeout {
		w.given = &TimeoutError{g.cfg.ID, w.call.String(), w.seq, m.late, g.cfg.Timeout}
		return w, false, true
	}
	ask = w.op != nil && !m.asking && since(m.at) > g.w.cfg.Deadline
	m.asking = m.asking || ask
	return w, ask, false
}

// progress is a question, and its answer: of a collective, and of how many a process has been called for.
type progress struct {
	Group  string `json:"group"`
	Called uint64 `json:"called"`
}

// probe asks all members of a plane how far they are. Who does not answer is suspected, who has not come to this collective is late.
func (g *Group) probe(p *plane, seq uint64) {
	ask, _ := json.Marshal(progress{Group: g.cfg.ID}) //nolint:errchkjson // it has nothing that could fail
	var mu sync.Mutex
	var late []int
	var wg sync.WaitGroup
	for i, m := range p.view.Members {
		if m.Rank == g.rank {
			continue
		}
		wg.Go(func() {
			called, err := g.ask(m.Global, ask)
			switch {
			case g.ctx.Err() != nil:
			case err != nil:
				g.members.Suspect(m.Rank, m.Incarnation, err)
				p.mesh.Fail(i, err)
			case called <= seq:
				mu.Lock()
				defer mu.Unlock()
				late = append(late, m.Rank)
			}
		})
	}
	wg.Wait()
	slices.Sort(late)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mark.asking, g.mark.at, g.mark.late = false, moment(), late
	if len(late) > 0 {
		g.w.cfg.Logger.Warn("pg: ranks are late for a collective", slog.String("group", g.cfg.ID),
			slog.Uint64("seq", seq), slog.Any("ranks", late))
	}
}

func (g *Group) ask(global int, ask []byte) (called uint64, err error) {
	ctx, cancel := context.WithTimeout(g.ctx, askTime)
	defer cancel()
	b, err := g.w.node.Ask(ctx, global, ask)
	if err != nil {
		return 0, err
	}
	var a progress
	if err := json.Unmarshal(b, &a); err != nil || a.Group != g.cfg.ID {
		return 0, errors.Join(errNotThere, err)
	}
	return a.Called, nil
}

// answer says how far this process is.
func (w *World) answer(_ int, ask []byte) []byte {
	var a progress
	if json.Unmarshal(ask, &a) != nil {
		return nil
	}
	w.mu.Lock()
	i := slices.IndexFunc(w.groups, func(g *Group) bool { return g.cfg.ID == a.Group })
	var g *Group
	if i >= 0 {
		g = w.groups[i]
	}
	w.mu.Unlock()
	if g == nil {
		return nil
	}
	g.mu.Lock()
	a.Called = g.next
	g.mu.Unlock()
	b, _ := json.Marshal(a) //nolint:errchkjson // as above
	return b
}

// stop has calls fail from now on; false if they do already for good.
func (g *Group) stop(err error) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if errors.Is(g.stopped, ErrClosed) {
		return false
	}
	g.stopped = err
	g.bell.Ring()
	return true
}

// endCalls ends all calls, when there will be no more.
func (g *Group) endCalls(err error) {
	g.turn.Lock()
	defer g.turn.Unlock()
	for g.step() {
	}
	for _, w := range g.messages {
		w.finish(Result{}, err)
	}
	g.messages = nil
	g.port.Close()
}

var _ member.Hooks = (*Group)(nil)
