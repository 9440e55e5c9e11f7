package source

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"larder/conductor"
	"larder/conductor/kvevent"
	"larder/zmtp"
)

// source follows one service. A goroutine of its own does all of it, and another one reads the connection.
type source struct {
	Service

	m      *Manager
	cancel context.CancelFunc
	done   chan struct{}
	again  chan struct{} // has something in it when all is to be dropped and asked for anew

	// Of the goroutine.
	own      conductor.Source // what events are of that do not say so themselves
	alsoIn   map[conductor.Scope]struct{}
	origins  map[origin]*conductor.Source
	held     map[held]struct{}
	last     held // of held
	batch    kvevent.Batch
	check    *checker  // nil if hashes are not compared
	gone     time.Time // since when the engine is away that was known; zero if it is there, or nothing is known
	noReplay time.Time // until when no replay is asked for, since one has just failed

	counters counters

	mu      sync.Mutex // of what follows, which the goroutine changes; pos while the manager is not frozen
	pos     position
	epoch   uint64
	state   State
	partial bool // what is known began after a gap
	problem error
	heardAt time.Time
}

// counters are Counters that grow.
type counters struct {
	batches, events, bad, unknown, gaps, replays, replayed, dropped, stale, restarts, expired, connects, verified, mismatched atomic.Uint64
}

func newSource(m *Manager, svc Service) *source {
	s := &source{
		Service: svc, m: m, done: make(chan struct{}), again: make(chan struct{}, 1),
		own: conductor.Source{
			Instance: svc.InstanceID, Rank: svc.DPRank,
			Scope: conductor.Scope{
				Tenant: svc.TenantID, Model: svc.ModelName, LoRA: svc.LoRAName, BlockSize: svc.BlockSize, Salt: svc.AdditionalSalt,
			},
		},
		alsoIn: map[conductor.Scope]struct{}{}, origins: map[origin]*conductor.Source{}, held: map[held]struct{}{},
		epoch: 1, state: Connecting, heardAt: now(),
	}
	s.check, _ = newChecker(&svc) // it has been validated
	if svc.Type == Mooncake {
		s.own.Rank = kvevent.NoRank // a pool is not of one rank
	}
	return s
}

// run follows the service until ctx is over.
func (s *source) run(ctx context.Context) {
	defer close(s.done)
	for failed := 0; ; failed++ {
		lived, err := s.session(ctx)
		if ctx.Err() != nil {
			return
		}
		s.trouble(err) // before the state says that there is some
		if lived {
			failed = 0
			s.m.cfg.Logger.Info("an engine is gone", append(s.attrs(), slog.Any("error", err))...)
			s.set(Disconnected)
			if s.pos.known {
				s.gone = now()
			}
		}
		if s.away(ctx, s.m.backoff(failed)) != nil {
			return
		}
	}
}

// firstBackoff is the pause after the first attempt to connect that has failed. Each one after that is twice as long.
const firstBackoff = 50 * time.Millisecond

// backoff is a pause before the next attempt: each one is other engines' at another time.
func (m *Manager) backoff(failed int) time.Duration {
	d := min(firstBackoff<<min(failed, 20), m.cfg.MaxBackoff)
	return d/2 + rand.N(d/2+1) //nolint:gosec // it need not be secret
}

// away waits, and drops what is known of an engine that has been away for too long.
func (s *source) away(ctx context.Context, d time.Duration) error {
	ready, stop := timer(d)
	defer stop()
	for {
		expired, stop := (<-chan time.Time)(nil), func() bool { return false }
		if !s.gone.IsZero() {
			expired, stop = timer(s.left())
		}
		select {
		case <-ctx.Done():
			stop()
			return ctx.Err()
		case <-ready:
			stop()
			return nil
		case <-expired:
			s.expire()
		case <-s.again:
			s.gone = time.Time{}
			s.forget(false)
		}
		stop()
	}
}

// left is how long what is known of an engine that is away is kept.
func (s *source) left() time.Duration { return s.m.cfg.DisconnectTTL - since(s.gone) }

func (s *source) expire() {
	s.m.cfg.Logger.Info("an engine is away for too long: what was known of it is dropped", s.attrs()...)
	s.counters.expired.Add(1)
	s.gone = time.Time{}
	s.forget(false)
}

// dialTimeout bounds one attempt to connect.
const dialTimeout = 5 * time.Second

// session connects, and follows the engine until it is gone. lived says whether it was there.
func (s *source) session(ctx context.Context) (lived bool, err error) {
	limit := dialTimeout
	if !s.gone.IsZero() {
		limit = min(limit, max(s.left(), firstBackoff))
	}
	dial, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err := zmtp.Dial(dial, s.Endpoint, zmtp.Config{Type: zmtp.SUB, Heartbeat: max(s.m.cfg.Heartbeat, 0)})
	if err == nil {
		err = c.Subscribe("")
	}
	if err != nil {
		if c != nil {
			_ = c.Close() // it returns nil
		}
		return false, fmt.Errorf("source: subscribe: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	in := newInbox(s.m.cfg.QueueBatches, s.m.cfg.QueueBytes)
	var reader sync.WaitGroup
	reader.Go(func() { s.read(c, in) })
	defer reader.Wait()
	defer in.end(nil)
	defer func() { _ = c.Close() }() // it returns nil
	return true, s.follow(ctx, in)
}

// read puts what an engine sends into the inbox, until that or the connection is ended.
func (s *source) read(c *zmtp.Conn, in *inbox) {
	for {
		m, err := c.Read()
		if err != nil {
			if err == io.EOF { //nolint:errorlint // Read's own
				err = fmt.Errorf("source: the engine has closed the connection: %w", err)
			}
			in.end(err)
			return
		}
		if len(m) != 3 || len(m[1]) != 8 {
			s.counters.bad.Add(1) // a batch is a topic, a number and a payload
			continue
		}
		if !in.put(binary.BigEndian.Uint64(m[1]), m[2]) {
			return
		}
	}
}

// follow applies what comes, until nothing does any more.
func (s *source) follow(ctx context.Context, in *inbox) error {
	s.counters.connects.Add(1)
	s.gone = time.Time{}
	s.trouble(nil)
	s.move((*position).begin)
	s.catchUp(ctx)
	s.set(Live)
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-s.again:
			s.forget(false)
			s.noReplay = time.Time{}
			s.catchUp(ctx)
		case <-in.ready:
			for ctx.Err() == nil {
				m, ok, ended, why := in.take()
				if ended {
					return why
				}
				if !ok {
					break
				}
				s.deliver(ctx, m)
				in.release(m)
			}
		}
	}
	return ctx.Err()
}

// maxFills is how often it is tried to make good one gap: between a replay and what comes next there may be another one.
const maxFills = 2

// deliver applies a batch that has come by the subscription, and what is missing before it.
func (s *source) deliver(ctx context.Context, m message) {
	sum := sumOf(m.payload)
	for fills := 0; ctx.Err() == nil; fills++ {
		switch s.pos.judge(m.seq, sum) {
		case due:
			s.apply(m.seq, sum, m.payload, false)
			s.hear(m.seq)
			return
		case repeated:
			s.hear(m.seq)
			return
		case restart:
			s.begun()
			if m.seq > 0 && fills < maxFills {
				s.catchUp(ctx)
			}
		case gap:
			if fills == 0 {
				s.counters.gaps.Add(1)
			}
			switch {
			case s.covers(m.payload):
				s.forget(false)
			case fills < maxFills:
				s.catchUp(ctx)
			default:
				s.lose(m.seq - s.pos.next)
			}
		}
	}
}

// hear takes note of a batch that has come by the subscription.
func (s *source) hear(seq uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pos.heard = seq + 1
	s.heardAt = now()
}

// move changes the position.
func (s *source) move(fn func(*position)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(&s.pos)
	s.heardAt = now()
}

func (s *source) set(st State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = st
}

// trouble notes what went wrong last; nil for nothing.
func (s *source) trouble(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problem = err
}

// pause waits, or returns the context's error if that is over first.
func pause(ctx context.Context, d time.Duration) error {
	ready, stop := timer(d)
	defer stop()
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// status is how the source is.
func (s *source) status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{
		Service: s.Service, State: s.state, Epoch: s.epoch, Sequence: s.pos.sequence(), Idle: since(s.heardAt), Counters: s.counters.read(),
	}
	if st.State == Live && s.partial {
		st.State = Stale
	}
	if s.problem != nil {
		st.Error = s.problem.Error()
	}
	return st
}
