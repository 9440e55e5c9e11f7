package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"larder/pg/shm"
)

// build has the lanes and the room made, and hands them over: adopt is called under the node's lock. When it fails nothing is left,
// and the others have been told.
func (p *party) build(ctx context.Context, adopt func()) error {
	defer p.n.building.Done()
	ctx, cancel := context.WithCancel(ctx)
	err := p.assemble(ctx)
	cancel() // those who dial for a party that has failed
	p.dials.Wait()
	p.n.mu.Lock()
	if err == nil {
		err = p.lostOne() // who has gone since learns of it from its new owner
	}
	if err == nil && (p.n.closed || p.n.parties[p.key] != p) { // or nobody wants the pair any more
		err = ErrClosed
	}
	if err == nil {
		adopt()
	}
	if p.n.parties[p.key] == p {
		delete(p.n.parties, p.key)
	}
	p.sweep() //nolint:contextcheck // nobody posts any more, and what comes next is not of this
	p.n.mu.Unlock()
	if err != nil {
		p.abandon(err)
	}
	return err
}

// lostOne is the error of a member whose connection has ended.
func (p *party) lostOne() error {
	for _, s := range p.seats {
		if s != nil && s.c.ended() {
			return s.c.down()
		}
	}
	return nil
}

// assemble offers, and then does what is next as others do theirs.
func (p *party) assemble(ctx context.Context) error {
	for len(p.inbox) > 0 { // early offers, so that mine are answers to them
		e := <-p.inbox
		if err := p.hear(&e); err != nil {
			e.drop()
			return err
		}
	}
	for _, s := range p.seats {
		if s == nil {
			continue
		}
		if err := s.c.sendJSON(frameOffer, nil, p.message(s, &partyMessage{Offer: p.offer()})); err != nil {
			return err
		}
	}
	for {
		if err := p.advance(ctx); err != nil {
			return err
		}
		if p.ready() {
			return nil
		}
		var e event
		select {
		case e = <-p.inbox:
		case e = <-p.dialed:
		case <-p.lost:
			if err := p.lostOne(); err != nil {
				return err
			}
			continue
		case <-p.patience():
			quiet := &RefusedError{Code: RefusedClosed, By: "this process", Text: "nothing was heard of " + p.key.String() + " for long"}
			return p.missing(quiet)
		case <-ctx.Done():
			return p.missing(ctx.Err())
		case <-p.n.ctx.Done():
			return ErrClosed
		}
		if err := p.hear(&e); err != nil {
			e.drop()
			return err
		}
	}
}

// patienceTime is how long a mesh hears nothing until it is begun anew, and up to twice that: whatever others have missed, or
// taken for an answer to another attempt, they are told again.
const patienceTime = time.Second

// patience is when to begin anew. Members that wait for each other do so at different times. A pair is begun anew by who asks.
func (p *party) patience() <-chan time.Time {
	if p.key.pair {
		return nil
	}
	return after(patienceTime + time.Duration(draw()%uint64(patienceTime)))
}

// message fills in what every message to a member says.
func (p *party) message(s *seat, m *partyMessage) *partyMessage {
	m.Pair, m.Group, m.Epoch, m.From, m.To = p.key.pair, p.key.group, p.key.epoch, p.number, s.theirs
	return m
}

// row is whom this process shares memory with, itself included.
func (p *party) row() []byte {
	row := make([]byte, (len(p.members)+7)/8)
	for i, s := range p.seats {
		if s == nil || s.c.bell != nil {
			setBit(row, i)
		}
	}
	return row
}

func (p *party) offer() *offer {
	return &offer{Terms: p.terms, Text: p.text, Shares: p.row(), Layout: p.layout}
}

// missing says what is missing of whom.
func (p *party) missing(err error) error {
	e := &MissingError{Group: p.key.group, Epoch: p.key.epoch, Err: err}
	for i, s := range p.seats {
		if s == nil || s.done && s.lane != nil {
			continue
		}
		what := "its word that all is ready"
		switch {
		case s.theirs == 0:
			what = "its call for the mesh"
		case s.share == nil && p.begun:
			what = "its memory"
		case s.lane == nil && p.begun:
			what = "its connection over " + s.via
		case !p.begun:
			continue // it waits for others, too
		}
		e.Missing = append(e.Missing, Missing{p.members[i], what})
	}
	return e
}

// refusedBy is why a member's word ends the party.
func (p *party) refusedBy(member int, code, text string) error {
	return &RefusedError{Code: code, By: fmt.Sprintf("rank %d", p.members[member].Rank), Text: text}
}

// hear takes an event. What it carries is taken, unless there is an error.
func (p *party) hear(e *event) error {
	s := p.seats[e.member]
	switch e.kind {
	case eventConn:
		if s.early != nil || s.lane != nil {
			return p.refusedBy(e.member, RefusedMismatch, "it has dialed one lane twice")
		}
		s.early, s.earlyBy = e.conn, e.message.From
		return p.welcome(s)
	case eventDialed:
		if e.err != nil {
			return e.err
		}
		return p.stream(s, e.conn, e.rest)
	case frameOffer:
		e.drop()
		return p.hearOffer(e.member, e.message)
	case frameLeave:
		e.drop()
		return p.hearLeave(e.member, e.message)
	}
	if e.message.From != s.theirs || e.message.To != p.number { // of another attempt
		e.drop()
		return nil
	}
	if e.kind == frameShare {
		return p.hearShare(e)
	}
	e.drop()
	s.done = true
	return nil
}

func (p *party) hearOffer(member int, m *partyMessage) error {
	s := p.seats[member]
	if !bytes.Equal(m.Offer.Terms, p.terms) {
		s.theirs = m.From // who is to be told
		return p.refusedBy(member, RefusedMismatch,
			fmt.Sprintf("it means another thing by %s: %.120s; here %s", p.key, m.Offer.Text, p.text))
	}
	was := s.theirs
	switch {
	case m.To != 0 && m.To != p.number: // an answer to an earlier attempt of mine: another follows
		return nil
	case p.begun && was != m.From:
		p.next = &event{member: member, kind: frameOffer, message: m}
		return p.refusedBy(member, RefusedClosed, fmt.Sprintf("it has begun %s anew", p.key))
	case was != 0 && was != m.From:
		s.forget()
		s.again = true
	}
	s.theirs, s.shares, s.layout = m.From, m.Offer.Shares, m.Offer.Layout
	if s.again { // what it had heard of me it has forgotten
		s.again = false
		if err := s.c.sendJSON(frameOffer, nil, p.message(s, &partyMessage{Offer: p.offer()})); err != nil {
			return err
		}
	}
	return p.welcome(s)
}

// hearLeave has a member that has given up before all were there be waited for again: it had waited for another, say.
func (p *party) hearLeave(member int, m *partyMessage) error {
	s := p.seats[member]
	switch {
	case m.To != p.number && (m.To != 0 || m.From != s.theirs): // of another attempt
		return nil
	case m.Why == nil:
		return p.refusedBy(member, RefusedClosed, "it has closed "+p.key.String())
	case m.Why.Code == RefusedClosed && !p.begun && !p.key.pair:
		s.forget()
		s.again = true
		return nil
	}
	rank := p.members[member].Rank
	why := &RefusedError{Code: m.Why.Code, Text: fmt.Sprintf("%.300s", m.Why.Text), Blames: m.Why.Blames, By: fmt.Sprintf("rank %d", rank)}
	if why.Code == RefusedFailed && len(why.Blames) == 0 { // it has failed by itself
		why.Blames = []int{rank}
	}
	return why
}

func (p *party) hearShare(e *event) error {
	s := p.seats[e.member]
	want := 0
	for _, is := range []bool{e.message.Share.Ring, e.message.Share.Outbox} {
		if is {
			want++
		}
	}
	if s.share != nil || len(e.files) != want || e.message.Share.Ring != (s.via == TransportShm) {
		return p.refusedBy(e.member, RefusedMismatch, "it does not share what it says that it shares")
	}
	s.share = e.message.Share
	if s.share.Outbox {
		s.outbox = e.files[want-1]
	}
	if s.via != TransportShm {
		return nil
	}
	c, err := shm.OpenRing(e.files[0], s.c.bell)
	_ = e.files[0].Close() // it is mapped
	e.files = nil
	if err != nil {
		return fmt.Errorf("link: the ring of rank %d: %w", s.c.who.Rank, err)
	}
	s.lane = &lane{rank: s.c.who.Rank, via: s.via, c: c} // p comes with begin
	return nil
}

// advance does what can be done with what has been heard.
func (p *party) advance(ctx context.Context) error {
	if !p.begun {
		for _, s := range p.seats {
			if s != nil && s.theirs == 0 {
				return nil
			}
		}
		if err := p.begin(ctx); err != nil {
			return err
		}
	}
	for range 2 { // all lanes first, then what is said when they are there
		for i, s := range p.seats {
			if s == nil {
				continue
			}
			if err := p.complete(i, s); err != nil { //nolint:contextcheck // lanes outlive their making
				return err
			}
		}
	}
	return p.meet() //nolint:contextcheck // likewise
}

// begin shares memory with all, when all have offered theirs.
func (p *party) begin(ctx context.Context) (err error) {
	p.begun = true
	rows := make([][]byte, len(p.members))
	for i, s := range p.seats {
		rows[i] = p.row()
		if s != nil {
			rows[i] = s.shares
		}
	}
	p.hosts = hosts(rows)
	p.mates = p.hosts[slices.IndexFunc(p.hosts, func(set []int) bool { return slices.Contains(set, p.me) })]
	for _, i := range p.mates {
		if i != p.me && p.seats[i].layout != p.layout {
			return p.refusedBy(i, RefusedMismatch,
				fmt.Sprintf("it means another room by %s: of layout %+v; here %+v", p.key, p.seats[i].layout, p.layout))
		}
	}
	if len(p.mates) > 1 && !p.key.pair {
		if p.outbox, err = shm.NewOutbox(p.layout, len(p.mates)); err != nil {
			return err
		}
	}
	for i, s := range p.seats {
		if s == nil {
			continue
		}
		if err := p.shareWith(i, s); err != nil {
			return err
		}
		if (s.via == TransportUnix || s.via == TransportTCP) && p.n.cfg.Rank > s.c.who.Rank {
			h := p.n.hello(Peer{Rank: s.c.who.Rank, Incarnation: s.c.who.Incarnation}, &laneHello{
				Pair: p.key.pair, Group: p.key.group, Epoch: p.key.epoch, Mine: p.number, Yours: s.theirs,
			})
			p.dials.Go(func() { p.dialed <- p.n.dialLane(ctx, i, s.c, s.via, h) })
		}
	}
	return nil
}

// shareWith sends a member what it needs of mine.
func (p *party) shareWith(i int, s *seat) (err error) {
	m := &share{}
	var out files
	switch s.via {
	case TransportShm:
		var f *os.File
		if s.half.p, f, err = shm.CreateRing(p.n.cfg.RingBytes, s.c.bell); err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // it is mapped
		m.Ring, out = true, append(out, f)
	case TransportRDMA, TransportEngine:
		if s.half.engine, err = p.n.newEngineLane(s.c.who.Rank, s.via); err != nil {
			return err
		}
		m.Engine = s.half.engine.share()
	}
	if p.outbox != nil && slices.Contains(p.mates, i) {
		m.Outbox, out = true, append(out, p.outbox.File())
	}
	return s.c.sendJSON(frameShare, out, p.message(s, &partyMessage{Share: m}))
}

// complete makes a lane of its halves, and tells the member when all is ready here.
func (p *party) complete(i int, s *seat) error {
	switch {
	case s.half.p != nil && s.lane != nil:
		s.lane.p, s.half.p = s.half.p, nil
	case s.half.engine != nil && s.share != nil:
		l := s.half.engine
		if s.share.Engine == nil {
			return p.refusedBy(i, RefusedMismatch, "it does not say where its ring is")
		}
		s.half.engine = nil
		s.lane = l.lane
		if err := l.start(s.share.Engine); err != nil {
			return err
		}
	}
	if s.told || p.room == nil && p.outbox != nil || slices.ContainsFunc(p.seats, func(s *seat) bool { return s != nil && !s.whole() }) {
		return nil // only all lanes together: else one member had its mesh, and others none that had to begin anew
	}
	s.told = true
	return s.c.sendJSON(frameDone, nil, p.message(s, &partyMessage{}))
}

// whole reports whether a lane is there.
func (s *seat) whole() bool { return s.lane != nil && s.half == half{} && s.share != nil }

// welcome takes the connection that a member has dialed for its lane, once it has offered.
func (p *party) welcome(s *seat) error {
	conn := s.early
	if conn == nil || s.theirs == 0 {
		return nil
	}
	s.early = nil
	if s.earlyBy != s.theirs {
		p.n.refuse(conn, &RefusedError{Code: RefusedUnknown, Text: "of another attempt"})
		return conn.Close()
	}
	_ = conn.SetWriteDeadline(soon(greetTimeout)) // it fails for closed ones only, as the next
	if err := writeJSON(conn, frameWelcome, nil, welcome{From: p.n.me}); err != nil {
		err = &LaneError{Rank: s.c.who.Rank, Transport: s.via, Err: fmt.Errorf("welcome it: %w", err)}
		if hungUp(err) {
			err = &RefusedError{Code: RefusedClosed, Text: err.Error(), Blames: []int{s.c.who.Rank}, By: s.c.who.String()}
		}
		return errors.Join(err, conn.Close())
	}
	_ = conn.SetWriteDeadline(time.Time{})
	return p.stream(s, conn, nil)
}

// stream makes a lane of a connection.
func (p *party) stream(s *seat, conn net.Conn, rest []byte) (err error) {
	s.lane, err = p.n.newStream(conn, rest, s.c.who.Rank, s.via)
	return err
}

// meet makes the room when all outboxes are there.
func (p *party) meet() error {
	if p.outbox == nil || p.room != nil {
		return nil
	}
	others, bells := make(files, len(p.mates)), make([]*shm.Bell, len(p.mates))
	for k, i := range p.mates {
		if i == p.me {
			continue
		}
		if others[k], bells[k] = p.seats[i].outbox, p.seats[i].c.bell; others[k] == nil {
			if p.seats[i].share != nil {
				return p.refusedBy(i, RefusedMismatch, "it has no outbox for the room")
			}
			return nil
		}
	}
	room, err := shm.NewRoom(slices.Index(p.mates, p.me), p.outbox, others, bells)
	if err != nil {
		return fmt.Errorf("link: make the room of %s: %w", p.key, err)
	}
	p.room = room
	p.closeOutboxes()
	for i, s := range p.seats {
		if s == nil {
			continue
		}
		if err := p.complete(i, s); err != nil {
			return err
		}
	}
	return nil
}

func (p *party) closeOutboxes() {
	for _, s := range p.seats {
		if s != nil {
			closeFiles(files{s.outbox})
			s.outbox = nil
		}
	}
}

// ready reports whether all is ready, here and there.
func (p *party) ready() bool {
	return p.begun && !slices.ContainsFunc(p.seats, func(s *seat) bool { return s != nil && (!s.told || !s.done) })
}

// sweep has what has come too late be heard by who comes next, if it can be, and drops the rest. The node's lock is held.
func (p *party) sweep() {
	if p.next != nil {
		_, _ = p.n.placed(p.seats[p.next.member].c, *p.next) // as below
	}
	for {
		select {
		case e := <-p.inbox:
			if e.kind == frameOffer || e.kind == frameLeave {
				_, _ = p.n.placed(p.seats[e.member].c, e) // there is room: it was sent less than maxEarly times
			}
			e.drop()
		case e := <-p.dialed:
			e.drop()
		default:
			return
		}
	}
}

// abandon lets go of all that a party has made, and tells the others why.
func (p *party) abandon(err error) {
	why := parting(err)
	for _, s := range p.seats {
		if s == nil {
			continue
		}
		if !s.c.ended() {
			s.c.leave(p.key, p.number, s.theirs, why)
		}
		s.discard()
	}
	p.closeOutboxes()
	switch {
	case p.room != nil:
		_ = p.room.Close() // it was never used
	case p.outbox != nil:
		_ = p.outbox.Close() // likewise
	}
}

// parting is what the others are told of an error here: whose fault it is, if it is another's.
func parting(err error) *RefusedError {
	why := &RefusedError{Code: RefusedFailed, Text: err.Error()}
	if refused, ok := errors.AsType[*RefusedError](err); ok {
		why.Code, why.Blames = refused.Code, refused.Blames
	} else if gaveUp(err) {
		why.Code = RefusedClosed
	} else if lane, ok := errors.AsType[*LaneError](err); ok {
		why.Blames = []int{lane.Rank}
	} else if down, ok := errors.AsType[*DownError](err); ok { // the others may not know yet
		why.Blames = []int{down.Rank}
	}
	return why
}

// forget has a member be as if it had never offered.
func (s *seat) forget() {
	s.discard()
	closeFiles(files{s.outbox})
	s.theirs, s.share, s.outbox, s.lane, s.early, s.done = 0, nil, nil, nil, nil, false // c and via others read
}

// gaveUp reports whether an attempt has ended because its time was over, here or on a connection, or somebody wanted it to.
func gaveUp(err error) bool {
	for _, why := range []error{context.Canceled, context.DeadlineExceeded, os.ErrDeadlineExceeded, ErrClosed} {
		if errors.Is(err, why) {
			return true
		}
	}
	return false
}

// discard lets go of a lane that nobody has used.
func (s *seat) discard() {
	if s.half.p != nil {
		_ = s.half.p.Close() // it was never used
	}
	if s.half.engine != nil {
		s.half.engine.lane.cut(ErrClosed)
		s.half.engine.lane.close()
	}
	if s.early != nil {
		_ = s.early.Close() // likewise
	}
	if s.lane != nil {
		s.lane.cut(ErrClosed)
		s.lane.close()
	}
}
