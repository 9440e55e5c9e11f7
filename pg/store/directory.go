package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"larder/cxl"
)

const (
	// minLockPause and maxLockPause bound the pause before the lock is tried again: it is held for tens of microseconds. The kernel's
	// own queue could not be left when a call's time is over.
	minLockPause = 20 * time.Microsecond
	maxLockPause = time.Millisecond
	// closeTime bounds the wait for the lock when a store is closed. Without it the others find the lease ended as if the process
	// had died.
	closeTime = 2 * time.Second
)

// directory is a Store of files.
type directory struct {
	path   string
	lease  time.Duration
	boot   [16]byte        // of this host; zeros if that is not known
	remote bool            // other hosts may write there, of which inotify does not tell
	life   context.Context //nolint:containedctx // the store's own life, which its goroutines share
	end    context.CancelFunc
	wg     sync.WaitGroup
	hub    *hub

	// sem has one element while a goroutine holds the lock: a flock belongs to an open file, which all of them share.
	sem      chan struct{}
	lockFile *os.File // of whose slots the one that counts is state; both under sem
	buf      []byte   // under sem

	own       atomic.Pointer[ownLease] // set under sem
	confirmed atomic.Int64             // when the renewal of it began that is known to have been in time
	mu        sync.Mutex
	lost      chan struct{} // of the present lease
	closed    bool
}

// Directory opens the store in a directory, which is made if it is not there. All who use it must see it by the same file system,
// which must have flock: those of a host do, NFS from version 4 on, CephFS, and Lustre if it is mounted with flock. A process may be
// killed at any moment; one that is stopped at the wrong one, which takes some tens of microseconds, keeps the others waiting until
// it goes on. Nothing is synced to disk: what is there is about processes, which end with the host.
//
// That a process of the same host has died is known at once, by the flock on the file of its lease; of another host when its file was
// not written for the lease. The latter holds for a process, too, that has forked without exec if the child lives on: it has the flock.
func Directory(ctx context.Context, path string, lease time.Duration) (Store, error) {
	d, err := newDirectory(ctx, path, lease)
	if err != nil {
		return nil, err
	}
	if err := d.start(ctx); err != nil {
		_ = d.Close() //nolint:contextcheck // has a time of its own
		return nil, err
	}
	return d, nil
}

func newDirectory(ctx context.Context, path string, lease time.Duration) (*directory, error) {
	lease, err := checkLease(lease)
	if err != nil {
		return nil, err
	}
	if path, err = filepath.Abs(path); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	d := &directory{
		path: path, lease: lease, life: life, end: end, sem: make(chan struct{}, 1), lost: make(chan struct{}),
	}
	if d.boot, err = cxl.BootID(); err != nil {
		d.boot = [16]byte{}
	}
	for _, name := range []string{"entries", "leases"} {
		if err := os.MkdirAll(d.file(name), 0o700); err != nil {
			err = d.unavailable(err)
			end()
			return nil, err
		}
	}
	d.remote = !localFileSystem(path)
	d.hub = newHub(d)
	return d, nil
}

// start takes a lease, and begins to keep it.
func (d *directory) start(ctx context.Context) error {
	ctx, cancel := withCallTime(ctx)
	defer cancel()
	if err := d.take(ctx); err != nil {
		return err
	}
	k := newKeeper(d)
	k.look(ctx) // so that what is known to be dead by now is not seen
	d.wg.Go(func() { k.run(d.life) })
	d.wg.Go(d.hub.run)
	return nil
}

// file is the path of a file of the directory.
func (d *directory) file(names ...string) string { return d.path + "/" + strings.Join(names, "/") }

func (d *directory) unavailable(err error) error {
	if d.life.Err() != nil {
		return ErrClosed
	}
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOLCK) {
		err = fmt.Errorf("its file system has no flock: mount it with locks, or use masters:// or tcp://: %w", err)
	}
	return &UnavailableError{"file://" + d.path, err}
}

// locked calls f with the lock, LOCK_SH or LOCK_EX, and with the state, which is fresh.
func (d *directory) locked(ctx context.Context, how int, f func(s *dirState) error) error {
	if ctx.Err() != nil {
		return d.unavailable(ctx.Err())
	}
	select {
	case d.sem <- struct{}{}:
	case <-d.life.Done():
		return ErrClosed
	case <-ctx.Done():
		return d.unavailable(ctx.Err())
	}
	defer func() { <-d.sem }()
	if err := d.flock(ctx, how); err != nil {
		return d.unavailable(err)
	}
	defer func() { _ = unix.Flock(int(d.lockFile.Fd()), unix.LOCK_UN) }()
	var slots [2 * slotBytes]byte
	n, _ := d.lockFile.ReadAt(slots[:], 0) // what is missing is not whole
	s, ok := decodeState(slots[:n])
	if !ok {
		s = dirState{revision: epoch()} // the first to come, or what a host left when it crashed: look counts
	}
	return f(&s)
}

// flock takes the lock. The caller holds sem.
func (d *directory) flock(ctx context.Context, how int) (err error) {
	for pause := minLockPause; ; {
		if d.lockFile == nil {
			if d.lockFile, err = os.OpenFile(d.file("lock"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
				return err //nolint:wrapcheck // names the file
			}
		}
		fd := int(d.lockFile.Fd())
		switch err := unix.Flock(fd, how|unix.LOCK_NB); {
		case err == nil && named(fd, d.file("lock")):
			return nil
		case err == nil: // somebody has removed the directory or given it another name, and perhaps made it anew
			_ = d.lockFile.Close()
			d.lockFile = nil
		case errors.Is(err, unix.EINTR):
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("flock: %w", err)
		default:
			if err := sleep(ctx, pause); err != nil {
				return fmt.Errorf("waiting for the lock: %w", err)
			}
			pause = min(2*pause, maxLockPause)
		}
	}
}

// named reports whether an open file is the one of that name.
func named(fd int, path string) bool {
	var is, there unix.Stat_t
	return unix.Fstat(fd, &is) == nil && unix.Stat(path, &there) == nil && is.Dev == there.Dev && is.Ino == there.Ino
}

// save writes the state of the next revision. What it is about follows: a revision that nothing has is no harm. The caller holds
// the lock.
func (d *directory) save(s *dirState) error {
	s.revision++
	slot, offset := s.slot()
	_, err := d.lockFile.WriteAt(slot, offset)
	return err //nolint:wrapcheck // names the file
}

// write makes a file of content, whole or not at all. The caller holds the lock. It returns the open file if keep.
func (d *directory) write(content []byte, keep bool, name ...string) (*os.File, error) {
	f, err := os.OpenFile(d.file("tmp"), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the file
	}
	if keep { // before anybody sees it
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		_, err = f.Write(content)
	}
	if err == nil {
		err = os.Rename(d.file("tmp"), d.file(name...))
	}
	if err == nil && keep {
		return f, nil
	}
	return nil, errors.Join(err, f.Close())
}

// readFile returns the first limit bytes of a file, nil if it is not there.
func readFile(path string, limit int) ([]byte, error) {
	fd, err := open(path, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	b := make([]byte, min(int(st.Size), limit))
	for n := 0; n < len(b); {
		m, err := unix.Pread(fd, b[n:], int64(n))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		case m == 0:
			return b[:n], nil
		}
		n += m
	}
	return b, nil
}

// open opens a file without the poller, which would be asked in vain.
func open(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			if err != nil {
				err = &os.PathError{Op: "open", Path: path, Err: err}
			}
			return fd, err
		}
	}
}

// read reads the entry of a file's name; its Modified is 0 if there is none, or what is there is garbage.
func (d *directory) read(name string) (dirEntry, error) {
	if d.remote { // opening a directory has NFS ask whether what it knows of its names still holds
		if fd, err := open(d.file("entries"), unix.O_RDONLY|unix.O_DIRECTORY); err == nil {
			_ = unix.Close(fd)
		}
	}
	b, err := readFile(d.file("entries", name), maxEntryFile+1)
	if err != nil || b == nil {
		return dirEntry{}, err
	}
	e, err := decodeEntry(b)
	if err != nil || entryName(e.Key) != name {
		return dirEntry{}, nil //nolint:nilerr // look removes it
	}
	return e, nil
}

// Get implements Store.
func (d *directory) Get(ctx context.Context, key string) (Entry, error) {
	if err := checkKey(key); err != nil {
		return Entry{}, err
	}
	if d.life.Err() != nil {
		return Entry{}, ErrClosed
	}
	if ctx.Err() != nil {
		return Entry{}, d.unavailable(ctx.Err())
	}
	e, err := d.read(entryName(key))
	switch {
	case err != nil:
		return Entry{}, d.unavailable(err)
	case e.Modified == 0:
		return Entry{}, fmt.Errorf("%w: %.64q", ErrNotFound, key)
	}
	return e.Entry, nil
}

// change calls f with the entry as it is, if that is what the caller expects, and with the lock.
func (d *directory) change(ctx context.Context, key string, o *options, f func(s *dirState, name string, old *dirEntry) error) (
	is Entry, err error,
) {
	ctx, cancel := withCallTime(ctx)
	defer cancel()
	err = d.locked(ctx, unix.LOCK_EX, func(s *dirState) error {
		name := entryName(key)
		old, err := d.read(name)
		if err != nil {
			return d.unavailable(err)
		}
		if !o.allows(old.Modified) {
			is = old.Entry
			return fmt.Errorf("%w: %.64q", ErrConflict, key)
		}
		return f(s, name, &old)
	})
	return is, err
}

// Put implements Store.
func (d *directory) Put(ctx context.Context, key string, value []byte, opts ...Option) (Entry, error) {
	if err := checkPut(key, value); err != nil {
		return Entry{}, err
	}
	o := readOptions(opts)
	e := dirEntry{Entry: Entry{Key: key, Value: value}}
	is, err := d.change(ctx, key, &o, func(s *dirState, name string, old *dirEntry) error {
		count, size := 0, len(value)-len(old.Value)
		if old.Modified == 0 {
			count, size = 1, len(key)+len(value)
		}
		if err := checkRoom(int(s.entries), count, int(s.bytes), size); err != nil { //nolint:gosec // bounded by it
			return err
		}
		if o.lease {
			if err := d.held(s); err != nil {
				return d.unavailable(err)
			}
			e.lease = d.own.Load().id
		}
		s.entries += uint64(count)
		s.bytes = uint64(max(int64(s.bytes)+int64(size), 0)) //nolint:gosec // bounded
		if err := d.save(s); err != nil {
			return d.unavailable(err)
		}
		e.Created, e.Modified = old.Created, s.revision
		if old.Modified == 0 {
			e.Created = s.revision
		}
		d.buf = e.appendTo(d.buf[:0])
		if _, err := d.write(d.buf, false, "entries", name); err != nil {
			return d.unavailable(err)
		}
		return nil
	})
	if err != nil {
		return is, err
	}
	return e.Entry, nil
}

// Delete implements Store.
func (d *directory) Delete(ctx context.Context, key string, opts ...Option) error {
	if err := checkKey(key); err != nil {
		return err
	}
	o := readOptions(opts)
	_, err := d.change(ctx, key, &o, func(s *dirState, name string, old *dirEntry) error {
		if old.Modified == 0 {
			return fmt.Errorf("%w: %.64q", ErrNotFound, key)
		}
		if err := d.remove(s, name, len(key)+len(old.Value)); err != nil {
			return d.unavailable(err)
		}
		return nil
	})
	return err
}

// remove deletes the file of an entry of that many bytes. The caller holds the lock.
func (d *directory) remove(s *dirState, name string, size int) error {
	s.entries -= min(s.entries, 1)
	s.bytes -= min(s.bytes, uint64(size)) //nolint:gosec // positive
	if err := d.save(s); err != nil {
		return err
	}
	return os.Remove(d.file("entries", name)) //nolint:wrapcheck // names the file
}

// List implements Store.
func (d *directory) List(ctx context.Context, prefix string) (list []Entry, revision uint64, err error) {
	if err := checkPrefix(prefix); err != nil {
		return nil, 0, err
	}
	ctx, cancel := withCallTime(ctx)
	defer cancel()
	err = d.locked(ctx, unix.LOCK_SH, func(s *dirState) error {
		revision = s.revision
		return d.each(func(_ string, e *dirEntry) error {
			if e.Modified != 0 && strings.HasPrefix(e.Key, prefix) {
				list = append(list, e.Entry)
			}
			return nil
		})
	})
	sortEntries(list)
	return list, revision, err
}

// each calls f with all entries; with a zero one for what is garbage. The caller holds the lock.
func (d *directory) each(f func(name string, e *dirEntry) error) error {
	names, err := namesIn(d.file("entries"))
	for _, name := range names {
		var e dirEntry
		if e, err = d.read(name); err != nil {
			break
		}
		if err := f(name, &e); err != nil {
			return err
		}
	}
	if err != nil {
		return d.unavailable(err)
	}
	return nil
}

// namesIn lists a directory.
func namesIn(path string) ([]string, error) {
	f, err := os.Open(path) //nolint:gosec // of the store
	if err != nil {
		return nil, err //nolint:wrapcheck // names the file
	}
	names, err := f.Readdirnames(-1)
	return names, errors.Join(err, f.Close())
}

// Lease implements Store.
func (d *directory) Lease() time.Duration { return d.lease }

// Confirmed implements Store.
func (d *directory) Confirmed() time.Duration { return ago(d.confirmed.Load()) }

// Lost implements Store.
func (d *directory) Lost() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

// Close deletes what the lease has, and then its file.
func (d *directory) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	close(d.lost)
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	var err error
	if d.own.Load() != nil {
		err = d.sweep(ctx, func(name string) bool { return name == leaseName(d.own.Load().id) })
	}
	d.end()
	d.hub.close()
	d.wg.Wait()
	d.sem <- struct{}{} // nobody uses the files any more
	if own := d.own.Load(); own != nil {
		err = errors.Join(err, own.f.Close())
	}
	if d.lockFile != nil {
		err = errors.Join(err, d.lockFile.Close())
	}
	return err
}
