package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"larder/cxl"
)

// Segment is another process's registered memory, as this process knows it, and the ways there. Its methods may be called
// concurrently.
type Segment struct {
	e     *Engine
	lanes []*lane // in the order in which they are preferred

	notifier *notifier

	comparing bool  // more than one lane leads to memory
	compared  int64 // when they were compared last; the keeper's
	sample    atomic.Pointer[sample]

	choosy bool // it makes a difference where memory lies, here or there

	mu        sync.Mutex
	d         Descriptor
	locations map[Handle]string // of buffers, if choosy
	closed    bool
}

// Open asks a process that listens at one of some addresses for its descriptor.
func (e *Engine) Open(ctx context.Context, addresses ...string) (*Segment, error) {
	var all error
	for _, addr := range addresses {
		d, err := e.describe(ctx, addr)
		if err == nil {
			return e.OpenDescriptor(*d)
		}
		all = errors.Join(all, fmt.Errorf("transfer: open the segment at %s: %w", addr, err))
	}
	if all == nil {
		all = errors.New("transfer: open a segment: no address")
	}
	return nil, all
}

// OpenDescriptor makes a segment of a descriptor that came some other way. Nothing is connected yet.
func (e *Engine) OpenDescriptor(d Descriptor) (*Segment, error) {
	if len(d.Engine) != 2*len(e.id) {
		return nil, fmt.Errorf("transfer: open a segment: %.40q is no engine's id", d.Engine)
	}
	froms := e.cfg.From
	if len(froms) == 0 {
		froms = []string{""}
	}
	if len(froms)*len(d.Rails) > maxRails {
		return nil, fmt.Errorf("transfer: open a segment: %d addresses here and %d there: at most %d rails",
			len(froms), len(d.Rails), maxRails)
	}
	s := &Segment{e: e, d: d, notifier: newNotifier(), choosy: e.choosy || len(d.Rails) > 1 && d.Topology.matters()}
	s.known(d.Buffers)
	self := d.Engine == e.ID()
	if self && e.cfg.allows(TransportLocal) {
		s.lanes = append(s.lanes, newLocalLane(s), newLocalStorageLane(s))
	}
	if !self && d.Host != "" && d.Host == cxl.BootName() && e.cfg.allows(TransportShm) {
		s.lanes = append(s.lanes, newShmLane(s))
	}
	if !self && len(d.NICs) > 0 && len(d.Rails) > 0 && e.rdma != nil {
		s.lanes = append(s.lanes, newRDMALane(s, e.rdma.join(d.Engine, d.Rails), d.NICs))
	}
	if !self && len(d.Rails) > 0 && e.cfg.allows(TransportTCP) {
		s.lanes = append(s.lanes, newTCPLane(s, froms, d.Rails, false), newTCPLane(s, froms, d.Rails, true))
	}
	if len(s.lanes) == 0 {
		return nil, fmt.Errorf("transfer: open the segment of %s: %w: it has no address, or its transports are not allowed here",
			d.name(), ErrNoPath)
	}
	memory := 0
	for i, l := range s.lanes {
		l.index = i
		if !l.storage {
			memory++
		}
	}
	s.comparing = memory > 1
	e.mu.Lock()
	closed := e.closed
	if !closed {
		e.segments[s] = struct{}{}
	}
	e.mu.Unlock()
	if closed {
		return nil, errors.Join(ErrClosed, s.Close())
	}
	return s, nil
}

// name is what a peer is called in messages.
func (d *Descriptor) name() string {
	if d.Name != "" {
		return d.Name
	}
	return d.Engine
}

// Descriptor is the segment as it was described last.
func (s *Segment) Descriptor() Descriptor {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.d
	d.Buffers, d.Rails, d.NICs = slices.Clone(d.Buffers), slices.Clone(d.Rails), slices.Clone(d.NICs)
	return d
}

// Buffer finds a buffer by its name.
func (s *Segment) Buffer(name string) (BufferInfo, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.d.Buffers {
		if b.Name == name {
			return b, true
		}
	}
	return BufferInfo{}, false
}

// Refresh asks the process again which buffers it has.
func (s *Segment) Refresh(ctx context.Context) error {
	s.mu.Lock()
	rails, engine := s.d.Rails, s.d.Engine
	s.mu.Unlock()
	if engine == s.e.ID() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.known(s.e.Describe().Buffers)
		return nil
	}
	var all error
	for _, addr := range rails {
		d, err := s.e.describe(ctx, addr)
		if err == nil && d.Engine != engine {
			err = fmt.Errorf("transfer: another process answers at %s: open its segment anew", addr)
		}
		if err == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.known(d.Buffers)
			return nil
		}
		all = errors.Join(all, err)
	}
	return all
}

// known takes note of the buffers that there are. mu is held.
func (s *Segment) known(buffers []BufferInfo) {
	s.d.Buffers = buffers
	if !s.choosy {
		return
	}
	s.locations = make(map[Handle]string, len(buffers))
	for i := range buffers {
		s.locations[buffers[i].Handle] = buffers[i].Location
	}
}

// peerTopology is the peer's; nil if it is not known. It does not change.
func (s *Segment) peerTopology() *Topology {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.d.Topology
}

// location is where a buffer lies; empty if that is not known.
func (s *Segment) location(h Handle) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.locations[h]
}

// Close ends what is under way, and forgets the segment. It waits until nothing lands in local memory any more.
func (s *Segment) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	s.notifier.close()
	for _, l := range s.lanes {
		l.close()
	}
	s.e.mu.Lock()
	delete(s.e.segments, s)
	s.e.mu.Unlock()
	return nil
}

// Path is one way to a peer, as it is now.
type Path struct {
	Transport   string        `json:"transport"`
	Storage     bool          `json:"storage,omitempty"` // it leads to buffers on storage, others to memory
	From        string        `json:"from,omitempty"`    // the address here; empty for any
	To          string        `json:"to"`
	State       string        `json:"state"` // active, paused, or probing: it has been paused and has not carried anything since
	PausedFor   time.Duration `json:"paused_for_ns,omitempty"`
	Connections int           `json:"connections"`
	Unsettled   int           `json:"unsettled,omitempty"` // connections whose end the peer has not confirmed
	Latency     time.Duration `json:"latency_ns"`          // of a slice, from its hand-over to its end; an average
	Slices      uint64        `json:"slices"`              // that were carried
	Bytes       uint64        `json:"bytes"`
	Errors      uint64        `json:"errors"`
}

// Paths are the ways to the process, in the order in which they are preferred.
func (s *Segment) Paths() (all []Path) {
	now := s.e.now()
	storage := slices.ContainsFunc(s.Descriptor().Buffers, func(b BufferInfo) bool { return b.Storage })
	for _, l := range s.lanes {
		l.mu.Lock()
		for _, r := range l.rails {
			p := Path{
				Transport: l.transport, Storage: l.storage, From: r.from, To: r.to, State: "active",
				Connections: len(r.conns), Unsettled: r.unsettled,
				Latency: time.Duration(r.latency.load()), Slices: r.slices.Load(), Bytes: r.bytes.Load(), Errors: r.errors.Load(),
			}
			if l.storage && !storage && p.Slices+p.Errors == 0 {
				continue // it leads to nothing
			}
			switch {
			case now < r.pausedUntil:
				p.State, p.PausedFor = "paused", time.Duration(r.pausedUntil-now)
			case r.probing:
				p.State = "probing"
			}
			all = append(all, p)
		}
		l.mu.Unlock()
	}
	return all
}

// push queues slices, linked from first to last, all of them for memory or all for storage.
func (s *Segment) push(first, last *slice) {
	if l := s.choose(first.request.Buffer.OnStorage(), first.length); l != nil {
		s.sampled(first)
		l.push(first, last)
		return
	}
	endAll(first, ErrNoPath)
}

func (s *Segment) tick(now int64) {
	s.notifier.tick(s.e, now)
	s.compare(now)
	for _, l := range s.lanes {
		l.tick(now)
	}
}

// describe asks for a descriptor.
func (e *Engine) describe(ctx context.Context, addr string) (*Descriptor, error) {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	c, _, err := e.dial(ctx, "", addr, kindControl, e.lastCon.Add(1))
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.conn.Close() }() // the answer is here
	h, body, err := c.call(&header{kind: frameDescribe}, nil, greetTimeout)
	if err != nil {
		return nil, err
	}
	if h.kind != frameDescribed {
		return nil, fmt.Errorf("transfer: a frame of type %d for a descriptor", h.kind)
	}
	return ParseDescriptor(body)
}

// ParseDescriptor reads a descriptor from JSON.
func ParseDescriptor(b []byte) (*Descriptor, error) {
	d := &Descriptor{}
	if err := json.Unmarshal(b, d); err != nil {
		return nil, fmt.Errorf("transfer: read a descriptor: %w", err)
	}
	switch {
	case len(d.Engine) != 32:
		return nil, fmt.Errorf("transfer: read a descriptor: %.40q is no engine's id", d.Engine)
	case len(d.Name) > maxName || len(d.Rails) > maxRails || len(d.Buffers) > maxListed || len(d.NICs) > maxNICs:
		return nil, errors.New("transfer: read a descriptor: it is too large")
	case slices.ContainsFunc(d.NICs, func(n string) bool { return !validNIC(n) }):
		return nil, fmt.Errorf("transfer: read a descriptor: a NIC's name is from 1 to %d bytes", maxName)
	}
	if err := d.Topology.check(); err != nil {
		return nil, err
	}
	for _, r := range d.Rails {
		if _, _, err := net.SplitHostPort(r); err != nil {
			return nil, fmt.Errorf("transfer: read a descriptor: %w", err)
		}
	}
	return d, nil
}

// abort has the peer confirm that it does not read a data connection any more. It returns nil if that is so. refused
// says that the connection had been closed from there: whoever is refused then knows that the process has ended.
func (s *Segment) abort(ctx context.Context, addr string, id uint64, refused bool) error {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	s.mu.Lock()
	want := s.d.Engine
	s.mu.Unlock()
	c, engine, err := s.e.dial(ctx, "", addr, kindControl, s.e.lastCon.Add(1))
	switch {
	case err != nil && refused && errors.Is(err, syscall.ECONNREFUSED):
		return nil
	case err != nil:
		return err
	}
	defer func() { _ = c.conn.Close() }() // the answer is here
	if engine != want {
		return nil // another process has taken its address, which it gave up last of all
	}
	h, _, err := c.call(&header{kind: frameAbort, seq: id}, nil, s.e.cfg.AbortTimeout)
	if err == nil && h.kind != frameAborted {
		err = fmt.Errorf("transfer: a frame of type %d for an abort's confirmation", h.kind)
	}
	return err
}

// retryEvery is how long the first confirmation is waited for again, and retryAtMost the longest.
const (
	retryEvery  = 20 * time.Millisecond
	retryAtMost = 5 * time.Second
)
