package raft

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
)

// contents reads a file.
func contents(t *testing.T, fs vfs.FS, name string) []byte {
	t.Helper()
	f, err := fs.Open(name)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	b, err := io.ReadAll(f)
	require.NoError(t, err)
	return b
}

// A log is what was written to it, and zeros; it becomes longer in steps.
func TestLogsAreLongerThanWhatIsWritten(t *testing.T) {
	for name, fs := range map[string]vfs.FS{"memory": vfs.NewMem(), "disk": vfs.Default} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, fs.MkdirAll(dir, 0o700))
			path := filepath.Join(dir, "000001.log")
			f, err := aheadFS{fs}.Create(path, vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			var want []byte
			sizes := map[int]bool{}
			for i := range 100 {
				p := bytes.Repeat([]byte{byte(i + 1)}, 7000)
				want = append(want, p...)
				n, err := f.Write(p)
				require.NoError(t, err)
				require.Len(t, p, n)
				b := contents(t, fs, path)
				require.Equal(t, want, b[:len(want)])
				require.Equal(t, make([]byte, len(b)-len(want)), b[len(want):])
				sizes[len(b)] = true
			}
			require.Len(t, sizes, 6, "700,000 bytes in steps of up to 128 KiB behind a write")
			require.NoError(t, f.Close())

			used := filepath.Join(dir, "000002.log")
			f, err = aheadFS{fs}.ReuseForWrite(path, used, vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			before := contents(t, fs, used)
			_, err = f.Write([]byte("again"))
			require.NoError(t, err)
			require.NoError(t, f.Close())
			require.Equal(t, append([]byte("again"), before[5:]...), contents(t, fs, used), "a log that is used again is long enough")
		})
	}
}

func TestOtherFilesAreAsLongAsTheyAre(t *testing.T) {
	fs := aheadFS{vfs.NewMem()}
	f, err := fs.Create("000001.sst", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write([]byte("table"))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, "table", string(contents(t, fs, "000001.sst")))
}

// What a full disk has no room for beyond what was to be written is no failure of the write; any other error is.
func TestZerosThatCannotBeWritten(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want require.ErrorAssertionFunc
	}{"full": {syscall.ENOSPC, require.NoError}, "broken": {syscall.EIO, require.Error}} {
		t.Run(name, func(t *testing.T) {
			var fail error
			mem := vfs.NewMem()
			fs := aheadFS{errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind == errorfs.OpFileWriteAt && fail != nil {
					return &os.PathError{Op: "write", Path: op.Path, Err: fail}
				}
				return nil
			}))}
			f, err := fs.Create("1.log", vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			fail = c.err
			n, err := f.Write([]byte("entry"))
			c.want(t, err)
			require.Equal(t, 5, n, "what was to be written is")
			require.Equal(t, "entry", string(contents(t, mem, "1.log")))
			fail = nil
			_, err = f.Write([]byte("s"))
			require.NoError(t, err)
			b := contents(t, mem, "1.log")
			require.Equal(t, "entrys", string(b[:6]))
			require.Greater(t, len(b), logAhead/2, "the next write tries again")
			require.NoError(t, f.Close())
		})
	}
}

// BenchmarkLogSync is a write of 2 KiB to a log and its sync, with and without zeros ahead of it, in turns.
func BenchmarkLogSync(b *testing.B) {
	var took [2][]time.Duration
	var files [2]vfs.File
	for i, fs := range []vfs.FS{vfs.Default, aheadFS{vfs.Default}} {
		f, err := fs.Create(filepath.Join(b.TempDir(), "1.log"), vfs.WriteCategoryUnspecified)
		require.NoError(b, err)
		require.NoError(b, f.Preallocate(0, 64<<20)) // as Pebble does
		defer f.Close()                              //nolint:errcheck // it goes
		files[i] = f
	}
	p := make([]byte, 2<<10)
	for b.Loop() {
		for i, f := range files {
			begin := time.Now()
			_, err := f.Write(p)
			require.NoError(b, err)
			require.NoError(b, f.SyncData())
			took[i] = append(took[i], time.Since(begin))
		}
	}
	var mean [2]float64
	for i := range took {
		for _, d := range took[i] {
			mean[i] += float64(d) / float64(len(took[i])) / 1e3
		}
		slices.Sort(took[i])
		name := []string{"plain", "ahead"}[i]
		b.ReportMetric(mean[i], "us/"+name)
		b.ReportMetric(float64(took[i][len(took[i])*99/100])/1e3, "p99-us/"+name)
	}
	b.ReportMetric(mean[1]/mean[0], "ahead/plain")
}
