package source

import (
	"context"
	"io"
	"log/slog"
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

// Manager follows services. Its methods may be called concurrently.
type Manager struct{ cfg Config }

// New makes a manager without services.
func New(cfg Config) *Manager { return &Manager{cfg: cfg} }

// Register begins to follow a service. The same again changes nothing, and is not fresh. The error is a *FieldError,
// ErrConflict, ErrFull or ErrClosed.
func (m *Manager) Register(s Service) (fresh bool, err error) { return true, s.Validate() }

// Unregister stops following the services that are meant, and drops what is known of them. It returns them as
// "instance|tenant|rank"; the error is ErrUnknown if there are none.
func (m *Manager) Unregister(Filter) (removed []string, err error) { return nil, ErrUnknown }

// Services are all services, by instance, tenant and rank.
func (m *Manager) Services() []Status { return nil }

// Resync drops what is known of an instance, and asks for all that its engines still have of what they did. It returns how
// many services that were.
func (m *Manager) Resync(instance string) int { return 0 }

// Frozen calls fn while no event is applied: what fn sees of the index is as of one moment. Events wait.
func (m *Manager) Frozen(fn func()) { fn() }

// Stats sums up all sources.
func (m *Manager) Stats() Stats { return Stats{} }

// Close stops following all services. What is known of them stays in the index.
func (m *Manager) Close() {}

// Store keeps what a manager knows from one process to the next.
type Store interface {
	// Save keeps what write writes in place of what it has, all of it or, with an error, nothing.
	Save(ctx context.Context, write func(io.Writer) error) error
	// Load gives what was saved last. The error is ErrNoState if nothing was.
	Load(ctx context.Context) (io.ReadCloser, error)
}

// Save keeps the services, up to where each is known, and the index, as of one moment.
func (m *Manager) Save(ctx context.Context, st Store) error { return nil }

// Load takes over what was saved, and goes on from there: before anything is registered.
func (m *Manager) Load(ctx context.Context, st Store) error { return nil }
