package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/zeebo/xxh3"

	"larder/raft"
)

// Restore makes the data directory of cfg from a snapshot stream, as the only member of a new cluster of the same name,
// and returns the log index of the state. The directory must hold no member yet. A node id is drawn into cfg if it has
// none. What the devices hold is checked when the server is started: the index begins a new incarnation.
func Restore(cfg *Config, r io.Reader, logger *slog.Logger) (uint64, error) {
	if len(cfg.Peers) > 0 || cfg.Join {
		return 0, errors.New("a restored cluster has one member: leave peers and join out, and add members when it runs")
	}
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return 0, fmt.Errorf("make the data directory: %w", err)
	}
	if cfg.NodeID == 0 {
		cfg.NodeID = raft.NewMemberID()
	}
	s := &Server{cfg: *cfg, nodeID: cfg.NodeID}
	index, _, err := raft.RestoreSnapshot(filepath.Join(cfg.DataDir, raftDir), r, raft.RestoreOptions{
		Store: raft.StoreOptions{
			Logger: logger, CacheBytes: int64(cfg.CacheSize), MinFreeBytes: uint64(cfg.MinFreeDisk), //nolint:gosec // checked by Validate
		},
		ClusterID: xxh3.HashString("larder cluster "+cfg.ClusterName) | 1,
		Member:    s.self(),
	})
	if err != nil {
		return 0, fmt.Errorf("data directory %s: %w", cfg.DataDir, err)
	}
	return index, nil
}

// raftDir is where a data directory holds the store.
const raftDir = "raft"
