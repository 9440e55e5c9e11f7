package source

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"larder/conductor"
)

// Config says what a Manager does. The zero value of each field but Index stands for its default.
type Config struct {
	Index *conductor.Index

	// DisconnectTTL is how long what is known of an engine that cannot be reached is kept; 60 s.
	DisconnectTTL time.Duration
	// ReplayTimeout bounds one replay; 10 s.
	ReplayTimeout time.Duration
	// Heartbeat is how often an engine is asked whether it is there; 5 s, and negative for never. One that gives no sign for
	// three times as long is taken for gone.
	Heartbeat time.Duration
	// MaxBackoff is the longest pause between two attempts to connect; 5 s. The first one is 50 ms.
	MaxBackoff time.Duration
	// SweepEvery is how often the index is swept; 10 s, and negative for never.
	SweepEvery time.Duration
	// MaxServices bounds the services; 4096.
	MaxServices int
	// QueueBatches and QueueBytes bound what has come from one engine and is not applied yet, while a replay goes on, say;
	// 4096 and 64 MiB. What does not fit waits at the engine, which drops what is more than its own limit: that is a gap then.
	QueueBatches, QueueBytes int

	Logger *slog.Logger // hears of what a person should know; nil: nobody does
}

func (c *Config) withDefaults() {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.DisconnectTTL, time.Minute},
		{&c.ReplayTimeout, 10 * time.Second},
		{&c.Heartbeat, 5 * time.Second},
		{&c.MaxBackoff, 5 * time.Second},
		{&c.SweepEvery, 10 * time.Second},
	} {
		*d.field = cmp.Or(*d.field, d.value)
	}
	c.MaxServices = cmp.Or(c.MaxServices, 4096)
	c.QueueBatches = cmp.Or(c.QueueBatches, 4096)
	c.QueueBytes = cmp.Or(c.QueueBytes, 64<<20)
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
}

// Manager follows services. Its methods may be called concurrently.
type Manager struct {
	cfg    Config
	life   context.Context //nolint:containedctx // of all goroutines
	cancel context.CancelFunc
	sweeps sync.WaitGroup

	// Who holds several locks has taken them in this order.
	changes sync.Mutex   // held while sources come and go, and while all of it is saved
	frozen  sync.RWMutex // held for reading while an event is applied or what is known is dropped
	mu      sync.Mutex   // of what follows, which is changed by who holds changes, too
	sources map[key]*source
	past    Counters // of those that are registered no more
}

// New makes a manager without services.
func New(cfg Config) *Manager {
	cfg.withDefaults()
	m := &Manager{cfg: cfg, sources: map[key]*source{}}
	m.life, m.cancel = context.WithCancel(context.Background())
	if cfg.SweepEvery > 0 {
		m.sweeps.Go(m.sweep)
	}
	return m
}

// sweep sweeps the index now and then.
func (m *Manager) sweep() {
	for pause(m.life, m.cfg.SweepEvery) == nil {
		m.cfg.Index.Sweep()
	}
}

// Register begins to follow a service. The same again changes nothing, and is not fresh. The error is a *FieldError,
// ErrConflict, ErrFull or ErrClosed.
func (m *Manager) Register(svc Service) (fresh bool, err error) {
	if err := svc.Validate(); err != nil {
		return false, err
	}
	m.changes.Lock()
	defer m.changes.Unlock()
	if old := m.sources[svc.key()]; old != nil {
		if old.Service != svc {
			return false, ErrConflict
		}
		return false, nil
	}
	switch {
	case m.life.Err() != nil:
		return false, ErrClosed
	case len(m.sources) >= m.cfg.MaxServices:
		return false, fmt.Errorf("%w: %d", ErrFull, m.cfg.MaxServices)
	}
	m.start(newSource(m, svc))
	return true, nil
}

// start follows a source. changes is held.
func (m *Manager) start(s *source) {
	ctx, cancel := context.WithCancel(m.life)
	s.cancel = cancel
	m.mu.Lock()
	m.sources[s.key()] = s
	m.mu.Unlock()
	go s.run(ctx)
}

// stop stops following a source. It drops what is known of it, if that is wanted.
func (s *source) stop(drop bool) {
	s.cancel()
	<-s.done
	if drop {
		s.forget(false)
	}
}

// Unregister stops following the services that are meant, and drops what is known of them. It returns them as
// "instance|tenant|rank"; the error is ErrUnknown if there are none, and a *FieldError if no instance is named.
func (m *Manager) Unregister(f Filter) (removed []string, err error) {
	if f.InstanceID == "" {
		return nil, &FieldError{"instance_id", "is missing"}
	}
	m.changes.Lock()
	defer m.changes.Unlock()
	for k, s := range m.sources {
		if !f.matches(&s.Service) {
			continue
		}
		s.stop(true)
		m.mu.Lock()
		m.past.add(s.counters.read())
		delete(m.sources, k)
		m.mu.Unlock()
		removed = append(removed, k.String())
	}
	if len(removed) == 0 {
		return nil, ErrUnknown
	}
	slices.Sort(removed)
	return removed, nil
}

// Services are all services, by instance, tenant and rank.
func (m *Manager) Services() []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]Status, 0, len(m.sources))
	for _, s := range m.sources {
		list = append(list, s.status())
	}
	slices.SortFunc(list, func(a, b Status) int { return a.key().compare(b.key()) })
	return list
}

// Resync drops what is known of an instance, and asks for all that its engines still have of what they did. It returns how
// many services that were.
func (m *Manager) Resync(instance string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sources {
		if s.InstanceID != instance {
			continue
		}
		n++
		select {
		case s.again <- struct{}{}:
		default: // it is to be done already
		}
	}
	return n
}

// Frozen calls fn while no event is applied: what fn sees of the index is as of one moment. Events wait, and queries do not. Of the
// manager's methods fn may call Services, Stats and Resync.
func (m *Manager) Frozen(fn func()) {
	m.frozen.Lock()
	defer m.frozen.Unlock()
	fn()
}

// Stats sums up all sources.
func (m *Manager) Stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	st := Stats{Services: map[State]int{}, Counters: m.past}
	for _, s := range m.sources {
		one := s.status()
		st.Services[one.State]++
		st.add(one.Counters)
	}
	return st
}

// Close stops following all services. What is known of them stays in the index.
func (m *Manager) Close() {
	m.cancel()
	m.changes.Lock()
	defer m.changes.Unlock()
	for _, s := range m.sources {
		s.stop(false)
	}
	m.sweeps.Wait()
}
