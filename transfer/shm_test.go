package transfer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestPrivateMemoryGoesOverARail has one buffer that others can map, and one that they cannot, in one batch.
func TestPrivateMemoryGoesOverARail(t *testing.T) {
	here, there := engine(t, Config{}), engine(t, Config{Listen: []string{anyPort}})
	seg := open(t, here, there.Addresses()...)
	shared, mem, err := there.Allocate(300_000, BufferOptions{})
	require.NoError(t, err)
	own := noise(t, 300_000)
	copy(mem, noise(t, len(mem)))
	private := register(t, there, own, BufferOptions{})
	a, b := make([]byte, len(mem)), make([]byte, len(own))
	require.NoError(t, carry(t, here,
		Request{Op: Read, Segment: seg, Buffer: shared.Info().Handle, Local: a},
		Request{Op: Read, Segment: seg, Buffer: private.Info().Handle, Local: b}))
	require.True(t, bytes.Equal(mem, a))
	require.True(t, bytes.Equal(own, b))
	require.NoError(t, shared.Retire(t.Context()))
	err = carry(t, here, Request{Op: Read, Segment: seg, Buffer: shared.Info().Handle, Local: a})
	require.ErrorIs(t, err, ErrStale)
}

// child is this test's binary as another process: it opens the segment at an address and writes to the buffer "pool".
const child = "LARDER_TEST_TRANSFER"

// TestMappingChild is what the other process does. What it is told on its standard input, line by line: go.
func TestMappingChild(t *testing.T) {
	addr := os.Getenv(child)
	if addr == "" {
		t.Skip("the other process of TestAProcessThatMapped")
	}
	here := engine(t, Config{})
	seg := open(t, here, addr)
	require.Equal(t, "shm", seg.lanes[0].transport)
	info, ok := seg.Buffer("pool")
	require.True(t, ok)
	local := bytes.Repeat([]byte{1}, int(info.Bytes))
	fmt.Println("ready")
	for {
		if err := carry(t, here, Request{Op: Write, Segment: seg, Buffer: info.Handle, Local: local}); err != nil {
			fmt.Println("failed:", strings.ReplaceAll(err.Error(), "\n", "; "))
			return
		}
	}
}

// writer starts a process that writes to an engine's buffer without end.
func writer(t *testing.T, e *Engine) (cmd *exec.Cmd, out io.Reader) {
	t.Helper()
	cmd = exec.Command(os.Args[0], "-test.run=^TestMappingChild$", "-test.v")
	cmd.Env = append(os.Environ(), child+"="+e.Addresses()[0])
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // with whatever
	})
	b := make([]byte, 1)
	var line []byte
	for !bytes.Contains(line, []byte("ready\n")) {
		_, err := out.Read(b)
		require.NoError(t, err, "%s", line)
		line = append(line, b...)
	}
	time.Sleep(20 * time.Millisecond)
	return cmd, out
}

// TestAProcessThatMapped retires a buffer under another process that writes to it, which goes on, is stopped, or killed.
func TestAProcessThatMapped(t *testing.T) {
	there := engine(t, Config{Listen: []string{anyPort}})
	pool := func(t *testing.T) (*Buffer, []byte) {
		t.Helper()
		p, err := newPages("test", 8<<20)
		require.NoError(t, err)
		t.Cleanup(p.close)
		b := register(t, there, p.b, BufferOptions{Name: "pool", File: p.f})
		t.Cleanup(func() { require.NoError(t, b.Retire(context.Background())) })
		return b, p.b
	}
	quiet := func(t *testing.T, mem []byte) {
		t.Helper()
		clear(mem)
		time.Sleep(20 * time.Millisecond)
		require.Equal(t, -1, bytes.IndexByte(mem, 1), "a byte landed")
	}
	t.Run("it goes on", func(t *testing.T) {
		b, mem := pool(t)
		_, out := writer(t, there)
		require.NoError(t, b.Retire(t.Context()))
		quiet(t, mem)
		said, err := io.ReadAll(out)
		require.NoError(t, err)
		require.Contains(t, string(said), "failed: ")
		require.Contains(t, string(said), ErrStale.Error())
	})
	t.Run("it is stopped", func(t *testing.T) {
		b, mem := pool(t)
		cmd, _ := writer(t, there)
		for stopped := false; !stopped; { // in the middle of a copy
			require.NoError(t, cmd.Process.Signal(syscall.SIGSTOP))
			time.Sleep(5 * time.Millisecond)
			if stopped = copying(there); !stopped {
				require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
				time.Sleep(time.Millisecond)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, b.Retire(ctx), context.DeadlineExceeded, "it may still write")
		require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
		require.NoError(t, b.Retire(t.Context()))
		quiet(t, mem)
	})
	t.Run("it is killed", func(t *testing.T) {
		b, mem := pool(t)
		cmd, _ := writer(t, there)
		require.NoError(t, cmd.Process.Signal(syscall.SIGSTOP))
		require.NoError(t, cmd.Process.Kill())
		require.NoError(t, b.Retire(t.Context()))
		quiet(t, mem)
	})
}

// copying reports whether a process is in the middle of a copy.
func copying(e *Engine) bool {
	e.sharer.mu.Lock()
	defer e.sharer.mu.Unlock()
	for p := range e.sharer.peers {
		for i := range shmSlots {
			if p.slots.word(i*slotSize).Load()&1 == 1 {
				return true
			}
		}
	}
	return false
}

// TestTheOwnerEnds has requests fail, and not succeed into memory that nobody has.
func TestTheOwnerEnds(t *testing.T) {
	here := engine(t, Config{})
	there := engine(t, Config{Listen: []string{anyPort}})
	seg := open(t, here, there.Addresses()...)
	b, _, err := there.Allocate(1<<20, BufferOptions{})
	require.NoError(t, err)
	r := Request{Op: Write, Segment: seg, Buffer: b.Info().Handle, Local: make([]byte, 1<<20)}
	require.NoError(t, carry(t, here, r))
	require.NoError(t, there.Close())
	for range 3 {
		err := carry(t, here, r)
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrUnsettled)
	}
}
