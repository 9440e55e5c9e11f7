package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"larder/transfer/uring"
)

// File is a file or a block device as [Storage]. Whole blocks go past the page cache where the file system can do that;
// the rest goes through it. What was written is in the file, but not durable before [File.Sync]. Parts that nobody has
// written are zeros and, in a file, take no space.
type File struct {
	path   string
	bytes  uint64
	direct *os.File // nil if the file system cannot
	plain  *os.File
	ring   *uring.Ring // nil if there is none
}

// OpenFile opens a file of so many bytes, and makes one or lengthens it if need be. A block device must be long enough.
func OpenFile(path string, bytes uint64) (f *File, err error) {
	if bytes == 0 || bytes > 1<<62 {
		return nil, fmt.Errorf("transfer: open %s: %d bytes: from 1 to 2^62", path, bytes)
	}
	f = &File{path: path, bytes: bytes}
	if f.plain, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil { //nolint:gosec // the operator chose the path
		return nil, fmt.Errorf("transfer: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
			f = nil
		}
	}()
	if err := f.lengthen(); err != nil {
		return f, err
	}
	f.direct, err = os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0) //nolint:gosec // as above
	switch {
	case err == nil:
		f.ring, _ = uring.New() // or a thread waits for each request
	case !errors.Is(err, unix.EINVAL):
		return f, fmt.Errorf("transfer: %w", err)
	}
	return f, nil
}

// lengthen sees to it that the file is long enough.
func (f *File) lengthen() error {
	end, err := f.plain.Seek(0, io.SeekEnd) // of a device, too
	if err != nil {
		return fmt.Errorf("transfer: %w", err)
	}
	if uint64(end) >= f.bytes { //nolint:gosec // not negative
		return nil
	}
	if err := f.plain.Truncate(int64(f.bytes)); err != nil { //nolint:gosec // checked by OpenFile
		return fmt.Errorf("transfer: make %s %d bytes long: %w", f.path, f.bytes, err)
	}
	return nil
}

// Direct reports whether whole blocks go past the page cache.
func (f *File) Direct() bool { return f.direct != nil }

// via is the way that bytes take: the page cache, without the ring, if they are not whole blocks at their place in memory and
// in the file.
func (f *File) via(p []byte, off uint64) (*uring.Ring, *os.File) {
	at := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))) //nolint:gosec // only looked at
	if f.direct == nil || (at|off|uint64(len(p)))%stagingUnit != 0 {
		return nil, f.plain
	}
	return f.ring, f.direct
}

// ReadAt implements [Storage].
func (f *File) ReadAt(ctx context.Context, p []byte, off uint64) error {
	if err := f.check(ctx, p, off); err != nil {
		return err
	}
	ring, file := f.via(p, off)
	_, err := ring.ReadAt(file, p, int64(off)) //nolint:gosec // within the file
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: %s was truncated", ErrMissing, f.path)
	}
	return err
}

// WriteAt implements [Storage].
func (f *File) WriteAt(ctx context.Context, p []byte, off uint64) error {
	if err := f.check(ctx, p, off); err != nil {
		return err
	}
	ring, file := f.via(p, off)
	_, err := ring.WriteAt(file, p, int64(off)) //nolint:gosec // within the file
	return err
}

func (f *File) check(ctx context.Context, p []byte, off uint64) error {
	if n := uint64(len(p)); n > f.bytes || off > f.bytes-n {
		return fmt.Errorf("%w: %d bytes at %d of %s", ErrRange, n, off, f.path)
	}
	return ctx.Err()
}

// Sync makes what was written durable.
func (f *File) Sync() error { return f.plain.Sync() }

// Close closes the file. Nobody uses it any more.
func (f *File) Close() error {
	err := errors.Join(f.ring.Close(), f.plain.Close())
	if f.direct != nil {
		err = errors.Join(err, f.direct.Close())
	}
	return err
}
