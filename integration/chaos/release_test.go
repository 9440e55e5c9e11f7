package chaos

import (
	"archive/tar"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

// releaseFlag makes the data directory that a later release starts from.
var releaseFlag = flag.Bool("write-release", false, "write testdata/release.tar.zst from the program as it is")

// releaseFile holds the data directory of a member alone, as the previous release left it when it was killed: a pool with
// entries, a pin, and a log that had not been flushed. Write it anew with -write-release when a release is made.
const releaseFile = "testdata/release.tar.zst"

// maxRelease bounds a file of the archive.
const maxRelease = 256 << 20

// previousRelease starts the program on the previous release's data directory. The pool of that time is gone with its
// machine, so its entries must not be served; everything else goes on.
func previousRelease(t *testing.T, name string) {
	t.Helper()
	r := begin(t, name, settings{members: 1, noLoad: true, pool: "34MiB", binary: func(t *testing.T, c *cluster.Cluster) {
		t.Helper()
		unpack(t, c.Nodes[0].Dir)
	}})
	r.fault("start on the previous release's data")
	x := r.c.Open(client.Config{})
	require.Zero(t, cluster.Held(t, x, "release", 32), "the bytes are on another machine")
	status, err := r.c.Nodes[0].Status()
	require.NoError(t, err)
	require.Greater(t, status.Term, uint64(1), "it began with nothing")
	cluster.Fill(t, x, "later", 64, cluster.PageSize)
	require.Equal(t, 64, cluster.Held(t, x, "later", 64))
	r.c.Nodes[0].Kill()
	r.c.Nodes[0].Restart()
	require.Equal(t, 64, cluster.Held(t, x, "later", 64))
	r.strange = true // the device of that time
	r.finish()
}

// TestWriteRelease writes the archive.
func TestWriteRelease(t *testing.T) {
	if !*releaseFlag {
		t.Skip("only with -write-release")
	}
	c := cluster.Start(t, cluster.Options{Pool: "34MiB"})
	x := c.Open(client.Config{Checksums: true})
	cluster.Fill(t, x, "release", 32, 1000)
	c.Ctl("pin", "--owner", "release", "release/0")
	c.Nodes[0].Kill()
	require.NoError(t, os.MkdirAll(filepath.Dir(releaseFile), 0o750))
	f, err := os.Create(releaseFile)
	require.NoError(t, err)
	z, err := zstd.NewWriter(f, zstd.WithEncoderLevel(zstd.SpeedBestCompression))
	require.NoError(t, err)
	w := tar.NewWriter(z)
	dir := c.Nodes[0].Dir
	require.NoError(t, os.Remove(filepath.Join(dir, "raft", "ballast")))
	require.NoError(t, w.AddFS(os.DirFS(dir)))
	require.NoError(t, errors.Join(w.Close(), z.Close(), f.Close()))
}

// unpack puts the archive's files into a directory.
func unpack(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(releaseFile)
	require.NoError(t, err)
	defer f.Close() //nolint:errcheck // opened for reading
	z, err := zstd.NewReader(f)
	require.NoError(t, err)
	defer z.Close()
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err)
		path := filepath.Join(dir, filepath.FromSlash(h.Name))
		if h.FileInfo().IsDir() {
			require.NoError(t, os.MkdirAll(path, 0o750))
			continue
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o750))
		b, err := io.ReadAll(io.LimitReader(r, maxRelease))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, b, 0o600))
	}
}
