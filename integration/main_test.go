package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// hang bounds every wait for something that must happen: a hundred times what it usually takes, so that only something
// that never happens runs into it, also on a loaded machine.
const hang = 90 * time.Second

// TestMain runs the tests, or, in a child process, what the parent asked for.
func TestMain(m *testing.M) {
	if job := os.Getenv(childJob); job != "" {
		os.Exit(runChild(job))
	}
	dir, err := os.MkdirTemp("", "larder-integration")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	built.dir = dir
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}))
}

// built is the program under test, built when it is first wanted.
var built struct {
	dir  string
	once sync.Once
	err  error
}

// larder returns the path of the program under test.
func larder(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("LARDER_BINARY"); path != "" {
		return path
	}
	path := filepath.Join(built.dir, "larder")
	built.once.Do(func() {
		args := []string{"build", "-o", path}
		if os.Getenv("LARDER_RACE") != "" {
			args = append(args, "-race")
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // a cold cache and other builds
		defer cancel()
		cmd := exec.CommandContext(ctx, "go", append(args, "larder/cmd/larder")...)
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("build larder: %w\n%s", err, out)
		}
	})
	require.NoError(t, built.err)
	return path
}

// run executes the program to its end and returns what it wrote.
func run(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), hang)
	defer cancel()
	var out, errs limitedBuffer
	cmd := exec.CommandContext(ctx, larder(t), args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// chaosTime is for how long tests that inject faults at random go on, at least: longer where LARDER_CHAOS_TIME says so.
func chaosTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("LARDER_CHAOS_TIME")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	require.NoError(t, err, "LARDER_CHAOS_TIME")
	return d
}

// skipShort leaves a test out of short runs.
func skipShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes longer than -short allows")
	}
}

// within calls try until it returns nil, and fails the test with its last error when that takes longer than hang.
func within(t *testing.T, what string, try func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(hang); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
		if t.Context().Err() != nil {
			break
		}
	}
	require.NoError(t, err, "%s did not happen within %v", what, hang)
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
