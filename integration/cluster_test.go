package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/server"
)

// Times that the clusters here run on: the defaults, so that what is measured is what users get.
const (
	electionTimeout = time.Second
	maxLease        = electionTimeout
	sessionTTL      = 10 * time.Second
)

// Sizes that clients here use unless a test says otherwise: small, so that there are many of each.
const (
	pageSize   = 16 << 10
	regionSize = 4 << 20
)

// clusterOptions describe a cluster.
type clusterOptions struct {
	members int
	pool    string   // size of the pool; "" = 512MiB
	flags   []string // of larder serve, for all members
	dataDir func(id uint64) string
}

// cluster is a set of masters of one host, with one pool.
type cluster struct {
	t     *testing.T
	dir   string
	pool  string // path of the pool's file
	size  string
	flags []string
	nodes []*node // members
	all   []*node // and those that were once
}

// clusters numbers the clusters of this process.
var clusters atomic.Uint64

// startCluster starts masters and waits until one of them leads. They end with the test.
func startCluster(t *testing.T, o clusterOptions) *cluster {
	t.Helper()
	c := newCluster(t, o)
	for _, n := range c.nodes {
		n.start()
	}
	c.leader()
	return c
}

// newCluster prepares masters without starting them.
func newCluster(t *testing.T, o clusterOptions) *cluster {
	t.Helper()
	larder(t)
	if o.pool == "" {
		o.pool = "512MiB"
	}
	shm, err := os.MkdirTemp("/dev/shm", fmt.Sprintf("larder-test-%d-", clusters.Add(1)))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(shm)) })
	c := &cluster{t: t, dir: t.TempDir(), pool: filepath.Join(shm, "pool"), size: o.pool, flags: o.flags}
	t.Cleanup(func() { // after all clients' have been closed
		for _, n := range c.all {
			n.cleanup()
		}
	})
	for i := range max(o.members, 1) {
		n := c.addNode(uint64(i) + 1)
		if o.dataDir != nil {
			n.dir = o.dataDir(n.id)
		}
	}
	peers := make([]string, 0, len(c.nodes))
	for _, n := range c.nodes {
		peers = append(peers, fmt.Sprintf("--peers=%d=%s/%s/%s", n.id, n.peer, n.client, n.admin))
	}
	if len(c.nodes) > 1 {
		for _, n := range c.nodes {
			n.flags = append(n.flags, peers...)
		}
	}
	return c
}

// addNode prepares another process of the cluster.
func (c *cluster) addNode(id uint64) *node {
	n := &node{
		t: c.t, id: id, dir: filepath.Join(c.dir, fmt.Sprintf("node%d", id)),
		client: freeAddr(c.t), peer: freeAddr(c.t), admin: freeAddr(c.t), log: new(limitedBuffer),
	}
	n.flags = append([]string{
		fmt.Sprintf("--node-id=%d", id), "--pool=" + c.pool + ",size=" + c.size, "--min-free-disk=64MiB",
	}, c.flags...)
	c.nodes = append(c.nodes, n)
	c.all = append(c.all, n)
	return n
}

// addrs lists the client addresses of all members.
func (c *cluster) addrs() []string {
	addrs := make([]string, 0, len(c.nodes))
	for _, n := range c.nodes {
		addrs = append(addrs, n.client)
	}
	return addrs
}

// adminFlags are the flags with which larder ctl finds the cluster.
func (c *cluster) adminFlags() []string {
	flags := make([]string, 0, 2*len(c.nodes))
	for _, n := range c.nodes {
		flags = append(flags, "--admin="+n.admin, "--addr="+n.client)
	}
	return flags
}

// ctl runs larder ctl, which must succeed, and returns what it printed.
func (c *cluster) ctl(args ...string) string {
	c.t.Helper()
	out, errs, err := run(c.t, append(append([]string{"ctl"}, c.adminFlags()...), args...)...)
	require.NoError(c.t, err, "larder ctl %v:\n%s%s", args, out, errs)
	return out
}

// leader waits until a running member leads and serves, and returns it.
func (c *cluster) leader() *node {
	c.t.Helper()
	var leader *node
	within(c.t, "a leader", func() error {
		var term uint64
		var errs []error
		leader = nil
		for _, n := range c.nodes {
			if n.state() != running {
				continue
			}
			status, err := n.status()
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if status.Serving && status.Term > term {
				leader, term = n, status.Term
			}
		}
		if leader == nil {
			return fmt.Errorf("no member leads: %w", errors.Join(errs...))
		}
		return nil
	})
	return leader
}

// settled waits until all running members have applied the same log, and returns the leader's status. Their state
// must be the same then.
func (c *cluster) settled() *server.StatusReply {
	c.t.Helper()
	var result *server.StatusReply
	within(c.t, "agreement", func() error {
		leader, err := c.leader().status()
		if err != nil {
			return err
		}
		for _, n := range c.nodes {
			if n.state() != running {
				continue
			}
			status, err := n.status()
			if err != nil {
				return err
			}
			if status.Applied != leader.Applied {
				return fmt.Errorf("member %d has applied %d of %d", n.id, status.Applied, leader.Applied)
			}
			if status.StateHash != leader.StateHash {
				c.t.Fatalf("at index %d member %d has state %s, the leader %s", leader.Applied, n.id, status.StateHash, leader.StateHash)
			}
		}
		result = leader
		return nil
	})
	return result
}

// open opens a client, which the test's end closes.
func (c *cluster) open(cfg client.Config) *client.Client {
	c.t.Helper()
	cfg.Addrs = c.addrs()
	if cfg.PageSize == 0 {
		cfg.PageSize = pageSize
	}
	if cfg.RegionSize == 0 {
		cfg.RegionSize = regionSize
	}
	x, err := client.Open(c.t.Context(), cfg)
	require.NoError(c.t, err)
	c.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := x.Close(ctx); err != nil {
			c.t.Logf("close client %s: %v", x.Instance(), err) // its masters may be gone
		}
	})
	return x
}

// check compares the index with the devices, bytes included.
func (c *cluster) check() {
	c.t.Helper()
	var report server.CheckReport
	require.NoError(c.t, json.Unmarshal([]byte(c.ctl("--json", "check", "--deep")), &report))
	require.Empty(c.t, report.Problems)
}

// runState says what a node's process does.
type runState int32

const (
	down runState = iota
	running
	stopped
)

// node is one master's process.
type node struct {
	t                   *testing.T
	id                  uint64
	dir                 string
	client, peer, admin string // addresses
	flags               []string
	log                 *limitedBuffer

	mu     sync.Mutex
	cmd    *exec.Cmd
	is     runState
	exited chan struct{}
	err    error // of the last exit; after exited
}

func (n *node) state() runState {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.is
}

// args is the command line of the process.
func (n *node) args() []string {
	return append([]string{
		"serve", "--data-dir=" + n.dir, "--listen=" + n.client, "--peer-listen=" + n.peer, "--admin-listen=" + n.admin,
		"--socket=none",
	}, n.flags...)
}

// start starts the process and does not wait for it to serve.
func (n *node) start() {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	require.Equal(n.t, down, n.is, "member %d runs already", n.id)
	cmd := exec.Command(larder(n.t), n.args()...)
	cmd.Stdout, cmd.Stderr = n.log, n.log
	cmd.Env = append(os.Environ(), "GORACE=halt_on_error=1")
	// It dies with this process, so that an interrupted run leaves nothing behind.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	fmt.Fprintf(n.log, "---- start %s\n", time.Now().Format(time.StampMilli))
	require.NoError(n.t, cmd.Start())
	exited := make(chan struct{})
	n.cmd, n.exited, n.is = cmd, exited, running
	go func() {
		err := cmd.Wait()
		n.mu.Lock()
		n.err, n.is = err, down
		n.mu.Unlock()
		fmt.Fprintf(n.log, "---- end %s: %v\n", time.Now().Format(time.StampMilli), err)
		close(exited)
	}()
}

// signal sends a signal to the process and notes what that does to it.
func (n *node) signal(s syscall.Signal) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.is == down {
		return
	}
	fmt.Fprintf(n.log, "---- %v %s\n", s, time.Now().Format(time.StampMilli))
	if err := n.cmd.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(n.t, err)
	}
	switch s { //nolint:exhaustive // the others end the process, or do nothing
	case syscall.SIGSTOP:
		n.is = stopped
	case syscall.SIGCONT:
		n.is = running
	}
}

// kill ends the process as a power failure of it would, and waits until it is gone.
func (n *node) kill() {
	n.t.Helper()
	n.signal(syscall.SIGKILL)
	n.wait() //nolint:errcheck // killed
}

// terminate asks the process to end, and returns how it did.
func (n *node) terminate() error {
	n.t.Helper()
	n.signal(syscall.SIGTERM)
	return n.wait()
}

// wait waits for the end of the process and returns its error.
func (n *node) wait() error {
	n.t.Helper()
	n.mu.Lock()
	exited := n.exited
	n.mu.Unlock()
	if exited == nil {
		return nil
	}
	select {
	case <-exited:
	case <-time.After(hang):
		n.t.Fatalf("member %d does not end", n.id)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

// restart starts the process again after it ended, and waits until it takes part.
func (n *node) restart() {
	n.t.Helper()
	n.start()
	n.ready()
}

// ready waits until the member says that it can serve.
func (n *node) ready() {
	n.t.Helper()
	within(n.t, fmt.Sprintf("readiness of member %d", n.id), func() error {
		if n.state() == down {
			n.t.Fatalf("member %d ended: %v", n.id, n.err)
		}
		return n.get("/readyz", nil)
	})
}

// cleanup ends the process and shows its log if the test failed.
func (n *node) cleanup() {
	n.mu.Lock()
	if n.is != down {
		n.cmd.Process.Kill() //nolint:errcheck // it may have ended
	}
	exited := n.exited
	n.mu.Unlock()
	if exited != nil {
		<-exited
	}
	if dir := os.Getenv("LARDER_LOGS"); dir != "" {
		name := strings.NewReplacer("/", "-").Replace(fmt.Sprintf("%s-%d.log", n.t.Name(), n.id))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(n.log.String()), 0o600); err != nil {
			n.t.Log(err)
		}
	}
	text := n.log.String()
	if strings.Contains(text, "DATA RACE") || strings.Contains(text, "panic:") || strings.Contains(text, "fatal error:") {
		n.t.Errorf("member %d crashed", n.id)
	}
	if n.t.Failed() {
		lines := strings.Split(text, "\n")
		n.t.Logf("log of member %d:\n%s", n.id, strings.Join(lines[max(0, len(lines)-maxLogLines):], "\n"))
	}
}

// maxLogLines is how much of a member's log a failed test shows.
const maxLogLines = 150

// adminClient keeps no connection, so that none is left when a test ends.
var adminClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 3 * time.Second}

// get asks the member's admin, and decodes its answer into out unless that is nil.
func (n *node) get(path string, out any) error {
	r, err := http.NewRequestWithContext(n.t.Context(), http.MethodGet, "http://"+n.admin+path, http.NoBody)
	if err != nil {
		return err
	}
	response, err := adminClient.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // opened for reading
	b, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("%s: %s: %s", path, response.Status, b)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(b, out)
}

// status asks the member for its status.
func (n *node) status() (*server.StatusReply, error) {
	status := new(server.StatusReply)
	if err := n.get("/status", status); err != nil {
		return nil, err
	}
	return status, nil
}

// ports hands out ports below those that the kernel gives to outgoing connections, so that no connection sits on a
// member's port while it is down.
var ports struct {
	mu   sync.Mutex
	used map[int]bool
}

// freeAddr returns a loopback address that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.used == nil {
		ports.used = make(map[int]bool)
	}
	for range 1000 {
		port := 20000 + rand.IntN(12000)
		if ports.used[port] {
			continue
		}
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		l, err := net.Listen("tcp", addr)
		if err != nil {
			continue
		}
		require.NoError(t, l.Close())
		ports.used[port] = true
		return addr
	}
	t.Fatal("no free port")
	return ""
}
