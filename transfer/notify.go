package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Notification is a message from another engine, or from this one to itself.
type Notification struct {
	Engine string // the sender's id
	Name   string // what it is about, as sender and receiver have agreed
	Body   []byte
}

// Bounds of notifications.
const (
	// MaxNotification is how many bytes the body of a notification may have: what is longer belongs into a buffer.
	MaxNotification = 64 << 10
	// notificationQueue is how many wait for the receiver, who has 16 MiB of them then.
	notificationQueue = 256
)

// inbox is the receiver's queue.
type inbox struct {
	mu     sync.RWMutex // held for writing to close
	closed bool
	queue  chan Notification
	// handlers take what is for them. Who calls one holds mu for reading.
	handlers []*handler
}

// handler takes the notifications whose names begin with its prefix.
type handler struct {
	prefix string
	fn     func(Notification)
}

// Notifications are those that others have sent to this engine, in order for each sender's segment. It is closed with the
// engine. Who does not take them has senders fail with [ErrFull].
func (e *Engine) Notifications() <-chan Notification { return e.inbox.queue }

// ReservedNames begin the names of notifications that never come by [Engine.Notifications]: who sent one that no handler takes is
// refused.
const ReservedNames = "larder-"

// Handle has fn take the notifications whose names begin with prefix, instead of the queue, so that parts of a process that share
// an engine do not take each other's. Of several that fit the one that came first takes it. fn is called as notifications come, in
// order for each sender's segment; it must neither wait nor notify, nor call stop. When stop returns fn is not called any more.
func (e *Engine) Handle(prefix string, fn func(Notification)) (stop func()) {
	h := &handler{prefix, fn}
	e.inbox.mu.Lock()
	defer e.inbox.mu.Unlock()
	e.inbox.handlers = append(e.inbox.handlers, h)
	return func() {
		e.inbox.mu.Lock()
		defer e.inbox.mu.Unlock()
		e.inbox.handlers = slices.DeleteFunc(e.inbox.handlers, func(other *handler) bool { return other == h })
	}
}

// deliver hands a notification to who takes it, or queues it, or says why not. It does not wait.
func (e *Engine) deliver(n Notification) error {
	e.inbox.mu.RLock()
	defer e.inbox.mu.RUnlock()
	if e.inbox.closed {
		return ErrClosed
	}
	for _, h := range e.inbox.handlers {
		if strings.HasPrefix(n.Name, h.prefix) {
			h.fn(n)
			e.counters.received.Add(1)
			return nil
		}
	}
	if strings.HasPrefix(n.Name, ReservedNames) {
		return fmt.Errorf("%w: nobody takes notifications of that name any more", ErrRefused)
	}
	select {
	case e.inbox.queue <- n:
		e.counters.received.Add(1)
		return nil
	default:
		e.counters.refused.Add(1)
		return ErrFull
	}
}

func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	close(b.queue)
}

// notifier sends a segment's notifications over one connection, one after the other.
type notifier struct {
	ctx    context.Context //nolint:containedctx // it ends with the segment
	cancel context.CancelFunc
	turn   chan struct{} // has one element while nobody sends
	c      *stream       // whose turn it is has it; nil if there is none
	used   int64
}

func newNotifier() *notifier {
	n := &notifier{turn: make(chan struct{}, 1)}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.turn <- struct{}{}
	return n
}

// Notify tells the segment's engine something: a name of at most 128 bytes and a body of at most [MaxNotification]. It is
// delivered at most once, and in the order in which calls return. Sent after a batch is done, it is seen after the batch's
// bytes. The error is [ErrFull] if the receiver has too many that it has not taken; after [ErrUncertain] it may have been
// delivered. After others it was not.
func (s *Segment) Notify(ctx context.Context, name string, body []byte) error {
	err := s.notify(ctx, name, body)
	s.e.counters.notify(err)
	return err
}

func (s *Segment) notify(ctx context.Context, name string, body []byte) error {
	switch {
	case len(name) > maxName:
		return fmt.Errorf("transfer: notify: the name has %d bytes, at most %d fit", len(name), maxName)
	case len(body) > MaxNotification:
		return fmt.Errorf("transfer: notify %q: the body has %d bytes, at most %d fit", name, len(body), MaxNotification)
	}
	d := s.Descriptor()
	if d.Engine == s.e.ID() {
		return s.e.deliver(Notification{Engine: d.Engine, Name: name, Body: append([]byte(nil), body...)})
	}
	n := s.notifier
	select {
	case <-n.turn:
	case <-n.ctx.Done():
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { n.turn <- struct{}{} }()
	if err := s.connectNotifier(ctx, &d); err != nil {
		return fmt.Errorf("transfer: notify %s: %w", d.name(), err)
	}
	err := s.sendNotification(ctx, name, body)
	if err != nil && !errors.Is(err, ErrFull) {
		_ = n.c.conn.Close() // nobody knows what it would say next
		n.c = nil
	}
	return err
}

// connectNotifier opens the connection at the first address that answers. It is the caller's turn.
func (s *Segment) connectNotifier(ctx context.Context, d *Descriptor) error {
	n := s.notifier
	if n.ctx.Err() != nil {
		return ErrClosed
	}
	if n.c != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	all := ErrNoPath
	for _, addr := range d.Rails {
		c, engine, err := s.e.dial(ctx, "", addr, kindControl, s.e.lastCon.Add(1))
		if err == nil && engine != d.Engine {
			err = errors.Join(fmt.Errorf("%w: another process answers: open its segment anew", ErrRefused), c.conn.Close())
		}
		if err == nil {
			n.c = c
			return nil
		}
		all = errors.Join(all, err)
	}
	return all
}

// sendNotification sends one and waits for its answer. It is the caller's turn.
func (s *Segment) sendNotification(ctx context.Context, name string, body []byte) error {
	n := s.notifier
	n.used = s.e.now()
	c := n.c
	end := func() { _ = c.conn.SetDeadline(past()) } // it fails for closed ones only
	stopped := context.AfterFunc(ctx, end)
	closed := context.AfterFunc(n.ctx, end) //nolint:contextcheck // either ends it
	defer func() { stopped(); closed() }()
	h := &header{kind: frameNotify, length: uint32(len(name))} //nolint:gosec // at most maxName
	answer, _, err := c.call(h, append([]byte(name), body...), s.e.cfg.StallTimeout)
	switch {
	case err != nil:
		return fmt.Errorf("transfer: notify: %w: %w", ErrUncertain, err)
	case answer.kind == frameFail:
		return fmt.Errorf("transfer: notify %q: %w", name, failure(answer.status))
	case answer.kind != frameNotified:
		return fmt.Errorf("transfer: notify: %w: a frame of type %d for an answer", ErrUncertain, answer.kind)
	}
	return nil
}

// tick closes a connection that nobody has used for long, before the peer does: whoever notified then would not know.
func (n *notifier) tick(e *Engine, now int64) {
	select {
	case <-n.turn:
	default:
		return
	}
	if n.c != nil && now-n.used > int64(e.cfg.IdleTimeout) {
		_ = n.c.conn.Close() // nothing is under way
		n.c = nil
	}
	n.turn <- struct{}{}
}

// close ends the notification that is under way, and the connection.
func (n *notifier) close() {
	n.cancel()
	<-n.turn // for good
	if n.c != nil {
		_ = n.c.conn.Close() // nothing is under way
	}
}

// notified takes a notification from a peer, and answers.
func (c *served) notified(h *header, body []byte) error {
	if h.length > maxName || int(h.length) > len(body) {
		return fmt.Errorf("transfer: a notification with a name of %d bytes", h.length)
	}
	name, text := string(body[:h.length]), body[h.length:]
	answer := header{kind: frameNotified, seq: h.seq}
	if err := c.t.e.deliver(Notification{Engine: c.hello.Load().Engine, Name: name, Body: text}); err != nil {
		answer.kind, answer.status = frameFail, statusOf(err)
	}
	return c.s.send(&answer, nil)
}
