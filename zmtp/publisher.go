package zmtp

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// Publisher is a PUB: what it publishes goes to all who have subscribed to it and read fast enough.
type Publisher struct {
	s       *Server
	dropped atomic.Uint64

	mu   sync.Mutex
	subs map[*subscriber]struct{}
}

// subscriber is one peer of a publisher: a goroutine reads its subscriptions, another writes what is queued.
type subscriber struct {
	c *Conn

	mu     sync.Mutex
	cond   sync.Cond
	topics map[string]int // how often each was subscribed to
	count  int            // of all
	queue  [][]byte       // encoded messages, which other subscribers share
	bytes  int
	ended  bool
}

// NewPublisher listens for subscribers.
func NewPublisher(ctx context.Context, endpoint string, cfg Config) (*Publisher, error) {
	cfg.Type = PUB
	p := &Publisher{subs: map[*subscriber]struct{}{}}
	var err error
	p.s, err = Listen(ctx, endpoint, cfg, p.serve)
	return p, err
}

// Endpoint is where the publisher listens.
func (p *Publisher) Endpoint() string { return p.s.Endpoint() }

// Dropped is how many messages subscribers did not get because their queue was full.
func (p *Publisher) Dropped() uint64 { return p.dropped.Load() }

// Subscribers is how many are connected.
func (p *Publisher) Subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.subs)
}

// Close ends all connections; what is queued is lost.
func (p *Publisher) Close() error { return p.s.Close() }

// Publish queues a message for those who have subscribed to the beginning of its first part. It does not wait.
func (p *Publisher) Publish(parts ...[]byte) {
	var encoded []byte
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.subs {
		if len(parts) == 0 || !s.wants(parts[0]) {
			continue
		}
		if encoded == nil {
			encoded = appendMessage(nil, parts)
		}
		if !s.push(encoded, &p.s.cfg) {
			p.dropped.Add(1)
		}
	}
}

func (p *Publisher) serve(c *Conn) {
	s := &subscriber{c: c, topics: map[string]int{}}
	s.cond.L = &s.mu
	c.subscribe = s.subscribe
	p.mu.Lock()
	p.subs[s] = struct{}{}
	p.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(s.write)
	s.read()
	p.mu.Lock()
	delete(p.subs, s)
	p.mu.Unlock()
	s.end()
	_ = c.Close() // it returns nil, and ends what is being written
	wg.Wait()
}

// read takes subscriptions until the peer is gone. Before ZMTP 3.1 they came as messages.
func (s *subscriber) read() {
	for {
		m, err := s.c.Read()
		if err != nil {
			return
		}
		if len(m) != 1 || len(m[0]) == 0 || m[0][0] > 1 {
			continue // a subscriber has nothing else to say
		}
		if s.subscribe(m[0][1:], m[0][0] == 1) != nil {
			return
		}
	}
}

// subscribe adds or takes back a subscription.
func (s *subscriber) subscribe(topic []byte, on bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !on:
		if s.topics[string(topic)] > 0 {
			s.count--
			if s.topics[string(topic)]--; s.topics[string(topic)] == 0 {
				delete(s.topics, string(topic))
			}
		}
	case s.count >= maxSubscriptions || len(topic) > maxCommand:
		return fmt.Errorf("%w: more than %d subscriptions, or one of %d bytes", ErrLimit, maxSubscriptions, len(topic))
	default:
		s.topics[string(topic)]++
		s.count++
	}
	return nil
}

// wants reports whether a subscription is a prefix of the topic.
func (s *subscriber) wants(topic []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.topics[""] > 0 {
		return true
	}
	for t := range s.topics {
		if bytes.HasPrefix(topic, []byte(t)) {
			return true
		}
	}
	return false
}

// push queues an encoded message, if there is room.
func (s *subscriber) push(m []byte, cfg *Config) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || len(s.queue) >= cfg.QueueMessages || s.bytes+len(m) > cfg.QueueBytes {
		return s.ended
	}
	s.queue = append(s.queue, m)
	s.bytes += len(m)
	s.cond.Signal()
	return true
}

func (s *subscriber) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.cond.Broadcast()
}

// write sends what is queued, until the peer is gone. What is being sent counts until it has been.
func (s *subscriber) write() {
	for {
		batch := s.take()
		if batch == nil {
			return
		}
		for _, m := range batch {
			if s.send(m) != nil {
				return
			}
			s.mu.Lock()
			s.bytes -= len(m)
			s.mu.Unlock()
		}
	}
}

func (s *subscriber) take() [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.queue) == 0 && !s.ended {
		s.cond.Wait()
	}
	if s.ended {
		return nil
	}
	batch := s.queue
	s.queue = nil
	return batch
}

func (s *subscriber) send(m []byte) error {
	s.c.w.Lock()
	defer s.c.w.Unlock()
	return s.c.send(m)
}
