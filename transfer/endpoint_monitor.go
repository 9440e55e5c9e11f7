package transfer

import (
	"log/slog"
	"runtime"
	"time"
)

// reclaimEvery is the monitor's clock: how old the last reclaim may become, and a port's state.
const reclaimEvery = time.Second

// monitor is the clock of a NIC. It runs on a CPU next to the NIC until the store is closed.
func (s *EndpointStore) monitor() {
	defer s.wg.Done()
	runtime.LockOSThread() // and never unlock: a thread that was pinned is no use to others, it ends with this goroutine
	if err := pinToNode(sysNodes, s.nic.NUMANode()); err != nil {
		s.cfg.Logger.Info("transfer: a NIC's monitor runs anywhere", slog.String("nic", s.name), slog.Any("error", err))
	}
	tick, stop := every(reclaimEvery)
	defer stop()
	events := s.nic.Events()
	for {
		select {
		case <-tick:
			s.tick()
		case <-s.signal.c:
			s.reclaim()
			s.mend()
		case event, ok := <-events:
			if !ok {
				events = nil // the port's state is asked for every second
				continue
			}
			s.event(event)
		case <-s.stop:
			return
		}
	}
}

// tick is what is done every second, whatever else happens or does not.
func (s *EndpointStore) tick() {
	s.reclaim()
	s.report()
	s.mend()
	s.lookAtPort()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fails.expire(s.cfg.Now())
	// The NIC may have more again than it had: others gave theirs back. One attempt a second finds out.
	s.limit = min(s.cfg.QPBudget, s.limit+max(s.cfg.QPsPerEndpoint, (s.cfg.QPBudget-s.limit)/8))
	s.unblock()
}

// lookAtPort has a NIC whose port carries be active, and one whose port does not be down.
func (s *EndpointStore) lookAtPort() {
	port, err := s.nic.PortState()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil && s.state == NICActive:
		s.leave(NICDown, err)
	case port == PortDown && s.state == NICActive:
		s.leave(NICDown, errPort)
	case err == nil && port == PortActive && s.state == NICDown:
		s.use()
	}
}

// event takes note of what has happened to the port. Endpoints from before it are stale: their peers may have given up
// theirs meanwhile.
func (s *EndpointStore) event(event PortEvent) {
	s.mu.Lock()
	s.cfg.Logger.Info("transfer: an event of a NIC", slog.String("nic", s.name), slog.Int("event", int(event)))
	switch {
	case s.state == NICClosed:
	case event == EventFatal:
		if s.state != NICFenced || !s.mustReset {
			s.fence(true, errFatal)
		}
	case s.state == NICFenced:
	case event == EventPortDown:
		s.leave(NICDown, errPort)
	case event == EventPortUp:
		s.leave(NICDown, errPortUp)
	}
	s.mu.Unlock()
	if event == EventPortUp {
		s.lookAtPort()
	}
	s.mend()
}
