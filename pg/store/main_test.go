package store_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"larder/pg/store"
)

// TestMain runs the tests, or, in a child process, what the parent asked for.
func TestMain(m *testing.M) {
	if job := os.Getenv(childEnv); job != "" {
		go func() { // it ends with its parent
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(1)
		}()
		if err := runChild(job, os.Getenv(childEnv+"_URL"), os.Getenv(childEnv+"_LEASE")); err != nil {
			fmt.Println(err)
		}
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

const childEnv = "LARDER_STORE_CHILD"

// child is a process that uses a store.
type child struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines chan string
}

func startChild(tb testing.TB, job, url string, lease time.Duration) *child {
	tb.Helper()
	self, err := os.Executable()
	require.NoError(tb, err)
	c := &child{t: tb, cmd: exec.Command(self), lines: make(chan string, 100)}
	c.cmd.Env = append(os.Environ(), childEnv+"="+job, childEnv+"_URL="+url, childEnv+"_LEASE="+lease.String())
	_, err = c.cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := c.cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, c.cmd.Start())
	read := make(chan struct{})
	go func() {
		defer close(read)
		for s := bufio.NewScanner(out); s.Scan(); {
			c.lines <- s.Text()
		}
	}()
	tb.Cleanup(func() {
		c.signal(syscall.SIGKILL)
		<-read
		_ = c.cmd.Wait()
	})
	return c
}

func (c *child) signal(s syscall.Signal) { _ = c.cmd.Process.Signal(s) }

func (c *child) says(line string) {
	c.t.Helper()
	select {
	case got := <-c.lines:
		require.Equal(c.t, line, got)
	case <-time.After(20 * time.Second):
		require.Fail(c.t, "the child is silent", line)
	}
}

func runChild(job, url, lease string) error {
	ctx := context.Background()
	d, err := time.ParseDuration(lease)
	if err != nil {
		return err
	}
	s, err := store.Open(ctx, url, d)
	if err != nil {
		return err
	}
	switch job {
	case "announce":
		for {
			lost := s.Lost()
			for _, key := range []string{"child/a", "child/b"} {
				if _, err := s.Put(ctx, key, []byte("here"), store.Leased()); err != nil {
					return err
				}
			}
			fmt.Println("announced")
			<-lost
			fmt.Println("lost")
		}
	default: // churn
		fmt.Println("up")
		for n := 0; ; n++ {
			key := fmt.Sprint("churn/", rand.N(8))
			switch rand.N(4) {
			case 0:
				_ = s.Delete(ctx, key)
			case 1:
				_, err = s.Put(ctx, key, make([]byte, rand.N(3000)))
			default:
				_, err = s.Put(ctx, key, make([]byte, rand.N(3000)), store.Leased())
			}
			if err != nil {
				return err
			}
		}
	}
}
