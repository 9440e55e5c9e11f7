package cmd

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/node"
	"larder/server"
	"larder/tiering/ssd"
	"larder/transfer"
)

// freeAddr is a loopback address that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

// get asks a node's admin.
func get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	require.NoError(t, err)
	response, err := c.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close() //nolint:errcheck // opened for reading
	b := make([]byte, 1<<20)
	n := 0
	for err == nil && n < len(b) {
		var k int
		k, err = response.Body.Read(b[n:])
		n += k
	}
	return response.StatusCode, string(b[:n])
}

// TestNodeServes runs larder node with a configuration file beside a server.
func TestNodeServes(t *testing.T) {
	c := startCluster(t)
	admin := freeAddr(t)
	file := filepath.Join(c.dir, "node.yaml")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, "masters: [%q]\ndram: 8MiB\nssd_size: 16MiB\nadmin_listen: %s\n",
		c.flags[3], admin), 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	var out, log output
	done := make(chan int, 1)
	args := []string{"node", "-c", file, "--ssd", filepath.Join(c.dir, "ssd"), "--listen", "127.0.0.1:0", "--host", "here"}
	go func() { done <- run(ctx, args, &out, &log) }()
	defer func() {
		cancel()
		require.Equal(t, exitDone, <-done, log.String())
	}()
	require.Eventually(t, func() bool {
		code, _ := get(t, "http://"+admin+"/healthz")
		return code == http.StatusOK
	}, 60*time.Second, 20*time.Millisecond, "the node is not ready")
	code, text := get(t, "http://"+admin+"/status")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, text, `"tier":"ssd"`)
	code, text = get(t, "http://"+admin+"/metrics")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, text, `larder_node_device_ready{device="dram"`)
	require.Contains(t, text, "go_goroutines")
	require.Eventually(t, func() bool {
		return strings.Contains(c.ctl(t, exitDone, "names"), "segment/node/here")
	}, 20*time.Second, 20*time.Millisecond, "others find it by name")
	for _, n := range decode[server.NamesReply](t, c.ctl(t, exitDone, "names", "--json")).Names {
		require.Contains(t, n.Value, `"buffers":null`, "who may write to its buffers is for the masters to say")
	}
}

func TestNodeCommandLine(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.yaml")
	require.NoError(t, os.WriteFile(bad, []byte("drm: 8MiB\n"), 0o600))
	for args, want := range map[string]string{
		"--dram 8":                                `size "8"`,
		"":                                        "nothing to contribute",
		"--dram 8MiB --listen 127.0.0.1":          "127.0.0.1",
		"--dram 8MiB --listen none --ssd " + dir:  "by transfer alone",
		"--cxl x,tier=dram":                       "the tier is cxl",
		"--dram 8MiB --nics no_such_nic":          "no_such_nic",
		"--dram 8MiB --transports pigeon":         `"pigeon" is no transport: local, shm, rdma, tcp`,
		"--dram 8MiB --num-qp-per-ep 65":          "from 1 to 64",
		"--dram 8MiB --topology " + dir + "/none": "no such file",
		"--dram 8MiB --eviction lru":              "fifo",
		"--dram 8MiB --numa 1023":                 "NUMA node 1023 has no memory",
		"--numa 0 --listen 127.0.0.1:0 --ssd x":   "a NUMA node is that of DRAM",
		"--dram 8MiB --ssd-compression gzip":      "auto",
		"--dram 8MiB --config " + bad:             `unknown key "drm"`,
	} {
		t.Run(args, func(t *testing.T) {
			code, _, errs := larder(t.Context(), append([]string{"node", "--admin-listen", "none"}, strings.Fields(args)...)...)
			require.Equal(t, exitUsage, code, errs)
			require.Contains(t, errs, want)
		})
	}
	code, out, _ := larder(t.Context(), "node", "--help")
	require.Equal(t, exitDone, code)
	require.Contains(t, out, "(default 256MiB)")
}

// TestNodesTransferOptions: what is said of ways and NICs reaches the engine, in a node and in a server's node.
func TestNodesTransferOptions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topology.json")
	require.NoError(t, os.WriteFile(file, []byte(`{"nodes":[{"id":0,"cpus":"0-3"}]}`), 0o600))
	want := transfer.EndpointConfig{MaxEndpoints: 7, QPsPerEndpoint: 3, Eviction: "fifo"}
	c := nodeCmd{
		Transports: []string{"tcp"}, MaxEndpoints: 7, NumQPPerEP: 3, Eviction: "fifo", SSDCompression: "off", SSD: []string{"d"},
		SSDCompactRate: 1 << 20,
	}
	require.NoError(t, c.Topology.UnmarshalText([]byte(file)))
	cfg, err := c.config(slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.Equal(t, []string{"tcp"}, cfg.Transports)
	require.Equal(t, want, cfg.Endpoints)
	require.Equal(t, "0-3", cfg.Topology.Nodes[0].CPUs)
	require.Equal(t, node.SSD{Dir: "d", Compression: ssd.CompressOff, CompactRate: 1 << 20}, cfg.SSD[0])

	s := server.Default()
	s.TransferTransports, s.TransferMaxEndpoints, s.TransferNumQPPerEP, s.TransferEviction = "tcp, shm", 7, 3, "fifo"
	s.TransferTopology, s.TransferNICs, s.TransferZeroCopy = file, "none", "off"
	var nc node.Config
	stop, err := servedTransfer(&nc, &s)
	require.NoError(t, err)
	require.NoError(t, stop())
	require.Equal(t, []string{"tcp", "shm"}, nc.Transports)
	require.Equal(t, "off", nc.ZeroCopy)
	require.Equal(t, want, nc.Endpoints)
	require.Equal(t, "0-3", nc.Topology.Nodes[0].CPUs)
	s.TransferNICs = "no_such_nic"
	_, err = servedTransfer(&nc, &s)
	require.ErrorContains(t, err, "transfer_nics")
}

// TestServerContributes has larder serve bring memory and a disk of its own, and let others reach its pool.
func TestServerContributes(t *testing.T) {
	dir := t.TempDir()
	c := startCluster(t, "--transfer-listen", "127.0.0.1:0", "--dram", "8MiB", "--ssd", filepath.Join(dir, "ssd"), "--ssd-size", "16MiB")
	var text string
	require.Eventually(t, func() bool {
		_, text = get(t, "http://"+c.flags[1]+"/metrics")
		return len(regexp.MustCompile(`(?m)^larder_node_device_ready\{.*\} 1$`).FindAllString(text, -1)) == 3
	}, 60*time.Second, 50*time.Millisecond, "not all devices serve")
	require.Contains(t, text, `device="exposed `)
	list := c.ctl(t, exitDone, "devices")
	require.Contains(t, list, "dram")
	require.Contains(t, list, "ssd")
	code, log := c.stop()
	require.Equal(t, exitDone, code, log)
	require.NotContains(t, log, "level=ERROR")
}

func TestServerWithoutAnythingToContributeListensForNobody(t *testing.T) {
	c := startCluster(t)
	_, text := get(t, "http://"+c.flags[1]+"/metrics")
	require.NotContains(t, text, "larder_node_")
}
