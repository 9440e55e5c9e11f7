package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
)

// guestKey names a link that a peer has made.
type guestKey struct {
	engine string
	id     uint64
}

// guest is a link that a peer has made: queue pairs here that answer its own. It ends when the peer says so, when the
// connection over which it was made ends, or when the endpoint store retires it. It implements ServedLink.
type guest struct {
	c    *rdmaServed
	key  guestKey
	port *port

	// The rdma's mu guards what follows.
	e        *Endpoint // nil while it is being made
	unwanted bool      // it was closed meanwhile
	stop     func()    // ends the making
}

// Gone implements Link.
func (g *guest) Gone() { g.c.r.dismissed(g) }

// Recall implements ServedLink. The peer that does not get it has the link taken away.
func (g *guest) Recall() {
	g.c.r.e.background(func() { _ = g.c.send(&header{kind: frameRecall, gen: g.key.id}, nil) })
}

func (r *rdma) dismissed(g *guest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.guests[g.key] == g {
		delete(r.guests, g.key)
		g.c.links--
	}
}

// maxLinks bounds those of one connection: as many as two engines have pairs of NICs.
const maxLinks = maxNICs * maxNICs

// rdmaServed is the answering end of an RDMA control connection.
type rdmaServed struct {
	r      *rdma
	c      *served
	engine string          // who asks
	ctx    context.Context //nolint:containedctx // it ends when the connection does
	cancel context.CancelFunc
	wg     sync.WaitGroup // links that are being made
	slots  chan struct{}  // for them

	sending sync.Mutex
	links   int // the rdma's mu guards it
}

// serveRDMA answers a peer until the connection ends. Then nothing of the links that were made over it lands any more.
//
//nolint:contextcheck,nolintlint // the connection's context: not for callers in other packages to pass
func (c *served) serveRDMA() error {
	v := &rdmaServed{r: c.t.e.rdma, c: c, engine: c.hello.Load().Engine, slots: make(chan struct{}, maxNICs)}
	v.ctx, v.cancel = context.WithCancel(c.t.e.ctx)
	defer v.end()
	for {
		h, body, err := c.s.receive()
		if err != nil {
			return err
		}
		switch h.kind {
		case frameConnect:
			err = v.connect(h, body)
		case frameGrant:
			err = v.grant(h)
		case frameClose:
			err = v.close(h)
		case framePing:
			err = v.send(&header{kind: framePong, seq: h.seq}, nil)
		default:
			err = fmt.Errorf("transfer: a frame of type %d on an RDMA control connection", h.kind)
		}
		if err != nil {
			return err
		}
	}
}

// end takes away the links of the connection.
func (v *rdmaServed) end() {
	v.cancel()
	v.wg.Wait()
	v.r.mu.Lock()
	var all []*guest
	for _, g := range v.r.guests {
		if g.c == v {
			all = append(all, g)
		}
	}
	v.r.mu.Unlock()
	for _, g := range all {
		if err := g.port.store.Dismiss(g.e); err != nil { // the store goes on trying
			v.r.e.cfg.Logger.Warn("transfer: a link is not closed", slog.String("peer", v.engine), slog.Any("error", err))
		}
	}
}

func (v *rdmaServed) send(h *header, body []byte) error {
	v.sending.Lock()
	defer v.sending.Unlock()
	if err := v.c.s.conn.SetWriteDeadline(soon(askTimeout)); err != nil {
		return err
	}
	return v.c.s.send(h, body)
}

func (v *rdmaServed) fail(h *header, status uint16, why error) error {
	text := why.Error()
	body, err := json.Marshal(refusal{Error: text[:min(len(text), maxRefusal)]})
	if err != nil {
		return err
	}
	return v.send(&header{kind: frameFail, seq: h.seq, status: status}, body)
}

var errTooMany = errors.New("transfer: too many links are being made, or have been")

// connect makes a link, and answers when there is room for it. Meanwhile other questions are answered.
func (v *rdmaServed) connect(h *header, body []byte) error {
	ask, err := parseConnectAsk(body)
	if err != nil {
		return err
	}
	p := v.r.port(ask.To)
	if p == nil {
		return v.fail(h, statusRefused, fmt.Errorf("transfer: there is no NIC %.20q", ask.To))
	}
	ctx, stop := context.WithCancel(v.ctx)
	g := &guest{c: v, key: guestKey{v.engine, h.gen}, port: p, stop: stop}
	select {
	case v.slots <- struct{}{}:
	default:
		stop()
		return v.fail(h, statusRefused, errTooMany)
	}
	if !v.enter(g) {
		stop()
		<-v.slots
		return v.fail(h, statusRefused, errTooMany)
	}
	v.wg.Go(func() {
		defer func() { <-v.slots }()
		defer stop()
		v.make(ctx, h, ask, g)
	})
	return nil
}

// enter takes note of a link before it is made: when it is not in the table there is no such link.
func (v *rdmaServed) enter(g *guest) bool {
	v.r.mu.Lock()
	defer v.r.mu.Unlock()
	if v.r.guests[g.key] != nil || v.links >= maxLinks || v.r.closed {
		return false
	}
	v.r.guests[g.key] = g
	v.links++
	return true
}

func (v *rdmaServed) make(ctx context.Context, h *header, ask *connectAsk, g *guest) {
	e, err := g.port.store.Accept(ctx, v.engine+"/"+ask.From, ask.QPs, g)
	if err != nil {
		v.r.dismissed(g)
		status := statusRefused
		if _, full := errors.AsType[*BudgetError](err); full {
			status = statusFull
		}
		_ = v.fail(h, status, err) // whoever does not hear it gives up
		return
	}
	v.r.mu.Lock()
	g.e = e
	unwanted := g.unwanted
	v.r.mu.Unlock()
	answer := connectAnswer{QPs: make([]QPAddress, len(e.queues))}
	for i, q := range e.queues {
		answer.QPs[i] = q.qp.Address()
	}
	body, err := json.Marshal(answer)
	if err == nil && !unwanted {
		err = v.send(&header{kind: frameConnected, seq: h.seq}, body)
	}
	if err != nil || unwanted { // nobody uses it
		_ = g.port.store.Dismiss(e)
	}
}

// grant tells how a buffer is reached.
func (v *rdmaServed) grant(h *header) error {
	b := v.r.e.buffers.of(h.buffer)
	if b == nil || b.info.Generation != h.gen {
		return v.fail(h, statusStale, ErrStale)
	}
	g := grant{Address: uint64(addressOf(b.mem)), Bytes: b.info.Bytes, ReadOnly: b.info.ReadOnly, Keys: map[string]uint32{}}
	for _, p := range v.r.ports {
		if b.pinned == nil {
			break
		}
		if region := b.pinned.regions[p.index].Load(); region != nil {
			g.Keys[p.nic.Name()] = (*region).RKey()
		}
	}
	body, err := json.Marshal(g)
	if err != nil {
		return err
	}
	return v.send(&header{kind: frameGranted, seq: h.seq}, body)
}

// close ends a link of this peer, over whichever connection it was made, and confirms it. One that is not known is closed.
func (v *rdmaServed) close(h *header) error {
	v.r.mu.Lock()
	g := v.r.guests[guestKey{v.engine, h.gen}]
	var e *Endpoint
	if g != nil {
		e = g.e
		g.unwanted = true
		g.stop()
	}
	v.r.mu.Unlock()
	if e != nil { // of one that is being made nobody has been told, so that nothing is posted to it
		if err := g.port.store.Dismiss(e); err != nil {
			return v.fail(h, statusRefused, err)
		}
	}
	return v.send(&header{kind: frameClosed, seq: h.seq}, nil)
}
