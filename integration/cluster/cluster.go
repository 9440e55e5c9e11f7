package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/internal/freeport"
	"larder/server"
)

// Times that the clusters here run on: the defaults, so that what is measured is what users get.
const (
	ElectionTimeout = time.Second
	MaxLease        = ElectionTimeout
	SessionTTL      = 10 * time.Second
)

// Sizes that clients here use unless a test says otherwise: small, so that there are many of each.
const (
	PageSize   = 16 << 10
	RegionSize = 4 << 20
)

// Options describe a cluster.
type Options struct {
	Members int
	Pool    string   // size of the pool; "" = 512MiB
	Flags   []string // of larder serve, for all members
	DataDir func(id uint64) string
	// Links puts proxies between all members, and between them and clients.
	Links bool
	// Wire gives each member a network namespace of its own, instead. A test that wants one is skipped where none can be
	// made.
	Wire bool
	// Disk is the size of a file system of its own for each data directory; "" = none. Where none can be mounted, the
	// data directories are plain ones, and Node.Disk is "".
	Disk string
	// Tags that the program is built with.
	Tags []string
}

// Cluster is a set of masters of one host, with one pool.
type Cluster struct {
	t     *testing.T
	Dir   string
	Pool  string // path of the pool's file
	size  string
	flags []string
	Nodes []*Node // members
	All   []*Node // and those that were once
	Links *Links  // nil without proxies
	wire  *wire   // nil without namespaces

	binary string
	disk   string // size of each member's; "" = none
}

// clusters numbers the clusters of this process.
var clusters atomic.Uint64

// Start starts masters and waits until one of them leads. They end with the test.
func Start(t *testing.T, o Options) *Cluster {
	t.Helper()
	c := New(t, o)
	for _, n := range c.Nodes {
		n.Start()
	}
	c.Leader()
	return c
}

// New prepares masters without starting them.
func New(t *testing.T, o Options) *Cluster {
	t.Helper()
	binary := Binary(t, o.Tags...)
	if o.Pool == "" {
		o.Pool = "512MiB"
	}
	shm, err := os.MkdirTemp("/dev/shm", fmt.Sprintf("larder-test-%d-", clusters.Add(1)))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(shm)) })
	c := &Cluster{
		t: t, Dir: t.TempDir(), Pool: filepath.Join(shm, "pool"), size: o.Pool, flags: o.Flags, binary: binary, disk: o.Disk,
	}
	if o.Links {
		c.Links = &Links{links: make(map[[2]uint64]*Link)}
	}
	if o.Wire {
		c.wire = newWire(t)
		c.flags = append(slices.Clone(c.flags), "--admin-token="+wireToken)
	}
	t.Cleanup(func() { // after all clients' have been closed
		if c.Links != nil {
			c.Links.close()
		}
		for _, n := range c.All {
			n.cleanup()
		}
	})
	for i := range max(o.Members, 1) {
		n := c.AddNode(uint64(i) + 1)
		if o.DataDir != nil {
			n.Dir = o.DataDir(n.ID)
		}
	}
	peers := make([]string, 0, len(c.Nodes))
	for _, n := range c.Nodes {
		peers = append(peers, fmt.Sprintf("--peers=%d=%s/%s/%s", n.ID, n.Peer, n.Client, n.Admin))
	}
	if len(c.Nodes) > 1 {
		for _, n := range c.Nodes {
			n.Flags = append(n.Flags, peers...)
		}
	}
	return c
}

// AddNode prepares another process of the cluster.
func (c *Cluster) AddNode(id uint64) *Node {
	n := &Node{
		t: c.t, ID: id, Dir: filepath.Join(c.Dir, fmt.Sprintf("node%d", id)),
		Client: freeport.For(c.t), Peer: freeport.For(c.t), Admin: freeport.For(c.t), Log: new(limitedBuffer), Binary: c.binary,
	}
	n.failpoints = filepath.Join(c.Dir, fmt.Sprintf("failpoints%d", id))
	n.Env = []string{"LARDER_FAILPOINTS=" + n.failpoints}
	if c.wire != nil {
		c.wire.stand(n)
	}
	n.listenClient, n.listenPeer = n.Client, n.Peer
	if c.Links != nil {
		n.listenClient, n.listenPeer = freeport.For(c.t), freeport.For(c.t)
		c.Links.stand(c.t, n)
	}
	if c.disk != "" {
		n.mount(c.disk)
	}
	n.Flags = append([]string{
		fmt.Sprintf("--node-id=%d", id), "--pool=" + c.Pool + ",size=" + c.size, "--min-free-disk=64MiB",
	}, c.flags...)
	c.Nodes = append(c.Nodes, n)
	c.All = append(c.All, n)
	return n
}

// Forget takes a node that was removed out of the members.
func (c *Cluster) Forget(n *Node) {
	c.Nodes = slices.DeleteFunc(c.Nodes, func(m *Node) bool { return m == n })
}

// Addrs lists the client addresses of all members.
func (c *Cluster) Addrs() []string {
	addrs := make([]string, 0, len(c.Nodes))
	for _, n := range c.Nodes {
		addrs = append(addrs, n.Client)
	}
	return addrs
}

// AdminFlags are the flags with which larder ctl finds the cluster.
func (c *Cluster) AdminFlags() []string {
	flags := make([]string, 0, 2*len(c.Nodes)+1)
	if c.wire != nil {
		flags = append(flags, "--token="+wireToken)
	}
	for _, n := range c.Nodes {
		flags = append(flags, "--admin="+n.Admin, "--addr="+n.Client)
	}
	return flags
}

// Ctl runs larder ctl, which must succeed, and returns what it printed.
func (c *Cluster) Ctl(args ...string) string {
	c.t.Helper()
	out, errs, err := Run(c.t, append(append([]string{"ctl"}, c.AdminFlags()...), args...)...)
	require.NoError(c.t, err, "larder ctl %v:\n%s%s", args, out, errs)
	return out
}

// Leader waits until a running member leads and serves, and returns it.
func (c *Cluster) Leader() *Node {
	c.t.Helper()
	var leader *Node
	Within(c.t, "a leader", func() error {
		var term uint64
		var errs []error
		leader = nil
		for _, n := range c.Nodes {
			if n.State() != Running {
				continue
			}
			status, err := n.Status()
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

// Settled waits until all running members have applied the same log, and returns the leader's status. Their state
// must be the same then.
func (c *Cluster) Settled() *server.StatusReply {
	c.t.Helper()
	var result *server.StatusReply
	Within(c.t, "agreement", func() error {
		leader, err := c.Leader().Status()
		if err != nil {
			return err
		}
		for _, n := range c.Nodes {
			if n.State() != Running {
				continue
			}
			status, err := n.Status()
			if err != nil {
				return err
			}
			if status.Applied != leader.Applied {
				return fmt.Errorf("member %d has applied %d of %d", n.ID, status.Applied, leader.Applied)
			}
			if status.StateHash != leader.StateHash {
				c.t.Fatalf("at index %d member %d has state %s, the leader %s", leader.Applied, n.ID, status.StateHash, leader.StateHash)
			}
		}
		result = leader
		return nil
	})
	return result
}

// Open opens a client, which the test's end closes.
func (c *Cluster) Open(cfg client.Config) *client.Client {
	c.t.Helper()
	cfg.Addrs = c.Addrs()
	if cfg.PageSize == 0 {
		cfg.PageSize = PageSize
	}
	if cfg.RegionSize == 0 {
		cfg.RegionSize = RegionSize
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

// Check compares the index with the devices, bytes included.
func (c *Cluster) Check() {
	c.t.Helper()
	var report server.CheckReport
	require.NoError(c.t, json.Unmarshal([]byte(c.Ctl("--json", "check", "--deep")), &report))
	require.Empty(c.t, report.Problems)
}

// RunState says what a node's process does.
type RunState int32

// What a process does.
const (
	Down RunState = iota
	Running
	Stopped
)

// Node is one master's process.
type Node struct {
	t                   *testing.T
	ID                  uint64
	Dir                 string
	Client, Peer, Admin string // addresses
	Flags               []string
	Env                 []string // beside this process's own
	Binary              string   // the program
	Disk                string   // where its own file system is mounted; "" = it has none
	Log                 *limitedBuffer

	listenClient, listenPeer string // where proxies pass on to
	failpoints               string // file that says which operations on files fail
	wire                     *wire  // nil without namespaces

	mu     sync.Mutex
	cmd    *exec.Cmd
	is     RunState
	exited chan struct{}
	err    error // of the last exit; after exited
}

// PID is the process's id, 0 if it does not run.
func (n *Node) PID() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.is == Down {
		return 0
	}
	return n.cmd.Process.Pid
}

// State is what the process does.
func (n *Node) State() RunState {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.is
}

// args is the command line of the process.
func (n *Node) args() []string {
	return append([]string{
		"serve", "--data-dir=" + n.Dir, "--listen=" + n.listenClient, "--peer-listen=" + n.listenPeer,
		"--advertise=" + n.Client, "--peer-advertise=" + n.Peer, "--admin-listen=" + n.Admin, "--socket=none",
	}, n.Flags...)
}

// Start starts the process and does not wait for it to serve.
func (n *Node) Start() {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	require.Equal(n.t, Down, n.is, "member %d runs already", n.ID)
	cmd := exec.Command(n.Binary, n.args()...)
	if n.wire != nil {
		cmd = n.wire.command(n, n.args())
	}
	cmd.Stdout, cmd.Stderr = n.Log, n.Log
	cmd.Env = append(append(os.Environ(), "GORACE=halt_on_error=1"), n.Env...)
	// It dies with this process, so that an interrupted run leaves nothing behind.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	fmt.Fprintf(n.Log, "---- start %s\n", now().Format(time.StampMilli))
	require.NoError(n.t, cmd.Start())
	exited := make(chan struct{})
	n.cmd, n.exited, n.is = cmd, exited, Running
	go func() {
		err := cmd.Wait()
		n.mu.Lock()
		n.err, n.is = err, Down
		n.mu.Unlock()
		fmt.Fprintf(n.Log, "---- end %s: %v\n", now().Format(time.StampMilli), err)
		close(exited)
	}()
}

// Signal sends a signal to the process and notes what that does to it.
func (n *Node) Signal(s syscall.Signal) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.is == Down {
		return
	}
	fmt.Fprintf(n.Log, "---- %v %s\n", s, now().Format(time.StampMilli))
	if err := n.cmd.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(n.t, err)
	}
	switch s { //nolint:exhaustive // the others end the process, or do nothing
	case syscall.SIGSTOP:
		n.is = Stopped
	case syscall.SIGCONT:
		n.is = Running
	}
}

// Kill ends the process as a power failure of it would, and waits until it is gone.
func (n *Node) Kill() {
	n.t.Helper()
	n.Signal(syscall.SIGKILL)
	n.Wait() //nolint:errcheck // killed
}

// Terminate asks the process to end, and returns how it did.
func (n *Node) Terminate() error {
	n.t.Helper()
	n.Signal(syscall.SIGTERM)
	return n.Wait()
}

// Wait waits for the end of the process and returns its error.
func (n *Node) Wait() error {
	n.t.Helper()
	n.mu.Lock()
	exited := n.exited
	n.mu.Unlock()
	if exited == nil {
		return nil
	}
	select {
	case <-exited:
	case <-after(Hang):
		n.t.Fatalf("member %d does not end", n.ID)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

// Restart starts the process again after it ended, and waits until it takes part.
func (n *Node) Restart() {
	n.t.Helper()
	n.Start()
	n.Ready()
}

// Ready waits until the member says that it can serve.
func (n *Node) Ready() {
	n.t.Helper()
	Within(n.t, fmt.Sprintf("readiness of member %d", n.ID), func() error {
		if n.State() == Down {
			n.t.Fatalf("member %d ended: %v", n.ID, n.err)
		}
		return n.Get("/readyz", nil)
	})
}

// cleanup ends the process and shows its log if the test failed.
func (n *Node) cleanup() {
	n.mu.Lock()
	if n.is != Down {
		n.cmd.Process.Kill() //nolint:errcheck // it may have ended
	}
	exited := n.exited
	n.mu.Unlock()
	if exited != nil {
		<-exited
	}
	if n.Disk != "" {
		if err := syscall.Unmount(n.Disk, syscall.MNT_DETACH); err != nil {
			n.t.Errorf("unmount the disk of member %d: %v", n.ID, err)
		}
	}
	if dir := os.Getenv("LARDER_LOGS"); dir != "" {
		name := strings.NewReplacer("/", "-").Replace(fmt.Sprintf("%s-%d.log", n.t.Name(), n.ID))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(n.Log.String()), 0o600); err != nil {
			n.t.Log(err)
		}
	}
	text := n.Log.String()
	if strings.Contains(text, "DATA RACE") || strings.Contains(text, "panic:") || strings.Contains(text, "fatal error:") {
		n.t.Errorf("member %d crashed", n.ID)
	}
	if n.t.Failed() {
		lines := strings.Split(text, "\n")
		n.t.Logf("log of member %d:\n%s", n.ID, strings.Join(lines[max(0, len(lines)-maxLogLines):], "\n"))
	}
}

// maxLogLines is how much of a member's log a failed test shows.
const maxLogLines = 150

// adminClient keeps no connection, so that none is left when a test ends.
var adminClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 3 * time.Second}

// Get asks the member's admin, and decodes its answer into out unless that is nil.
func (n *Node) Get(path string, out any) error {
	r, err := http.NewRequestWithContext(n.t.Context(), http.MethodGet, "http://"+n.Admin+path, http.NoBody)
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

// Status asks the member for its status.
func (n *Node) Status() (*server.StatusReply, error) {
	status := new(server.StatusReply)
	if err := n.Get("/status", status); err != nil {
		return nil, err
	}
	return status, nil
}
