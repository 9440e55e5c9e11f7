package replay

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestScratchOfAKilledRunIsRemovedByTheNext, that of one that goes on is not, and a run leaves nothing behind.
func TestScratchOfAKilledRunIsRemovedByTheNext(t *testing.T) {
	base := filepath.Join(t.TempDir(), "state", "larder")
	var outside []string
	also := func(dir string) error { outside = append(outside, dir); return nil }

	first, removeFirst, err := Scratch(base, also)
	require.NoError(t, err)
	killed := filepath.Join(base, scratchPrefix+"killed")
	require.NoError(t, os.MkdirAll(filepath.Join(killed, "db"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(killed, scratchMarker), nil, 0o600))
	other := filepath.Join(base, "db")
	require.NoError(t, os.Mkdir(other, 0o700))

	second, removeSecond, err := Scratch(base, also)
	require.NoError(t, err)
	require.NoDirExists(t, killed)
	require.Equal(t, []string{killed}, outside, "and what it had elsewhere")
	require.DirExists(t, first, "its run goes on")
	require.DirExists(t, other, "it is no run's")
	require.NotEqual(t, first, second)

	require.NoError(t, removeSecond())
	require.NoError(t, removeFirst())
	require.NoDirExists(t, first)
	require.NoDirExists(t, second)
	require.DirExists(t, base, "somebody else uses it")

	require.NoError(t, os.Remove(other))
	require.NoError(t, os.Remove(base))
	_, remove, err := Scratch(base, nil)
	require.NoError(t, err)
	require.NoError(t, remove())
	require.NoDirExists(t, base, "it was not there before")

	_, _, err = Scratch("/dev/null/x", nil)
	require.ErrorContains(t, err, "--data")
}

// TestScratchLeavesAloneWhatARunWasToldToKeep: --data may name a directory there that is called like a run's own.
func TestScratchLeavesAloneWhatARunWasToldToKeep(t *testing.T) {
	base := t.TempDir()
	kept := filepath.Join(base, scratchPrefix+"lru", "db")
	require.NoError(t, os.MkdirAll(kept, 0o700))
	var removed []string
	also := func(dir string) error { removed = append(removed, dir); return nil }
	dir, remove, err := Scratch(base, also)
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(dir, scratchMarker), "the next run knows it by that")
	require.NoError(t, removeLeft(base, also))
	require.DirExists(t, kept)
	require.Empty(t, removed)
	require.NoError(t, remove())
	require.Equal(t, []string{dir}, removed)
}

// TestScratchWithoutLocksLeavesNothing: a file system may have none. A directory that somebody else has locked is his.
func TestScratchWithoutLocksLeavesNothing(t *testing.T) {
	defer func(f func(int, int) error) { flock = f }(flock)
	for lock, left := range map[unix.Errno]int{unix.ENOTSUP: 0, unix.ENOLCK: 0, unix.EWOULDBLOCK: scratchTries} {
		flock = func(int, int) error { return lock }
		base := t.TempDir()
		_, _, err := Scratch(base, nil)
		require.ErrorIs(t, err, lock)
		entries, err := os.ReadDir(base)
		require.NoError(t, err)
		require.Len(t, entries, left, lock)
	}
}
