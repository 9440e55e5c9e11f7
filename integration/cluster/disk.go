package cluster

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// SmallDisk mounts a file system of its own for a data directory, or skips the test where that is not permitted.
func SmallDisk(t *testing.T, size string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.Mkdir(dir, 0o700))
	if err := syscall.Mount("larder-test", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("a file system of its own for a data directory cannot be mounted here: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

// mount gives the member a file system of its own, or a plain directory where that is not permitted.
func (n *Node) mount(size string) {
	n.t.Helper()
	disk := filepath.Join(n.t.TempDir(), "disk")
	require.NoError(n.t, os.Mkdir(disk, 0o700))
	n.Dir = filepath.Join(disk, "data")
	if err := syscall.Mount("larder-test", disk, "tmpfs", 0, "size="+size); err != nil {
		n.t.Logf("member %d has no file system of its own: %v", n.ID, err)
		return
	}
	n.Disk = disk
}

// FillDisk leaves no more than left bytes of a file system free, and returns what undoes it.
func FillDisk(t *testing.T, dir string, left uint64) (undo func()) {
	t.Helper()
	path := filepath.Join(dir, "ballast of the test")
	f, err := os.Create(path)
	require.NoError(t, err)
	Within(t, "a full disk", func() error {
		var s syscall.Statfs_t
		if err := syscall.Statfs(dir, &s); err != nil {
			return err
		}
		free := s.Bavail * uint64(s.Bsize)
		require.Greater(t, free, left)
		// Whoever is being tested takes space meanwhile: then once more.
		return syscall.Fallocate(int(f.Fd()), 0, 0, int64(free-left))
	})
	require.NoError(t, f.Close())
	return func() { require.NoError(t, os.Remove(path)) }
}

// Fail makes operations of a member on its files fail, as the lines say; none ends that. The program must be built with
// the tag failpoints: see raft's failpoints.go for what a line is.
func (n *Node) Fail(lines ...string) {
	n.t.Helper()
	next := n.failpoints + ".next"
	require.NoError(n.t, os.WriteFile(next, []byte(strings.Join(lines, "\n")), 0o600))
	require.NoError(n.t, os.Rename(next, n.failpoints))
}

// Failed returns the lines given to Fail that were carried out at least once.
func (n *Node) Failed() []string {
	n.t.Helper()
	b, err := os.ReadFile(n.failpoints + ".hits")
	if !errors.Is(err, os.ErrNotExist) {
		require.NoError(n.t, err)
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}
