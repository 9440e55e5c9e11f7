package replay

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	scratchPrefix = "larder-replay-"
	scratchTries  = 8 // each is lost only to another run that began in the same moment
)

// Scratch makes a directory for one run below base, and removes those that killed runs have left there. A run holds a
// lock on its directory, which ends with its process. outside, if not nil, removes what a run has elsewhere; it is
// called with the run's directory when that is removed.
func Scratch(base string, outside func(dir string) error) (dir string, remove func() error, err error) {
	_, missing := os.Stat(base)
	for range scratchTries {
		if err = os.MkdirAll(base, 0o700); err != nil {
			break
		}
		if err = removeLeft(base, outside); err != nil {
			break
		}
		if dir, err = os.MkdirTemp(base, scratchPrefix); err != nil {
			continue
		}
		var held *os.File
		if held, err = lockDir(dir); err != nil {
			continue // another run took it for one that was left
		}
		return dir, func() error {
			defer held.Close() //nolint:errcheck // it was only opened for its lock
			err := removeScratch(dir, outside)
			if errors.Is(missing, os.ErrNotExist) {
				os.Remove(base) //nolint:errcheck,gosec // there may be something else in it by now
			}
			return err
		}, nil
	}
	return "", nil, fmt.Errorf("replay: %w; name a directory with --data", err)
}

// removeLeft removes the directories of runs that have ended without doing so.
func removeLeft(base string, outside func(string) error) error {
	entries, err := os.ReadDir(base)
	if err != nil {
		return err //nolint:wrapcheck // the caller wraps
	}
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), scratchPrefix) {
			continue
		}
		dir := filepath.Join(base, e.Name())
		held, err := lockDir(dir)
		if err != nil {
			continue // its run goes on, or it has just been removed
		}
		if err := errors.Join(removeScratch(dir, outside), held.Close()); err != nil {
			return err
		}
	}
	return nil
}

func removeScratch(dir string, outside func(string) error) error {
	var err error
	if outside != nil {
		err = outside(dir)
	}
	return errors.Join(err, os.RemoveAll(dir))
}

// lockDir takes the lock of a directory that nobody holds, and that is still there then.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir) //nolint:gosec // a run's own
	if err != nil {
		return nil, err //nolint:wrapcheck // names the path
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	here, gone := os.Stat(dir)
	mine, unknown := f.Stat()
	if err = cmp.Or(err, gone, unknown); err == nil && !os.SameFile(here, mine) {
		err = os.ErrNotExist
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return f, nil
}
