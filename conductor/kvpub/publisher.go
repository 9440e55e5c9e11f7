package kvpub

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"larder/conductor/kvevent"
	"larder/zmtp"
)

// Publisher publishes events. Its methods may be called concurrently; events that are published one after the other are told
// in that order.
type Publisher struct {
	cfg    Config
	pub    *zmtp.Publisher
	router *zmtp.Server // nil if nothing is sent again
	topic  []byte
	wg     sync.WaitGroup
	done   chan struct{}
	first  chan struct{} // 1: a batch has got its first event

	refused, events, replays atomic.Uint64

	mu     sync.Mutex
	enc    kvevent.Encoder
	next   uint64 // sequence of the next batch
	ring   ring
	closed bool
}

// New begins to publish. ctx ends the attempt only.
func New(ctx context.Context, cfg Config) (*Publisher, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	p := &Publisher{
		cfg: cfg, topic: []byte(cfg.Topic), done: make(chan struct{}), first: make(chan struct{}, 1),
		enc: kvevent.Encoder{Format: cfg.Format}, ring: ring{most: cfg.RingBatches, mostBytes: cfg.RingBytes},
	}
	p.enc.Begin(0)
	if p.pub, err = zmtp.NewPublisher(ctx, cfg.Listen, cfg.Socket); err != nil {
		return nil, fmt.Errorf("kvpub: %w", err)
	}
	if cfg.Replay != "" {
		socket := cfg.Socket
		socket.Type, socket.MaxMessage = zmtp.ROUTER, maxRequest
		if p.router, err = zmtp.Listen(ctx, cfg.Replay, socket, p.serveReplay); err != nil {
			return nil, errors.Join(fmt.Errorf("kvpub: %w", err), p.pub.Close())
		}
	}
	p.wg.Go(p.send)
	return p, nil
}

// Endpoint is where subscribers connect to.
func (p *Publisher) Endpoint() string { return p.pub.Endpoint() }

// ReplayEndpoint is where subscribers ask for past batches; empty if nowhere.
func (p *Publisher) ReplayEndpoint() string {
	if p.router == nil {
		return ""
	}
	return p.router.Endpoint()
}

// Close ends all connections; what waits is lost.
func (p *Publisher) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	close(p.done)
	p.mu.Unlock()
	p.wg.Wait()
	err := p.pub.Close()
	if p.router != nil {
		err = errors.Join(err, p.router.Close())
	}
	return err
}

// Stats are what a publisher has done.
type Stats struct {
	Sequence    uint64 // of the next batch
	Events      uint64
	Refused     uint64 // events that could not be encoded
	Dropped     uint64 // batches that subscribers lost since they read too slowly
	Replays     uint64 // requests for past batches
	Subscribers int
	Kept        int // batches that can be sent again
	KeptBytes   int
}

// Stats tells what the publisher has done.
func (p *Publisher) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{
		Sequence: p.next, Events: p.events.Load(), Refused: p.refused.Load(), Dropped: p.pub.Dropped(), Replays: p.replays.Load(),
		Subscribers: p.pub.Subscribers(), Kept: p.ring.n, KeptBytes: p.ring.bytes,
	}
}

// Publish adds events to the present batch, which goes out when it is full or its interval is over. It does not wait, and
// keeps nothing of them. One that cannot be encoded is left out; the error says why the first was.
func (p *Publisher) Publish(events ...kvevent.Event) (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return zmtp.ErrClosed
	}
	for i := range events {
		switch refused := p.enc.Add(&events[i]); {
		case refused != nil:
			p.refused.Add(1)
			if err == nil {
				err = refused
			}
		case p.enc.Len() >= p.cfg.BatchEvents || p.enc.Size() >= p.cfg.BatchBytes:
			p.flush()
		case p.enc.Len() == 1:
			select {
			case p.first <- struct{}{}:
			default:
			}
		}
	}
	return err
}

// Flush sends the present batch, if it has events.
func (p *Publisher) Flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flush()
}

// Skip tells subscribers that events are missing which nobody can send again: a number is left out of the sequence, and they
// see that at once, by a batch without events.
func (p *Publisher) Skip() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.flush()
	p.next++
	p.out()
}

// flush sends the present batch, if it has events. mu is held.
func (p *Publisher) flush() {
	if p.enc.Len() > 0 && !p.closed {
		p.out()
	}
}

// out sends the present batch and begins the next one. mu is held.
func (p *Publisher) out() {
	p.events.Add(uint64(p.enc.Len())) //nolint:gosec // not negative
	payload := bytes.Clone(p.enc.End(p.cfg.Rank))
	p.enc.Begin(seconds())
	p.ring.push(batch{p.next, payload})
	p.pub.Publish(p.topic, binary.BigEndian.AppendUint64(nil, p.next), payload)
	p.next++
}

// send ends batches whose time is over, and has others see that this side is there.
func (p *Publisher) send() {
	due := timer(p.cfg.Interval)
	due.Stop()
	defer due.Stop()
	beat, last := make(<-chan time.Time), uint64(0)
	if p.cfg.Beat > 0 {
		t := every(p.cfg.Beat)
		defer t.Stop()
		beat = t.C
	}
	for {
		select {
		case <-p.done:
			return
		case <-p.first:
			due.Reset(p.cfg.Interval)
		case <-due.C:
			p.Flush()
		case <-beat:
			last = p.beat(last)
		}
	}
}

// beat sends a batch without events if none has gone out since the last beat, when the next one's sequence was last. It returns
// what that is now.
func (p *Publisher) beat(last uint64) uint64 {
	due := p.cfg.Beating == nil || p.cfg.Beating()
	p.mu.Lock()
	defer p.mu.Unlock()
	if due && p.next == last && p.enc.Len() == 0 && !p.closed {
		p.out()
	}
	return p.next
}
