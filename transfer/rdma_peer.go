package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// rdmaPeer is a process that this engine has lanes to, with what it has told.
type rdmaPeer struct {
	r       *rdma
	engine  string
	dialing chan struct{} // of capacity 1: one dials at a time

	mu        sync.Mutex
	users     int // lanes, and links whose end is not confirmed
	addresses []string
	control   *rdmaControl // nil if there is none
	links     map[uint64]*rdmaLink
	grants    map[Handle]*grant
	ended     []*rdmaLink // the peer has to be told of
	telling   bool
}

const (
	// pingEvery is how often a peer shows that it is there. Links are taken away from one that has not for quietTime.
	pingEvery = 5 * time.Second
	quietTime = 4 * pingEvery
	// exitGrace is how long the kernel may take to let go of the queue pairs of a process that has ended. It closes its
	// sockets meanwhile.
	exitGrace = time.Second
	// askTimeout is how long a peer may take to answer what it need not wait for.
	askTimeout = greetTimeout
)

// join gives a lane its peer, until part.
func (r *rdma) join(engine string, addresses []string) *rdmaPeer {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[engine]
	if p == nil {
		p = &rdmaPeer{
			r: r, engine: engine, dialing: make(chan struct{}, 1), links: map[uint64]*rdmaLink{}, grants: map[Handle]*grant{},
		}
		r.peers[engine] = p
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users++
	p.addresses = addresses
	return p
}

// hold has the peer be asked, until part.
func (p *rdmaPeer) hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users++
}

// part ends what join or hold began. The last user takes the links with it.
func (p *rdmaPeer) part() {
	p.r.mu.Lock()
	p.mu.Lock()
	p.users--
	last := p.users == 0
	if last && p.r.peers[p.engine] == p {
		delete(p.r.peers, p.engine)
	}
	c, links := p.control, make([]*rdmaLink, 0, len(p.links))
	for _, k := range p.links {
		links = append(links, k)
	}
	p.mu.Unlock()
	p.r.mu.Unlock()
	if !last {
		return
	}
	for _, k := range links {
		k.port.store.Drop(k.path, k)
	}
	if c != nil {
		c.kill(errIdle)
	}
}

// exchange is EndpointConfig.Exchange.
func (p *port) exchange(ctx context.Context, path string, local []QPAddress) ([]QPAddress, Link, error) {
	engine, nic, _ := strings.Cut(path, "/")
	p.r.mu.Lock()
	peer := p.r.peers[engine]
	p.r.mu.Unlock()
	if peer == nil {
		return nil, nil, ErrClosed
	}
	c, err := peer.dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	id, err := newGeneration()
	if err != nil {
		return nil, nil, err
	}
	k := &rdmaLink{peer: peer, port: p, path: path, id: id, control: c}
	peer.mu.Lock()
	peer.links[k.id] = k
	peer.mu.Unlock()
	body, err := json.Marshal(connectAsk{From: p.nic.Name(), To: nic, QPs: local})
	var answer *connectAnswer
	if err == nil {
		body, err = c.ask(ctx, &header{kind: frameConnect, gen: k.id}, body, frameConnected)
	}
	if err == nil {
		answer, err = parseConnectAnswer(body)
	}
	if err != nil {
		peer.gone(k) // the peer may have made its end
		return nil, nil, err
	}
	return answer.QPs, k, nil
}

// gone forgets a link and tells the peer, which takes care of its end. It does not wait.
func (p *rdmaPeer) gone(k *rdmaLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.links[k.id] != k {
		return
	}
	delete(p.links, k.id)
	if p.control != k.control { // its end has ended with the connection
		return
	}
	p.ended = append(p.ended, k)
	if !p.telling {
		p.telling = true
		p.r.e.background(p.tell)
	}
}

// tell tells the peer which links are not needed any more. It does not matter whether that arrives: an end that is not used
// is replaced, or recalled.
func (p *rdmaPeer) tell() {
	for {
		p.mu.Lock()
		if len(p.ended) == 0 || p.control == nil {
			p.ended, p.telling = nil, false
			p.mu.Unlock()
			return
		}
		k, c := p.ended[0], p.control
		p.ended = p.ended[1:]
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(p.r.e.ctx, askTimeout)
		_, _ = c.ask(ctx, &header{kind: frameClose, gen: k.id}, nil, frameClosed)
		cancel()
	}
}

// closeLink has the peer confirm that its end of a link is closed.
func (p *rdmaPeer) closeLink(ctx context.Context, k *rdmaLink) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := p.dial(ctx)
	switch {
	case errors.Is(err, errOther):
		return nil // another process has taken its address, which it gave up last of all
	case errors.Is(err, syscall.ECONNREFUSED) && k.control.closedThere.Load():
		if !sleep(ctx, exitGrace) {
			return ctx.Err()
		}
		return nil // it has ended
	case err != nil:
		return err
	}
	_, err = c.ask(ctx, &header{kind: frameClose, gen: k.id}, nil, frameClosed)
	return err
}

// maxGrants bounds the grants that are kept: beyond it they are asked for each time.
const maxGrants = 4096

// grant is how a buffer is reached, as the peer has said once.
func (p *rdmaPeer) grant(ctx context.Context, h Handle) (*grant, error) {
	p.mu.Lock()
	g := p.grants[h]
	p.mu.Unlock()
	if g != nil {
		return g, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	body, err := c.ask(ctx, &header{kind: frameGrant, buffer: h.ID, gen: h.Generation}, nil, frameGranted)
	if err != nil {
		return nil, err
	}
	if g, err = parseGrant(body); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for old := range p.grants {
		if len(p.grants) < maxGrants {
			break
		}
		delete(p.grants, old) // any: it is asked for again
	}
	p.grants[h] = g
	return g, nil
}

// forget has a grant asked for again, after its keys have been refused.
func (p *rdmaPeer) forget(h Handle, g *grant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.grants[h] == g {
		delete(p.grants, h)
	}
}

// recalled lets go of a link, which the peer has asked for.
func (p *rdmaPeer) recalled(id uint64) {
	p.mu.Lock()
	k := p.links[id]
	p.mu.Unlock()
	if k != nil {
		k.port.store.Yield(k.path, k)
	}
}

// tick looks whether the peer is still there, and ends a connection that is not needed.
func (p *rdmaPeer) tick(now int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.control
	switch {
	case c == nil:
	case len(p.links) == 0 && now-c.used.Load() > int64(p.r.e.cfg.IdleTimeout):
		p.r.e.background(func() { c.kill(errIdle) })
	case now-c.pinged > int64(pingEvery):
		c.pinged = now
		p.r.e.background(c.ping)
	}
}

var errOther = fmt.Errorf("%w: another process answers: open its segment anew", ErrRefused)

// dial is the control connection, made if need be.
func (p *rdmaPeer) dial(ctx context.Context) (*rdmaControl, error) {
	select {
	case p.dialing <- struct{}{}:
		defer func() { <-p.dialing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.mu.Lock()
	c, addresses := p.control, slices.Clone(p.addresses)
	p.mu.Unlock()
	if c != nil {
		return c, nil
	}
	e, all := p.r.e, error(nil)
	for _, addr := range addresses {
		try, cancel := context.WithTimeout(ctx, greetTimeout)
		s, engine, err := e.dial(try, "", addr, kindRDMA, e.lastCon.Add(1))
		cancel()
		if err == nil && engine != p.engine {
			return nil, errors.Join(errOther, s.conn.Close())
		}
		if err == nil {
			return p.begin(s)
		}
		all = errors.Join(all, fmt.Errorf("transfer: ask %s for RDMA: %w", addr, err))
	}
	return nil, all
}

// begin uses a connection that was made.
func (p *rdmaPeer) begin(s *stream) (*rdmaControl, error) {
	now := p.r.e.now()
	c := &rdmaControl{peer: p, s: s, pinged: now, waiting: map[uint64]chan controlAnswer{}, dead: make(chan struct{})}
	c.used.Store(now)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users == 0 { // the last has left
		return nil, errors.Join(ErrClosed, s.conn.Close())
	}
	p.control = c
	p.r.wg.Go(c.read) // it ends with the connection, which ends with the last user
	return c, nil
}

// rdmaControl is the asker's end of an RDMA control connection. Questions are answered in any order; the peer may recall
// links at any time.
type rdmaControl struct {
	peer        *rdmaPeer
	s           *stream
	pinged      int64        // the peer's mu guards it
	used        atomic.Int64 // when something was last asked but a ping
	closedThere atomic.Bool  // the peer has closed it, or its kernel

	sending sync.Mutex

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan controlAnswer
	err     error
	dead    chan struct{} // closed when it has ended
}

type controlAnswer struct {
	h    *header
	body []byte
}

// maxAsked bounds the questions that wait for an answer: peers that connect, and a few more.
const maxAsked = 2 * maxConnecting

var errAsked = errors.New("transfer: too many questions wait for the peer's answer")

// ask is one exchange.
func (c *rdmaControl) ask(ctx context.Context, h *header, body []byte, want uint8) ([]byte, error) {
	if h.kind != framePing {
		c.used.Store(c.peer.r.e.now())
	}
	answer := make(chan controlAnswer, 1)
	c.mu.Lock()
	if len(c.waiting) >= maxAsked {
		c.mu.Unlock()
		return nil, errAsked
	}
	c.last++
	h.seq = c.last
	c.waiting[h.seq] = answer
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, h.seq)
		c.mu.Unlock()
	}()
	if err := c.send(h, body); err != nil {
		c.kill(err)
		return nil, err
	}
	select {
	case a := <-answer:
		switch a.h.kind {
		case want:
			return a.body, nil
		case frameFail:
			return nil, refused(a.h, a.body)
		}
		return nil, fmt.Errorf("transfer: a frame of type %d for an answer", a.h.kind)
	case <-c.dead:
		return nil, c.why()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *rdmaControl) send(h *header, body []byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	if err := c.s.conn.SetWriteDeadline(soon(askTimeout)); err != nil {
		return err
	}
	return c.s.send(h, body)
}

func (c *rdmaControl) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// read takes answers until the connection ends.
func (c *rdmaControl) read() {
	for {
		h, body, err := c.s.receive()
		if err != nil {
			c.end(err)
			return
		}
		if h.kind == frameRecall {
			c.peer.recalled(h.gen)
			continue
		}
		c.mu.Lock()
		answer := c.waiting[h.seq]
		delete(c.waiting, h.seq)
		c.mu.Unlock()
		if answer != nil { // it is waited for still
			answer <- controlAnswer{h, body}
		}
	}
}

// kill ends the connection soon.
func (c *rdmaControl) kill(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
	_ = c.s.conn.SetDeadline(past()) // it fails for closed ones only
}

// end deals with what the connection took with it: the peer's end of all links that were made over it.
func (c *rdmaControl) end(err error) {
	c.closedThere.Store(slices.ContainsFunc(closedThere, func(reason error) bool { return errors.Is(err, reason) }))
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	why := c.err
	c.mu.Unlock()
	_ = c.s.conn.Close() // it says only that
	close(c.dead)
	p := c.peer
	p.mu.Lock()
	if p.control == c {
		p.control = nil
	}
	var links []*rdmaLink
	for _, k := range p.links {
		if k.control == c {
			links = append(links, k)
		}
	}
	p.mu.Unlock()
	for _, k := range links {
		k.port.store.Drop(k.path, k)
	}
	p.r.e.cfg.Logger.Debug("transfer: an RDMA control connection ends", slog.String("peer", p.engine), slog.Any("error", why))
}

// ping ends the connection if the peer does not answer.
func (c *rdmaControl) ping() {
	ctx, cancel := context.WithTimeout(c.peer.r.e.ctx, askTimeout)
	defer cancel()
	if _, err := c.ask(ctx, &header{kind: framePing}, nil, framePong); err != nil {
		c.kill(err)
	}
}
