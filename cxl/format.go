package cxl

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MemFDPrefix starts the path of a device that is made of anonymous memory: memfd:NAME.
const MemFDPrefix = "memfd:"

const (
	// allocateChunk is how much room is reserved by one call, in bytes: a signal undoes one call's work on tmpfs, so
	// one call must not be long.
	allocateChunk = 256 << 20
	// sizeUnit is what a device's size must be a multiple of, in bytes: the page size of every supported host.
	sizeUnit = 64 << 10
	// defaultMode lets nobody but the owner's user open a file that Format makes.
	defaultMode fs.FileMode = 0o600
)

// Medium overrides what a device's kind says of its memory.
type Medium uint8

const (
	// MediumAuto goes by the kind, and for a device-DAX by what the kernel says.
	MediumAuto Medium = iota
	// MediumVolatile says that the bytes are lost when this host restarts.
	MediumVolatile
	// MediumPersistent says that the bytes outlive a restart of this host: the memory has a power supply of its own.
	MediumPersistent
)

// Options says what [Format] and [Create] make.
type Options struct {
	Pool        [16]byte
	Device      [16]byte // uuid
	DeviceID    uint64
	Generation  uint64 // random, not zero, committed by the master beforehand
	Incarnation uint64
	// Size in bytes, the header span included, a multiple of 64 KiB. Zero takes a device-DAX or an existing file as
	// large as it is. A file is created or extended to it, never cut.
	Size      int64
	Coherence Coherence
	Medium    Medium      // device-DAX only
	Mode      fs.FileMode // permissions of a file that is created; zero: 0600
	// Force formats a device that holds something else, or another pool's header, all of which is lost. It does not
	// override a live owner.
	Force bool
}

// Format writes a header to a device whose header span holds only zeros, creating or extending a file first. All of a
// file's room is reserved, so that a full file system cannot fail a store later. Without [Options.Force] it refuses a
// device of this pool with [ErrFormatted], and anything else with a [*ForeignError].
func Format(path string, opts Options) error {
	if strings.HasPrefix(path, MemFDPrefix) {
		return fmt.Errorf("cxl: format %s: it lives in the process that makes it: use Create", path)
	}
	f, m, undo, err := prepare(path, opts)
	if err != nil {
		return err
	}
	return closing(f, undo(format(f, m, opts)))
}

// Create formats a device and opens it with a claim, without letting go of it in between. It is the only way to a
// device memfd:NAME, which is made by it, sealed against truncation, and gone when its last holder is.
func Create(path string, opts Options) (*Device, error) {
	f, m, undo, err := prepare(path, opts)
	if err != nil {
		return nil, err
	}
	if err = undo(format(f, m, opts)); err != nil {
		return nil, closing(f, err)
	}
	m, err = probe(f) // its size has changed
	if err != nil {
		return nil, closing(f, err)
	}
	d, err := attach(f, m, Expect{Pool: opts.Pool, Device: opts.Device, Claim: true, Force: opts.Force})
	if err != nil {
		return nil, closing(f, err)
	}
	d.ownFD = m.kind == MemFD && strings.HasPrefix(path, MemFDPrefix)
	return d, nil
}

// closing closes f and keeps both errors.
func closing(f *os.File, err error) error {
	if e := f.Close(); e != nil {
		return errors.Join(err, fmt.Errorf("cxl: close: %w", e))
	}
	return err
}

// check refuses options that no device can have.
func (o Options) check(path string) error {
	var zero [16]byte
	switch {
	case o.Generation == 0:
		return fmt.Errorf("cxl: format %s: %w", path, errZeroGeneration)
	case o.Pool == zero || o.Device == zero:
		return fmt.Errorf("cxl: format %s: a pool id and a device uuid are required", path)
	case o.Size < 0 || o.Size%sizeUnit != 0 || (o.Size > 0 && o.Size <= HeaderSpan) || o.Size > math.MaxInt64/2:
		return fmt.Errorf("cxl: format %s: size %d: %w: want a multiple of %d above %d bytes",
			path, o.Size, ErrRange, sizeUnit, HeaderSpan)
	case o.Coherence == CoherenceNone && !canControlCache:
		return fmt.Errorf("cxl: format %s: %w", path, ErrNoCacheControl)
	}
	return nil
}

// prepare opens or creates what is to be formatted and locks it. undo passes an error on after removing a file that
// was created here, or giving an existing one its old size back; it does nothing for a nil error.
func prepare(path string, opts Options) (*os.File, medium, func(error) error, error) {
	if err := opts.check(path); err != nil {
		return nil, medium{}, nil, err
	}
	f, created, err := openOrCreate(path, opts)
	if err != nil {
		return nil, medium{}, nil, err
	}
	m, err := probe(f)
	if err == nil {
		err = lock(f, m)
	}
	if err != nil {
		return nil, medium{}, nil, closing(f, err)
	}
	undo := func(err error) error {
		switch {
		case err == nil || m.kind == DeviceDAX || strings.HasPrefix(path, MemFDPrefix):
			return err
		case created:
			return errors.Join(err, os.Remove(path)) //nolint:gosec // the operator's path
		}
		if st, e := f.Stat(); e == nil && st.Size() == m.size {
			return err // a refusal leaves even the times of a file alone
		}
		return errors.Join(err, f.Truncate(m.size))
	}
	return f, m, undo, nil
}

// openOrCreate opens a path for formatting. created says that there was nothing before.
func openOrCreate(path string, opts Options) (f *os.File, created bool, err error) {
	if name, ok := strings.CutPrefix(path, MemFDPrefix); ok {
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			return nil, false, fmt.Errorf("cxl: create %s: memfd_create: %w", path, err)
		}
		return os.NewFile(uintptr(fd), path), true, nil
	}
	mode := opts.Mode
	if mode == 0 {
		mode = defaultMode
	}
	flags := os.O_RDWR | unix.O_NONBLOCK
	// A device node that is missing is a mistake in its name, not a file to make.
	if opts.Size > 0 && !strings.HasPrefix(path, "/dev/dax") {
		f, err = os.OpenFile(path, flags|os.O_CREATE|os.O_EXCL, mode) //nolint:gosec // the operator's path
		if err == nil {
			return f, true, nil
		}
		if !errors.Is(err, os.ErrExist) {
			return nil, false, fmt.Errorf("cxl: create device: %w", err)
		}
	}
	f, err = os.OpenFile(path, flags, 0) //nolint:gosec // the operator's path
	if err != nil {
		return nil, false, fmt.Errorf("cxl: format: %w", err)
	}
	return f, false, nil
}

// format writes the header of an open, locked device.
func format(f *os.File, m medium, opts Options) error {
	old := inspect(f, m)
	if err := mayFormat(old, opts); err != nil {
		return err
	}
	size := opts.Size
	if size == 0 {
		size = m.size &^ (sizeUnit - 1)
	}
	switch {
	case size <= HeaderSpan:
		return fmt.Errorf("cxl: format %s: it has %d bytes: %w: give a size above %d", f.Name(), m.size, ErrRange, HeaderSpan)
	case m.kind == DeviceDAX && size > m.size:
		return &SpaceError{Path: f.Name(), Need: size - m.size, Have: 0}
	case m.kind != DeviceDAX:
		if err := reserve(f, m, size); err != nil {
			return err
		}
		m.size = max(m.size, size)
	}
	h := Header{
		Pool: opts.Pool, Device: opts.Device, DeviceID: opts.DeviceID, Generation: opts.Generation,
		Incarnation: opts.Incarnation, Size: uint64(size), Volatile: m.volatile, Coherence: opts.Coherence,
	}
	if m.kind == DeviceDAX && opts.Medium != MediumAuto {
		h.Volatile = opts.Medium == MediumVolatile
	}
	if old.Header != nil {
		h.sequence = old.Header.sequence // so that no old copy outranks a new one if the power fails half-way
	}
	m.volatile = h.Volatile
	return writeFresh(f, m, h, errors.Is(old.HeaderErr, ErrNoHeader))
}

// mayFormat decides whether what a device holds may be overwritten.
func mayFormat(old Info, opts Options) error {
	h := old.Header
	switch {
	case errors.Is(old.HeaderErr, ErrNoHeader):
		return nil
	case h != nil && old.Claim == ClaimAlive && old.Kind == DeviceDAX:
		return refuse(old.Path, old.Claim, h.Claim) // the lock says so for files, not for a device's second node
	case opts.Force:
		return nil
	case h != nil && h.Pool != opts.Pool:
		return foreign(old.Path, *h)
	case h != nil:
		return fmt.Errorf("cxl: format %s: device %x: %w", old.Path, h.Device, ErrFormatted)
	}
	return fmt.Errorf("cxl: format %s: %w", old.Path, old.HeaderErr)
}

// writeFresh zeroes the header span unless it is blank, and writes both slots and the live line.
func writeFresh(f *os.File, m medium, h Header, blank bool) (err error) {
	if h.BootID, err = bootFor(h.Volatile); err != nil {
		return err
	}
	length := int64(headerBytes)
	if !blank {
		length = HeaderSpan
	}
	d := &Device{path: f.Name(), file: f, medium: m, coherent: h.Coherence == CoherenceHardware}
	if d.head, err = mapSpan(f, m, 0, length, true); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.head.unmap()) }()
	d.live = uint64At(d.head.data, liveOffset)
	if !blank {
		if err = Guard(func() { clear(d.head.data) }); err == nil {
			err = d.flush(d.head.data)
		}
		if err != nil {
			return fmt.Errorf("cxl: clear header span of %s: %w", f.Name(), err)
		}
	}
	if err = d.update(func(to *Header) { *to = h }); err != nil {
		return err
	}
	if err = d.setLive(h.Generation, h.Incarnation); err != nil {
		return err
	}
	return settle(f, m)
}

// settle makes a new file itself survive a power loss: its size and blocks, and its name in its directory.
func settle(f *os.File, m medium) error {
	switch m.kind {
	case FSDAX, File:
	case KindUnknown, DeviceDAX, TmpFS:
		return nil
	case MemFD:
		if strings.HasPrefix(f.Name(), MemFDPrefix) {
			_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
			if err != nil {
				return fmt.Errorf("cxl: seal %s: %w", f.Name(), err)
			}
		}
		return nil
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("cxl: sync: %w", err)
	}
	dir, err := os.Open(filepath.Dir(f.Name())) //nolint:gosec // the operator's path
	if err != nil {
		return fmt.Errorf("cxl: sync directory: %w", err)
	}
	return closing(dir, dir.Sync())
}

// reserve extends a file to size and reserves room for all of it.
func reserve(f *os.File, m medium, size int64) error {
	fd := int(f.Fd())
	if err := checkRoom(f, m, size); err != nil {
		return err
	}
	if m.size < size {
		if err := f.Truncate(size); err != nil {
			return fmt.Errorf("cxl: extend to %d bytes: %w", size, err)
		}
	}
	for at := int64(0); at < size; {
		n := min(size-at, allocateChunk)
		err := unix.Fallocate(fd, 0, at, n)
		switch {
		case err == nil:
			at += n
		case errors.Is(err, unix.EINTR):
		case isAny(err, unix.ENOSPC, unix.EDQUOT, unix.ENOMEM):
			return &SpaceError{Path: f.Name(), Need: size - at, Have: max(freeSpace(fd), 0)}
		case isAny(err, unix.EOPNOTSUPP, unix.ENOSYS):
			return fill(f, max(m.size, at), size)
		default:
			return fmt.Errorf("cxl: reserve %d bytes of %s: %w", size, f.Name(), err)
		}
	}
	return nil
}

// fill writes zeros from one offset to another, where a file system cannot reserve room.
func fill(f *os.File, from, to int64) error {
	zeros := make([]byte, 1<<20)
	for from < to {
		n, err := f.WriteAt(zeros[:min(to-from, int64(len(zeros)))], from)
		if isAny(err, unix.ENOSPC, unix.EDQUOT) {
			return &SpaceError{Path: f.Name(), Need: to - from, Have: 0}
		}
		if err != nil {
			return fmt.Errorf("cxl: fill: %w", err)
		}
		from += int64(n)
	}
	return nil
}

// checkRoom refuses before anything is changed, and before a tmpfs larger than the machine takes the last memory.
func checkRoom(f *os.File, m medium, size int64) error {
	fd := int(f.Fd())
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("cxl: stat %s: %w", f.Name(), err)
	}
	const statBlock = 512 // the unit of st_blocks, whatever the file system's own
	need := size - st.Blocks*statBlock
	have := freeSpace(fd)
	if m.volatile && m.align == pageSize { // huge pages of hugetlbfs are set aside and not counted as available
		if memory := memAvailable(); memory >= 0 && (have < 0 || memory < have) {
			have = memory
		}
	}
	if have >= 0 && need > have {
		return &SpaceError{Path: f.Name(), Need: need, Have: have}
	}
	return nil
}

// freeSpace is how many bytes a file system has left for us, or -1 if it sets no limit of its own.
func freeSpace(fd int) int64 {
	var s unix.Statfs_t
	if err := unix.Fstatfs(fd, &s); err != nil || s.Blocks == 0 {
		return -1
	}
	return int64(s.Bavail) * s.Bsize //nolint:gosec // bytes of a file system fit 63 bits
}

// memAvailable is the kernel's estimate of memory that can still be had without swapping, or -1 if it gives none.
func memAvailable() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return -1
	}
	defer f.Close() //nolint:errcheck // opened for reading
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			if err != nil {
				return -1
			}
			return kib << 10
		}
	}
	return -1
}
