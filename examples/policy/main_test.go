package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

// asServer makes the test binary run main instead of the tests.
const asServer = "LARDER_EXAMPLE_SERVER"

func TestMain(m *testing.M) {
	if os.Getenv(asServer) != "" {
		main() // does not return
	}
	os.Exit(m.Run())
}

// run starts the example with arguments, as a user would.
func run(t *testing.T, out *bytes.Buffer, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0], args...)
	c.Env = append(os.Environ(), asServer+"=1")
	c.Stdout, c.Stderr = out, out
	require.NoError(t, c.Start())
	return c
}

func TestServerRunsThePolicy(t *testing.T) {
	dir, err := os.MkdirTemp("", "larder-example-") // short, for the socket's path
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	socket := filepath.Join(dir, "s")
	var out bytes.Buffer
	serve := run(t, &out, "serve", "--eviction-policy", "used-last", "--data-dir", dir, "--socket", socket,
		"--listen", "none", "--peer-listen", "none", "--admin-listen", "none",
		"--pool", filepath.Join(dir, "pool")+",size=16MiB", "--min-free-disk", "1MiB")
	var c *client.Client
	require.Eventually(t, func() bool {
		c, err = client.Open(t.Context(), client.Config{Addrs: []string{"unix:" + socket}, PageSize: 65536, RegionSize: 1 << 20})
		return err == nil
	}, 20*time.Second, 20*time.Millisecond, "no server")
	value := bytes.Repeat([]byte("x"), 65536)
	for i := range 300 { // more than the pool holds: the policy must have chosen victims
		_, err := c.Put(t.Context(), []byte{byte(i), byte(i >> 8)}, value)
		require.NoError(t, err)
	}
	require.Positive(t, c.Stats().Evicted)
	require.NoError(t, c.Close(t.Context()))
	require.NoError(t, serve.Process.Signal(syscall.SIGTERM))
	require.NoError(t, serve.Wait(), out.String())
}

func TestReplayRunsThePolicy(t *testing.T) {
	var out bytes.Buffer
	replay := run(t, &out, "replay", "--policy", "used-last", "--requests", "200", "--pages", "256", "--page", "4KiB", "--quiet", "--json")
	require.NoError(t, replay.Wait(), out.String())
	var report struct {
		Failures  int      `json:"verification_failures"`
		Blocks    uint64   `json:"blocks"`
		Evictions []uint64 `json:"evictions_by_phase"`
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &report), out.String())
	require.Zero(t, report.Failures)
	require.Positive(t, report.Blocks)
	require.Positive(t, report.Evictions[1])
}

func TestPolicyKeepsItsContract(t *testing.T) {
	policy.Register("used-last", func(_ policy.Config, table policy.Table) (policy.Policy, error) {
		return &usedLast{policy.NewBase(table)}, nil
	})
	for seed := range uint64(5) {
		require.NoError(t, policytest.Check("used-last", policy.Config{}, seed))
	}
}
