package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"larder/cmd/replay"
	"larder/internal/freeport"
	"larder/node"
	"larder/server"
)

// replayNodes are the flags of nodes beside the server that a replay starts.
type replayNodes struct {
	Nodes     int           `help:"Nodes to start beside the server, each a process of its own, named n1, n2 and so on."`
	NodeDRAM  server.Size   `name:"node-dram" help:"Memory of each node (default 0: none)."`
	NodeSSD   server.Size   `name:"node-ssd" help:"Bytes that the SSD store of each node holds, in the data directory (default 0: none)."`
	KillNodes time.Duration `name:"kill-nodes" placeholder:"EVERY" help:"Kill a node that often, the nodes by turns, and start it again (default 0: never)."`
	Bandwidth server.Size   `default:"256MiB" help:"Bytes per second that each node copies between tiers (default 256MiB)."`
	Tier      string        `help:"Tier that stores prefer: cxl, dram or ssd (default: any)."`
	Replicas  int           `help:"Nodes that each block is stored on (default 0: one)."`
}

// Times of the nodes of a replay.
const (
	nodeStartTime = 30 * time.Second       // to make a store and attach it
	nodeStopTime  = 10 * time.Second       // to say goodbye
	nodeLook      = 100 * time.Millisecond // between two looks at one that starts
)

// fleet is the nodes of a replay.
type fleet struct {
	cancel context.CancelFunc
	killer sync.WaitGroup
	kills  atomic.Uint64
	list   []*replayNode
	logger *slog.Logger
}

// replayNode is one node's process.
type replayNode struct {
	program string
	args    []string
	admin   string
	stderr  io.Writer

	mu  sync.Mutex
	cmd *exec.Cmd
}

// start starts the nodes and waits until they are ready. dir is for their stores. A nil fleet can be stopped.
func (f *replayNodes) start(e *env, dir, masters string, page, region uint64, logger *slog.Logger) (_ *fleet, err error) {
	if f.Nodes <= 0 {
		return nil, nil //nolint:nilnil // described above
	}
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("replay: start nodes: %w", err)
	}
	all := &fleet{logger: logger}
	ctx, cancel := context.WithCancel(e.ctx)
	all.cancel = cancel
	defer func() {
		if err != nil {
			err = errors.Join(err, all.stop())
		}
	}()
	for i := range f.Nodes {
		admin, err := freeport.Addr()
		if err != nil {
			return nil, err
		}
		name := "n" + strconv.Itoa(i+1)
		n := &replayNode{program: program, admin: admin, stderr: e.stderr, args: []string{
			"node", "--masters=" + masters, "--host=" + name, "--listen=127.0.0.1:0", "--admin-listen=" + admin,
			fmt.Sprintf("--dram=%v", f.NodeDRAM), fmt.Sprintf("--bandwidth=%v", f.Bandwidth),
			fmt.Sprintf("--page-size=%v", server.Size(page)), fmt.Sprintf("--region-size=%v", server.Size(region)), "--log-level=error",
		}}
		if f.NodeSSD > 0 {
			n.args = append(n.args, "--ssd="+filepath.Join(dir, "ssd-"+name), fmt.Sprintf("--ssd-size=%v", f.NodeSSD))
		}
		if err := n.start(); err != nil {
			return nil, err
		}
		all.list = append(all.list, n)
	}
	for _, n := range all.list {
		if err := n.awaitReady(ctx); err != nil {
			return nil, err
		}
	}
	if f.KillNodes > 0 {
		all.killer.Go(func() { all.killThem(ctx, f.KillNodes) })
	}
	return all, nil
}

// killThem kills nodes by turns until ctx is over.
func (f *fleet) killThem(ctx context.Context, every time.Duration) {
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
		n := f.list[i%len(f.list)]
		n.kill()
		f.kills.Add(1)
		err := n.start() //nolint:contextcheck // a node's process is stopped, not interrupted
		if err == nil {
			err = n.awaitReady(ctx)
		}
		if err != nil && ctx.Err() == nil {
			f.logger.Warn("a node that was killed does not come back", slog.Any("error", err))
		}
	}
}

// stats says what has become of the nodes.
func (f *fleet) stats() (s replay.Nodes) {
	s.Kills = f.kills.Load()
	for _, n := range f.list {
		status, err := n.status(context.Background())
		if err != nil {
			continue // it has just been killed
		}
		for i := range status.Devices {
			s.Demoted += status.Devices[i].Copied
		}
	}
	return s
}

// stop ends the nodes in good order.
func (f *fleet) stop() error {
	if f == nil {
		return nil
	}
	f.cancel()
	f.killer.Wait()
	var errs []error
	for _, n := range f.list {
		errs = append(errs, n.stop())
	}
	return errors.Join(errs...)
}

// start starts the process, which ends with this one.
func (n *replayNode) start() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cmd = exec.CommandContext(context.Background(), n.program, n.args...) //nolint:gosec // this program
	n.cmd.Stderr = n.stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := n.cmd.Start(); err != nil {
		return fmt.Errorf("replay: start a node: %w", err)
	}
	return nil
}

// kill ends the process between any two of its instructions.
func (n *replayNode) kill() {
	n.mu.Lock()
	defer n.mu.Unlock()
	_ = n.cmd.Process.Kill() // it may have ended
	_ = n.cmd.Wait()         // killed
}

// stop asks the process to end, and ends it if it does not.
func (n *replayNode) stop() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	late := time.AfterFunc(nodeStopTime, func() { _ = n.cmd.Process.Kill() }) // it may have ended
	defer late.Stop()
	_ = n.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	if err := n.cmd.Wait(); err != nil {
		return fmt.Errorf("replay: a node ended with: %w", err)
	}
	return nil
}

// awaitReady waits until the node's devices are.
func (n *replayNode) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, nodeStartTime)
	defer cancel()
	for {
		status, err := n.status(ctx)
		if err == nil && status.Ready() {
			return nil
		}
		select {
		case <-ctx.Done():
			if err == nil {
				why := make([]string, 0, len(status.Devices))
				for i := range status.Devices {
					why = append(why, fmt.Sprintf("%s is %s: %s", status.Devices[i].Name, status.Devices[i].State, status.Devices[i].Why))
				}
				err = errors.New(strings.Join(why, "; "))
			}
			return fmt.Errorf("replay: a node is not ready: %w", err)
		case <-time.After(nodeLook):
		}
	}
}

// nodeHTTP keeps no connection, so that none is left when the replay ends.
var nodeHTTP = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 3 * time.Second}

func (n *replayNode) status(ctx context.Context) (*node.Status, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.admin+"/status", http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("replay: ask a node: %w", err)
	}
	response, err := nodeHTTP.Do(r)
	if err != nil {
		return nil, fmt.Errorf("replay: ask a node: %w", err)
	}
	defer response.Body.Close() //nolint:errcheck // opened for reading
	status := new(node.Status)
	if err := json.NewDecoder(response.Body).Decode(status); err != nil {
		return nil, fmt.Errorf("replay: ask a node: %w", err)
	}
	return status, nil
}
