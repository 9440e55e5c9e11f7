package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// Hang bounds every wait for something that must happen: a hundred times what it usually takes, so that only something
// that never happens runs into it, also on a loaded machine.
const Hang = 90 * time.Second

// built are the programs under test by their build tags, each built when it is first wanted.
var built struct {
	mu   sync.Mutex
	dir  string
	path map[string]string
}

// Main runs the tests of a package, or, in a child process, what the parent asked for. Call it from TestMain with its
// testing.M.
func Main(m goleak.TestingM) {
	if job := os.Getenv(childJob); job != "" {
		os.Exit(runChild(job))
	}
	dir, err := os.MkdirTemp("", "larder-integration")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	built.dir, built.path = dir, make(map[string]string)
	goleak.VerifyTestMain(watched{m}, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}))
}

// Binary returns the path of the program under test, built with some tags. LARDER_BINARY names another one, to
// whose name tags are appended with dashes; LARDER_RACE has the race detector built in.
func Binary(t *testing.T, tags ...string) string {
	t.Helper()
	if path := os.Getenv("LARDER_BINARY"); path != "" {
		return strings.Join(append([]string{path}, tags...), "-")
	}
	built.mu.Lock()
	defer built.mu.Unlock()
	name := strings.Join(append([]string{"larder"}, tags...), "-")
	if path := built.path[name]; path != "" {
		return path
	}
	path := filepath.Join(built.dir, name)
	args := []string{"build", "-o", path, "-tags=" + strings.Join(tags, ",")}
	if os.Getenv("LARDER_RACE") != "" {
		args = append(args, "-race")
	}
	ctx, cancel := context.WithTimeout(t.Context(), buildTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, "go", append(args, "larder/cmd/larder")...).CombinedOutput()
	require.NoError(t, err, "build larder: %s", out)
	built.path[name] = path
	return path
}

// buildTime bounds a build: with a cold cache, beside other builds.
const buildTime = 10 * time.Minute

// Run executes the program to its end and returns what it wrote.
func Run(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Hang)
	defer cancel()
	var out, errs limitedBuffer
	cmd := exec.CommandContext(ctx, Binary(t), args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// ChaosTime is for how long tests that inject faults at random go on, at least: longer where LARDER_CHAOS_TIME says so.
func ChaosTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("LARDER_CHAOS_TIME")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	require.NoError(t, err, "LARDER_CHAOS_TIME")
	return d
}

// SkipShort leaves a test out of short runs.
func SkipShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes longer than -short allows")
	}
}

// Within calls try until it returns nil, and fails the test with its last error when that takes longer than Hang.
func Within(t *testing.T, what string, try func() error) {
	t.Helper()
	var err error
	for begun := now(); since(begun) < Hang+Stalled(begun); sleep(20 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
		if t.Context().Err() != nil {
			break
		}
	}
	require.NoError(t, err, "%s did not happen within %v", what, Hang)
}

// limitedBuffer keeps the last bytes that were written.
type limitedBuffer struct {
	mu  sync.Mutex
	buf []byte
}

// maxKept bounds a limitedBuffer: some thousands of log lines.
const maxKept = 1 << 20

func (b *limitedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.buf = append(b.buf, p...)
	if len(b.buf) > 2*maxKept {
		b.buf = append(b.buf[:0], b.buf[len(b.buf)-maxKept:]...)
	}
	return len(p), nil
}

func (b *limitedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.buf)
}

// Reset forgets what was written.
func (b *limitedBuffer) Reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.buf = nil
}
