package server

import (
	"errors"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"larder/cxl"
	"larder/meta"
)

// watcher waits for the ends of processes of this host. Each costs a descriptor and a parked goroutine, not a thread:
// a pidfd can be waited for like a socket.
type watcher struct {
	died   func(meta.SessionID)
	logger *slog.Logger

	mu      sync.Mutex
	files   map[meta.SessionID]*os.File
	stopped bool
	wg      sync.WaitGroup
}

// watch begins to wait for the end of a session's process. It does not block; that the process is gone already is told
// from another goroutine, too.
func (w *watcher) watch(id meta.SessionID, p meta.Process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped || w.files[id] != nil {
		return
	}
	fd, err := unix.PidfdOpen(int(p.PID), unix.O_NONBLOCK) //nolint:gosec // a pid; PIDFD_NONBLOCK is O_NONBLOCK
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.PidfdOpen(int(p.PID), 0) //nolint:gosec // kernels before 5.10 lack the flag
	}
	switch {
	case errors.Is(err, unix.ESRCH):
		w.report(id)
		return
	case err != nil:
		w.logger.Warn("cannot watch a client's process; it is looked for once a second when that matters",
			slog.Uint64("pid", p.PID), slog.Any("error", err))
		return
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	// The pid may have been used again before it was opened, not after.
	if cxl.ProcessDead(int(p.PID), p.Start) { //nolint:gosec // a pid
		_ = f.Close() // nothing was written to it
		w.report(id)
		return
	}
	w.files[id] = f
	w.wg.Add(1)
	go w.wait(id, f)
}

// report tells of an end from a goroutine of its own: the caller may hold the Master's locks.
func (w *watcher) report(id meta.SessionID) {
	w.wg.Go(func() { w.died(id) })
}

func (w *watcher) wait(id meta.SessionID, f *os.File) {
	defer w.wg.Done()
	ended := false
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} //nolint:gosec // a descriptor fits
			n, err := unix.Poll(p, 0)
			ended = err == nil && n > 0 && p[0].Revents&unix.POLLIN != 0
			return ended
		})
	}
	w.mu.Lock()
	stopped := w.files[id] != f
	if !stopped {
		delete(w.files, id)
	}
	w.mu.Unlock()
	_ = f.Close() // nothing was written to it
	if ended && !stopped {
		w.died(id)
	} else if err != nil && !stopped {
		w.logger.Warn("cannot watch a client's process; it is looked for once a second when that matters",
			slog.Uint64("session", uint64(id)), slog.Any("error", err))
	}
}

// forget stops waiting for a session's process.
func (w *watcher) forget(id meta.SessionID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f := w.files[id]; f != nil {
		delete(w.files, id)
		_ = f.Close() // wakes the goroutine
	}
}

// stop ends all waiting.
func (w *watcher) stop() {
	w.mu.Lock()
	w.stopped = true
	for id, f := range w.files {
		delete(w.files, id)
		_ = f.Close() // wakes the goroutine
	}
	w.mu.Unlock()
	w.wg.Wait()
}

// localHost identifies this host.
func localHost() Host {
	h := Host{PIDNamespace: cxl.PIDNamespace(), Dead: cxl.ProcessDead}
	if id, err := cxl.BootID(); err == nil {
		h.BootID = hexID(id)
	}
	return h
}
