package source

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// stateFile is what a Dir keeps its state in.
const stateFile = "conductor.state"

// Dir is a Store in a directory, which it makes. What it has stays until all of what is saved next is on the disk.
type Dir string

// Save implements Store.
func (d Dir) Save(ctx context.Context, write func(io.Writer) error) error {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return err //nolint:wrapcheck // it names the path
	}
	f, err := os.CreateTemp(string(d), stateFile+".*")
	if err != nil {
		return err //nolint:wrapcheck // it names the path
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close(), ctx.Err())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(string(d), stateFile))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return syncDir(string(d))
}

// syncDir has a directory's entries on the disk.
func syncDir(path string) error {
	f, err := os.Open(path) //nolint:gosec // the operator's
	if err != nil {
		return err //nolint:wrapcheck // it names the path
	}
	return errors.Join(f.Sync(), f.Close())
}

// Load implements Store.
func (d Dir) Load(context.Context) (io.ReadCloser, error) {
	f, err := os.Open(filepath.Join(string(d), stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNoState
	}
	return f, err //nolint:wrapcheck // it names the path
}
