package cxl

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// populateChunk is how many bytes one worker faults in at a time: some milliseconds of work.
	populateChunk = 32 << 20
	// populateWorkers bounds the goroutines that fault a mapping in; more only contend for the kernel's locks.
	populateWorkers = 8
)

// span is a mapped piece of a device.
type span struct {
	whole []byte // what was mapped, aligned as the medium asks
	data  []byte // what was asked for
	sync  bool   // the kernel gave MAP_SYNC
}

// mapSpan maps length bytes at offset, aligning both to the medium internally.
func mapSpan(f *os.File, m medium, offset, length int64, writable bool) (span, error) {
	start := offset &^ (m.align - 1)
	into := offset - start
	whole := (into + length + m.align - 1) &^ (m.align - 1)
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	fd := int(f.Fd())
	s := span{}
	var err error
	if m.kind == FSDAX && writable {
		// Only with MAP_SYNC do flushed lines survive a crash without an fsync: it makes block maps durable first.
		s.whole, err = unix.Mmap(fd, start, int(whole), prot, unix.MAP_SHARED_VALIDATE|unix.MAP_SYNC)
		s.sync = err == nil
	}
	if !s.sync {
		s.whole, err = unix.Mmap(fd, start, int(whole), prot, unix.MAP_SHARED)
	}
	if err != nil {
		return span{}, fmt.Errorf("cxl: map %d bytes at %d of %s: %w", whole, start, f.Name(), err)
	}
	s.data = s.whole[into : into+length : into+length]
	return s, nil
}

// unmap gives the address range back.
func (s *span) unmap() error {
	if s.whole == nil {
		return nil
	}
	err := unix.Munmap(s.whole)
	s.whole, s.data = nil, nil
	if err != nil {
		return fmt.Errorf("cxl: unmap: %w", err)
	}
	return nil
}

// persist makes earlier stores to b durable as far as the medium can: see the package comment.
func (s *span) persist(m medium, b []byte) (err error) {
	defer caught(debugPanicOnFault(), &err)
	switch {
	case len(b) == 0:
	case m.volatile:
		storeFence()
	case m.kind == DeviceDAX || s.sync:
		WriteBack(b)
	default:
		return s.msync(b)
	}
	return nil
}

// msync writes the pages that hold b to their file and waits.
func (s *span) msync(b []byte) error {
	from := int(address(b) - address(s.whole))
	first := from &^ (int(pageSize) - 1)
	if err := unix.Msync(s.whole[first:from+len(b)], unix.MS_SYNC); err != nil {
		return fmt.Errorf("cxl: msync: %w", err)
	}
	return nil
}

// MapOptions says how a piece of a device is mapped.
type MapOptions struct {
	ReadOnly  bool // stores fault
	Populate  bool // fault every page in now, so that no copy pays for it later
	HugePages bool // ask for huge pages; where the kernel or medium has none, pages stay small
	NUMA      int  // the NUMA node that pages come from, plus 1, whoever touches them first; 0 = that of who does. For memory files
}

// Mapping is a mapped piece of a device. Its methods may be called concurrently, except Close, which must come after
// every use of the bytes.
type Mapping struct {
	span     span
	dev      *Device
	offset   int64
	readOnly bool
	closed   atomic.Bool
}

// Map maps length bytes of the device's data at offset, both in bytes from the start of the device: the first valid
// offset is [HeaderSpan]. Alignment is the mapping's own affair. The device stays open until all its mappings are
// closed.
func (d *Device) Map(offset, length int64, opts MapOptions) (*Mapping, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	size := int64(d.header.Size) //nolint:gosec // checked at open to fit the medium
	switch {
	case d.closed:
		return nil, fmt.Errorf("cxl: map %s: %w", d.path, ErrClosed)
	case offset < HeaderSpan || length <= 0 || offset > size || length > size-offset:
		return nil, fmt.Errorf("cxl: map %d bytes at %d of %s: %w: data lies in [%d, %d)",
			length, offset, d.path, ErrRange, HeaderSpan, size)
	case d.readOnly && !opts.ReadOnly:
		return nil, fmt.Errorf("cxl: map %s for writing: %w", d.path, ErrReadOnly)
	}
	s, err := mapSpan(d.file, d.medium, offset, length, !opts.ReadOnly)
	if err != nil {
		return nil, err
	}
	if !opts.ReadOnly {
		// A child of a fork would go on to write after this process is proven dead and its regions were given away.
		if err := unix.Madvise(s.whole, unix.MADV_DONTFORK); err != nil {
			return nil, errors.Join(fmt.Errorf("cxl: keep %s from children of a fork: %w", d.path, err), s.unmap())
		}
	}
	if opts.HugePages {
		_ = unix.Madvise(s.whole, unix.MADV_HUGEPAGE) // a wish: device-DAX has them anyway, files may have none
	}
	if opts.NUMA > 0 {
		if err := bind(s.whole, opts.NUMA-1); err != nil {
			return nil, errors.Join(fmt.Errorf("cxl: %s: %w", d.path, err), s.unmap())
		}
	}
	if opts.Populate {
		if err := populate(s.whole, !opts.ReadOnly); err != nil {
			return nil, errors.Join(fmt.Errorf("cxl: populate %s: %w", d.path, err), s.unmap())
		}
	}
	d.mappings++
	return &Mapping{span: s, dev: d, offset: offset, readOnly: opts.ReadOnly}, nil
}

// Bytes are the mapped bytes, shared with every other mapping of the device. Touching them after Close, or after the
// file was truncated, faults: see [Guard].
func (m *Mapping) Bytes() []byte { return m.span.data }

// Offset is where the mapping starts on its device, in bytes.
func (m *Mapping) Offset() int64 { return m.offset }

// Device is the device that is mapped.
func (m *Mapping) Device() *Device { return m.dev }

// Generation is [Device.Generation] of the mapped device.
func (m *Mapping) Generation() uint64 { return m.dev.Generation() }

// Publish makes earlier stores to b, a part of Bytes, readable by every host that maps the device, before whatever
// this goroutine does next. It must come before anyone is told of the bytes.
func (m *Mapping) Publish(b []byte) (err error) {
	if m.dev.coherent {
		storeFence()
		return nil
	}
	defer caught(debugPanicOnFault(), &err)
	WriteBack(b)
	return nil
}

// Refresh drops what this host's caches hold of b, a part of Bytes, so that the next load reads what another host
// published. It must come before each copy out. Coherent devices need nothing.
func (m *Mapping) Refresh(b []byte) (err error) {
	if m.dev.coherent {
		return nil
	}
	defer caught(debugPanicOnFault(), &err)
	Invalidate(b)
	return nil
}

// Surrender writes back and drops what this host's caches hold of b, a part of Bytes, so that no line of it can be
// written to memory later, over another owner's bytes. It must come before a page is freed to others or a REVOKE is
// acknowledged.
func (m *Mapping) Surrender(b []byte) error {
	storeFence()
	return m.Refresh(b) // a dropped line is written back first
}

// Persist makes earlier stores to b, a part of Bytes, survive a power loss, where the medium can: see the package
// comment.
func (m *Mapping) Persist(b []byte) error {
	if m.readOnly {
		return fmt.Errorf("cxl: persist: %w", ErrReadOnly)
	}
	return m.span.persist(m.dev.medium, b)
}

// Close unmaps the bytes. It is the last call on the mapping and on every slice of its bytes.
func (m *Mapping) Close() error {
	if m.closed.Swap(true) {
		return fmt.Errorf("cxl: mapping: %w", ErrClosed)
	}
	m.dev.mu.Lock()
	defer m.dev.mu.Unlock()
	m.dev.mappings--
	return m.span.unmap()
}

// populate faults in every page of b with a few goroutines.
func populate(b []byte, write bool) error {
	pieces := (len(b) + populateChunk - 1) / populateChunk
	workers := min(pieces, runtime.GOMAXPROCS(0), populateWorkers)
	var next atomic.Int64
	errs := make(chan error, workers)
	for range workers {
		go func() {
			for {
				from := int(next.Add(1)-1) * populateChunk
				if from >= len(b) {
					errs <- nil
					return
				}
				if err := populatePiece(b[from:min(from+populateChunk, len(b))], write); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	all := make([]error, 0, workers)
	for range workers {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// populatePiece faults in one piece by the kernel's call, or by touching each page on a kernel older than 5.14.
func populatePiece(b []byte, write bool) error {
	advice := unix.MADV_POPULATE_READ
	if write {
		advice = unix.MADV_POPULATE_WRITE
	}
	for {
		err := unix.Madvise(b, advice)
		switch {
		case err == nil:
			return nil
		case isAny(err, unix.EINTR, unix.EAGAIN):
		case errors.Is(err, unix.EINVAL):
			return touchPages(b, write)
		case isAny(err, unix.EFAULT, unix.EHWPOISON):
			return fmt.Errorf("%w: %w", ErrTruncated, err)
		default:
			return fmt.Errorf("madvise: %w", err)
		}
	}
}

// touchPages faults in each page of b by loading a word of it, or by adding zero to it, which changes nothing even
// while others store there.
func touchPages(b []byte, write bool) error {
	return Guard(func() {
		for i := 0; i < len(b); i += int(pageSize) {
			word := (*uint32)(unsafe.Pointer(&b[i])) //nolint:gosec // a page's first word, inside b
			if write {
				atomic.AddUint32(word, 0)
			} else {
				atomic.LoadUint32(word)
			}
		}
	})
}
