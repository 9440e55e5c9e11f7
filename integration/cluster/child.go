// Package cluster starts real larder processes for tests, puts proxies and small disks where faults are to happen, loads
// them with clients whose every byte can be verified, and keeps what these were promised.
package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
)

// Environment of a child process: what it does, and with which masters.
const (
	childJob  = "LARDER_TEST_CHILD"
	childArgs = "LARDER_TEST_CHILD_ARGS"
)

// ChildConfig is what a child is told.
type ChildConfig struct {
	Addrs    []string
	Instance string // "" = of its own
	TTL      time.Duration
	Name     string // its keys begin with it
	Live     int    // keys that it keeps, or Allocs that it holds
	Size     int    // bytes of what it allocates
}

// runChild is the main function of a child process.
func runChild(job string) int {
	var cfg ChildConfig
	if err := json.Unmarshal([]byte(os.Getenv(childArgs)), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		return 1
	}
	jobs := map[string]func(*client.Client, ChildConfig) error{"write": childWrite, "hold": childHold}
	x, err := client.Open(context.Background(), client.Config{
		Addrs: cfg.Addrs, Instance: cfg.Instance, TTL: cfg.TTL, PageSize: PageSize, RegionSize: RegionSize,
	})
	if err == nil {
		err = jobs[job](x, cfg)
	}
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the parent has let go of it
		fmt.Fprintln(os.Stderr, "child:", err)
		return 1
	}
	return 0
}

// say tells the parent something, in one write, so that a line is there whole or not at all.
func say(format string, args ...any) error {
	_, err := fmt.Fprintf(os.Stdout, format+"\n", args...)
	return err
}

// hear waits until the parent has noted what was said. It is io.EOF when the parent has let go of the child.
func hear() error {
	_, err := os.Stdin.Read(make([]byte, 1))
	return err
}

// step carries out one operation. The parent knows of it before it begins, and after it was acknowledged.
func step(key string, version uint64, do func(ctx context.Context) error) error {
	if err := say("begin %s %d", key, version); err != nil {
		return err
	}
	if err := hear(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), Hang)
	defer cancel()
	if err := do(ctx); err != nil {
		return fmt.Errorf("%s to version %d: %w", key, version, err)
	}
	return say("ack %s", key)
}

// childWrite stores and deletes keys of its own.
func childWrite(x *client.Client, cfg ChildConfig) error {
	var buf []byte
	for n := 0; ; n++ {
		key := fmt.Sprintf("%s/%d", cfg.Name, n)
		buf = ValueOf(buf, key, 1)
		err := step(key, 1, func(ctx context.Context) error {
			_, err := x.Put(ctx, []byte(key), buf)
			return err
		})
		if err == nil && n >= cfg.Live {
			key := fmt.Sprintf("%s/%d", cfg.Name, n-cfg.Live)
			err = step(key, 0, func(ctx context.Context) error {
				_, err := x.Delete(ctx, []byte(key))
				return err
			})
		}
		if err != nil {
			return err
		}
		sleep(pace)
	}
}

// childHold writes bytes of values that it never registers, says so, and waits for its end.
func childHold(x *client.Client, cfg ChildConfig) error {
	for n := range cfg.Live {
		key := fmt.Sprintf("%s/%d", cfg.Name, n)
		a, err := x.Alloc(context.Background(), []byte(key), cfg.Size)
		if err != nil {
			return fmt.Errorf("alloc %s: %w", key, err)
		}
		copy(a.Bytes(), MakeValue(nil, key, 1, cfg.Size))
	}
	if err := say("holding"); err != nil {
		return err
	}
	return hear()
}

// Child is a client in a process of its own.
type Child struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.WriteCloser
	errs  limitedBuffer

	done chan struct{} // its output has ended
	mu   sync.Mutex
	said map[string]bool // lines that are no operations
}

// StartChild starts a client in a process of its own. What it says of its operations goes into the ledger.
func StartChild(t *testing.T, c *Cluster, l *Ledger, job string, cfg ChildConfig) *Child {
	t.Helper()
	cfg.Addrs = c.Addrs()
	args, err := json.Marshal(cfg)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	k := &Child{t: t, cmd: exec.Command(self), done: make(chan struct{}), said: make(map[string]bool)}
	k.cmd.Env = append(os.Environ(), childJob+"="+job, childArgs+"="+string(args))
	k.cmd.Stderr = &k.errs
	out, err := k.cmd.StdoutPipe()
	require.NoError(t, err)
	k.stdin, err = k.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, k.cmd.Start())
	go k.listen(out, l)
	t.Cleanup(func() {
		k.Kill()
		if t.Failed() {
			t.Logf("child %s: %s", cfg.Name, k.errs.String())
		}
	})
	return k
}

// listen reads what the child says.
func (k *Child) listen(out io.Reader, l *Ledger) {
	defer close(k.done)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var key string
		var version uint64
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, "begin "):
			if _, err := fmt.Sscanf(line, "begin %s %d", &key, &version); err == nil {
				l.Of(key).Begin(version)
			}
			if _, err := k.stdin.Write([]byte("\n")); err != nil {
				continue // it has been killed; what it said before is still to be heard
			}
		case strings.HasPrefix(line, "ack "):
			l.Of(line[len("ack "):]).Ack()
		default:
			k.mu.Lock()
			k.said[line] = true
			k.mu.Unlock()
		}
	}
}

// Hears waits until the child has said a line.
func (k *Child) Hears(line string) {
	k.t.Helper()
	Within(k.t, "child's "+line, func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		select {
		case <-k.done:
			k.t.Fatalf("the child ended: %s", k.errs.String())
		default:
		}
		if !k.said[line] {
			return errors.New("it has not said so")
		}
		return nil
	})
}

// Signal sends a signal.
func (k *Child) Signal(s syscall.Signal) {
	k.t.Helper()
	if err := k.cmd.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(k.t, err)
	}
}

// Alive fails the test if the child has ended by itself: one of its calls has failed.
func (k *Child) Alive() {
	k.t.Helper()
	select {
	case <-k.done:
		k.t.Fatalf("the child ended: %s", k.errs.String())
	default:
	}
}

// Kill ends the child between any two of its instructions, and waits until all it said has been heard.
func (k *Child) Kill() {
	if k.cmd.ProcessState != nil {
		return
	}
	k.cmd.Process.Kill() //nolint:errcheck // it may have ended
	<-k.done
	k.cmd.Wait()    //nolint:errcheck // killed
	k.stdin.Close() //nolint:errcheck // the other end is gone
}
