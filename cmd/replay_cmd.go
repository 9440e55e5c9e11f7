package cmd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"larder/cmd/replay"
	"larder/cxl"
	"larder/protocol"
	"larder/server"
)

// replayCmd is larder replay.
type replayCmd struct {
	Trace     string        `type:"existingfile" help:"Trace, one JSON object a line: timestamp, input_length, output_length, hash_ids. Without one a sample is generated."`
	Requests  int           `help:"Replay only so many requests; 0: all."`
	Seed      uint64        `default:"1" help:"Of the generated sample (default 1)."`
	Clients   int           `default:"1" help:"Clients at a time; one replays strictly in order (default 1)."`
	Page      server.Size   `default:"64KiB" help:"Bytes of a block, and of a page (default 64KiB)."`
	Region    server.Size   `help:"Bytes of a region; 0: an eighth of each client's share of the pool, at most 64MiB."`
	Pool      server.Size   `default:"640MiB" help:"Size of the pool of the server that is started (default 640MiB)."`
	Pages     int           `help:"Make the pool exactly so many pages, instead of --pool."`
	Policy    string        `default:"lru" help:"Eviction policy of the server that is started (default lru)."`
	Addr      []string      `placeholder:"HOST:PORT" help:"Masters of a running cluster to replay against, or unix:PATH; no server is started then."`
	Admin     []string      `placeholder:"HOST:PORT" help:"Admins of that cluster, to count its evictions (default: those that its members name)."`
	Data      string        `help:"Data directory of the server that is started, kept; without one, one below the default of larder serve is used and removed."`
	Speed     float64       `help:"0: as fast as possible; 1: as the timestamps say; 2: twice as fast."`
	Checksums bool          `help:"Store and verify checksums too; every byte is compared in any case."`
	Prefault  bool          `help:"Map the pool completely before it is used."`
	Budget    time.Duration `default:"60s" help:"How long one request may be repeated while leaders change (default 60s)."`
	Compare   bool          `help:"Print what exact LRU and the optimum would have reached."`
	Prefix    string        `help:"In front of the keys, to keep runs against one cluster apart (default replay/)."`
	JSON      bool          `help:"Print JSON."`
	Quiet     bool          `help:"Show no progress."`

	replayNodes `embed:""`
}

// Bounds of the region size that is derived.
const (
	maxReplayRegion = 64 << 20
	regionsPerShare = 8 // so that clients can shift space among each other
	deviceUnit      = 64 << 10

	maxSocketPath = 107
	socketSuffix  = ".sock" // beside the pool, where the path of the data is too long for a socket
)

// Run implements the command.
func (r *replayCmd) Run(e *env) (err error) {
	if err := r.check(); err != nil {
		return usageError(err)
	}
	logger := slog.New(slog.NewTextHandler(e.stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	cfg := replay.Config{
		Addrs: r.Addr, Trace: r.Trace, Sample: replay.Sample{Seed: r.Seed}, MaxRequest: r.Requests,
		Clients: r.Clients, PageSize: uint64(r.Page), RegionSize: uint64(r.Region), Checksums: r.Checksums,
		Prefault: r.Prefault, Speed: r.Speed, KeyPrefix: r.Prefix, Budget: r.Budget, Compare: r.Compare, Logger: logger,
		Tier: r.Tier, Replicas: r.Replicas,
	}
	if !r.Quiet {
		cfg.Progress = e.stderr
		if f, ok := e.stderr.(*os.File); ok {
			cfg.Terminal = term.IsTerminal(int(f.Fd()))
		}
	}
	if len(r.Addr) == 0 {
		stop, err := r.startServer(e, &cfg, logger)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
	} else {
		cfg.Evictions = r.evictions
	}
	report, err := replay.Run(e.ctx, cfg)
	if report == nil {
		return err //nolint:wrapcheck // says all
	}
	if r.JSON {
		err = errors.Join(err, report.WriteJSON(e.stdout))
	} else {
		err = errors.Join(err, report.WriteTable(e.stdout))
	}
	if err == nil && report.Failures > 0 {
		return &exitError{exitUnwell, fmt.Errorf("%d blocks did not hold the bytes that were stored", report.Failures)}
	}
	return err
}

// check refuses flags that do not go together.
func (r *replayCmd) check() error {
	switch {
	case r.Clients < 1 || r.Pages < 0 || r.Speed < 0 || r.Nodes < 0 || r.KillNodes < 0:
		return errors.New("replay: --clients must be at least 1, --pages, --speed, --nodes and --kill-nodes not negative")
	case r.Nodes > 0 && r.NodeDRAM == 0 && r.NodeSSD == 0:
		return errors.New("replay: --nodes have nothing to contribute: add --node-dram or --node-ssd")
	case r.Nodes == 0 && (r.NodeDRAM > 0 || r.NodeSSD > 0 || r.KillNodes > 0):
		return errors.New("replay: say how many nodes with --nodes")
	case r.Nodes > 0 && len(r.Addr) > 0:
		return errors.New("replay: --nodes are for the server that is started; start larder node for a running cluster")
	}
	return nil
}

// evictions asks the admins that were named, or else those that the members name themselves: these may listen where
// only their own host reaches them, and another cluster's may answer there.
func (r *replayCmd) evictions(ctx context.Context, members []protocol.Member) (p replay.ByPhase, err error) {
	addrs := slices.Clone(r.Admin)
	if len(r.Admin) == 0 {
		for _, m := range members {
			if m.Admin != "" {
				addrs = append(addrs, m.Admin)
			}
		}
	}
	if len(addrs) == 0 {
		return p, replay.ErrUntold
	}
	var s server.StatusReply
	err = (&clusterFlags{Admin: addrs}).newAdmin().getLeader(ctx, "/status", nil, &s)
	if len(r.Admin) == 0 && (err != nil || !sameMembers(&s, members)) {
		return p, errors.Join(replay.ErrUntold, err)
	}
	return phases(s.Stats.Evictions), err
}

// sameMembers reports whether a status is that of the cluster of these members.
func sameMembers(s *server.StatusReply, members []protocol.Member) bool {
	return slices.ContainsFunc(s.Members, func(has server.MemberStatus) bool {
		return slices.ContainsFunc(members, func(m protocol.Member) bool {
			return m.ID == has.ID && m.Addr == has.Client && m.Socket == has.Socket
		})
	})
}

// phases converts counts by phase.
func phases(counts []uint64) (p replay.ByPhase) {
	copy(p[:], counts)
	return p
}

// startServer starts a cluster of one on embedded defaults, and puts its address into cfg. stop ends it and removes
// what was temporary.
func (r *replayCmd) startServer(e *env, cfg *replay.Config, logger *slog.Logger) (stop func() error, err error) {
	dir, temporary := r.Data, r.Data == ""
	remove := func() error { return nil }
	if temporary {
		base, err := dataDir()
		if err != nil {
			return nil, err
		}
		outside := func(dir string) error { // what is not on the disk
			return errors.Join(os.RemoveAll(poolFile(dir, true)), os.RemoveAll(poolFile(dir, true)+socketSuffix))
		}
		if dir, remove, err = replay.Scratch(base, outside); err != nil {
			return nil, err //nolint:wrapcheck // says what to do
		}
	}
	sc := server.Default()
	sc.DataDir, sc.EvictionPolicy, sc.PageSize = dir, r.Policy, r.Page
	sc.ClusterName = "replay"
	sc.Listen, sc.PeerListen, sc.AdminListen = server.Off, server.Off, server.Off // the socket alone: no port is taken
	size := r.Pool
	if r.Pages > 0 {
		size = cxl.HeaderSpan + server.Size(r.Pages)*r.Page
		if size%deviceUnit != 0 {
			return nil, errors.Join(usageError(fmt.Errorf(
				"replay: %d pages of %v are no multiple of %v, which a device is; choose another number",
				r.Pages, r.Page, server.Size(deviceUnit))), remove())
		}
	}
	device := server.DeviceConfig{Path: poolFile(dir, temporary), Size: size}
	sc.Pool = []server.DeviceConfig{device}
	if cfg.RegionSize == 0 {
		share := uint64(size-min(size, cxl.HeaderSpan)) / uint64(regionsPerShare*r.Clients) //nolint:gosec // at least 1
		cfg.RegionSize = max(min(share, maxReplayRegion)/uint64(r.Page), 1) * uint64(r.Page)
	}
	sc.RegionSize = server.Size(cfg.RegionSize)
	if temporary && len(filepath.Join(dir, "larder.sock")) > maxSocketPath {
		sc.Socket = device.Path + socketSuffix
	}
	if err := errors.Join(sc.Complete(), sc.Validate()); err != nil {
		return nil, errors.Join(usageError(err), remove())
	}
	s, err := server.Start(sc, logger)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("replay: start a server: %w", err), remove())
	}
	cfg.Addrs = []string{"unix:" + sc.Socket}
	cfg.Evictions = func(context.Context, []protocol.Member) (replay.ByPhase, error) {
		status := s.Status()
		return phases(status.Stats.Evictions[:]), nil
	}
	nodes, err := r.start(e, dir, cfg.Addrs[0], cfg.PageSize, cfg.RegionSize, logger)
	if err != nil {
		return nil, errors.Join(err, stopServer(s, nil, &sc), remove())
	}
	if nodes != nil {
		cfg.Nodes, cfg.Near = nodes.stats, []string{cxl.HostName()} // the server's pool is the fast one
	}
	return func() error { return errors.Join(nodes.stop(), stopServer(s, nil, &sc), remove()) }, nil
}

// dataDir is where larder serve has its data by default.
func dataDir() (string, error) {
	sc := server.Default()
	sc.Pool = []server.DeviceConfig{{Path: os.DevNull, Size: deviceUnit}} // so that none is looked for
	if err := sc.Complete(); err != nil {
		return "", fmt.Errorf("replay: %w; or name a directory with --data", err)
	}
	return sc.DataDir, nil
}

// poolFile is where the pool of a server started for a replay lies: in memory where there is /dev/shm, under a name
// that is the same whenever the same data directory is used.
func poolFile(dir string, temporary bool) string {
	const shm = "/dev/shm"
	if unix.Access(shm, unix.W_OK) != nil {
		return filepath.Join(dir, "pool")
	}
	if temporary {
		return filepath.Join(shm, filepath.Base(dir)+".pool")
	}
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return filepath.Join(shm, "larder-replay-"+strconv.FormatUint(xxh3.HashString(dir), 16)+".pool")
}
