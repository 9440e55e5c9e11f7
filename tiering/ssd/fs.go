package ssd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// fileSystem is one directory. Tests bring one that loses power.
type fileSystem interface {
	// open opens a file for reading and writing. With create it makes it; without, fs.ErrNotExist says that there is
	// none. direct asks for O_DIRECT; the answer says whether it was given.
	open(name string, create, direct bool) (f file, isDirect bool, err error)
	// syncDir makes the names of files durable.
	syncDir() error
	// lock keeps other processes out until it is closed.
	lock() (io.Closer, error)
}

// file is one open file.
type file interface {
	// ReadAt is as in io.ReaderAt.
	ReadAt(b []byte, off int64) (int, error)
	// writeVec writes all of bufs, one behind the other.
	writeVec(bufs [][]byte, off int64) error
	// sync makes what was written durable.
	sync() error
	// allocate makes the file at least n bytes long, with blocks for all of them where the file system can.
	allocate(n int64) error
	Close() error
}

// dirFS is a directory of the operating system.
type dirFS struct{ dir string }

func (d dirFS) open(name string, create, direct bool) (file, bool, error) {
	flags := os.O_RDWR
	if create {
		flags |= os.O_CREATE
	}
	path := filepath.Join(d.dir, name)
	if direct {
		f, err := os.OpenFile(path, flags|unix.O_DIRECT, 0o600) //nolint:gosec // the operator chose the directory
		if err == nil {
			return &osFile{f}, true, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			return nil, false, err
		}
	}
	f, err := os.OpenFile(path, flags, 0o600) //nolint:gosec // as above
	if err != nil {
		return nil, false, err
	}
	return &osFile{f}, false, nil
}

func (d dirFS) syncDir() error {
	f, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func (d dirFS) lock() (io.Closer, error) {
	f, err := os.OpenFile(filepath.Join(d.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%w: %s", ErrLocked, d.dir)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

type osFile struct{ *os.File }

// writeVec writes on after a short count, which is no error; what failed is not tried again.
func (f *osFile) writeVec(bufs [][]byte, off int64) error {
	bufs = append([][]byte(nil), bufs...) // it is cut below
	for len(bufs) > 0 {
		n, err := unix.Pwritev(int(f.Fd()), bufs, off)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("ssd: write %s: %w", f.Name(), err)
		}
		if n == 0 {
			return fmt.Errorf("ssd: write %s: %w", f.Name(), io.ErrShortWrite)
		}
		off += int64(n)
		for len(bufs) > 0 && n >= len(bufs[0]) {
			n -= len(bufs[0])
			bufs = bufs[1:]
		}
		if n > 0 {
			bufs[0] = bufs[0][n:]
		}
	}
	return nil
}

// sync is called once: after an error the kernel may have dropped what it could not write, and a second call succeeds.
func (f *osFile) sync() error {
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return fmt.Errorf("ssd: flush %s: %w", f.Name(), err)
	}
	return nil
}

func (f *osFile) allocate(n int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() >= n {
		return nil
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, n)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = f.Truncate(n)
	}
	if errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: allocate %d bytes for %s: free the disk, or ask for a smaller Capacity", ErrNoSpace, n, f.Name())
	}
	return err
}
