package cmd

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"larder/cmd/replay"
	"larder/internal/freeport"
	"larder/server"
)

// TestMain also is a rank of a benchmark that a test runs, in a process of its own.
func TestMain(m *testing.M) {
	if os.Getenv("LARDER_PG_BENCH_RANK") != "" {
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	goleak.VerifyTestMain(m)
}

// update makes TestReadme write the README instead of comparing with it.
var update = flag.Bool("update", false, "write the options' table into the README")

// output is a buffer that a running command and its test share.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// larder runs a command line and returns exit code, standard output and standard error.
func larder(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, errs output
	code = run(ctx, args, &out, &errs)
	return code, out.String(), errs.String()
}

// cluster is a server that runs in the background, and the flags that reach it.
type cluster struct {
	dir   string
	flags []string
	stop  func() (code int, log string)
}

// startCluster runs larder serve until stop or the end of the test.
func startCluster(t *testing.T, more ...string) *cluster {
	t.Helper()
	dir, err := os.MkdirTemp("", "larder-cmd-") // short, for the socket's path
	require.NoError(t, err)
	addrs := [2]string{freeport.For(t), freeport.For(t)}
	args := append([]string{
		"serve", "--data-dir", filepath.Join(dir, "data"), "--pool", filepath.Join(dir, "pool") + ",size=16MiB",
		"--listen", addrs[0], "--peer-listen", "none", "--admin-listen", addrs[1], "--socket", filepath.Join(dir, "s"),
		"--min-free-disk", "1MiB",
	}, more...)
	ctx, cancel := context.WithCancel(context.Background())
	var out, log output
	done := make(chan int, 1)
	go func() { done <- run(ctx, args, &out, &log) }()
	c := &cluster{dir: dir, flags: []string{"--admin", addrs[1], "--addr", addrs[0]}}
	c.stop = sync.OnceValues(func() (int, string) {
		cancel()
		return <-done, log.String()
	})
	t.Cleanup(func() {
		c.stop()
		require.NoError(t, os.RemoveAll(dir))
	})
	require.Eventually(t, func() bool {
		code, _, _ := larder(t.Context(), append([]string{"ctl", "status"}, c.flags...)...)
		return code == exitDone
	}, 30*time.Second, 20*time.Millisecond, "the server does not answer")
	return c
}

// ctl runs a ctl command that must end with a code.
func (c *cluster) ctl(t *testing.T, want int, args ...string) (stdout string) {
	t.Helper()
	code, stdout, stderr := larder(t.Context(), append(append([]string{"ctl"}, args...), c.flags...)...)
	require.Equal(t, want, code, "ctl %v: %s%s", args, stdout, stderr)
	if want != exitDone {
		require.True(t, strings.HasPrefix(stderr, "larder: "), stderr)
		return stderr
	}
	return stdout
}

func TestCommandLine(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml")
	require.NoError(t, os.WriteFile(good, []byte("data_dir: "+dir+"\npool: [16MiB]\n"), 0o600))
	require.NoError(t, os.WriteFile(bad, []byte("listn: x\ntick: 5\n"), 0o600))
	tests := []struct {
		args         string
		code         int
		stdout, errs string
	}{
		{"", exitDone, "Usage: larder", ""},
		{"--help", exitDone, "Usage: larder", ""},
		{"serve --help", exitDone, "--eviction-policy=VALUE", ""},
		{"serve --help", exitDone, "prefix-lru", ""},
		{"serve --help", exitDone, "force:", ""},
		{"config check --json " + good, exitDone, `"ok": true`, ""},
		{"config check --json " + bad, exitUsage, `"problems": [`, `did you mean "listen"`},
		{"config print --json --config " + good, exitDone, `"data_dir": "` + dir + `"`, ""},
		{"ctl get --hex xy - --admin 127.0.0.1:1", exitUsage, "", "not hexadecimal"},
		{"version", exitDone, "larder ", ""},
		{"version --json", exitDone, `"protocol": 1`, ""},
		{"nonsense", exitUsage, "", "see larder --help"},
		{"serve --page-size 5", exitUsage, "", "flag --page-size: page_size: size \"5\""},
		{"serve --dry-run --page-size 128KiB --pool 16MiB", exitDone, "page_size: 128KiB", ""},
		{"config check " + good, exitDone, "ok", ""},
		{"config check " + bad, exitUsage, "", `did you mean "listen"`},
		{"config print --config " + good, exitDone, "data_dir: \"" + dir + "\"", ""},
		{"ctl status --admin 127.0.0.1:1", exitFailed, "", "is larder serve running"},
		{"ctl clear --admin 127.0.0.1:1", exitUsage, "", "say what"},
		{"ctl policy set --admin 127.0.0.1:1", exitUsage, "", "name a policy"},
		{"top --once --admin 127.0.0.1:1", exitFailed, "", "no member answers"},
		{"top --interval 1ms", exitUsage, "", "too short"},
		{"replay --clients 0", exitUsage, "", "at least 1"},
		{"replay --pages 3 --page 4KiB", exitUsage, "", "choose another number"},
		{"replay --trace /nowhere", exitUsage, "", "/nowhere"},
		{"replay --policy mru", exitUsage, "", "choose one of"},
		{"bench --run (", exitUsage, "", "--run"},
		{"bench --time 1ns", exitUsage, "", "too short"},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			code, stdout, stderr := larder(t.Context(), strings.Fields(tt.args)...)
			require.Equal(t, tt.code, code, "%s%s", stdout, stderr)
			require.Contains(t, stdout, tt.stdout)
			require.Contains(t, stderr, tt.errs)
		})
	}
}

func TestOperatingACluster(t *testing.T) {
	c := startCluster(t)
	in, out := filepath.Join(c.dir, "in"), filepath.Join(c.dir, "out")
	value := bytes.Repeat([]byte("0123456789abcdef"), 9000) // more than one page, and no multiple of one
	require.NoError(t, os.WriteFile(in, value, 0o600))

	require.Contains(t, c.ctl(t, exitDone, "status"), "leader")
	require.Contains(t, c.ctl(t, exitDone, "put", "a key", in), "stored")
	require.Contains(t, c.ctl(t, exitDone, "put", "a key", in), "held already")
	c.ctl(t, exitDone, "get", "a key", out)
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Equal(t, value, got)
	require.Contains(t, c.ctl(t, exitFailed, "get", "nobody", out), "NOT_FOUND")
	require.Contains(t, c.ctl(t, exitDone, "keys", "--prefix", "a"), `"a key"`)
	require.NotContains(t, c.ctl(t, exitDone, "keys", "--prefix", "b"), "key\"")
	require.Contains(t, c.ctl(t, exitDone, "regions"), "departed")
	require.Contains(t, c.ctl(t, exitDone, "clients"), "INSTANCE")
	require.Contains(t, c.ctl(t, exitDone, "check", "--deep"), "1 verified")
	require.Contains(t, c.ctl(t, exitDone, "pin", "a key"), "pinned")
	require.Contains(t, c.ctl(t, exitFailed, "rm", "a key"), "pinned")
	require.Contains(t, c.ctl(t, exitDone, "unpin", "a key"), "unpinned")
	require.Contains(t, c.ctl(t, exitFailed, "unpin", "a key"), "was not pinned by operator")

	require.Contains(t, c.ctl(t, exitDone, "policy", "set", "sieve", "--ttl", "90s"), "sieve")
	require.Contains(t, c.ctl(t, exitDone, "policy"), "1m30s")
	require.Contains(t, c.ctl(t, exitFailed, "policy", "set", "mru"), "choose one of")
	require.Contains(t, c.ctl(t, exitDone, "upgrade"), "cluster version 5")
	require.Contains(t, c.ctl(t, exitDone, "members"), "leader")
	require.Contains(t, c.ctl(t, exitFailed, "members", "remove", "77"), "no member")

	snapshot, restored := filepath.Join(c.dir, "snapshot"), filepath.Join(c.dir, "restored")
	c.ctl(t, exitDone, "snapshot", "save", snapshot)
	require.Contains(t, c.ctl(t, exitDone, "rm", "a key"), "removed")
	require.Contains(t, c.ctl(t, exitDone, "clear", "--all"), "done")
	code, stdout, stderr := larder(t.Context(), "ctl", "snapshot", "restore", snapshot, "--data-dir", restored, "--pool", "16MiB")
	require.Equal(t, exitDone, code, stderr)
	require.Contains(t, stdout, "new cluster")

	var v view
	code, stdout, stderr = larder(t.Context(), append([]string{"top", "--once", "--json", "--interval", "100ms"}, c.flags...)...)
	require.Equal(t, exitDone, code, stderr)
	require.NoError(t, json.Unmarshal([]byte(stdout), &v))
	require.True(t, v.Status.Serving)

	code, log := c.stop()
	require.Equal(t, exitDone, code, log)
	require.Contains(t, log, "stopped")
}

// decode reads what a command printed as JSON.
func decode[T any](t *testing.T, stdout string) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(stdout), &v), "%s", stdout)
	return v
}

func TestOperatingTenantsAndBinaryKeys(t *testing.T) {
	c := startCluster(t)
	in, out := filepath.Join(c.dir, "in"), filepath.Join(c.dir, "out")
	require.NoError(t, os.WriteFile(in, []byte("blue bytes"), 0o600))
	c.ctl(t, exitDone, "put", "--tenant", "blue", "--hex", "ff00", in)
	require.NoError(t, os.WriteFile(in, []byte("default bytes"), 0o600))
	c.ctl(t, exitDone, "put", "--hex", "ff00", in)
	c.ctl(t, exitDone, "get", "--tenant", "blue", "--hex", "ff00", out)
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Equal(t, "blue bytes", string(got))

	table := c.ctl(t, exitDone, "keys", "--tenant", "blue")
	require.Contains(t, table, "TENANT")
	require.Contains(t, table, `"\xff\x00"`, "what a key holds, not U+FFFD")
	require.NotContains(t, table, "default")
	require.Contains(t, c.ctl(t, exitDone, "keys", "--hex", "--prefix", "ff"), "ff00")
	for _, k := range decode[server.KeysReply](t, c.ctl(t, exitDone, "keys", "--json")).Keys {
		require.Equal(t, "ff00", k.KeyHex)
	}

	require.Contains(t, c.ctl(t, exitDone, "pin", "--tenant", "blue", "--hex", "ff00", "--owner", "ann"), "pinned")
	require.Contains(t, c.ctl(t, exitDone, "pin", "--hex", "ff00", "--ttl", "1h"), "pinned")
	for _, verb := range []string{"pin", "unpin", "rm"} {
		require.Contains(t, c.ctl(t, exitUsage, verb, "\xff"), "--hex", "another key is not taken in its place")
	}
	table = c.ctl(t, exitDone, "pins", "--owner", "ann")
	require.Regexp(t, `blue +"\\xff\\x00" +hard +ann +- +never`, table)
	require.NotContains(t, table, "operator")
	pins := decode[server.PinsReply](t, c.ctl(t, exitDone, "pins", "--json")).Pins
	require.Len(t, pins, 2)
	require.Contains(t, c.ctl(t, exitDone, "pins", "--limit", "1"), "more: --cursor ")
	require.Contains(t, c.ctl(t, exitFailed, "rm", "--tenant", "blue", "--hex", "ff00"), "larder ctl pins")
	c.ctl(t, exitFailed, "unpin", "--hex", "ff00", "--owner", "ann")
	c.ctl(t, exitDone, "unpin", "--tenant", "blue", "--hex", "ff00", "--owner", "ann")
	c.ctl(t, exitDone, "rm", "--tenant", "blue", "--hex", "ff00")
	require.NotContains(t, c.ctl(t, exitDone, "keys"), "blue")
}

// Every verb prints JSON with --json, and ends with the same code as without.
func TestEveryVerbPrintsJSON(t *testing.T) {
	c := startCluster(t)
	in, out, snapshot := filepath.Join(c.dir, "in"), filepath.Join(c.dir, "out"), filepath.Join(c.dir, "snapshot")
	require.NoError(t, os.WriteFile(in, []byte("bytes"), 0o600))
	for _, step := range []struct {
		args string
		code int
		want string
	}{
		{"put key " + in, exitDone, `"stored": true`},
		{"put key " + in, exitDone, `"stored": false`},
		{"put other " + in, exitDone, `"stored": true`},
		{"get key " + out, exitDone, `"bytes": 5`},
		{"keys", exitDone, `"key_hex": "6b6579"`},
		{"pin key", exitDone, `true`},
		{"pin key nokey", exitFailed, `false`},
		{"pins", exitDone, `"owner": "operator"`},
		{"rm key", exitFailed, `"removed": false`},
		{"unpin key", exitDone, `true`},
		{"unpin key", exitFailed, `false`},
		{"rm key", exitDone, `"removed": true`},
		{"regions", exitDone, `"state"`},
		{"regions --limit 1", exitDone, `"state"`},
		{"clients", exitDone, `[`},
		{"status", exitDone, `"serving": true`},
		{"members", exitDone, `"leader": true`},
		{"check", exitDone, `"problems": []`},
		{"policy", exitDone, `"policy": "lru"`},
		{"policy set sieve", exitDone, `"policy": "sieve"`},
		{"upgrade", exitDone, `"version"`},
		{"tenants", exitDone, `"session_pins"`},
		{"tenants set default --guarantee 1MiB", exitDone, `"guarantee": 1048576`},
		{"tenants set default --guarantee 1GiB", exitFailed, ""},
		{"snapshot save " + snapshot, exitDone, `"bytes": `},
		{"snapshot restore " + snapshot + " --pool 16MiB --data-dir " + filepath.Join(c.dir, "restored"), exitDone, `"node_id": `},
		{"clear --all", exitDone, `"ok": true`},
		{"transfer-leader", exitFailed, ""},
		{"drain nobody", exitFailed, ""},
	} {
		args := append([]string{"ctl", "--json"}, strings.Fields(step.args)...)
		code, stdout, stderr := larder(t.Context(), append(args, c.flags...)...)
		require.Equal(t, step.code, code, "%s: %s%s", step.args, stdout, stderr)
		require.Contains(t, stdout, step.want, step.args)
		if step.want != "" {
			require.True(t, json.Valid([]byte(stdout)), "%s: %s", step.args, stdout)
		}
	}
}

func TestListsSayThatThereIsMore(t *testing.T) {
	c := startCluster(t)
	in := filepath.Join(c.dir, "in")
	require.NoError(t, os.WriteFile(in, []byte("bytes"), 0o600))
	c.ctl(t, exitDone, "put", "a", in)
	c.ctl(t, exitDone, "put", "b", in)
	first := c.ctl(t, exitDone, "regions", "--limit", "1")
	match := regexp.MustCompile(`more: --after (\d+), or a higher --limit`).FindStringSubmatch(first)
	require.NotNil(t, match, first)
	second := c.ctl(t, exitDone, "regions", "--limit", "1", "--after", match[1])
	require.NotContains(t, second, "more:")
	require.NotEqual(t, first, second)
	code, stdout, stderr := larder(t.Context(), append([]string{"ctl", "regions", "--json", "--limit", "1"}, c.flags...)...)
	require.Equal(t, exitDone, code)
	require.True(t, json.Valid([]byte(stdout)))
	require.Contains(t, stderr, "--after "+match[1])
}

// The command line and what the server tells everybody are of one version.
func TestServerTellsTheVersionOfTheBinary(t *testing.T) {
	c := startCluster(t)
	status := decode[server.StatusReply](t, c.ctl(t, exitDone, "status", "--json"))
	require.Equal(t, version(), status.Version)
	require.NotEqual(t, "(devel)", status.Version)
	require.Equal(t, version(), server.Version)
}

func TestSystemdIsTold(t *testing.T) {
	dir, err := os.MkdirTemp("", "larder-sd-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	path := filepath.Join(dir, "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	t.Setenv("NOTIFY_SOCKET", path)
	c := startCluster(t)
	_, _ = c.stop()
	buf := make([]byte, 64)
	for _, want := range []string{"READY=1", "STOPPING=1"} {
		n, err := conn.Read(buf)
		require.NoError(t, err)
		require.Equal(t, want, string(buf[:n]))
	}
}

func TestReplayStartsAServerAndKeepsItsData(t *testing.T) {
	dir, err := os.MkdirTemp("", "larder-replay-test-")
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, os.RemoveAll(dir))
		require.NoError(t, os.RemoveAll(poolFile(dir, false)))
	})
	var first, second replay.Report
	for _, report := range []*replay.Report{&first, &second} {
		code, stdout, stderr := larder(t.Context(), "replay", "--requests", "30", "--page", "4KiB", "--pages", "8192", "--data", dir,
			"--quiet", "--json")
		require.Equal(t, exitDone, code, stderr)
		require.NoError(t, json.Unmarshal([]byte(stdout), report))
		require.Zero(t, report.Failures)
		require.Equal(t, 30, report.Requests)
	}
	require.Less(t, first.PrefixRatio, 1.0)
	require.InDelta(t, 1, second.PrefixRatio, 0, "what the first run stored is still there")
}

func TestReadme(t *testing.T) {
	const begin, end = "-update -->\n", "<!-- end of options -->"
	var table strings.Builder
	table.WriteString("\n| option | default | |\n|---|---|---|\n")
	for _, option := range server.Options() {
		help := strings.NewReplacer("|", "\\|", "<", "&lt;").Replace(option.Help)
		def := ""
		if option.Default != "" {
			def = "`" + option.Default + "`"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", option.Name, def, help)
	}
	table.WriteString("\n")
	const path = "../README.md"
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	head, rest, ok := strings.Cut(string(b), begin)
	require.True(t, ok)
	_, tail, ok := strings.Cut(rest, end)
	require.True(t, ok)
	want := head + begin + table.String() + end + tail
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
		return
	}
	if want != string(b) {
		t.Fatal("the table of options is out of date: run go test ./cmd -run TestReadme -update")
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	table := newTable("NAME", "-COUNT")
	table.row("a", 1)
	table.row("längere", uint64(1000))
	require.NoError(t, table.print(&out))
	require.Equal(t, "NAME     COUNT\na            1\nlängere   1000\n", out.String())
	require.Equal(t, "1.5 KiB", bytesText(1536))
	require.Equal(t, "512 B", bytesText(512))
}

func TestTopComparesLooks(t *testing.T) {
	last, now := &server.StatusReply{}, &server.StatusReply{}
	last.UptimeMS, now.UptimeMS = 1000, 3000
	last.Requests = server.RequestsView{ByType: map[string]uint64{"LOOKUP_KV": 10}, Keys: 10, Hits: 5}
	now.Requests = server.RequestsView{ByType: map[string]uint64{"LOOKUP_KV": 30, "REGISTER_KV": 4}, Keys: 30, Hits: 20}
	v := compare(last, now, 2*time.Second)
	require.InDelta(t, 10, v.Rates["LOOKUP_KV"], 1e-9)
	require.InDelta(t, 2, v.Rates["REGISTER_KV"], 1e-9)
	require.InDelta(t, 0.75, v.HitRatio, 1e-9)
	now.NodeID = 2
	require.Empty(t, compare(last, now, 2*time.Second).Rates, "another member's counters cannot be compared")
	require.Equal(t, "["+strings.Repeat("#", 20)+strings.Repeat("-", 10)+strings.Repeat(" ", 10)+"]", bar(0.5, 0.25))
	require.Len(t, bar(2, 2), barWidth+2)
}
