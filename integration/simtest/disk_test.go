package simtest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/zeebo/xxh3"
)

// blockSize is what a disk writes at once.
const blockSize = 512

// disk is a member's disk: what power loss leaves of it is drawn, and it fails as it is told.
//
// Pebble writes from goroutines of its own, so that the fields are guarded; between two events nobody is writing.
type disk struct {
	seed, id, drawn uint64

	mu   sync.Mutex
	mem  *vfs.MemFS
	free uint64 // bytes that are left
	// crashIn operations of the process, or of what Pebble does for it in the background, the power is lost, 0 = it is
	// not. Who has come so far goes no further, and when all else has come to rest it happens: how far that had come
	// meanwhile depends on how goroutines are scheduled. keep percent of what was not synced survives.
	crashIn [2]int
	due     bool
	keep    int
	torn    bool
	after   *vfs.MemFS // what the crash has left; nil = none yet
	// failIn operations on the log or the witness one fails, and all later ones; 0 = none.
	failIn int
	broken bool
	// misreadOf places one is read from another block of its file, until the next crash; 0 = none. Which ones follows
	// from the place, for Pebble reads from several goroutines, and in another order each time.
	misreadOf uint64
	// removed files go when nothing is at work: Pebble removes what it needs no more in the background, and whether that
	// came before some sync of the directory would depend on how goroutines are scheduled.
	removed []string
	syncs   uint64 // so far
	logged  int    // bytes that were written to Pebble's log since it was flushed
	sick    bool   // something has been made to fail since the last start
}

func newDisk(seed, id uint64) *disk {
	return &disk{seed: seed, id: id, mem: vfs.NewCrashableMem(), free: 1 << 40}
}

// draw begins a stream of random numbers of its own for one event: how many it needs must not change what comes later.
func (d *disk) draw() *rand.Rand {
	d.drawn++
	return rand.New(rand.NewPCG(d.seed, streamDisk+d.id<<32+d.drawn))
}

var errIO = errors.New("simulated input/output error")

// diskFS is one mounting of a disk: after a crash, what still runs writes to the old one and harms nobody.
type diskFS struct {
	vfs.FS
	d *disk
	// gone says that the process which mounted it has ended itself. What works for it in the background comes no
	// further than to its next new table: Pebble tries a flush again for ever, and counts on the process's end. What
	// is under way ends as it would, for how far it has come depends on how goroutines are scheduled.
	gone  atomic.Bool
	never chan struct{}
	mu    sync.Mutex
	why   error // why it ended itself
	lost  bool  // the power was lost while something was at work, which still waits; guarded by the disk's mu
}

// fail notes that the process ends itself.
func (fs *diskFS) fail(err error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.why = err
	fs.gone.Store(true)
}

// failed returns why the process ends itself, nil if it does not.
func (fs *diskFS) failed() error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.why
}

func (d *disk) mount() *diskFS { return &diskFS{FS: d.mem, d: d, never: make(chan struct{})} }

// change is called before each write, sync or change of a name. It does not return if the power is lost here.
func (d *disk) change(fs *diskFS, name string, sync bool) error {
	now, err := d.allow(fs, name, sync)
	if now {
		<-fs.never
	}
	return err
}

// allow counts a change. It reports whether it is the one at which the power is lost, and with what it fails.
func (d *disk) allow(fs *diskFS, name string, sync bool) (now bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if fs.FS != vfs.FS(d.mem) {
		return false, nil
	}
	if sync {
		d.syncs++
	}
	if protected(name) && !sync {
		// How many writes the log takes up to a sync depends on how goroutines are scheduled, how many syncs does not.
		if d.broken {
			return false, errIO
		}
		return false, nil
	}
	if in := d.crashes(name); in != nil && *in > 0 {
		if *in--; *in == 0 {
			d.due, d.crashIn, fs.lost = true, [2]int{}, true
			return true, nil
		}
	}
	if !protected(name) {
		return false, nil
	}
	if d.failIn > 0 {
		if d.failIn--; d.failIn == 0 {
			d.broken = true
		}
	}
	if d.broken {
		return false, errIO
	}
	return false, nil
}

// crashes is what counts down to the loss of power for a change that is made now, nil if nothing does.
func (d *disk) crashes(name string) *int {
	switch {
	case d.crashIn == [2]int{}:
		return nil
	case !protected(name) && inBackground():
		return &d.crashIn[1]
	}
	return &d.crashIn[0]
}

// inBackground reports whether this is a goroutine that Pebble has begun.
func inBackground() bool {
	stack := make([]uintptr, 256) // several times as deep as Pebble goes
	frames := runtime.CallersFrames(stack[:runtime.Callers(1, stack)])
	first := ""
	for more := true; more; {
		var f runtime.Frame
		if f, more = frames.Next(); f.Function != "runtime.goexit" {
			first = f.Function
		}
	}
	return strings.HasPrefix(first, "github.com/cockroachdb/pebble/")
}

// protected reports whether raft's promises depend on a file: the write-ahead log, and the witness.
func protected(name string) bool {
	return strings.HasSuffix(name, ".log") || path.Base(name) == "witness"
}

// clone is what power loss leaves now. keep percent of the blocks that were not synced are there; with torn the last
// block of the log is cut in two, if it was not synced. MemFS itself draws in the order of a map, which no seed repeats,
// so it is asked for the two extremes, and what lies between is drawn here.
func (d *disk) clone(keep int, torn bool) *vfs.MemFS {
	rng := d.draw()
	after := d.mem.CrashClone(vfs.CrashCloneCfg{})
	if keep > 0 {
		all := d.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(0, 0))})
		if keep == 100 {
			after = all
		} else {
			mingle(after, all, "/", keep, rng)
		}
	}
	if torn {
		tear(d.mem, after, rng)
	}
	return after
}

// mingle copies keep percent of what all has, and the other has not, under a directory.
func mingle(to, all *vfs.MemFS, dir string, keep int, rng *rand.Rand) {
	list, err := all.List(dir)
	if err != nil {
		return
	}
	for _, name := range sortedCopy(list) {
		name = all.PathJoin(dir, name)
		info, err := all.Stat(name)
		if err != nil {
			continue
		}
		_, missing := to.Stat(name)
		if missing != nil && rng.IntN(100) >= keep {
			continue
		}
		if info.IsDir() {
			_ = to.MkdirAll(name, 0o700) // in memory it does not fail
			mingle(to, all, name, keep, rng)
			continue
		}
		mingleFile(to, all, name, keep, rng)
	}
}

// mingleFile copies keep percent of the blocks of a file that differ.
func mingleFile(to, all *vfs.MemFS, name string, keep int, rng *rand.Rand) {
	from, was := contents(all, name), contents(to, name)
	is := bytes.Clone(was)
	for at := 0; at < len(from); at += blockSize {
		block := from[at:min(at+blockSize, len(from))]
		if at+len(block) <= len(was) && bytes.Equal(block, was[at:at+len(block)]) || rng.IntN(100) >= keep {
			continue
		}
		if grow := at + len(block) - len(is); grow > 0 {
			is = append(is, make([]byte, grow)...)
		}
		copy(is[at:], block)
	}
	if _, err := to.Stat(name); err != nil || !bytes.Equal(is, was) {
		_ = overwrite(to, name, is) // in memory it does not fail
	}
}

// crash takes the power away, now or, if it was lost in the middle of something, then.
func (d *disk) crash(keep int, torn bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.after == nil {
		d.after = d.clone(keep, torn)
	}
	d.mem, d.after, d.removed = d.after, nil, nil
	d.crashIn, d.due, d.failIn, d.misreadOf, d.broken, d.sick, d.logged = [2]int{}, false, 0, 0, false, false, 0
}

// lost reports whether the power was lost in the middle of something.
func (d *disk) lost() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.due || d.after != nil
}

func (fs *diskFS) wrap(f vfs.File, err error, name string) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &diskFile{File: f, fs: fs, name: name}, nil
}

// Create implements vfs.FS.
func (fs *diskFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if fs.gone.Load() && strings.HasSuffix(name, ".sst") {
		<-fs.never
	}
	if err := fs.d.change(fs, "", false); err != nil {
		return nil, err
	}
	f, err := fs.FS.Create(name, c)
	return fs.wrap(f, err, name)
}

// Open implements vfs.FS.
func (fs *diskFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := fs.FS.Open(name, opts...)
	return fs.wrap(f, err, name)
}

// OpenReadWrite implements vfs.FS.
func (fs *diskFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := fs.FS.OpenReadWrite(name, c, opts...)
	return fs.wrap(f, err, name)
}

// OpenDir implements vfs.FS.
func (fs *diskFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	return fs.wrap(f, err, name)
}

// ReuseForWrite implements vfs.FS.
func (fs *diskFS) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.ReuseForWrite(from, to, c)
	return fs.wrap(f, err, to)
}

// Rename implements vfs.FS.
func (fs *diskFS) Rename(from, to string) error {
	if err := fs.d.change(fs, "", false); err != nil {
		return err
	}
	return fs.FS.Rename(from, to)
}

// Remove implements vfs.FS.
func (fs *diskFS) Remove(name string) error {
	if obsolete(name) {
		fs.d.mu.Lock()
		defer fs.d.mu.Unlock()
		if fs.FS == vfs.FS(fs.d.mem) {
			fs.d.removed = append(fs.d.removed, name)
		}
		return nil
	}
	if err := fs.d.change(fs, "", false); err != nil {
		return err
	}
	return fs.FS.Remove(name)
}

// obsolete reports whether a file is of those that Pebble removes in the background. It never uses their names again.
func obsolete(name string) bool {
	base := path.Base(name)
	return strings.HasSuffix(base, ".log") || strings.HasSuffix(base, ".sst") ||
		strings.HasPrefix(base, "MANIFEST-") || strings.HasPrefix(base, "OPTIONS-")
}

// rest takes the power away if that is due, and removes what was to be removed. The caller knows that nothing is at work.
func (d *disk) rest() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.due {
		d.after, d.due = d.clone(d.keep, d.torn), false
	}
	slices.Sort(d.removed)
	for _, name := range d.removed {
		_ = d.mem.Remove(name) // a log may have been used again, under another name
	}
	d.removed = d.removed[:0]
}

// GetDiskUsage implements vfs.FS.
func (fs *diskFS) GetDiskUsage(string) (vfs.DiskUsage, error) {
	fs.d.mu.Lock()
	defer fs.d.mu.Unlock()
	return vfs.DiskUsage{AvailBytes: fs.d.free, TotalBytes: 1 << 41, UsedBytes: 1<<41 - fs.d.free}, nil
}

// Unwrap implements vfs.FS.
func (fs *diskFS) Unwrap() vfs.FS { return fs.FS }

type diskFile struct {
	vfs.File
	fs   *diskFS
	name string
}

// change is called before each write and sync. A log that fails ends the process where it happens: Pebble would go on to
// the next change of logs, and end it there, by a panic that nothing can catch.
func (f *diskFile) change(sync bool) error {
	err := f.fs.d.change(f.fs, f.name, sync)
	if err != nil && strings.HasSuffix(f.name, ".log") {
		f.fs.fail(err)
		<-f.fs.never
	}
	return err
}

// Write implements vfs.File.
func (f *diskFile) Write(b []byte) (int, error) {
	if err := f.change(false); err != nil {
		return 0, err
	}
	if d := f.fs.d; strings.HasSuffix(f.name, ".log") {
		d.mu.Lock()
		if f.fs.FS == vfs.FS(d.mem) {
			d.logged += len(b)
		}
		d.mu.Unlock()
	}
	return f.File.Write(b)
}

// WriteAt implements vfs.File.
func (f *diskFile) WriteAt(b []byte, at int64) (int, error) {
	if err := f.change(false); err != nil {
		return 0, err
	}
	return f.File.WriteAt(b, at)
}

// Sync implements vfs.File.
func (f *diskFile) Sync() error {
	if err := f.change(true); err != nil {
		return err
	}
	return f.File.Sync()
}

// SyncData implements vfs.File.
func (f *diskFile) SyncData() error {
	if err := f.change(true); err != nil {
		return err
	}
	return f.File.SyncData()
}

// SyncTo implements vfs.File.
func (f *diskFile) SyncTo(n int64) (bool, error) {
	if err := f.change(false); err != nil {
		return false, err
	}
	return f.File.SyncTo(n)
}

// ReadAt implements vfs.File. A misdirected read returns what lies in another block of the file.
func (f *diskFile) ReadAt(b []byte, at int64) (int, error) {
	n, err := f.File.ReadAt(b, at)
	d := f.fs.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.misreadOf == 0 || n < blockSize/8 {
		return n, err
	}
	place := xxh3.HashString(fmt.Sprintf("%d/%d/%d/%s/%d", d.seed, d.id, d.drawn, f.name, at))
	if place%d.misreadOf != 0 {
		return n, err
	}
	other := make([]byte, n)
	info, serr := f.Stat()
	if serr != nil || info.Size() <= blockSize {
		return n, err
	}
	from := int64(place / d.misreadOf % uint64(info.Size()/blockSize) * blockSize)
	if m, rerr := f.File.ReadAt(other, from); m > 0 && (rerr == nil || errors.Is(rerr, io.EOF)) {
		copy(b, other[:min(m, blockSize)])
	}
	return n, err
}

// files lists what lies under a directory, with sizes, in order.
func files(fs vfs.FS, dir string) (names []string) {
	list, err := fs.List(dir)
	if err != nil {
		return nil
	}
	for _, name := range sortedCopy(list) {
		full := fs.PathJoin(dir, name)
		info, err := fs.Stat(full)
		switch {
		case err != nil:
		case info.IsDir():
			names = append(names, files(fs, full)...)
		default:
			names = append(names, full)
		}
	}
	return names
}

// contents reads a file, nil if there is none.
func contents(fs vfs.FS, name string) []byte {
	f, err := fs.Open(name)
	if err != nil {
		return nil
	}
	b, err := io.ReadAll(f)
	if errors.Join(err, f.Close()) != nil {
		return nil
	}
	return b
}

// overwrite replaces a file that lies at rest.
func overwrite(fs vfs.FS, name string, b []byte) error {
	out, err := fs.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = out.Write(b)
	if err = errors.Join(err, out.Sync(), out.Close()); err != nil {
		return err
	}
	dir, err := fs.OpenDir(fs.PathDir(name))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// rewrite changes the bytes of a file that lies at rest.
func rewrite(fs vfs.FS, name string, change func(b []byte) []byte) error {
	return overwrite(fs, name, change(contents(fs, name)))
}

// tear cuts, in what a crash has left, a block at the end of the newest log in two: its second half never reached the
// disk. Only what was not synced can be torn, so a block that a crash without mercy would have left is left alone.
func tear(before, after *vfs.MemFS, rng *rand.Rand) {
	synced := before.CrashClone(vfs.CrashCloneCfg{})
	var last string
	for _, name := range files(after, "/") {
		if strings.HasSuffix(name, ".log") {
			last = name
		}
	}
	if last == "" {
		return
	}
	safe := int64(0)
	if info, err := synced.Stat(last); err == nil {
		safe = info.Size()
	}
	info, err := after.Stat(last)
	if err != nil || info.Size() <= safe {
		return
	}
	cut := safe + rng.Int64N(info.Size()-safe)
	_ = rewrite(after, last, func(b []byte) []byte { // in memory it does not fail
		end := min(int64(len(b)), (cut/blockSize+1)*blockSize)
		clear(b[cut:end])
		return b
	})
}

// rot flips one bit of one file of a disk that is at rest, and says in which.
func (d *disk) rot() (name string, at int64) {
	rng := d.draw()
	list := files(d.mem, "/")
	var some []string
	for _, name := range list {
		if info, err := d.mem.Stat(name); err == nil && info.Size() > 0 {
			some = append(some, name)
		}
	}
	if len(some) == 0 {
		return "", 0
	}
	name = some[rng.IntN(len(some))]
	_ = rewrite(d.mem, name, func(b []byte) []byte { // in memory it does not fail
		at = rng.Int64N(int64(len(b)))
		b[at] ^= 1 << rng.IntN(8)
		return b
	})
	return name, at
}

// full makes the disk's space run out, or come back.
func (d *disk) full(is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free = 1 << 40
	if is {
		d.free = 0
	}
}
