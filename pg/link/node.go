package link

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"

	"larder/pg/shm"
)

// Node is a process's end of all channels to other processes of its job. Its methods may be called concurrently.
type Node struct {
	cfg      Config
	me       identity
	bell     *shm.Bell
	address  []byte
	ctx      context.Context //nolint:containedctx // it ends what the node has begun
	cancel   context.CancelFunc
	wg       sync.WaitGroup // all goroutines
	building sync.WaitGroup // parties
	pumps    sync.WaitGroup // goroutines of lanes, which end before connections do
	greeting chan struct{}  // has an element for each connection that has not said yet who it is
	listener []net.Listener
	engine   *engineEnd // nil if there is none

	mu      sync.Mutex
	closed  bool
	peers   map[int]*peer
	parties map[scope]*party
	meshes  map[*Mesh]struct{}
	pairs   map[scope]*pair
}

// Peer is another process, as the store tells of it.
type Peer struct {
	Rank        int // global
	Incarnation uint64
	Address     []byte // its [Node.Address]
}

// peer is a rank, whoever has it.
type peer struct {
	wanted  uint64   // the incarnation that Connect was called for last; 0 if it was not
	gone    []uint64 // incarnations that were replaced by a Connect for another, the last maxGone
	c       *control // nil if there is none
	dialing bool
	news    chan struct{} // closed when any of it changes, and then another
}

// maxGone bounds the incarnations of a rank that are remembered to be stale: a process that old has other troubles.
const maxGone = 16

// maxGreeting bounds the connections that have not said yet who they are.
const maxGreeting = 64

// New makes a node and begins to listen.
func New(cfg Config) (*Node, error) {
	if err := cfg.withDefaults(); err != nil {
		return nil, err
	}
	n := &Node{
		cfg: cfg, peers: map[int]*peer{}, parties: map[scope]*party{}, meshes: map[*Mesh]struct{}{}, pairs: map[scope]*pair{},
		greeting: make(chan struct{}, maxGreeting),
	}
	n.me = identity{
		Rank: cfg.Rank, Incarnation: cfg.Incarnation, Host: cfg.Host, Transports: cfg.Transports, TCP: len(cfg.Listen) > 0,
		Engine: cfg.Engine != nil, NICs: cfg.Engine != nil && len(cfg.Engine.NICs()) > 0,
	}
	var err error
	if n.bell, err = shm.NewBell(); err != nil {
		return nil, err
	}
	if err := n.listen(); err != nil {
		return nil, errors.Join(err, n.bell.Close())
	}
	if cfg.Engine != nil {
		n.engine = newEngineEnd(cfg.Engine)
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	for _, l := range n.listener {
		n.wg.Go(func() { n.accept(l) })
	}
	return n, nil
}

// Bell is what this process sleeps on while it waits for what others send.
func (n *Node) Bell() *shm.Bell { return n.bell }

// Address is how others reach this process: they need it for [Node.Connect].
func (n *Node) Address() []byte { return slices.Clone(n.address) }

// peerOf is what is known of a rank. The lock is held.
func (n *Node) peerOf(rank int) *peer {
	p := n.peers[rank]
	if p == nil {
		p = &peer{news: make(chan struct{})}
		n.peers[rank] = p
	}
	return p
}

// tell has those look again that wait for a rank.
func (p *peer) tell() {
	close(p.news)
	p.news = make(chan struct{})
}

// Connect connects to another process, and returns when that is done or ctx has ended. Of two processes the one with the higher
// rank dials, again and again for as long as ctx lives, and the other waits for it: both have to call. It does nothing if they are
// connected. A process that another incarnation of the rank is connected as is let go of: it is down, with [ErrReplaced], and
// refused from then on. The error is a *[RefusedError] if it is no use to try again.
func (n *Node) Connect(ctx context.Context, to Peer) error {
	at, err := parseAddress(to.Address)
	if err != nil {
		return err
	}
	if to.Rank < 0 || to.Rank == n.cfg.Rank || to.Incarnation == 0 {
		return fmt.Errorf("link: connect to rank %d, incarnation %016x: no other process has those", to.Rank, to.Incarnation)
	}
	if err := n.want(to); err != nil {
		return err
	}
	for {
		c, mine, news, err := n.look(to)
		switch {
		case err != nil:
			return err
		case c != nil:
			select {
			case <-c.up:
				return nil
			case <-c.over:
				continue // as it was before, soon
			case <-ctx.Done():
				return fmt.Errorf("link: connect to rank %d: %w", to.Rank, ctx.Err())
			}
		case mine:
			err := n.dial(ctx, to, at)
			n.dialed(to.Rank)
			if err != nil {
				return err
			}
			continue
		}
		select {
		case <-news:
		case <-n.ctx.Done():
			return ErrClosed
		case <-ctx.Done():
			who := "that it dials"
			if n.cfg.Rank > to.Rank {
				who = "that dialing it succeeds"
			}
			return fmt.Errorf("link: connect to rank %d (incarnation %016x): waited %s: %w", to.Rank, to.Incarnation, who, ctx.Err())
		}
	}
}

// want notes which incarnation of a rank is the right one, and lets go of another.
func (n *Node) want(to Peer) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return ErrClosed
	}
	p := n.peerOf(to.Rank)
	if slices.Contains(p.gone, to.Incarnation) {
		return &RefusedError{Code: RefusedStale, By: "this process", Text: fmt.Sprintf(
			"incarnation %016x of rank %d was replaced by %016x: take what the store says now", to.Incarnation, to.Rank, p.wanted)}
	}
	if p.wanted != 0 && p.wanted != to.Incarnation {
		p.bury(p.wanted)
	}
	p.wanted = to.Incarnation
	if p.c != nil && p.c.who.Incarnation != to.Incarnation {
		p.bury(p.c.who.Incarnation)
		p.c.fail(ErrReplaced)
	}
	p.tell()
	return nil
}

// bury has an incarnation refused from now on.
func (p *peer) bury(incarnation uint64) {
	if !slices.Contains(p.gone, incarnation) {
		p.gone = append(p.gone, incarnation)
	}
	p.gone = p.gone[max(0, len(p.gone)-maxGone):]
}

// look finds the connection to a process, or whether it is the caller who has to dial.
func (n *Node) look(to Peer) (c *control, mine bool, news <-chan struct{}, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.peerOf(to.Rank)
	switch {
	case n.closed:
		return nil, false, nil, ErrClosed
	case p.wanted != to.Incarnation:
		return nil, false, nil, fmt.Errorf("link: connect to rank %d, incarnation %016x: %w", to.Rank, to.Incarnation, ErrReplaced)
	case p.c != nil && p.c.who.Incarnation == to.Incarnation && !p.c.ended():
		return p.c, false, p.news, nil
	case n.cfg.Rank > to.Rank && !p.dialing && p.c == nil:
		p.dialing = true
		return nil, true, p.news, nil
	}
	return nil, false, p.news, nil
}

func (c *control) ended() bool {
	select {
	case <-c.over:
		return true
	default:
		return false
	}
}

// dialed has another caller of Connect dial.
func (n *Node) dialed(rank int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.peerOf(rank)
	p.dialing = false
	p.tell()
}

// admits says why a process is not welcome now, nil if it is.
func (n *Node) admits(who *identity) *RefusedError {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.admitted(who)
}

// admitted is admits with the lock held.
func (n *Node) admitted(who *identity) *RefusedError {
	p := n.peerOf(who.Rank)
	switch {
	case n.closed:
		return &RefusedError{Code: RefusedClosed, Text: "the node is closed"}
	case slices.Contains(p.gone, who.Incarnation):
		return &RefusedError{Code: RefusedStale, Text: fmt.Sprintf(
			"incarnation %016x of rank %d was replaced by another: start anew with a new incarnation", who.Incarnation, who.Rank)}
	case p.c != nil && !p.c.ended() && p.c.who.Incarnation != who.Incarnation && p.wanted != who.Incarnation:
		return &RefusedError{Code: RefusedOther, Text: fmt.Sprintf("rank %d is connected as incarnation %016x, which is not known to "+
			"have been replaced by %016x: try again when the store says so", who.Rank, p.c.who.Incarnation, who.Incarnation)}
	}
	return nil
}

// register makes a connection the one to its process, in place of an earlier one.
func (n *Node) register(c *control) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if refused := n.admitted(&c.who); refused != nil {
		refused.By = "this process"
		return refused
	}
	p := n.peerOf(c.who.Rank)
	if c.before = p.c; c.before != nil {
		c.before.fail(ErrReplaced)
	}
	p.c = c
	n.wg.Go(c.run)
	p.tell()
	return nil
}

// drop has all know that a connection has ended.
func (n *Node) drop(c *control) {
	down := c.down()
	n.mu.Lock()
	if p := n.peerOf(c.who.Rank); p.c == c {
		p.c = nil
		p.tell()
	}
	for _, p := range n.parties {
		p.lose(c)
	}
	for m := range n.meshes {
		m.lose(c, down)
	}
	for _, p := range n.pairs {
		n.losePair(p, c, down)
	}
	closed := n.closed
	n.mu.Unlock()
	n.bell.Ring()
	if n.cfg.Down != nil && !closed {
		n.cfg.Down(c.who.Rank, c.who.Incarnation, c.err)
	}
}

// connection is the one to a process, nil if it is not connected. The lock is held.
func (n *Node) connection(rank int, incarnation uint64) *control {
	p := n.peers[rank]
	if p == nil || p.c == nil || p.c.ended() || p.c.who.Incarnation != incarnation {
		return nil
	}
	return p.c
}

// Connected reports whether a process is connected.
func (n *Node) Connected(rank int, incarnation uint64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.connection(rank, incarnation) != nil
}

// Local reports whether a process is connected and shares memory with this one.
func (n *Node) Local(rank int, incarnation uint64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.connection(rank, incarnation)
	return c != nil && c.bell != nil
}

// Ask asks the process that is connected as a rank, and waits for what its [Config.Answer] says. The error is [ErrNotConnected],
// [ErrBusy], a *[DownError] or that of ctx: a process that is stopped does not answer and is not down.
func (n *Node) Ask(ctx context.Context, rank int, ask []byte) ([]byte, error) {
	if len(ask) > MaxAsk {
		return nil, fmt.Errorf("link: a question of %d bytes, the most is %d", len(ask), MaxAsk)
	}
	n.mu.Lock()
	var c *control
	if p := n.peers[rank]; p != nil {
		c = p.c
	}
	n.mu.Unlock()
	if c == nil {
		return nil, fmt.Errorf("%w: rank %d", ErrNotConnected, rank)
	}
	return c.ask(ctx, ask)
}

// Close closes all meshes and pairs, takes leave of all processes, and returns when nothing of the node is left. What has been
// written into lanes is carried before, for as long as lingerTime. It waits for Up, Down and Answer to return, none of which may call
// it; Down is not called any more. An engine must be closed after it.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		n.wg.Wait()
		return nil
	}
	n.closed = true
	meshes, pairs := n.meshes, n.pairs
	n.meshes, n.pairs = map[*Mesh]struct{}{}, map[scope]*pair{}
	n.mu.Unlock()
	for m := range meshes {
		_ = m.Close() // it cannot fail
	}
	for _, p := range pairs {
		p.close()
	}
	n.cancel()
	for _, l := range n.listener {
		_ = l.Close() // it cannot fail
	}
	n.building.Wait()
	n.pumps.Wait()
	n.mu.Lock()
	controls := make([]*control, 0, len(n.peers))
	for _, p := range n.peers {
		if p.c != nil {
			controls = append(controls, p.c)
		}
	}
	n.mu.Unlock()
	for _, c := range controls {
		_ = c.send(frameBye, nil) // then it is gone already
		c.fail(ErrClosed)
	}
	n.wg.Wait()
	if n.engine != nil {
		n.engine.close()
	}
	return n.bell.Close()
}

func (n *Node) log(text string, conn net.Conn, err error) {
	n.cfg.Logger.Warn(text, slog.String("peer", conn.RemoteAddr().String()), slog.Any("error", err)) //nolint:sloglint // constants of callers
}

// draw is a random number, not 0, that nobody can guess.
func draw() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// marshal is json.Marshal of what can always be marshaled.
func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("link: " + err.Error())
	}
	return b
}
