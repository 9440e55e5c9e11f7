package transfer

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// retire takes an endpoint out of the map, if it is there, and has its queue pairs destroyed once nothing is outstanding
// on them. The mu is held.
func (s *EndpointStore) retire(e *Endpoint) {
	e.active.Store(false)
	if s.live[e.peer] == e {
		delete(s.live, e.peer)
		s.policy.remove(e)
	}
	if s.served[e.peer] == e {
		delete(s.served, e.peer)
		s.order.remove(e)
	}
	e.since = s.cfg.Now()
	if s.waiting.n < s.cfg.MaxWaiting {
		s.waiting.push(e)
	} else {
		s.parked.push(e)
	}
	s.want()
	s.signal.raise()
}

// want has signals raised if somebody waits for what the monitor does. The mu is held.
func (s *EndpointStore) want() {
	s.signal.wanted.Store(s.waiting.n > 0 || s.parked.n > 0 || len(s.blocked)+len(s.refused) > 0 || s.state == NICFenced)
}

// reclaim takes the queue pairs of retired endpoints to ERR, destroys those on which nothing is outstanding, and gives
// their room to those who wait for it. Its cost is that of the endpoints that are retired; the NIC's calls are made without
// the mu.
func (s *EndpointStore) reclaim() {
	s.reclaiming.Lock()
	defer s.reclaiming.Unlock()
	s.mu.Lock()
	s.batch = s.parked.appendTo(s.waiting.appendTo(s.batch[:0]))
	s.mu.Unlock()
	for _, e := range s.batch {
		s.reclaimOne(e)
	}
	clear(s.batch) // what is destroyed is garbage
	if cap(s.batch) > 2*s.cfg.MaxWaiting {
		s.batch = nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastReclaim.Store(s.cfg.Now())
	s.fillWaiting()
	s.unblock()
}

func (s *EndpointStore) reclaimOne(e *Endpoint) {
	if !e.erred {
		if e.outstanding() > 0 && s.cfg.Now() < e.drainUntil {
			return
		}
		if err := e.toError(); err != nil {
			s.cfg.Logger.Warn("transfer: a queue pair does not go to ERR", slog.String("nic", s.name), slog.String("peer", e.peer),
				slog.Any("error", err))
			return
		}
		e.erred = true
	}
	if e.outstanding() > 0 {
		return
	}
	n, err := e.destroy()
	if s.destroyed(e, n, err) && e.link != nil {
		e.link.Gone()
	}
}

// destroyed takes note that n more queue pairs of an endpoint are, and reports whether all are.
func (s *EndpointStore) destroyed(e *Endpoint, n int, err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.destroyed += n
	s.qps -= n
	s.count.qpsDestroyed += uint64(n) //nolint:gosec // few
	if e.evicted {
		s.evicting -= n
	}
	if err != nil {
		s.cfg.Logger.Warn("transfer: a queue pair cannot be destroyed", slog.String("nic", s.name), slog.String("peer", e.peer),
			slog.Any("error", err))
		return false
	}
	e.list.remove(e)
	s.unblock()
	return true
}

// fillWaiting moves retired endpoints that had no place in the waiting list to it. The mu is held.
func (s *EndpointStore) fillWaiting() {
	for s.parked.n > 0 && s.waiting.n < s.cfg.MaxWaiting {
		e := s.parked.oldest
		s.parked.remove(e)
		s.waiting.push(e)
	}
}

// unblock promises room to those who wait for it, in order, as far as there is. The mu is held.
func (s *EndpointStore) unblock() {
	s.fillWaiting()
	for _, line := range []*waitLine{&s.blocked, &s.refused} {
		for len(*line) > 0 && s.promise((*line)[0]) {
			close((*line)[0].room)
			(*line)[0] = nil
			*line = (*line)[1:]
		}
	}
	s.want()
}

// report looks for retired endpoints that do not drain: it reports them, and fences the NIC off if they take too long.
func (s *EndpointStore) report() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, found, late := s.cfg.Now(), 0, false
	var first *Endpoint
	for _, list := range []*endpointList{&s.waiting, &s.parked} {
		for e := list.oldest; e != nil; e = e.next {
			age := time.Duration(now - e.since)
			late = late || age >= s.cfg.FenceAfter
			if age < s.cfg.StuckAfter || e.stuck {
				continue
			}
			e.stuck = true
			if found++; found == 1 {
				first = e
			}
		}
	}
	if found > 0 {
		s.count.stuck += uint64(found)
		s.cfg.Logger.Warn("transfer: retired endpoints do not drain", slog.String("nic", s.name), slog.Int("endpoints", found),
			slog.String("first_peer", first.peer), slog.Int("its_outstanding", first.outstanding()))
	}
	if late && s.state != NICFenced && s.state != NICClosed {
		s.fence(false, errStuck)
	}
}

var (
	errStuck  = errors.New("a retired queue pair does not drain")
	errFatal  = errors.New("the device has failed")
	errPort   = errors.New("its port is down")
	errPortUp = errors.New("its port was down")
)

// fence ends the use of a NIC until it has drained or was reset. The mu is held.
func (s *EndpointStore) fence(mustReset bool, why error) {
	s.cfg.Logger.Error("transfer: a NIC is fenced off", slog.String("nic", s.name), slog.Any("error", why),
		slog.Int("queue_pairs", s.qps), slog.Int("waiting", s.waiting.n+s.parked.n))
	s.count.fences++
	s.fencedAt, s.resetAt, s.pause, s.mustReset = s.cfg.Now(), 0, 0, mustReset
	s.leave(NICFenced, why)
}

// leave takes the NIC out of use: all endpoints are retired, and whoever connects is told. The mu is held.
func (s *EndpointStore) leave(to NICState, why error) {
	s.state, s.why = to, why
	s.endEra(s.notActive())
	s.retireAll()
}

func (s *EndpointStore) retireAll() {
	for _, e := range s.live {
		s.count.deletions++
		s.retire(e)
	}
	for _, e := range s.served {
		s.count.deletions++
		s.retire(e)
	}
	s.want()
}

// use has the NIC connect again. The mu is held.
func (s *EndpointStore) use() {
	s.cfg.Logger.Info("transfer: a NIC is active again", slog.String("nic", s.name))
	s.state, s.why = NICActive, nil
	s.era, s.endEra = context.WithCancelCause(context.Background())
}

const (
	// resetTimeout bounds one attempt to reset a NIC: a firmware takes some seconds.
	resetTimeout = 30 * time.Second
	// resetPause is the first pause between attempts, and doubles up to resetPauseMost.
	resetPause     = time.Second
	resetPauseMost = time.Minute
)

// mend ends a fence: without a reset if all has drained after all, else with one, as soon as nobody connects and the
// endpoints that can drain have had their time.
func (s *EndpointStore) mend() {
	s.mu.Lock()
	now := s.cfg.Now()
	if s.state != NICFenced || len(s.peers)+len(s.guests) > 0 || now < s.resetAt {
		s.mu.Unlock()
		return
	}
	if s.qps == 0 && !s.mustReset {
		s.leftFence()
		s.mu.Unlock()
		return
	}
	wait := !s.mustReset && now-s.fencedAt < int64(s.cfg.StuckAfter)
	s.mu.Unlock()
	if wait {
		return
	}
	if err := s.resetNIC(); err != nil {
		s.mu.Lock()
		s.pause = min(max(2*s.pause, resetPause), resetPauseMost)
		s.resetAt = s.cfg.Now() + int64(s.pause)
		s.mu.Unlock()
		s.cfg.Logger.Error("transfer: a NIC cannot be reset", slog.String("nic", s.name), slog.Any("error", err))
		return
	}
	s.mu.Lock()
	s.leftFence()
	s.mu.Unlock()
	s.lookAtPort()
}

// leftFence leaves it to the next look at the port whether the NIC is active. The mu is held.
func (s *EndpointStore) leftFence() {
	s.state, s.why, s.mustReset = NICDown, errPort, false
}

// resetNIC resets a NIC to which nobody connects, and forgets its endpoints, which are all retired.
//
//nolint:contextcheck,nolintlint // nobody's context but its own: not for its callers in other packages to pass
func (s *EndpointStore) resetNIC() error {
	s.reclaiming.Lock()
	defer s.reclaiming.Unlock()
	s.mu.RLock()
	all := s.parked.appendTo(s.waiting.appendTo(nil))
	s.mu.RUnlock()
	for _, e := range all { // nobody is in the middle of posting afterwards
		if !e.erred {
			_ = e.toError() // the reset does what it could not
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), resetTimeout)
	defer cancel()
	if err := s.nic.Reset(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	s.count.resets++
	s.count.qpsReset += uint64(s.qps) //nolint:gosec // a count
	for _, e := range all {
		e.list.remove(e)
	}
	s.qps, s.evicting, s.limit = 0, 0, s.cfg.QPBudget
	s.want()
	s.mu.Unlock()
	for _, e := range all {
		for _, q := range e.queues {
			if s.cfg.Lost != nil && q.depth.Outstanding() > 0 {
				s.cfg.Lost(q.depth)
			}
		}
		if e.link != nil {
			e.link.Gone()
		}
	}
	return nil
}
