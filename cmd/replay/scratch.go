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
	scratchMarker = ".larder-replay" // a file in every run's own directory, and in no other that is called like one
	scratchTries  = 8                // each is lost only to somebody else who locks the directory in the same moment
)

var flock = unix.Flock // tests replace it

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
		if held, err = claim(dir); err != nil {
			continue
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

// claim locks a run's new directory and marks it as one, in that order: what is marked and not locked was left. It
// removes the directory if it fails, unless somebody else has locked it.
func claim(dir string) (*os.File, error) {
	held, err := lockDir(dir)
	if err == nil {
		if err = os.WriteFile(filepath.Join(dir, scratchMarker), nil, 0o600); err == nil {
			return held, nil
		}
		err = errors.Join(err, held.Close())
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		os.Remove(dir) //nolint:errcheck,gosec // the error that is returned matters more
	}
	return nil, err
}

// removeLeft removes the directories of runs that have ended without doing so. One that is not marked is not a run's
// own, whatever it is called: somebody named it with --data and keeps it.
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
		if _, err := os.Lstat(filepath.Join(dir, scratchMarker)); err != nil {
			continue
		}
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

// removeScratch removes the marker last, so that a run that is killed meanwhile leaves what the next one knows.
func removeScratch(dir string, outside func(string) error) error {
	var err error
	if outside != nil {
		err = outside(dir)
	}
	entries, _ := os.ReadDir(dir) // RemoveAll says what is wrong
	for _, e := range entries {
		if e.Name() != scratchMarker {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(err, os.RemoveAll(dir))
}

// lockDir takes the lock of a directory that nobody holds, and that is still there then.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir) //nolint:gosec // a run's own
	if err != nil {
		return nil, err //nolint:wrapcheck // names the path
	}
	err = flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
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
