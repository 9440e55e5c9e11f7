package link

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/shm"
)

// childEnv has the test binary be another process of a job.
const childEnv = "LARDER_LINK_CHILD"

// childConfig is what the other process is told.
type childConfig struct {
	Config  Config
	Peer    Peer
	Members []Member
}

// child is rank 1. It connects to rank 0, builds a mesh with it, writes "ready" into its lane and its room, answers questions, and sends
// back what comes by the lane.
func child() {
	err := runChild()
	fmt.Fprintln(os.Stderr, "child:", err)
	os.Exit(1)
}

func runChild() error {
	var c childConfig
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &c); err != nil {
		return err
	}
	c.Config.Answer = func(_ int, ask []byte) []byte { return append([]byte("child: "), ask...) }
	n, err := New(c.Config)
	if err != nil {
		return err
	}
	os.Stdout.WriteString(base64.StdEncoding.EncodeToString(n.Address()) + "\n") //nolint:errcheck // the parent waits for it
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	if err := n.Connect(ctx, c.Peer); err != nil {
		return err
	}
	m, err := n.Mesh(ctx, MeshConfig{Group: "g", Epoch: 1, Me: 1, Members: c.Members, Layout: small})
	if err != nil {
		return err
	}
	if room, _ := m.Room(); room != nil {
		room.Publish(0, shm.Header{Seq: 7}, copy(room.TryReserve(0), "ready"))
	}
	in, out := m.lanes[0].c, m.lanes[0].p
	if err := send(n.Bell(), out, []byte("ready")); err != nil {
		return err
	}
	for {
		var b []byte
		n.Bell().Wait(func() bool { b = in.Ready(); return len(b) > 0 || in.Err() != nil }, spin, wait)
		if len(b) == 0 {
			return fmt.Errorf("nothing comes any more: %w", in.Err())
		}
		if err := send(n.Bell(), out, b); err != nil {
			return err
		}
		in.Consume(len(b))
	}
}

// BenchmarkProcesses is there and back between two processes.
func BenchmarkProcesses(b *testing.B) {
	for name, cfg := range processWays {
		b.Run(name, func(b *testing.B) {
			n, _ := node(b, Config{Transports: cfg.Transports, Listen: []string{loopback}})
			_, m := other(b, n, cfg)
			p, c := m.Lane(1)
			if err := receive(n.Bell(), c, make([]byte, 5)); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				exchange(b, n.Bell(), p, c, 64, true)
			}
		})
	}
}

// other starts the other process and builds the mesh with it.
func other(tb testing.TB, n *Node, cfg Config, command ...string) (*exec.Cmd, *Mesh) {
	tb.Helper()
	all := []Member{{0, 100}, {1, 101}}
	text, err := json.Marshal(struct {
		Config  map[string]any
		Peer    Peer
		Members []Member
	}{map[string]any{
		"Job": n.cfg.Job, "Rank": 1, "Incarnation": 101, "Host": cfg.Host, "Transports": cfg.Transports,
	}, peerOf(n), all})
	require.NoError(tb, err)
	self, err := os.Executable()
	require.NoError(tb, err)
	command = append(command, self)
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	cmd.Stderr = tb.Output()
	out, err := cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(tb, err)
	address, err := base64.StdEncoding.DecodeString(strings.TrimSpace(line))
	require.NoError(tb, err)
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	require.NoError(tb, n.Connect(ctx, Peer{Rank: 1, Incarnation: 101, Address: address}))
	m, err := n.Mesh(ctx, MeshConfig{Group: "g", Epoch: 1, Members: all, Layout: small})
	require.NoError(tb, err)
	return cmd, m
}

// ways between two processes of this host.
var processWays = map[string]Config{
	TransportShm:  {},
	TransportUnix: {Transports: []string{TransportUnix}},
	TransportTCP:  {Transports: []string{TransportTCP}},
}

// TestAProcessThatIsKilled is known to be down at once, and all that it had written is still read.
func TestAProcessThatIsKilled(t *testing.T) {
	for name, cfg := range processWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, heard := node(t, Config{Transports: cfg.Transports, Listen: []string{loopback}})
			cmd, m := other(t, n, cfg)
			require.Equal(t, name, m.Transport(1))
			_, c := m.Lane(1)
			got := make([]byte, 5)
			require.True(t, n.Bell().Wait(func() bool { return len(c.Ready()) == 5 }, 0, wait))
			begun := time.Now()
			require.NoError(t, cmd.Process.Kill())
			require.Eventually(t, func() bool { return len(heard.all()) == 2 }, wait, time.Millisecond)
			require.Less(t, time.Since(begun), time.Second)
			require.Equal(t, "down 1/101", heard.all()[1])
			require.ErrorIs(t, heard.lastErr(), ErrLost)
			require.NoError(t, receive(n.Bell(), c, got))
			require.Equal(t, "ready", string(got))
			require.Error(t, receive(n.Bell(), c, got))
			if room, _ := m.Room(); room != nil {
				_, p, ok := room.TryRead(0, 1)
				require.True(t, ok)
				require.Equal(t, "ready", string(p))
				require.True(t, room.IsDown(1))
			}
			_, err := n.Ask(t.Context(), 1, nil)
			require.ErrorIs(t, err, ErrNotConnected)
		})
	}
}

// TestAProcessThatIsStopped is not down: it answers nothing, and goes on when it is let go.
func TestAProcessThatIsStopped(t *testing.T) {
	for name, cfg := range processWays {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, heard := node(t, Config{Transports: cfg.Transports, Listen: []string{loopback}})
			cmd, m := other(t, n, cfg)
			p, c := m.Lane(1)
			got := make([]byte, 5)
			require.NoError(t, receive(n.Bell(), c, got))
			answer, err := n.Ask(within(t, wait), 1, []byte("well?"))
			require.NoError(t, err)
			require.Equal(t, "child: well?", string(answer))
			require.NoError(t, cmd.Process.Signal(syscall.SIGSTOP))
			require.Eventually(t, func() bool { // all of its threads
				tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", cmd.Process.Pid))
				return len(tasks) > 0 && !slices.ContainsFunc(tasks, func(task string) bool {
					text, err := os.ReadFile(task)
					return err == nil && !strings.Contains(string(text), ") T ")
				})
			}, wait, time.Millisecond)
			_, err = n.Ask(within(t, 50*time.Millisecond), 1, nil)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NoError(t, send(n.Bell(), p, []byte("still")))
			require.True(t, n.Connected(1, 101))
			require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
			require.NoError(t, receive(n.Bell(), c, got))
			require.Equal(t, "still", string(got))
			require.Equal(t, []string{"up 1/101"}, heard.all())
		})
	}
}

// TestAHostThatVanishes without a word is found out in some seconds. The other process runs in a network namespace of its own, whose
// link is taken away.
func TestAHostThatVanishes(t *testing.T) {
	t.Parallel()
	space := fmt.Sprintf("larder%d", os.Getpid())
	ip := func(args ...string) error { return exec.Command("ip", args...).Run() }
	if err := ip("netns", "add", space); err != nil {
		t.Skip("needs the right to make network namespaces: ", err)
	}
	t.Cleanup(func() { require.NoError(t, ip("netns", "del", space)) })
	here := fmt.Sprintf("lh%d", os.Getpid())
	for _, args := range [][]string{
		{"link", "add", here, "type", "veth", "peer", "name", "there", "netns", space},
		{"addr", "add", "10.213.77.1/30", "dev", here},
		{"link", "set", here, "up"},
		{"-n", space, "addr", "add", "10.213.77.2/30", "dev", "there"},
		{"-n", space, "link", "set", "there", "up"},
		{"-n", space, "link", "set", "lo", "up"},
	} {
		if err := ip(args...); err != nil {
			t.Skip("needs the right to make network links: ip ", args, err)
		}
	}
	n, heard := node(t, Config{Listen: []string{"10.213.77.1:0"}})
	_, m := other(t, n, Config{}, "ip", "netns", "exec", space)
	require.Equal(t, TransportTCP, m.Transport(1), "its namespace has other Unix sockets")
	require.Len(t, m.Hosts(), 2)
	_, c := m.Lane(1)
	got := make([]byte, 5)
	require.NoError(t, receive(n.Bell(), c, got))
	begun := time.Now()
	require.NoError(t, ip("link", "set", here, "down"))
	require.Eventually(t, func() bool { return len(heard.all()) == 2 }, wait, 5*time.Millisecond)
	t.Log("it took", time.Since(begun))
	require.Less(t, time.Since(begun), 2*vanished)
	require.Error(t, receive(n.Bell(), c, got))
}
