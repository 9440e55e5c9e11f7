package transfer

import "time"

// A READ that waits on a rail which has gone quiet is asked for once more, over another rail, into memory of the engine's own.
// If that comes first, what the first attempt still brings is thrown away as it arrives, and only then are the bytes copied
// and the request ended: nothing lands later. A WRITE is never hedged: its first attempt could land after it has ended, over
// what was written since, and to know better is to wait for the peer's confirmation.
const (
	// hedgeAfter is how long a slice waits before it is asked for again: much longer than any network takes.
	hedgeAfter = 100 * time.Millisecond
	// hedgeFactor is how many times longer than on another rail it must have waited.
	hedgeFactor = 8
	// hedgesAtOnce bounds what one connection has asked for again at one time.
	hedgesAtOnce = 64
)

// hedge asks again for READs that wait too long on a connection, if nothing is queued and another rail may carry them.
func (l *lane) hedge(c *connection, now int64) {
	l.mu.Lock()
	wait := int64(0)
	for _, r := range l.rails {
		if r != c.rail && len(r.conns) > 0 && r.carries.Load() && now >= r.pausedUntil {
			wait = max(int64(hedgeAfter), hedgeFactor*r.latency.load())
		}
	}
	busy := l.queued > 0
	l.mu.Unlock()
	if wait == 0 || busy || l.storage { // a disk that is slow does not get faster by more work
		return
	}
	for _, w := range c.waiting(now - wait) {
		l.askAgain(c, &w)
	}
}

// quiet is a READ that waits, by its number on its connection, with what it takes to ask for it again: it may end at any time.
type quiet struct {
	seq      uint64
	request  Request
	length   uint64
	deadline int64
}

// waiting are the READs of a connection that were handed to it before a time and have not been asked for again.
func (c *connection) waiting(since int64) (all []quiet) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for seq := c.head + 1; seq <= c.tail && len(all) < hedgesAtOnce; seq++ {
		s := c.ring[seq%windowSlices]
		if s.request.Op != Read || s.orphan || s.hedged || s.began > since || seq == c.landing {
			continue
		}
		s.hedged = true
		r := Request{Op: Read, Segment: s.peer, Buffer: s.request.Buffer, Offset: s.offset()}
		all = append(all, quiet{seq, r, s.length, s.batch.deadline})
	}
	return all
}

// askAgain reads what a slice reads into other memory, over other rails.
func (l *lane) askAgain(c *connection, w *quiet) {
	mem, seq := make([]byte, w.length), w.seq
	w.request.Local = mem
	b := l.seg.e.newBatch([]Request{w.request}, 1, w.deadline)
	b.own = true
	b.then = func() {
		if !b.failed.Load() {
			c.overtake(seq, mem)
		}
	}
	b.cut()
	b.slices[0].avoid, b.slices[0].tried = 1<<c.rail.index, ^uint64(0)
	l.push(&b.slices[0], &b.slices[0])
}

// overtake ends a slice with bytes that came another way, unless its own are landing already.
func (c *connection) overtake(seq uint64, mem []byte) {
	c.mu.Lock()
	at := seq % windowSlices
	s := c.ring[at]
	if seq <= c.head || s == nil || s.orphan || seq == c.landing {
		c.mu.Unlock()
		return
	}
	c.ring[at] = &slice{request: &Request{Op: Read}, length: s.length, began: s.began, orphan: true}
	c.mu.Unlock()
	err := copyPieces(Read, mem, s.pieces(nil), 0)
	c.rail.lane.seg.e.counters.hedged.Add(1)
	s.end(err)
}
