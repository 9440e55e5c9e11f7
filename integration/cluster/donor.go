package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/internal/freeport"
	"larder/node"
)

// Donor is one larder node's process: it contributes devices to a cluster.
type Donor struct {
	t     *testing.T
	c     *Cluster
	Name  string // its host's, as placements name it
	Admin string
	SSD   string // directory of its store; "" = none
	Flags []string
	Log   *limitedBuffer

	cmd    *exec.Cmd
	exited chan struct{}
}

// Donate starts a node beside the masters, and waits until its devices are ready. flags are those of larder node beyond its
// addresses; with an ssd-size among them it has a store. It ends with the test.
func (c *Cluster) Donate(name string, flags ...string) *Donor {
	c.t.Helper()
	d := &Donor{t: c.t, c: c, Name: name, Admin: freeport.For(c.t), Log: new(limitedBuffer)}
	d.Flags = append([]string{
		"--host=" + name, "--listen=" + freeport.For(c.t), "--admin-listen=" + d.Admin, fmt.Sprintf("--page-size=%dB", PageSize),
		fmt.Sprintf("--region-size=%dB", RegionSize),
	}, flags...)
	for _, f := range flags {
		if strings.HasPrefix(f, "--ssd-size=") {
			d.SSD = filepath.Join(c.Dir, "ssd-"+name)
			d.Flags = append(d.Flags, "--ssd="+d.SSD)
		}
	}
	c.t.Cleanup(func() {
		d.Kill()
		text := d.Log.String()
		if strings.Contains(text, "DATA RACE") || strings.Contains(text, "panic:") || strings.Contains(text, "fatal error:") {
			c.t.Errorf("node %s crashed", name)
		}
		if dir := os.Getenv("LARDER_LOGS"); dir != "" {
			file := strings.NewReplacer("/", "-").Replace(fmt.Sprintf("%s-%s.log", c.t.Name(), name))
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				c.t.Log(err)
			}
		}
		if c.t.Failed() {
			lines := strings.Split(text, "\n")
			c.t.Logf("log of node %s:\n%s", name, strings.Join(lines[max(0, len(lines)-maxLogLines):], "\n"))
		}
	})
	d.Start()
	d.Ready()
	return d
}

// Start starts the process and does not wait for it to serve.
func (d *Donor) Start() {
	d.t.Helper()
	args := append([]string{"node", "--masters=" + strings.Join(d.c.Addrs(), ",")}, d.Flags...)
	d.cmd = exec.Command(d.c.binary, args...)
	d.cmd.Stdout, d.cmd.Stderr = d.Log, d.Log
	d.cmd.Env = append(os.Environ(), "GORACE=halt_on_error=1")
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(d.t, d.cmd.Start())
	cmd, exited := d.cmd, make(chan struct{})
	d.exited = exited
	go func() {
		err := cmd.Wait()
		fmt.Fprintf(d.Log, "---- end: %v\n", err)
		close(exited)
	}()
}

// Signal sends a signal.
func (d *Donor) Signal(s syscall.Signal) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(d.t, err)
	}
}

// Kill ends the process between any two of its instructions.
func (d *Donor) Kill() {
	d.t.Helper()
	d.Signal(syscall.SIGKILL)
	<-d.exited
}

// Terminate asks the process to end, and waits until it has.
func (d *Donor) Terminate() {
	d.t.Helper()
	d.Signal(syscall.SIGTERM)
	<-d.exited
	require.True(d.t, d.cmd.ProcessState.Success(), "%v", d.cmd.ProcessState)
}

// Ready waits until all devices of the node are.
func (d *Donor) Ready() {
	d.t.Helper()
	Within(d.t, "readiness of node "+d.Name, func() error {
		select {
		case <-d.exited:
			d.t.Fatalf("node %s ended", d.Name)
		default:
		}
		status, err := d.Status()
		if err == nil && !status.Ready() {
			err = fmt.Errorf("it is not: %+v", status.Devices)
		}
		return err
	})
}

// Status asks the node how it is.
func (d *Donor) Status() (*node.Status, error) {
	r, err := http.NewRequestWithContext(d.t.Context(), http.MethodGet, "http://"+d.Admin+"/status", http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := adminClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close() //nolint:errcheck // opened for reading
	b, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	status := new(node.Status)
	return status, json.Unmarshal(b, status)
}

// Device is the node's device of a tier.
func (d *Donor) Device(tier string) node.DeviceStatus {
	d.t.Helper()
	status, err := d.Status()
	require.NoError(d.t, err)
	for i := range status.Devices {
		if status.Devices[i].Tier == tier {
			return status.Devices[i]
		}
	}
	d.t.Fatalf("node %s has no %s", d.Name, tier)
	return node.DeviceStatus{}
}
