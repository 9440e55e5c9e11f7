package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"larder/transfer"
)

const (
	// handoffPrefix begins the names of the notifications that are about layers of a Receiver; its ticket's id follows.
	handoffPrefix = "larder/layers/"
	// layerAborted is the layer of a notification which says that no more come.
	layerAborted = ^uint32(0)
	// notifyWait is how long that takes beyond the time that a receiver has for an answer; who is gone costs no more.
	notifyWait = 500 * time.Millisecond
	// notifyTries is how often a receiver is told that a layer is there: with the pauses in between about half a second, in
	// which one that lives has taken what waits.
	notifyTries = 8
	// retireWait is how long Receiver.Close waits for a peer that is in the middle of a copy.
	retireWait = 5 * time.Second
)

// ErrAborted says that the sender of a value has given up.
var ErrAborted = errors.New("the sender has given up")

// Ticket is what a sender has to know to put a value into a Receiver's memory. It is as good as a key: whoever has it can
// write there until the Receiver is closed. It goes from the receiving engine to the sending one by their own ways, as JSON
// say, or by way of the masters: see [Receiver.Publish].
type Ticket struct {
	ID         string              `json:"id"`       // names the Receiver, and no other one ever
	Instance   string              `json:"instance"` // the receiver's
	Key        []byte              `json:"key"`
	Sizes      []int               `json:"sizes"` // of the layers, in bytes
	Descriptor transfer.Descriptor `json:"descriptor"`
	Buffer     transfer.Handle     `json:"buffer"`
}

// Receiver is memory of a decode instance into which a prefill instance puts a value, layer by layer, while it computes
// those that follow. Its methods may be called concurrently. Every Receiver ends with Close.
type Receiver struct {
	*layout
	c      *Client
	ticket Ticket
	mem    []byte
	buffer *transfer.Buffer
	inbox  *inbox

	mu      sync.Mutex
	arrived []chan struct{} // per layer, closed when it is there
	missing int
	aborted chan struct{} // closed when the sender gives up, or the Receiver is closed
	closed  bool
	gone    sync.Once

	publishing sync.Mutex // before mu
	published  *KeptName  // nil = it is not
}

// Receive makes memory ready for the value of key, whose layers have these sizes in bytes and lie one behind the other. mem,
// if it is not nil, is that memory, of the sizes' sum; otherwise it is made, such that senders on the same host can map it.
//
// It needs a Config.Transfer that listens. The notifications of that engine are taken by the clients that receive with it:
// nobody else may.
func (c *Client) Receive(key []byte, sizes []int, mem []byte) (*Receiver, error) {
	r, err := c.receive(key, sizes, mem)
	return r, fail("receive", key, err)
}

func (c *Client) receive(key []byte, sizes []int, mem []byte) (*Receiver, error) {
	o, err := newLayout(sizes)
	e := c.cfg.Transfer
	switch {
	case err != nil:
		return nil, err
	case e == nil || len(e.Addresses()) == 0:
		return nil, fmt.Errorf("%w: Config.Transfer has to listen, so that others reach this process", ErrConfig)
	case mem != nil && len(mem) != o.total:
		return nil, fmt.Errorf("%w: %d bytes for layers of %d", ErrConfig, len(mem), o.total)
	}
	if err := c.checkKey(key); err != nil {
		return nil, err
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails: see crypto/rand
	r := &Receiver{layout: o, c: c, mem: mem, missing: len(o.sizes), aborted: make(chan struct{})}
	for range o.sizes {
		r.arrived = append(r.arrived, make(chan struct{}))
	}
	options := transfer.BufferOptions{Name: handoffPrefix + hex.EncodeToString(id[:])}
	if mem == nil {
		r.buffer, r.mem, err = e.Allocate(o.total, options)
	} else {
		r.buffer, err = e.Register(mem, options)
	}
	if err != nil {
		return nil, err //nolint:wrapcheck // says what to do
	}
	d := e.Describe()
	d.Buffers = nil
	r.ticket = Ticket{
		ID: hex.EncodeToString(id[:]), Instance: c.cfg.Instance, Key: append([]byte(nil), key...), Sizes: o.sizes,
		Descriptor: d, Buffer: r.buffer.Info().Handle,
	}
	r.inbox = openInbox(e, r, c.cfg.Logger)
	return r, nil
}

// Ticket is what the sender needs.
func (r *Receiver) Ticket() Ticket { return r.ticket }

// Bytes is the memory of layer i. It holds the layer after Wait, and must not be touched after Close unless it is the
// caller's own.
func (r *Receiver) Bytes(i int) []byte {
	from := r.offsets[i]
	return r.mem[from : from+r.sizes[i] : from+r.sizes[i]]
}

// Wait waits until layer i is there. The error is ErrAborted if it will not come.
func (r *Receiver) Wait(ctx context.Context, i int) error {
	if i < 0 || i >= len(r.arrived) {
		return fail("receive", r.ticket.Key, fmt.Errorf("%w: layer %d of %d", ErrConfig, i, len(r.arrived)))
	}
	select {
	case <-r.arrived[i]:
		return nil
	default:
	}
	select {
	case <-r.arrived[i]:
		return nil
	case <-r.aborted:
		return fail("receive", r.ticket.Key, ErrAborted)
	case <-ctx.Done():
		return fail("receive", r.ticket.Key, ctx.Err())
	}
}

// Store puts the value, of which all layers must be there, into the pool under its key, as Put does. Otherwise nobody but this
// instance has it.
func (r *Receiver) Store(ctx context.Context, opts ...StoreOption) (PutResult, error) {
	r.mu.Lock()
	missing, closed := r.missing, r.closed
	r.mu.Unlock()
	if missing > 0 || closed {
		return PutResult{}, fail("receive", r.ticket.Key, fmt.Errorf("%w: %d layers are missing, or it is closed", ErrConfig, missing))
	}
	return r.c.Put(ctx, r.ticket.Key, r.mem, opts...)
}

// Close ends the Receiver: when it has returned nil nothing is written to its memory any more, and what Receive has made is
// gone. If a sender is stuck in the middle of a copy it fails; call it again before the memory is used for something else.
func (r *Receiver) Close(ctx context.Context) error {
	r.mu.Lock()
	was := r.closed
	r.closed = true
	r.mu.Unlock()
	if !was {
		r.abort()
	}
	_ = r.withdraw(ctx) // the name goes with the session then, and leads nowhere from here on
	ctx, cancel := context.WithTimeout(ctx, retireWait)
	defer cancel()
	if err := r.buffer.Retire(ctx); err != nil {
		return fail("close receiver", r.ticket.Key, err)
	}
	r.gone.Do(func() { r.inbox.close(r) })
	return nil
}

// tell notes what a notification says.
func (r *Receiver) tell(body []byte) {
	if len(body) != 4 {
		return
	}
	i := binary.LittleEndian.Uint32(body)
	if i == layerAborted {
		r.abort()
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if uint64(i) >= uint64(len(r.arrived)) {
		return
	}
	select {
	case <-r.arrived[i]: // it was told before
	default:
		close(r.arrived[i])
		if r.missing--; r.missing == 0 {
			r.withdrawSoon()
		}
	}
}

func (r *Receiver) abort() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.aborted:
	default:
		close(r.aborted)
		r.withdrawSoon()
	}
}

// inbox hands the notifications of an engine to the Receivers that they are for.
type inbox struct {
	e    *transfer.Engine
	stop chan struct{}
	done chan struct{}

	mu        sync.Mutex
	receivers map[string]*Receiver
}

// inboxes are those of all engines of this process: several clients may receive with one.
var inboxes = struct {
	sync.Mutex
	of map[*transfer.Engine]*inbox
}{of: make(map[*transfer.Engine]*inbox)}

// openInbox has r hear of what is for it.
func openInbox(e *transfer.Engine, r *Receiver, log *slog.Logger) *inbox {
	inboxes.Lock()
	defer inboxes.Unlock()
	b := inboxes.of[e]
	if b == nil {
		b = &inbox{e: e, stop: make(chan struct{}), done: make(chan struct{}), receivers: make(map[string]*Receiver)}
		inboxes.of[e] = b
		go b.read(log)
	}
	b.mu.Lock()
	b.receivers[r.ticket.ID] = r
	b.mu.Unlock()
	return b
}

// close has r hear of nothing any more. The last one ends the inbox.
func (b *inbox) close(r *Receiver) {
	inboxes.Lock()
	defer inboxes.Unlock()
	b.mu.Lock()
	delete(b.receivers, r.ticket.ID)
	last := len(b.receivers) == 0
	b.mu.Unlock()
	if last {
		delete(inboxes.of, b.e)
		close(b.stop)
		<-b.done
	}
}

func (b *inbox) read(log *slog.Logger) {
	defer close(b.done)
	for {
		select {
		case n, ok := <-b.e.Notifications():
			if !ok {
				b.ended()
				return
			}
			id, ours := strings.CutPrefix(n.Name, handoffPrefix)
			b.mu.Lock()
			r := b.receivers[id]
			b.mu.Unlock()
			if !ours || r == nil {
				log.Debug("a notification is for nobody", slog.String("name", n.Name))
				continue
			}
			r.tell(n.Body)
		case <-b.stop:
			return
		}
	}
}

// ended tells all receivers that nothing comes any more: the engine was closed.
func (b *inbox) ended() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.receivers {
		r.abort()
	}
}

// Sender puts a value into a Receiver's memory layer by layer. Its methods may be called concurrently. Every Sender ends with
// Finish or Abort.
type Sender struct {
	layers
	c      *Client
	ticket Ticket
	seg    *segment
}

// Send begins to send the value of a ticket. Nothing is sent before Launch.
func (c *Client) Send(t Ticket) (*Sender, error) {
	if c.life.Err() != nil {
		return nil, ErrClosed
	}
	o, err := newLayout(t.Sizes)
	if err != nil {
		return nil, fail("send", t.Key, err)
	}
	seg, err := c.devices.carrier.openDescriptor(t.Descriptor)
	if err != nil {
		return nil, fail("send", t.Key, err)
	}
	s := &Sender{c: c, ticket: t, seg: seg}
	s.init(c, o)
	return s, nil
}

// Launch begins to send layer i. b, which has the layer's size, must not change until Wait has returned.
func (s *Sender) Launch(i int, b []byte) error {
	return fail("launch layer", s.ticket.Key, s.launch(i, len(b), func(ctx context.Context, _ *layer) error {
		f := s.c.submit(ctx, []transfer.Request{{
			Op: transfer.Write, Segment: s.seg.Segment, Buffer: s.ticket.Buffer, Offset: uint64(s.offsets[i]), Local: b, //nolint:gosec // not negative
		}}, uint64(len(b)))
		f.wait(ctx)
		if _, err := f.status(0); err != nil {
			s.stop(err) // the value does not come: the others are not wanted any more
			return fmt.Errorf("send layer %d: %w", i, err)
		}
		s.c.counters.layersSent.Add(1)
		return s.notify(ctx, uint32(i)) //nolint:gosec // at most maxLayers
	}))
}

// notify tells the receiver of a layer that is there. One that was told twice heard it once.
func (s *Sender) notify(ctx context.Context, i uint32) error {
	ctx, cancel := context.WithTimeout(ctx, s.c.cfg.CallTimeout+notifyWait)
	defer cancel()
	var last error
	for n := range notifyTries {
		if n > 0 {
			if err := sleep(ctx, backoff(n+2)); err != nil {
				return errors.Join(err, last)
			}
		}
		one, cancel := context.WithTimeout(ctx, s.c.cfg.CallTimeout)
		last = s.seg.Notify(one, handoffPrefix+s.ticket.ID, binary.LittleEndian.AppendUint32(nil, i))
		cancel()
		if last == nil {
			return nil
		}
	}
	return fmt.Errorf("tell the receiver: %w", last)
}

// Wait waits until layer i, which was launched, is with the receiver, who has been told.
func (s *Sender) Wait(ctx context.Context, i int) error {
	return fail("wait for layer", s.ticket.Key, s.wait(ctx, i))
}

// Finish waits for all layers, each of which must have been launched. If one has failed those that have not begun do not
// begin, and the receiver is told that the value does not come. It ends the Sender in any case.
func (s *Sender) Finish() error {
	if !s.end(s.c.life) {
		return fail("send", s.ticket.Key, fmt.Errorf("%w: the Sender has ended", ErrConfig))
	}
	defer s.c.devices.carrier.drop(s.seg)
	if err := s.fault(); err != nil {
		_ = s.notify(s.c.life, layerAborted) // a receiver that cannot be told waits until its own time is over
		return fail("send", s.ticket.Key, err)
	}
	return nil
}

// Abort ends the Sender, and tells the receiver that the value does not come. It waits for what is under way, and for the
// receiver's answer, as long as a peer may take that answers. After Finish it does nothing.
func (s *Sender) Abort() {
	if s.leave() {
		_ = s.notify(s.c.life, layerAborted) // as in Finish
		s.c.devices.carrier.drop(s.seg)
	}
}
