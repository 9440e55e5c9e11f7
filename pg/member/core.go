package member

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// core is one group as one process sees it: a state machine without clock, goroutine or I/O. It is told of changes of the store,
// of what became of its own writes, of what the data plane sees and of calls, each with the time; what is to be done then lies in
// outs.
//
// Whatever it does follows from the mirror of the store's records and the time since they became as they are; what else it keeps is
// what this process is to say in its own row. A write whose fate is unknown is read back before another one is tried.
type core struct {
	cfg  coreConfig
	spec spec
	now  time.Duration
	outs []output
	wake time.Duration // when something is to be done without any input; never, if 0
	call int           // ids of calls

	// The mirror.
	rows      map[int]*row
	rowRev    map[int]uint64 // newest revision known of each row, there or not
	rec       record
	recSince  time.Duration // when rec became what it is
	viewFloor uint64        // newest revision known of it, there or not
	rowWrite  write         // of our row
	viewWrite write         // of the view record

	// What this process has to say.
	links   map[int]link
	joining bool   // it wants to be activated
	out     uint64 // see row.Out
	ack     *ack
	resync  *resync
	sync    uint64
	seen    uint64

	// Where it stands.
	view        View   // the last one that was handed on
	member      bool   // of it
	told        uint64 // epoch of the proposal that the data plane was told of, 0 if none
	connects    bool   // by Connect
	holds       bool   // by Hold
	attached    bool   // our row is there
	isolated    bool   // the store has not confirmed us for too long
	recheck     bool   // it has again, and we look whether our row is still there
	lost        bool   // our lease has ended; announced ends that
	failures    uint64 // epoch of the last view that a failure made
	synced      uint64 // failures that Sync has told of
	takenBy     uint64 // another incarnation that has our slot
	requests    []*request
	pending     due   // what there is to do, if it is not our turn yet
	turned      bool  // pending was looked at in this step
	keep        []int // who of the view in force are to stay, if others are known to be lost; nil if not
	suspectedAt map[suspicion]time.Duration
}

type coreConfig struct {
	group       string
	rank        int // slot
	incarnation uint64
	attached    uint64 // see row
	generation  uint64
	lease       time.Duration
	table       func(v View, reports [][]byte) []byte
}

// link is the connection to a peer.
type link struct {
	incarnation uint64
	up          bool
	why         string        // it is down
	until       time.Duration // it is only a channel that could not be made: after that we try again; 0 if the connection is down
}

// due is an action, and since when it could be done.
type due struct {
	key string
	at  time.Duration
}

// write is the one request about a record that may be on its way, and what is known of the record.
type write struct {
	rev     uint64 // revision to compare with
	busy    bool
	get     bool   // it is a read
	floor   uint64 // of a read: the newest revision that was known when it began
	id      int
	unknown bool          // the last write's fate: it has to be read first
	after   time.Duration // not before
	value   []byte        // on its way, or there
}

type outKind uint8

const (
	outPut outKind = iota
	outGet
	outConnect
	outHold
	outCommit
	outAbandon
	outIsolated
	outDone
)

// output is one thing to do. Puts and gets are answered by stored, holds by held, connects by connected.
type output struct {
	kind   outKind
	id     int    // put, get, done
	key    string // within the group
	value  []byte
	rev    uint64 // put: only if the entry has this revision
	leased bool
	view   View   // connect, hold, commit
	epoch  uint64 // abandon
	resp   Response
	err    error // isolated, done
}

// Keys within a group.
const (
	keySpec = "spec"
	keyView = "view"
	keySlot = "slot/"
)

func newCore(cfg coreConfig, s spec, now time.Duration) *core {
	return &core{
		cfg: cfg, spec: s, now: now, joining: cfg.rank < s.Founders,
		rows: map[int]*row{}, rowRev: map[int]uint64{}, links: map[int]link{},
	}
}

// fate is what became of a request to the store.
type fate uint8

const (
	fateDone     fate = iota
	fateConflict      // of a put
	fateAbsent        // of a get
	fateUnknown
)

// change tells of an entry of the group. Ones that are not newer than what is known are ignored.
func (c *core) change(key string, value []byte, rev uint64, deleted bool) {
	if key == keyView {
		if rev > c.viewFloor {
			c.setView(value, rev, deleted)
		}
		return
	}
	digits, isSlot := strings.CutPrefix(key, keySlot)
	rank, err := strconv.Atoi(digits)
	if !isSlot || err != nil || rank < 0 || rank >= MaxCap || rev <= c.rowRev[rank] {
		return
	}
	c.setRow(rank, value, rev, deleted)
}

func (c *core) setView(value []byte, rev uint64, deleted bool) {
	c.viewFloor, c.viewWrite.rev, c.viewWrite.unknown = rev, rev, false
	c.recSince = c.now
	rec, err := decodeRecord(value)
	if deleted || err != nil {
		c.rec = record{Generation: c.cfg.generation, Last: c.rec.Last}
		if deleted {
			c.viewWrite.rev = 0
		}
		return
	}
	if rec.Generation != c.cfg.generation {
		rec = record{Generation: c.cfg.generation, Last: rec.Last}
	}
	c.rec = rec
}

func (c *core) setRow(rank int, value []byte, rev uint64, deleted bool) {
	c.rowRev[rank] = rev
	r, err := decodeRow(value)
	before := rank == c.cfg.rank && r.Incarnation == c.cfg.incarnation && r.Attached != c.cfg.attached
	if deleted || err != nil || r.Generation != c.cfg.generation || before {
		delete(c.rows, rank)
	} else {
		c.rows[rank] = &r
	}
	if rank != c.cfg.rank {
		return
	}
	c.rowWrite.rev, c.rowWrite.unknown = rev, false
	c.takenBy = 0
	switch {
	case deleted:
		c.rowWrite.rev, c.rowWrite.value = 0, nil
		if c.attached {
			c.leaseLost()
		}
	case before: // ours, of a membership that is over
		c.rowWrite.value = nil
	case err == nil && r.Incarnation == c.cfg.incarnation && r.Generation == c.cfg.generation:
		c.rowWrite.value = value
	case err == nil && r.Incarnation != c.cfg.incarnation:
		c.takenBy = r.Incarnation
		if c.attached {
			c.leaseLost()
		}
	}
}

// link is the connection to a rank, if it is to the process that has it now.
func (c *core) linked(rank int, incarnation uint64) {
	c.links[rank] = link{incarnation: incarnation, up: true}
}

// suspect notes that the connection to a rank is lost, or that a channel to it cannot be made for a while.
func (c *core) suspect(rank int, incarnation uint64, why string, until time.Duration) {
	old := c.links[rank]
	if old.incarnation != incarnation && old.up {
		return // it is about an earlier life
	}
	if old.incarnation == incarnation && !old.up && old.until == 0 {
		return
	}
	c.links[rank] = link{incarnation: incarnation, why: clip(why), until: until}
	if c.member && c.view.Has(rank, incarnation) {
		c.askResync(c.view.Epoch, true, fmt.Sprintf("a channel to rank %d was lost", rank))
	}
}

// askResync asks for a new view after an epoch.
func (c *core) askResync(epoch uint64, retry bool, why string) {
	if epoch != c.view.Epoch || !c.member {
		return
	}
	if c.resync != nil && c.resync.Epoch == epoch {
		retry = retry && c.resync.Retry
	}
	c.resync = &resync{Epoch: epoch, Retry: retry, Why: clip(why)}
}

// leaseLost takes this process out of the group until announced.
func (c *core) leaseLost() {
	if c.lost {
		return
	}
	c.lost, c.attached, c.recheck, c.isolated = true, false, false, true
	c.member, c.joining, c.resync, c.sync = false, false, nil, 0
	c.out = max(c.rec.Last, c.view.Epoch)
	c.abandon()
	c.put(output{kind: outIsolated, err: ErrLeaseLost})
	for _, r := range c.requests {
		c.finish(r, Response{}, ErrLeaseLost)
	}
}

// announced says that the process has a lease again: it takes its slot, outside of the view.
func (c *core) announced() {
	if c.lost {
		c.lost, c.isolated = false, false
		c.put(output{kind: outIsolated})
	}
}

// tick tells the time, and how long ago the store has confirmed our lease.
func (c *core) tick(now, confirmed time.Duration) {
	c.now = now
	for rank, l := range c.links {
		if l.until != 0 && now >= l.until {
			c.links[rank] = link{incarnation: l.incarnation, up: true}
		}
	}
	switch {
	case c.lost:
	case confirmed > c.cfg.lease:
		c.recheck = false
		if !c.isolated {
			c.isolated = true
			c.put(output{kind: outIsolated, err: ErrIsolated})
		}
	case c.isolated && !c.recheck:
		c.recheck = true
		c.rowWrite.unknown, c.viewWrite.unknown = true, true
	}
}

// rejoin ends isolation once it is known that our row has been there all the time. What was in progress has stopped, though.
func (c *core) rejoin() {
	if !c.recheck || c.rowWrite.unknown || c.viewWrite.unknown || c.rowWrite.busy || c.viewWrite.busy {
		return
	}
	c.recheck, c.isolated = false, false
	c.put(output{kind: outIsolated})
	c.askResync(c.view.Epoch, true, "it was cut off from the store for longer than its lease")
}

// step does what is to be done by now. It is called after any inputs.
func (c *core) step() {
	c.wake = 0
	for _, l := range c.links {
		if l.until != 0 {
			c.wakeAt(l.until)
		}
	}
	c.flush(&c.rowWrite, keySlot+strconv.Itoa(c.cfg.rank))
	c.flush(&c.viewWrite, keyView)
	c.rejoin()
	c.adopt()
	c.follow()
	v := c.judge()
	if c.keep = nil; v.trouble && v.closed {
		c.keep = v.keep
	}
	c.answer(v)
	c.act(v)
	c.writeRow()
}

func (c *core) put(o output) { c.outs = append(c.outs, o) }

func (c *core) wakeAt(t time.Duration) {
	if c.wake == 0 || t < c.wake {
		c.wake = t
	}
}

// take returns what is to be done, in this order.
func (c *core) take() []output {
	outs := c.outs
	c.outs = nil
	return outs
}

func (c *core) newID() int {
	c.call++
	return c.call
}

// flush reads a record again whose state is unknown.
func (c *core) flush(w *write, key string) {
	if !w.unknown || w.busy {
		return
	}
	if c.now < w.after {
		c.wakeAt(w.after)
		return
	}
	w.busy, w.get, w.id, w.floor = true, true, c.newID(), c.floor(key)
	c.put(output{kind: outGet, id: w.id, key: key})
}

// stored tells what became of a put or a get. A put that is done has its new revision; a conflict has none.
func (c *core) stored(id int, f fate, value []byte, rev uint64) {
	for _, x := range []struct {
		w   *write
		key string
	}{{&c.rowWrite, keySlot + strconv.Itoa(c.cfg.rank)}, {&c.viewWrite, keyView}} {
		if !x.w.busy || x.w.id != id {
			continue
		}
		x.w.busy = false
		switch f {
		case fateUnknown:
			x.w.unknown, x.w.after = true, c.now+RetryPause
		case fateConflict:
			x.w.unknown, x.w.after = true, 0
		case fateAbsent:
			x.w.unknown = false
			c.absent(x.w, x.key)
		case fateDone:
			if x.w.get {
				x.w.unknown = false
			} else if x.key != keyView {
				c.attached = c.attached || !c.lost
			}
			if rev <= c.floor(x.key) && x.w.rev == 0 { // what is known is that it was deleted, at a revision that may be too high
				if !x.w.get {
					x.w.unknown = true
				} else if c.floor(x.key) == x.w.floor {
					c.lowerFloor(x.key, rev-1)
				}
			}
			c.change(x.key, value, rev, false)
		}
	}
}

// lowerFloor forgets a deletion whose revision was that of when it was known.
func (c *core) lowerFloor(key string, rev uint64) {
	if key == keyView {
		c.viewFloor = rev
		return
	}
	c.rowRev[c.cfg.rank] = rev
}

// floor is the newest revision that is known of the view record or our row.
func (c *core) floor(key string) uint64 {
	if key == keyView {
		return c.viewFloor
	}
	return c.rowRev[c.cfg.rank]
}

// absent notes that a record that was read is not there; unless it is by now, as we know from elsewhere.
func (c *core) absent(w *write, key string) {
	if c.floor(key) != w.floor {
		return
	}
	if key == keyView {
		if w.rev != 0 {
			c.setView(nil, c.viewFloor, true)
		}
		return
	}
	w.rev, w.value = 0, nil
	delete(c.rows, c.cfg.rank)
	if c.attached {
		c.leaseLost()
	}
}

// saying is what our row is to be.
func (c *core) saying() row {
	r := row{
		Generation: c.cfg.generation, Incarnation: c.cfg.incarnation, Attached: c.cfg.attached, State: stateInactive, Out: c.out,
		Ack: c.ack, Resync: c.resync, Sync: c.sync,
	}
	switch {
	case c.member:
		r.State = stateActive
	case c.joining:
		r.State = stateAwaiting
	}
	for rank, l := range c.links {
		if l.up {
			r.Up = append(r.Up, peer{rank, l.incarnation})
		} else if other := c.rows[rank]; other != nil && other.Incarnation == l.incarnation {
			r.Down = append(r.Down, doubt{rank, l.incarnation, l.why})
		}
	}
	byRank := func(a, b peer) int { return cmp.Compare(a.Rank, b.Rank) }
	slices.SortFunc(r.Up, byRank)
	slices.SortFunc(r.Down, func(a, b doubt) int { return cmp.Compare(a.Rank, b.Rank) })
	if len(r.Down) > 0 {
		c.seen = c.view.Epoch
	}
	r.Seen = c.seen
	if c.member {
		for key := range c.suspectedAt {
			r.Heard = append(r.Heard, key.peer)
		}
		slices.SortFunc(r.Heard, byRank)
	}
	return r
}

// writeRow writes our row if it is not what it is to be.
func (c *core) writeRow() {
	w := &c.rowWrite
	if w.busy || w.unknown || c.isolated || c.takenBy != 0 {
		return
	}
	r := c.saying()
	value := encode(r)
	if bytes.Equal(value, w.value) {
		return
	}
	w.busy, w.get, w.id = true, false, c.newID()
	c.put(output{kind: outPut, id: w.id, key: keySlot + strconv.Itoa(c.cfg.rank), value: value, rev: w.rev, leased: true})
}

// adopt hands on a view that was committed.
func (c *core) adopt() {
	if c.rec.Committed.Epoch <= c.view.Epoch || c.lost {
		return
	}
	v := c.rec.Committed
	v.Group = c.cfg.group
	me := v.Has(c.cfg.rank, c.cfg.incarnation) && c.out < v.Epoch
	if !me {
		v.Members = slices.DeleteFunc(slices.Clone(v.Members), func(m Member) bool {
			return m.Rank == c.cfg.rank && m.Incarnation == c.cfg.incarnation
		})
	}
	v.Left = leavers(c.view.Members, &v)
	if c.told != 0 && c.told != v.Epoch {
		c.abandon()
	}
	c.told, c.connects, c.holds = 0, false, false
	if c.ack != nil && c.ack.Epoch != v.Epoch {
		c.ack = nil
	}
	if me {
		c.joining = false
	}
	if v.Reason == ReasonFailure || v.Reason == ReasonResync {
		c.failures = v.Epoch
	}
	c.view, c.member = v, me
	c.resync = nil
	c.put(output{kind: outCommit, view: v})
}

// leavers are those of old who are not in a view.
func leavers(old Members, v *View) (left Members) {
	for _, m := range old {
		if !v.Has(m.Rank, m.Incarnation) {
			left = append(left, m)
		}
	}
	return left
}

// abandon ends what the data plane was told of a proposal.
func (c *core) abandon() {
	if c.told == 0 {
		return
	}
	c.put(output{kind: outAbandon, epoch: c.told})
	if c.ack != nil && c.ack.Epoch == c.told {
		c.ack = nil
	}
	c.told, c.connects, c.holds = 0, false, false
}

// follow takes part in the proposal that there is.
func (c *core) follow() {
	p := c.rec.Proposed
	if c.told != 0 && (p == nil || p.Epoch != c.told) && c.told > c.rec.Committed.Epoch {
		c.abandon()
	}
	if p == nil || c.isolated {
		return
	}
	v := *p
	v.Group = c.cfg.group
	v.Left = leavers(c.rec.Committed.Members, &v)
	in := v.Has(c.cfg.rank, c.cfg.incarnation)
	if in && (c.out >= v.Epoch || !c.member && !c.joining) {
		c.acknowledge(v.Epoch).Failed = "it does not wait to be activated"
		return
	}
	if c.member && v.Phase == PhaseHold && !c.holds {
		c.told, c.holds = v.Epoch, true
		c.put(output{kind: outHold, view: v})
	}
	if in && !c.connects {
		c.told, c.connects = v.Epoch, true
		c.put(output{kind: outConnect, view: v})
	}
}

// acknowledge is our word on a proposal, to be changed. Rows are compared by value, so it is a new one each time.
func (c *core) acknowledge(epoch uint64) *ack {
	a := ack{Epoch: epoch}
	if c.ack != nil && c.ack.Epoch == epoch {
		a = *c.ack
	}
	c.ack = &a
	return c.ack
}

// held is the answer to a hold.
func (c *core) held(epoch, done, entered uint64) {
	if epoch == c.told && c.holds {
		a := c.acknowledge(epoch)
		a.Held, a.Done, a.Entered = true, done, entered
	}
}

// connected is the answer to a connect.
func (c *core) connected(epoch uint64, report []byte, err error) {
	if epoch != c.told || !c.connects || epoch <= c.view.Epoch {
		return
	}
	if err == nil && len(report) > MaxReport {
		err = fmt.Errorf("its report has %d bytes, of at most %d", len(report), MaxReport)
	}
	if err == nil {
		a := c.acknowledge(epoch)
		a.Connected, a.Report = true, report
		return
	}
	p := c.rec.Proposed
	var ce *ConnectError
	if errors.As(err, &ce) && p != nil {
		blamed := false
		for _, rank := range ce.Ranks {
			if i := p.Index(rank); i >= 0 && rank != c.cfg.rank {
				c.suspect(rank, p.Members[i].Incarnation, "no channel: "+ce.Err.Error(), c.now+MeshPause)
				blamed = true
			}
		}
		if blamed {
			return
		}
	}
	c.acknowledge(epoch).Failed = clip(err.Error())
}
