package transfer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// port is a NIC in use.
type port struct {
	r      *rdma
	index  int
	nic    NIC
	store  *EndpointStore
	ctx    context.Context //nolint:containedctx // it ends the poller
	cancel context.CancelFunc
	wg     sync.WaitGroup

	regs       sync.Mutex // held to register, and while the NIC is reset
	registered map[*pinned]struct{}
	retired    keys

	mu      sync.Mutex
	room    sync.Cond
	flights map[uint64]*flight
	last    uint64 // flights, numbered
	ended   uint64 // how many have
	aside   int    // for workers that have not posted yet
}

// maxFlights bounds the work requests that are outstanding on a NIC: its completion queue must hold the completions of all.
const maxFlights = MaxOutstanding

// MaxOutstanding is how many work requests an engine has outstanding on a NIC at most: its completion queue must hold as
// many completions. 8192 slices of 64 KiB are 512 MiB.
const MaxOutstanding = 8192

// watched is a NIC as its endpoint store sees it.
type watched struct {
	NIC
	p *port
}

// Reset implements NIC.
func (w watched) Reset(ctx context.Context) error { return w.p.reset(ctx) }

func newPort(r *rdma, index int, nic NIC) (*port, error) {
	p := &port{r: r, index: index, nic: nic, registered: map[*pinned]struct{}{}, flights: map[uint64]*flight{}}
	p.room.L = &p.mu
	cfg := r.e.cfg.Endpoints
	cfg.Exchange, cfg.Lost, cfg.Logger = p.exchange, p.lost, r.e.cfg.Logger
	var err error
	if p.store, err = NewEndpointStore(watched{nic, p}, cfg); err != nil {
		return nil, err
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Go(p.poll)
	return p, nil
}

// close destroys all queue pairs, ends the poller, and takes all memory from the NIC.
func (p *port) close() error {
	err := p.store.Close()
	p.cancel()
	p.wg.Wait()
	p.regs.Lock()
	all := make([]*pinned, 0, len(p.registered))
	for m := range p.registered {
		all = append(all, m)
	}
	p.regs.Unlock()
	for _, m := range all {
		err = errors.Join(err, p.deregister(m))
	}
	return err
}

const (
	// polled is how many completions are taken at once.
	polled = 64
	// pollPause is how long the poller leaves a NIC alone that does not let itself be polled.
	pollPause = 10 * time.Millisecond
)

// poll ends flights as their completions come. While there are none it sleeps.
func (p *port) poll() {
	var out [polled]Completion
	for {
		n, err := p.nic.Wait(p.ctx, out[:])
		for i := range out[:n] {
			p.completed(&out[i])
		}
		switch {
		case p.ctx.Err() != nil:
			return
		case err != nil:
			p.r.e.cfg.Logger.Warn("transfer: a NIC cannot be polled", slog.String("nic", p.nic.Name()), slog.Any("error", err))
			sleep(p.ctx, pollPause)
		}
	}
}

// board enters flights, whose work requests are posted next.
func (p *port) board(list []*flight) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.r.e.now()
	for _, f := range list {
		p.last++
		f.id, f.posted = p.last, now
		p.flights[f.id] = f
		f.way.slices++
		f.way.bytes += f.s.length
	}
}

// leave takes a flight out that has ended; nil if it has left before.
func (p *port) leave(id uint64) *flight {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.flights[id]
	if f != nil {
		p.remove(f)
		p.ended++
		p.room.Broadcast()
	}
	return f
}

// unboard takes a flight out that was not posted after all.
func (p *port) unboard(f *flight) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.remove(f)
}

// remove takes a flight out. The mu is held.
func (p *port) remove(f *flight) {
	delete(p.flights, f.id)
	f.way.slices--
	f.way.bytes -= f.s.length
}

func (p *port) endedSoFar() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

// waitForEnd waits until more flights have ended than so many, or the lane is closed.
func (p *port) waitForEnd(l *rdmaLane, than uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.ended == than && l.ctx.Err() == nil {
		p.room.Wait()
	}
}

// StatusError is a work request that a NIC has not carried out.
type StatusError struct {
	NIC    string
	Peer   string
	Status CompletionStatus
	Vendor uint32 // the NIC's own code
}

// Error implements error.
func (e *StatusError) Error() string {
	return fmt.Sprintf("transfer: NIC %s to %s: %v (vendor code %#x)", e.NIC, e.Peer, e.Status, e.Vendor)
}

// completed ends a flight.
func (p *port) completed(c *Completion) {
	f := p.leave(c.ID)
	if f == nil { // from before a reset, which has lost it
		return
	}
	var err error
	if c.Status != StatusOK {
		err = &StatusError{NIC: p.nic.Name(), Peer: f.way.peer, Status: c.Status, Vendor: c.Vendor}
	}
	switch c.Status {
	case StatusOK, StatusFlushed:
	case StatusRemoteAccess: // the key is stale, most likely: nothing is wrong with the peer
		p.store.Renew(f.way.peer, c.QPN)
	default:
		p.store.Fail(f.way.peer, c.QPN, err)
	}
	f.depth.Done() // not earlier: its queue pair's number could be another's
	f.land(c.Status, err)
}

// lost ends the flights of a queue pair that a reset has ended.
func (p *port) lost(d *Depth) {
	p.mu.Lock()
	var all []uint64
	for id, f := range p.flights {
		if f.depth == d {
			all = append(all, id)
		}
	}
	p.mu.Unlock()
	for _, id := range all {
		if f := p.leave(id); f != nil {
			f.depth.Done()
			f.land(StatusFlushed, &StatusError{NIC: p.nic.Name(), Peer: f.way.peer, Status: StatusFlushed})
		}
	}
}

// tick retires endpoints on which a flight takes too long: its completion comes then, or the NIC is reset.
func (p *port) tick(now int64) {
	type pair struct {
		peer string
		qpn  uint32
	}
	stalled := int64(p.r.e.cfg.StallTimeout)
	late := map[pair]error{}
	p.mu.Lock()
	for _, f := range p.flights {
		at := pair{f.way.peer, f.qpn}
		switch {
		case now-f.posted > stalled:
			late[at] = errStalled
		case f.s.batch.late(now) && late[at] == nil:
			late[at] = ErrTimeout
		}
	}
	p.mu.Unlock()
	for at, err := range late {
		if errors.Is(err, ErrTimeout) { // of one batch: the peer has done nothing wrong
			p.store.Renew(at.peer, at.qpn)
		} else {
			p.store.Fail(at.peer, at.qpn, err)
		}
	}
}
