package server

import (
	"context"

	"larder/meta"
)

// ClearScope says what Clear drops. Exactly one of its fields is set.
type ClearScope struct {
	All     bool
	Prefix  []byte
	Context *meta.Context // empty fields match everything
}

// Clear drops everything in scope, of all tenants unless it names one; nothing of it is served any more when it
// returns nil. Leader only.
func (s *Server) Clear(ctx context.Context, scope ClearScope) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	_, err := s.do(ctx, &meta.Clear{All: scope.All, Prefix: scope.Prefix, Context: scope.Context})
	return err
}
