package cxl

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// holdEnv makes the test binary claim the device it names, say so, and hold it until its input ends.
const holdEnv = "CXL_TEST_HOLD"

func TestMain(m *testing.M) {
	if path := os.Getenv(holdEnv); path != "" {
		os.Exit(hold(path))
	}
	goleak.VerifyTestMain(m)
}

func hold(path string) int {
	_, err := Open(path, Expect{Claim: true})
	_, _ = fmt.Fprintln(os.Stdout, err)
	_, _ = os.Stdin.Read(make([]byte, 1)) // returns when the parent closes the pipe
	return 0
}

// holder starts a process that tries to claim path and returns it with what its Open said.
func holder(t *testing.T, path string) (*exec.Cmd, string) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), holdEnv+"="+path)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	return cmd, line
}

const testSize = 8 << 20

var (
	testPool   = [16]byte{0xaa, 1}
	testDevice = [16]byte{0xdd, 1}
)

func testOptions() Options {
	return Options{
		Pool: testPool, Device: testDevice, DeviceID: 3, Generation: 41, Incarnation: 1, Size: testSize,
		Coherence: CoherenceHardware,
	}
}

// onTmpFS is a path in a fresh directory on tmpfs.
func onTmpFS(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "cxl-test-")
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, os.RemoveAll(dir)) })
	return filepath.Join(dir, "pool")
}

// media runs a test on each kind of file that any machine has.
func media(t *testing.T, f func(t *testing.T, path string, kind Kind)) {
	t.Helper()
	t.Run("file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "pool")
		kind := File
		var fs unix.Statfs_t
		require.NoError(t, unix.Statfs(filepath.Dir(path), &fs))
		if fs.Type == unix.TMPFS_MAGIC {
			kind = TmpFS
		}
		f(t, path, kind)
	})
	t.Run("tmpfs", func(t *testing.T) { f(t, onTmpFS(t), TmpFS) })
}

// create makes a device that is closed with the test.
func create(tb testing.TB, path string, opts Options) *Device {
	tb.Helper()
	d, err := Create(path, opts)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = d.Close() })
	return d
}

// open opens a device and closes it with the test.
func open(tb testing.TB, path string, want Expect) *Device {
	tb.Helper()
	d, err := Open(path, want)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = d.Close() })
	return d
}

// mapAll maps all data of a device until the test ends.
func mapAll(tb testing.TB, d *Device, opts MapOptions) *Mapping {
	tb.Helper()
	m, err := d.Map(HeaderSpan, int64(d.Header().Size)-HeaderSpan, opts)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = m.Close() })
	return m
}
