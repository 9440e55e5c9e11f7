package raft

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// maxBackgroundErrors in a row, without one flush or compaction that succeeded,
// stop the member. Pebble retries at some 10^5 a second, so this is reached in
// milliseconds once a fault is permanent, while a single ENOSPC that the ballast
// cures causes far fewer.
const maxBackgroundErrors = 1000

// spaceResume is by how much free space must exceed the minimum before writes
// are accepted again, so that the gate does not flutter.
const spaceResume = 1.25

// health watches the disk: free space, slowness and background errors. Its
// fields are atomics because Pebble calls it from places where nothing may block.
type health struct {
	s        *Store
	failStop func(error)
	failOnce sync.Once
	failed   atomic.Bool
	cause    error // valid once failed is set

	minFree   uint64
	ballast   int64
	simulated bool // what fails in the background ends once FailStop has returned

	full       atomic.Bool // below MinFreeBytes: no new proposals
	critical   atomic.Bool // below a quarter of it: no writes that can be refused
	hasBallast atomic.Bool

	avail, total                       atomic.Uint64
	slowOps, slowMaxNanos, diskFulls   atomic.Int64
	backgroundErrors, backgroundStreak atomic.Int64
	stalls                             atomic.Int64
}

func (h *health) init(s *Store, o *StoreOptions) {
	h.s, h.failStop, h.minFree, h.ballast = s, o.FailStop, o.MinFreeBytes, o.BallastBytes
	h.simulated = o.CompactionScheduler != nil
	if h.failStop == nil {
		logger := o.Logger
		h.failStop = func(err error) {
			logger.Error("the member stops: its storage failed", slog.Any("error", err))
			os.Exit(exitStorage)
		}
	}
}

// exitStorage is the process's status after a storage fault: EX_IOERR of sysexits.
const exitStorage = 74

// fail reports err once. Whoever else comes meanwhile waits until it is reported.
func (h *health) fail(err error) {
	h.failOnce.Do(func() {
		h.cause = err
		h.failed.Store(true)
		h.failStop(err)
	})
}

// diskSlow is called by the disk health checker, on its own goroutine, and must
// neither block nor log.
func (h *health) diskSlow(info vfs.DiskSlowInfo) {
	h.slowOps.Add(1)
	for {
		old := h.slowMaxNanos.Load()
		if int64(info.Duration) <= old || h.slowMaxNanos.CompareAndSwap(old, int64(info.Duration)) {
			break
		}
	}
	if info.Duration >= stallLimit {
		go h.fail(fmt.Errorf("%w: %s of %s", ErrDiskStalled, info.OpType, info.Path)) // os.Exit may block on output
	}
}

// diskFull gives up the ballast. Pebble's writers wait for it.
func (h *health) diskFull() {
	h.diskFulls.Add(1)
	h.full.Store(true)
	if h.hasBallast.Swap(false) {
		_ = h.s.fs.Remove(h.s.path("ballast")) // an error leaves the disk full, and Pebble reports that itself
	}
}

func (h *health) listener() *pebble.EventListener {
	ok := func() { h.backgroundStreak.Store(0) }
	return &pebble.EventListener{
		BackgroundError: func(err error) {
			h.backgroundErrors.Add(1)
			if h.backgroundStreak.Add(1) == maxBackgroundErrors {
				h.fail(fmt.Errorf("raft: %d background errors in a row, the last: %w", maxBackgroundErrors, err))
			}
			if h.simulated && h.failed.Load() {
				runtime.Goexit() // Pebble would try again for ever, as fast as it can
			}
		},
		DataCorruption: func(info pebble.DataCorruptionInfo) {
			h.fail(&CorruptionError{What: "the file " + info.Path, Cause: info.Details})
		},
		FlushEnd: func(i pebble.FlushInfo) {
			if i.Err == nil {
				ok()
			}
		},
		CompactionEnd: func(i pebble.CompactionInfo) {
			if i.Err == nil {
				ok()
			}
		},
		WriteStallBegin: func(pebble.WriteStallBeginInfo) { h.stalls.Add(1) },
	}
}

// PollSpace measures the free space, moves the gate that makes proposals fail
// with ErrDiskFull, and creates the ballast when there is room for it. It may
// block on a sick disk; the Node calls it every few ticks, one call at a time.
func (s *Store) PollSpace() {
	h := &s.health
	u, err := s.fs.GetDiskUsage(s.dir)
	if err != nil {
		return // a file system without the notion has no gate
	}
	h.avail.Store(u.AvailBytes)
	h.total.Store(u.TotalBytes)
	switch {
	case u.AvailBytes < h.minFree:
		h.full.Store(true)
	case float64(u.AvailBytes) >= spaceResume*float64(h.minFree):
		h.full.Store(false)
	}
	h.critical.Store(u.AvailBytes < h.minFree/4)
	if h.ballast > 0 && !h.hasBallast.Load() && u.AvailBytes > 2*h.minFree+uint64(h.ballast) {
		if err := h.makeBallast(); err != nil {
			s.logger.Warn("no ballast file: a full disk will stop the member", slog.Any("error", err))
		}
	}
}

// makeBallast allocates the ballast file, or finds it.
func (h *health) makeBallast() (err error) {
	name := h.s.path("ballast")
	if info, err := h.s.fs.Stat(name); err == nil && info.Size() == h.ballast {
		h.hasBallast.Store(true)
		return nil
	}
	f, err := h.s.fs.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("raft: create ballast: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Preallocate(0, h.ballast); err != nil {
		return fmt.Errorf("raft: allocate ballast: %w", err)
	}
	h.hasBallast.Store(true)
	return nil
}

// Space is the disk's state as last measured.
type Space struct {
	// AvailBytes and TotalBytes of the file system, 0 if unknown.
	AvailBytes, TotalBytes uint64
	// Full means that proposals fail with ErrDiskFull.
	Full bool
	// Critical means that appends from a leader are refused too.
	Critical bool
}

// Space gives the last measurement of PollSpace.
func (s *Store) Space() Space {
	h := &s.health
	return Space{AvailBytes: h.avail.Load(), TotalBytes: h.total.Load(), Full: h.full.Load(), Critical: h.critical.Load()}
}

// Healthy returns nil, ErrDiskFull, or what made the store fail for good.
func (s *Store) Healthy() error {
	switch {
	case s.health.failed.Load():
		return fmt.Errorf("raft: the storage failed, fix the disk and restart: %w", s.health.cause)
	case s.health.full.Load():
		return ErrDiskFull
	}
	return nil
}

// pebbleLogger passes Pebble's messages on. Its Fatalf never returns: Pebble
// relies on that.
type pebbleLogger struct{ s *Store }

// Infof implements pebble.Logger. Pebble reports each flush and compaction here: for debugging only.
func (l *pebbleLogger) Infof(format string, args ...any) {
	l.s.logger.Debug("pebble", slog.String("text", fmt.Sprintf(format, args...)))
}

// Errorf implements pebble.Logger.
func (l *pebbleLogger) Errorf(format string, args ...any) {
	l.s.logger.Error("pebble", slog.String("text", fmt.Sprintf(format, args...)))
}

// Fatalf implements pebble.Logger: the member stops. If FailStop returns, the calling goroutine ends here; what it
// held stays locked, which is right, since nothing may be written any more.
func (l *pebbleLogger) Fatalf(format string, args ...any) {
	l.s.health.fail(fmt.Errorf("raft: storage: %s", fmt.Sprintf(format, args...)))
	runtime.Goexit()
}
