package server

import (
	"context"
	"errors"
	"io"
	"log/slog"

	"larder/meta"
)

// Server is one running member: its Raft node, its index, its devices and its listeners. All methods are safe for
// concurrent use.
type Server struct {
	cfg    Config
	logger *slog.Logger
}

// Start opens the data directory, joins or forms the cluster and listens.
func Start(cfg Config, logger *slog.Logger) (*Server, error) {
	return &Server{cfg: cfg, logger: logger}, errors.ErrUnsupported
}

// Stop hands leadership over, closes the listeners and everything else.
func (s *Server) Stop(ctx context.Context) error { return ctx.Err() }

// Config returns the configuration that the server runs on.
func (s *Server) Config() Config { return s.cfg }

// Addr returns the address that clients are told; Listening addresses follow from the listeners, so that ":0" works.
func (s *Server) Addr() string { return s.cfg.Listen }

// Status describes this member.
func (s *Server) Status() Status { return Status{} }

// Ready returns nil when this member can serve: a leader is known, the log is applied, the disk is well.
func (s *Server) Ready() error { return nil }

// Members lists the cluster.
func (s *Server) Members() []MemberStatus { return nil }

// Regions lists up to limit regions with ids above after; next is 0 at the end.
func (s *Server) Regions(after uint64, limit int) (regions []RegionStatus, next uint64) { return nil, 0 }

// Clients lists the sessions, ascending.
func (s *Server) Clients() []ClientStatus { return nil }

// Keys lists up to limit entries whose keys begin with prefix, in no particular order; next is 0 at the end. A page
// may be empty and yet not be the last.
func (s *Server) Keys(prefix []byte, cursor uint64, limit int) (keys []KeyStatus, next uint64) { return nil, 0 }

// Settings returns the replicated settings as this member has applied them.
func (s *Server) Settings() meta.Settings { return meta.Settings{} }

// SetSettings logs the settings that change makes of the present ones. Leader only.
func (s *Server) SetSettings(ctx context.Context, change func(*meta.Settings)) error { return ctx.Err() }

// Check compares the index with the devices; deep verifies the bytes of entries that have checksums.
func (s *Server) Check(ctx context.Context, deep bool) (*CheckReport, error) { return nil, ctx.Err() }

// AddMember adds a member and returns its id, with which it is then started.
func (s *Server) AddMember(ctx context.Context, m NewMember) (uint64, error) { return 0, ctx.Err() }

// PromoteMember makes a learner that has caught up a voter.
func (s *Server) PromoteMember(ctx context.Context, id uint64) error { return ctx.Err() }

// RemoveMember removes a member for ever.
func (s *Server) RemoveMember(ctx context.Context, id uint64) error { return ctx.Err() }

// TransferLeadership hands leadership to a member, 0 = the one that is furthest.
func (s *Server) TransferLeadership(ctx context.Context, to uint64) error { return ctx.Err() }

// Pin pins keys for an operator and says for each whether it existed. Leader only.
func (s *Server) Pin(ctx context.Context, keys [][]byte, spec PinSpec) ([]bool, error) { return nil, ctx.Err() }

// Unpin undoes Pin of the same owner, and says for each key whether there was such a pin. Leader only.
func (s *Server) Unpin(ctx context.Context, keys [][]byte, owner string) ([]bool, error) { return nil, ctx.Err() }

// Clear drops everything in scope; nothing of it is served any more when it returns nil. Leader only.
func (s *Server) Clear(ctx context.Context, scope ClearScope) error { return ctx.Err() }

// Drain takes all regions from an instance, and returns how many it has asked for. Leader only.
func (s *Server) Drain(ctx context.Context, instance string) (int, error) { return 0, ctx.Err() }

// SnapshotSave writes a snapshot of this member's state to w.
func (s *Server) SnapshotSave(ctx context.Context, w io.Writer) error { return ctx.Err() }

// Counters returns the live counters.
func (s *Server) Counters() *Counters { return nil }
