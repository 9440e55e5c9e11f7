package maru

import (
	"context"
	"time"
)

const (
	// KeepInterval is how often a member that does not lead tells the leader of the clients that it has. The time after which
	// a client counts as gone must be several times as long.
	KeepInterval = 2 * time.Second
	// keepTimeout is for how long a leader may take to answer that, and a request of the client waits meanwhile.
	keepTimeout = 500 * time.Millisecond
)

// keep has the leader know of each client of this member, also of one that asks for nothing: what a client owns is not to be
// had as long as the client has a connection to any member.
func (s *Server) keep() {
	if !s.started() {
		return
	}
	for pause(s.ctx, KeepInterval) {
		if s.index.Term() != 0 || s.index.Leader() == "" {
			continue
		}
		s.mu.Lock()
		conns := make([]*conn, 0, len(s.conns))
		for c := range s.conns {
			conns = append(conns, c)
		}
		s.mu.Unlock()
		for _, c := range conns {
			if !c.tell() {
				break // the others would wait as long for it
			}
		}
	}
}

// tell has the link to the leader made, and tells it which instance the client is. It returns false if the leader did not
// answer.
func (c *conn) tell() bool {
	if c.member || !c.linking.TryLock() {
		return true // the client is telling it something itself
	}
	defer c.linking.Unlock()
	if !c.connect(now().Add(keepTimeout)) {
		return false
	}
	l := c.link
	ctx, cancel := context.WithTimeout(c.ctx, keepTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.c.Close() })()
	name := ""
	if p := c.client.Instance.Load(); p != nil {
		name = *p
	}
	b, mark := beginReply(nil, Header{Type: Handshake})
	err := l.c.Write(nil, endReply(appendStr(appendStr(append(b, 0x81), "instance_id"), name), mark))
	if err == nil {
		_, err = l.c.Read()
	}
	if err != nil {
		c.unlink()
	}
	return err == nil
}

const (
	// beatInterval is how often a member looks whether it runs.
	beatInterval = 50 * time.Millisecond
	// stallAfter is how late that may be before the process counts as having been stopped meanwhile. Also for so long after
	// it went on, what comes may have come before.
	stallAfter = 500 * time.Millisecond
)

// stall is a time during which the process did not run.
type stall struct{ from, to time.Time }

// watch notices when the process was stopped, by a signal, its host, or for want of a processor.
func (s *Server) watch() {
	last := now()
	for pause(s.ctx, beatInterval) {
		t := now()
		if t.Sub(last) > stallAfter {
			s.stalled.Store(&stall{last, t})
		}
		s.beat.Store(&t)
		last = t
	}
}

// since is when a message can have arrived that was waited for from before on, and is there now: it cannot be told from one
// that came while the process was stopped.
func (s *Server) since(before, now time.Time) time.Time {
	if beat := *s.beat.Load(); now.Sub(beat) > stallAfter {
		return beat
	}
	if x := s.stalled.Load(); x != nil && before.Before(x.to) && now.Sub(x.to) < stallAfter {
		return x.from
	}
	return now
}
