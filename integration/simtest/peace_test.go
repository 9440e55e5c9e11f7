package simtest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"larder/integration/simtest/model"
	"larder/meta"
)

// Bounds of the second phase.
const (
	electionBound = 3 * 2 * electionSpan // a leader within three election timeouts, jitter doubles each
	peaceBound    = 120 * sec            // everything that is pending comes to an end
)

// peace ends all faults and checks that the cluster comes to rest.
func (s *sim) peace() {
	s.quiet = true
	s.trace("peace", 0, 0)
	for _, l := range s.net.links {
		l.cut, l.clogged, l.slowTo = 0, 0, 0
	}
	s.linkSlowTo = 0
	for _, m := range s.sorted() {
		m.disk.full(false)
		m.disk.mu.Lock()
		m.disk.crashIn, m.disk.failIn, m.disk.misreadOf = [2]int{}, 0, 0
		m.disk.mu.Unlock()
		m.slowTo, m.lagging = 0, false
		if m.life != nil {
			m.life.resume()
		}
		m.restart()
	}
	for i, c := range s.clients {
		if c == nil || c.life.dead {
			s.newClient(i)
			continue
		}
		c.deaf, c.silentTo = false, 0
		c.life.resume()
		if x := c.conn; x != nil && (x.up.cut || x.server != nil && x.server.down.cut) {
			x.lost("healed")
		}
	}
	for i, c := range s.marus {
		if c == nil || c.life.dead {
			s.newMaru(i)
		} else {
			c.life.resume()
		}
	}
	for i, n := range s.nodes {
		if n == nil || n.life.dead {
			s.newNode(i)
			continue
		}
		n.life.resume()
		if x := n.conn; x != nil && (x.up.cut || x.server != nil && x.server.down.cut) {
			x.lost("healed")
		}
	}
	s.await("a leader is elected", electionBound+2*sec, func() bool { return s.leader() != nil })
	s.await("the operator is done", peaceBound, func() bool { return !s.operator.busy() })
	s.await("all operations end", peaceBound, s.idle)
	s.await("devices are in service", peaceBound, s.devicesReady)
	s.await("clients are connected", peaceBound, s.connected)
	s.await("tasks are over", peaceBound, s.tasksOver)
	s.readAll()
	s.await("clients know their pages", peaceBound, s.certain)
	s.await("replicas agree", peaceBound, s.agree)
	if m, ok := s.log.model.(*model.Model); ok && s.violation == nil {
		if err := m.CompareState(s.log.state); err != nil {
			s.fail("model", "at the end: %v", err)
		}
	}
	s.compareBooks()
}

// await lets the cluster run until something holds.
func (s *sim) await(what string, bound int64, cond func() bool) {
	end := s.now + bound
	for s.violation == nil && !cond() {
		if s.now >= end {
			s.fail("liveness", "%s: not within %d s after the faults%s", what, bound/sec, s.stuck())
			return
		}
		s.until(min(end, s.now+100*ms))
	}
}

// idle says that no operation is in progress, and none is being undone.
func (s *sim) idle() bool {
	for c := range s.processes() {
		if c.busy > 0 || c.pool.asking > 0 || c.sess == nil || len(c.sess.open) > 0 {
			return false
		}
	}
	return !slices.ContainsFunc(s.marus, func(c *maruClient) bool { return c.busy > 0 })
}

func (s *sim) connected() bool {
	for c := range s.processes() {
		if c.conn == nil || c.sess == nil || c.sess.ended || c.node != nil && (c.node.attached != c.conn || c.conn.to != s.leader()) {
			return false // clients find out when they read
		}
	}
	return true
}

// certain says that no client waits for a HANDSHAKE to tell which of its pages are in use.
func (s *sim) certain() bool {
	for c := range s.processes() {
		if c.conn == nil || c.pool.doubtful {
			return false
		}
	}
	return true
}

// tasksOver says that all tasks have come to their end: none is lost, whoever led when it was made.
func (s *sim) tasksOver() bool {
	for _, t := range s.log.state.Tasks() {
		if t.State < meta.TaskFinished {
			return false
		}
	}
	return true
}

func (s *sim) devicesReady() bool {
	for _, d := range s.devices {
		if d.lost || d.mem.generation == 0 {
			return false
		}
	}
	return true
}

// readAll reads every key once more.
func (s *sim) readAll() {
	left := 0
	for i, key := range s.keys {
		c := s.clients[i%len(s.clients)]
		left++
		c.later(func(p *proc) {
			c.get(p, key)
			left--
		})
	}
	for _, key := range s.maruKeys {
		c := s.marus[0]
		left++
		c.later(func(p *proc) {
			c.read(p, key, false)
			left--
		})
	}
	s.await("every key is read", peaceBound, func() bool { return left == 0 })
}

// agree says that all members have applied the same.
func (s *sim) agree() bool {
	for _, m := range s.sorted() {
		if !m.up() || m.at != s.log.last() {
			return false
		}
	}
	return true
}

// compareBooks compares what clients think of their pages with what the index says: no page is leaked.
func (s *sim) compareBooks() {
	if s.violation != nil {
		return
	}
	for c := range s.processes() {
		for _, r := range c.pool.list {
			info, ok := s.log.state.Region(regionID(r.id))
			if !ok || info.Epoch != r.epoch || uint64(info.Owner) != c.sess.id {
				continue // a REVOKE is on its way
			}
			there := make([]bool, len(r.state))
			occupied := s.log.state.Occupied(regionID(r.id))
			for i := 0; i+1 < len(occupied); i += 2 {
				for j := occupied[i] / pageSize; j < (occupied[i]+occupied[i+1])/pageSize; j++ {
					there[j] = true
				}
			}
			for i, is := range there {
				if is && r.state[i] == pageFree {
					s.fail("books", "page %d of region %d is occupied, and its owner thinks that it is free", i, r.id)
				}
				if !is && r.state[i] == pageUsed && (s.mix.push || c.node != nil) {
					s.fail("books", "page %d of region %d is free, and its owner was not told", i, r.id)
				}
			}
		}
	}
}

// stuck describes what has not come to an end.
func (s *sim) stuck() string {
	var b strings.Builder
	for c := range s.processes() {
		fmt.Fprintf(&b, "\nclient %d: busy %d, asking %d, connected %v, allocating %v", c.n, c.busy, c.pool.asking, c.conn != nil, c.allocating)
		if ss := c.sess; ss != nil {
			fmt.Fprintf(&b, ", session %d ended %v, alive %v, unanswered %v", ss.id, ss.ended, ss.alive(c.clock.Boottime()),
				slices.Sorted(maps.Keys(ss.open)))
		}
		for _, r := range c.pool.list {
			fmt.Fprintf(&b, ", region %d %v copies %d", r.id, r.state, r.copies)
		}
		for _, r := range c.pool.dying {
			fmt.Fprintf(&b, ", dying region %d copies %d", r.id, r.copies)
		}
		if x := c.conn; x != nil {
			fmt.Fprintf(&b, ", to member %d, calls %d", x.to.id, len(x.calls))
		}
	}
	for _, m := range s.sorted() {
		if m.up() && m.core != nil {
			st := m.core.Status()
			fmt.Fprintf(&b, "\nmember %d: %s, term %d, applied %d of %d, paused %v", m.id, st.State, st.Term, st.Applied, st.Commit, m.life.paused)
		}
	}
	for _, r := range s.log.state.Regions() {
		fmt.Fprintf(&b, "\nregion %d: %v of session %d (%s), for %d, %d live, %d pinned", r.ID, r.State, r.Owner, r.Instance, r.For, r.Live, r.Pinned)
	}
	return b.String() + s.stuckMaru()
}
