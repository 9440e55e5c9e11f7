package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Over RDMA a slice is one work request: the NIC here reads or writes memory of the peer's process, which does nothing for
// it. What the two processes have to tell each other goes over a TCP connection, the control connection of this peer
// (rdma_peer.go, rdma_serve.go): which queue pairs are connected with which, a link; by which keys a buffer is reached, a
// grant; and that a link is closed, so that nothing of it lands any more.
//
// Each NIC is a port: its endpoint store, its registered memory, and the flights, which are slices whose work requests are
// outstanding. A flight ends once, when its completion is polled, or when a reset of the NIC has lost it. A READ has then
// landed or never will. A WRITE that has not succeeded may have packets on their way: it is tried again, and ends, when the
// peer has confirmed that the link is closed (rdma_link.go).

// rdma is an engine's NICs.
type rdma struct {
	e      *Engine
	ports  []*port
	bounce bounce
	wg     sync.WaitGroup // readers of control connections, and whoever waits for confirmations

	editing sync.Mutex // held to change local
	local   atomic.Pointer[[]*pinned]

	mu     sync.Mutex
	closed bool
	peers  map[string]*rdmaPeer // that this engine has lanes to, by engine
	guests map[guestKey]*guest  // links that peers have made
}

// maxNICs bounds the NICs of an engine: a machine has a dozen.
const maxNICs = 64

// checkNICs refuses NICs that cannot be used.
func (c *Config) checkNICs() error {
	if len(c.NICs) > maxNICs {
		return fmt.Errorf("transfer: %d NICs, at most %d", len(c.NICs), maxNICs)
	}
	for i, n := range c.NICs {
		name := n.Name()
		switch {
		case !validNIC(name):
			return fmt.Errorf("transfer: a NIC's name is from 1 to %d bytes: %.100q", maxName, name)
		case slices.ContainsFunc(c.NICs[:i], func(o NIC) bool { return o.Name() == name }):
			return fmt.Errorf("transfer: NIC %s is named twice", name)
		case n.MaxMessage() < c.SliceSize:
			return fmt.Errorf("transfer: a slice size of %d bytes: NIC %s moves at most %d at once", c.SliceSize, name, n.MaxMessage())
		}
	}
	return nil
}

func validNIC(name string) bool { return name != "" && len(name) <= maxName }

// newRDMA takes the NICs into use; nil if there are none, or they may not be used. With checksums they are not: whoever is
// written to by a NIC cannot check what has come.
func newRDMA(e *Engine) (*rdma, error) {
	if len(e.cfg.NICs) == 0 || !e.cfg.allows(TransportRDMA) || e.cfg.Checksums {
		return nil, nil //nolint:nilnil // documented
	}
	r := &rdma{e: e, peers: map[string]*rdmaPeer{}, guests: map[guestKey]*guest{}}
	r.local.Store(&[]*pinned{})
	r.bounce.r = r
	for i, n := range e.cfg.NICs {
		p, err := newPort(r, i, n)
		if err != nil {
			return nil, errors.Join(err, r.close())
		}
		r.ports = append(r.ports, p)
	}
	return r, nil
}

// names are the NICs by which peers reach this engine.
func (r *rdma) names() (all []string) {
	if r == nil {
		return nil
	}
	for _, p := range r.ports {
		all = append(all, p.nic.Name())
	}
	return all
}

// port finds a NIC by its name.
func (r *rdma) port(name string) *port {
	for _, p := range r.ports {
		if p.nic.Name() == name {
			return p
		}
	}
	return nil
}

// tick is called by the engine's keeper.
func (r *rdma) tick(now int64) {
	if r == nil {
		return
	}
	for _, p := range r.ports {
		p.tick(now)
	}
	r.mu.Lock()
	peers := make([]*rdmaPeer, 0, len(r.peers))
	for _, p := range r.peers {
		peers = append(peers, p)
	}
	r.mu.Unlock()
	for _, p := range peers {
		p.tick(now)
	}
}

// close ends the use of the NICs. When it returns nil no NIC reads or writes memory of this process any more.
func (r *rdma) close() (err error) {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, p := range r.ports { // a NIC that has to be reset takes its time
		wg.Go(func() {
			failed := p.close()
			mu.Lock()
			defer mu.Unlock()
			err = errors.Join(err, failed)
		})
	}
	wg.Wait()
	r.bounce.close()
	if err != nil {
		r.e.cfg.Logger.Error("transfer: a NIC cannot be let go of", slog.Any("error", err))
	}
	return err
}

// wait waits for what goes on for as long as the engine's ctx.
func (r *rdma) wait() {
	if r != nil {
		r.wg.Wait()
	}
}

// EndpointStats tells how the endpoints of each NIC are.
func (e *Engine) EndpointStats() []EndpointStats {
	if e.rdma == nil {
		return nil
	}
	all := make([]EndpointStats, len(e.rdma.ports))
	for i, p := range e.rdma.ports {
		all[i] = p.store.Stats()
	}
	return all
}

// sleep waits, and reports whether ctx has not ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-after(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// PeerEndpointStats asks a process that listens at an address how the endpoints of its NICs are.
func (e *Engine) PeerEndpointStats(ctx context.Context, addr string) (all []EndpointStats, err error) {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	c, _, err := e.dial(ctx, "", addr, kindControl, e.lastCon.Add(1))
	if err != nil {
		return nil, fmt.Errorf("transfer: ask %s for its endpoints: %w", addr, err)
	}
	defer func() { _ = c.conn.Close() }() // the answer is here
	h, body, err := c.call(&header{kind: frameStats}, nil, greetTimeout)
	if err == nil && h.kind != frameStatistics {
		err = fmt.Errorf("transfer: a frame of type %d for statistics", h.kind)
	}
	if err == nil {
		err = json.Unmarshal(body, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("transfer: ask %s for its endpoints: %w", addr, err)
	}
	return all, nil
}
