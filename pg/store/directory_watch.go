package store

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// How often the revision is looked at: where inotify tells of all changes, to find out if it does; where other hosts make changes;
	// and where there is no inotify, as when a user has more than fs.inotify.max_user_instances of them.
	checkEvery  = time.Second
	remoteEvery = 20 * time.Millisecond
	pollEvery   = 5 * time.Millisecond
	// maxDeaf is how many times in a row the revision may have changed while inotify told nothing before it is not counted on.
	maxDeaf = 2
	// maxDirty bounds the files that a watch has yet to look at: of more it looks at all.
	maxDirty = 1024
	// watchPause is how long a watch waits when the directory cannot be read.
	watchPause = 100 * time.Millisecond
)

// localFileSystem reports whether a path's is one that no other host writes to.
func localFileSystem(path string) bool {
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil {
		return false
	}
	switch st.Type {
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC, unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC,
		unix.OVERLAYFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC, unix.BCACHEFS_SUPER_MAGIC, zfsMagic:
		return true
	}
	return false
}

const zfsMagic = 0x2fc12fc1

// hub hears of what other processes change in a directory, and tells its watches and the keeper.
type hub struct {
	d       *directory
	inotify *os.File      // nil if there is none
	entries atomic.Int32  // which of its watches is of the entries
	events  atomic.Uint64 // that it told of entries
	first   uint64        // the revision before there was a watch
	leases  chan struct{} // has an element when something has become of a lease

	mu      sync.Mutex
	watches map[*dirWatch]struct{}
}

// dirWatch is a Watch: the files that it has yet to look at.
type dirWatch struct {
	wake chan struct{} // has an element when there is one

	mu    sync.Mutex
	all   bool
	dirty map[string]struct{}
}

func newHub(d *directory) *hub {
	h := &hub{d: d, leases: make(chan struct{}, 1), watches: make(map[*dirWatch]struct{})}
	h.first = h.revision()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return h
	}
	h.inotify = os.NewFile(uintptr(fd), "inotify")
	if h.begin() != nil {
		h.close()
		h.inotify = nil
	}
	return h
}

// begin asks for what happens in the directory from now on, which may be another one of the same name.
func (h *hub) begin() error {
	if h.inotify == nil {
		return nil
	}
	c, err := h.inotify.SyscallConn()
	if err != nil {
		return err //nolint:wrapcheck // only whether
	}
	var entries int
	var failed error
	err = c.Control(func(f uintptr) {
		fd := int(f)
		entries, failed = unix.InotifyAddWatch(fd, h.d.file("entries"), unix.IN_MOVED_TO|unix.IN_MOVED_FROM|unix.IN_DELETE)
		if failed == nil {
			h.entries.Store(int32(entries)) //nolint:gosec // the kernel counts from 1
			_, failed = unix.InotifyAddWatch(fd, h.d.file("leases"), unix.IN_CLOSE_WRITE|unix.IN_DELETE)
		}
	})
	return errors.Join(err, failed)
}

func (h *hub) close() {
	if h.inotify != nil {
		_ = h.inotify.Close()
	}
}

// run looks at the revision from time to time, until the store is closed.
func (h *hub) run() {
	if h.inotify != nil {
		h.d.wg.Go(h.listen)
	}
	pace := pollEvery
	switch {
	case h.d.remote:
		pace = remoteEvery
	case h.inotify != nil:
		pace = checkEvery
	}
	tick, stop := every(pace)
	defer func() { stop() }()
	deaf, revision, events := 0, h.first, uint64(0)
	for {
		select {
		case <-tick:
		case <-h.d.life.Done():
			return
		}
		r, e := h.revision(), h.events.Load()
		changed, told := r != revision, e != events
		revision, events = r, e
		switch {
		case told && pace == checkEvery:
			deaf = 0
		case changed:
			h.all()
			if deaf++; pace == checkEvery && deaf == maxDeaf {
				pace = pollEvery
				stop()
				tick, stop = every(pace)
			}
		}
	}
}

// revision is that of the last change, as far as it can be read.
func (h *hub) revision() uint64 {
	slots, _ := readFile(h.d.file("lock"), 2*slotBytes)
	s, _ := decodeState(slots)
	return s.revision
}

// listen reads what inotify tells.
func (h *hub) listen() {
	b := make([]byte, 64<<10)
	for {
		n, err := h.inotify.Read(b)
		if err != nil {
			return // closed
		}
		h.heard(b[:n])
	}
}

// heard takes a run of events, as inotify(7) describes them.
func (h *hub) heard(b []byte) {
	for len(b) >= unix.SizeofInotifyEvent {
		of, mask := int32(binary.NativeEndian.Uint32(b)), binary.NativeEndian.Uint32(b[4:]) //nolint:gosec // it is one
		n := min(int(binary.NativeEndian.Uint32(b[12:])), len(b)-unix.SizeofInotifyEvent)
		name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:][:n]), "\x00")
		b = b[unix.SizeofInotifyEvent+n:]
		switch {
		case mask&(unix.IN_Q_OVERFLOW|unix.IN_IGNORED) != 0:
			h.all()
			kick(h.leases)
		case of != h.entries.Load():
			kick(h.leases)
		default:
			h.events.Add(1)
			h.each(func(w *dirWatch) { w.look(name) })
		}
	}
}

// all has all watches look at all there is.
func (h *hub) all() { h.each((*dirWatch).lookAtAll) }

func (h *hub) each(f func(w *dirWatch)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watches {
		f(w)
	}
}

func (w *dirWatch) look(name string) {
	w.mu.Lock()
	if len(w.dirty) < maxDirty {
		w.dirty[name] = struct{}{}
	} else {
		w.all = true
	}
	w.mu.Unlock()
	kick(w.wake)
}

func (w *dirWatch) lookAtAll() {
	w.mu.Lock()
	w.all = true
	w.mu.Unlock()
	kick(w.wake)
}

// take returns what is to be looked at.
func (w *dirWatch) take() (names []string, all bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.dirty {
		names = append(names, name)
	}
	all, w.all = w.all, false
	clear(w.dirty)
	return names, all
}

// Watch implements Store.
func (d *directory) Watch(ctx context.Context, prefix string, fn func(changes []Change) error) error {
	if err := checkPrefix(prefix); err != nil {
		return err
	}
	w := &dirWatch{wake: make(chan struct{}, 1), dirty: make(map[string]struct{})}
	d.hub.mu.Lock()
	d.hub.watches[w] = struct{}{}
	d.hub.mu.Unlock()
	defer func() {
		d.hub.mu.Lock()
		delete(d.hub.watches, w)
		d.hub.mu.Unlock()
	}()
	w.lookAtAll()
	f := newFollower(fn)
	files := make(map[string]string) // keys that f knows by the names of their files
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return ctx.Err() //nolint:wrapcheck // the caller's own
		case <-d.life.Done():
			return ErrClosed
		}
		changes, err := d.changes(ctx, w, prefix, f, files)
		switch {
		case ctx.Err() != nil:
			return ctx.Err() //nolint:wrapcheck // the caller's own
		case d.life.Err() != nil:
			return ErrClosed
		case err != nil: // the file system may get over it
			_ = sleep(ctx, watchPause)
			w.lookAtAll()
			continue
		}
		for _, x := range changes {
			if x.Deleted {
				delete(files, entryName(x.Key))
			} else {
				files[entryName(x.Key)] = x.Key
			}
		}
		if err := f.tell(changes); err != nil {
			return err
		}
	}
}

// changes finds out what has become of the files that w is to look at.
func (d *directory) changes(ctx context.Context, w *dirWatch, prefix string, f *follower, files map[string]string) ([]Change, error) {
	names, all := w.take()
	if all {
		list, revision, err := d.List(ctx, prefix)
		if err != nil {
			return nil, err
		}
		return f.compare(list, revision), nil
	}
	var changes []Change
	var gone []string // as it seems
	for _, name := range names {
		e, err := d.read(name)
		switch {
		case err != nil:
			return nil, d.unavailable(err)
		case e.Modified == 0 && files[name] != "":
			gone = append(gone, name)
		case e.Modified != 0 && strings.HasPrefix(e.Key, prefix):
			changes = append(changes, Change{e.Entry, false})
		}
	}
	if len(gone) > 0 { // with the lock, or the revision might be that of the next entry of that name
		ctx, cancel := withCallTime(ctx)
		defer cancel()
		err := d.locked(ctx, unix.LOCK_SH, func(s *dirState) error {
			for _, name := range gone {
				e, err := d.read(name)
				if err != nil {
					return d.unavailable(err)
				}
				x := Change{e.Entry, false}
				if e.Modified == 0 {
					key := files[name]
					x = Change{Entry{Key: key, Created: f.known[key].created, Modified: s.revision}, true}
				}
				changes = append(changes, x)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	sortChanges(changes)
	return f.fresh(changes), nil
}
