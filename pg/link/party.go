package link

import (
	"fmt"
	"net"
	"os"
	"slices"
	"sync"

	"larder/pg/shm"
)

// party is this process's part in building a mesh, or a pair. One goroutine builds it, with what others put into the inbox.
type party struct {
	n       *Node
	key     scope
	number  uint64 // of this attempt
	me      int
	members []Member
	layout  shm.Layout
	terms   []byte
	text    string
	seats   []*seat // by member; nil for me
	inbox   chan event
	lost    chan struct{} // has an element when a connection may have ended
	dialed  chan event    // one for each seat at most
	dials   sync.WaitGroup

	next   *event  // the offer that has ended this attempt
	begun  bool    // all have offered, and been sent a share
	hosts  [][]int // from then on
	mates  []int   // the set of hosts that I am in
	outbox *shm.Outbox
	room   *shm.Room
}

// seat is another member's place in a party.
type seat struct {
	c       *control
	via     string
	theirs  uint64 // its number, once it has offered
	shares  []byte // its row
	layout  shm.Layout
	share   *share
	outbox  *os.File
	half    half     // of the lane, until the other half is known
	early   net.Conn // a lane's connection that has come before its offer
	earlyBy uint64   // its dialer's number
	lane    *lane
	again   bool // it has left, and may not know of my offer when it comes again
	told    bool // that all is ready here
	done    bool // all is ready there
}

// half is what a lane is made of before the peer has told its part: the ring to a peer that shares memory, or what the engine needs.
type half struct {
	p      *shm.Producer
	engine *engineLane
}

// event is something that a party hears of.
type event struct {
	member  int
	kind    byte // of a frame, or one of those below
	message *partyMessage
	files   files
	conn    net.Conn
	rest    []byte // what has been read of it
	err     error
}

// Kinds of events that are no frames.
const (
	eventConn   = frameKinds + iota // the member has dialed the lane
	eventDialed                     // this process has
)

// drop lets go of what nobody has taken.
func (e *event) drop() {
	closeFiles(e.files)
	if e.conn != nil {
		_ = e.conn.Close() // nobody has written to it
	}
}

// inboxFor is how many events a member may have waiting: a working one sends four messages and a connection.
const inboxFor = 16

// gather makes a party and has it hear from now on. The lock is held.
func (n *Node) gather(key scope, cfg *MeshConfig) (*party, error) {
	switch {
	case n.closed:
		return nil, ErrClosed
	case n.parties[key] != nil:
		return nil, fmt.Errorf("link: %s is being built already", key)
	}
	p := &party{
		n: n, key: key, number: draw(), me: cfg.Me, members: cfg.Members, layout: cfg.Layout,
		seats: make([]*seat, len(cfg.Members)), inbox: make(chan event, inboxFor*len(cfg.Members)), lost: make(chan struct{}, 1),
		dialed: make(chan event, len(cfg.Members)),
	}
	p.terms, p.text = terms(cfg, n.cfg.RingBytes)
	var missing []Missing
	for i, m := range cfg.Members {
		if i == cfg.Me {
			continue
		}
		c := n.connection(m.Rank, m.Incarnation)
		if c == nil {
			missing = append(missing, Missing{m, "a connection to it"})
			continue
		}
		via, err := n.choose(c)
		if err != nil {
			return nil, err
		}
		p.seats[i] = &seat{c: c, via: via}
	}
	if missing != nil {
		return nil, &MissingError{Group: key.group, Epoch: key.epoch, Missing: missing, Err: ErrNotConnected}
	}
	n.parties[key] = p
	n.building.Add(1)
	for i, s := range p.seats {
		if s != nil && s.c.early[key] != nil {
			p.inbox <- event{member: i, kind: frameOffer, message: s.c.early[key]}
			delete(s.c.early, key)
		}
	}
	return p, nil
}

// choose finds the transport for lanes to a process: the first in the order of who has the higher rank that both have and that leads
// there.
func (n *Node) choose(c *control) (string, error) {
	order, other, tcp := n.cfg.Transports, c.who.Transports, c.who.TCP
	if c.who.Rank > n.cfg.Rank {
		order, other, tcp = other, order, n.me.TCP
	}
	leads := map[string]bool{
		TransportShm: c.bell != nil, TransportUnix: c.local(), TransportTCP: tcp,
		TransportRDMA: n.me.NICs && c.who.NICs, TransportEngine: n.me.Engine && c.who.Engine,
	}
	for _, name := range order {
		if leads[name] && slices.Contains(other, name) {
			return name, nil
		}
	}
	return "", fmt.Errorf("%w: to rank %d, of host %q, which has %v; here there are %v, on host %q", ErrNoTransport, c.who.Rank, c.who.Host,
		c.who.Transports, n.cfg.Transports, n.cfg.Host)
}

// seatOf finds the member that a connection leads to, -1 if there is none.
func (p *party) seatOf(c *control) int {
	return slices.IndexFunc(p.seats, func(s *seat) bool { return s != nil && s.c == c })
}

// post tells the party of something. It is false if there is no room: somebody has said too much. The node's lock is held.
func (p *party) post(e event) bool {
	select {
	case p.inbox <- e:
		return true
	default:
		return false
	}
}

// lose tells the party that a connection has ended. The node's lock is held.
func (p *party) lose(c *control) {
	if p.seatOf(c) >= 0 {
		poke(p.lost)
	}
}

// deliver takes a message about a mesh or a pair to those that it concerns.
func (n *Node) deliver(c *control, e event) {
	taken, err := n.place(c, e)
	if !taken {
		e.drop()
	}
	if err != nil {
		c.fail(err)
	}
}

func (n *Node) place(c *control, e event) (taken bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.placed(c, e)
}

// placed is place with the lock held.
func (n *Node) placed(c *control, e event) (taken bool, err error) {
	key := e.message.of(c.who.Rank)
	if p := n.parties[key]; p != nil {
		if e.member = p.seatOf(c); e.member >= 0 {
			if !p.post(e) {
				return false, fmt.Errorf("%w: more messages than %s has", ErrFrame, key)
			}
			return true, nil
		}
	}
	switch {
	case n.closed:
	case e.kind == frameOffer && key.pair:
		n.offered(key, c, e.message)
	case e.kind == frameOffer && len(c.early) < maxEarly:
		c.early[key] = e.message
	case e.kind == frameOffer:
		why := &RefusedError{Code: RefusedBusy, Text: fmt.Sprintf("%d meshes are offered that nobody here has asked for", maxEarly)}
		n.wg.Go(func() { c.leave(key, 0, e.message.From, why) })
	case e.kind == frameLeave && key.pair:
		n.left(key, c, e.message)
	case e.kind == frameLeave:
		if was := c.early[key]; was != nil && was.From == e.message.From {
			delete(c.early, key)
		}
	}
	return false, nil
}

// leave tells a peer that this process has no part in something any more.
func (c *control) leave(key scope, from, to uint64, why *RefusedError) {
	if from == 0 {
		from = to // it is not looked at
	}
	m := &partyMessage{Pair: key.pair, Group: key.group, Epoch: key.epoch, From: from, To: to, Why: why}
	_ = c.sendJSON(frameLeave, nil, m) // if it fails the peer is down
}
