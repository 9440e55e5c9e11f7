package cmd

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// conduct runs larder conductor until the test ends, and returns what it logs once it serves.
func conduct(t *testing.T, args ...string) *output {
	t.Helper()
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	t.Chdir(t.TempDir())
	ctx, cancel := context.WithCancel(context.Background())
	out, done := &output{}, make(chan int, 1)
	go func() { done <- run(ctx, append([]string{"conductor"}, args...), out, out) }()
	t.Cleanup(func() {
		cancel()
		require.Equal(t, exitDone, <-done, "%s", out)
	})
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "msg=serving") || len(done) > 0 }, 10*time.Second, time.Millisecond)
	require.Contains(t, out.String(), "msg=serving")
	return out
}

// free skips a test that needs an address that somebody else has.
func free(t *testing.T, addr string) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skip(err)
	}
	require.NoError(t, l.Close())
}

// TestConductorTakesOthersConfiguration: a configuration of another conductor starts this one as it is, at its port.
func TestConductorTakesOthersConfiguration(t *testing.T) {
	free(t, "127.0.0.1:13333")
	file, err := filepath.Abs("testdata/conductor_config.json")
	require.NoError(t, err)
	t.Setenv("CONDUCTOR_CONFIG_PATH", file)
	conduct(t)
	code, body := get(t, "http://127.0.0.1:13333/services")
	require.Equal(t, 200, code)
	for _, want := range []string{`"count":1`, `"instance_id":"vllm-prefill-node1"`, `"endpoint":"tcp://127.0.0.1:5557"`, `"block_size":128`} {
		require.Contains(t, body, want)
	}
}

// TestConductorDefaults: without a configuration it listens at the usual port, of this host alone.
func TestConductorDefaults(t *testing.T) {
	free(t, "127.0.0.1:13333")
	t.Setenv("HOME", t.TempDir())
	t.Setenv("CONDUCTOR_CONFIG_PATH", "")
	out := conduct(t)
	require.Contains(t, out.String(), "addr=127.0.0.1:13333")
}

// TestConductorFindsItsConfiguration: in the home directory if nothing else is said, with ~ meaning that.
func TestConductorFindsItsConfiguration(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	for _, c := range []struct{ file, env string }{
		{".mooncake/conductor_config.json", ""}, {"other.json", "~/other.json"},
	} {
		t.Run(c.file, func(t *testing.T) {
			addr := freeAddr(t)
			_, port, err := net.SplitHostPort(addr)
			require.NoError(t, err)
			file := filepath.Join(home, c.file)
			require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
			require.NoError(t, os.WriteFile(file, []byte(`{"http_server_port":`+port+`}`), 0o600))
			t.Setenv("CONDUCTOR_CONFIG_PATH", c.env)
			conduct(t)
			code, _ := get(t, "http://"+addr+"/healthz")
			require.Equal(t, 200, code)
		})
	}
}

// TestConductorLogLevel: the level is named as others name it.
func TestConductorLogLevel(t *testing.T) {
	for _, level := range []string{"DEBUG", "INFO", "WARN", "ERROR", "error"} {
		t.Run(level, func(t *testing.T) {
			t.Setenv("CONDUCTOR_LOG_LEVEL", level)
			c, parsed := parseConductor(t, "--listen", "127.0.0.1:0")
			require.Equal(t, level, c.LogLevel)
			require.NoError(t, parsed)
		})
	}
	t.Setenv("CONDUCTOR_LOG_LEVEL", "LOUD")
	_, err := parseConductor(t)
	require.ErrorContains(t, err, "DEBUG")
}

// parseConductor is what a command line and the environment say.
func parseConductor(t *testing.T, args ...string) (*conductorCmd, error) {
	t.Helper()
	commands := cli{Serve: newServeCmd(), Config: newConfigCmd()}
	commands.Ctl.Snapshot.Restore.configFlags = newConfigFlags()
	parser, err := newParser(&commands, &output{}, &output{}, func(int) {})
	require.NoError(t, err)
	_, err = parser.Parse(append([]string{"conductor"}, args...))
	return &commands.Conductor, err
}

// TestConductorSeed: the seed is that of the names of blocks, as a number or as a text.
func TestConductorSeed(t *testing.T) {
	for text, seed := range map[string]uint64{"0": 0, "42": 42, "0x10": 16, "pepper": seedOf("pepper")} {
		t.Run(text, func(t *testing.T) {
			addr := freeAddr(t)
			t.Setenv("CONDUCTOR_SEED", text)
			t.Setenv("CONDUCTOR_LISTEN", addr)
			t.Setenv("CONDUCTOR_CONFIG_PATH", "")
			t.Setenv("HOME", t.TempDir())
			conduct(t)
			code, body := get(t, "http://"+addr+"/")
			require.Equal(t, 200, code)
			require.Contains(t, body, fmt.Sprintf(`"seed":"%d"`, seed), "those who ask by hash can see it")
		})
	}
	require.NotZero(t, seedOf("pepper"))
}

// TestConductorRefuses what cannot be, with what to do.
func TestConductorRefuses(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Chdir(t.TempDir())
	bad := filepath.Join(t.TempDir(), "bad.json")
	require.NoError(t, os.WriteFile(bad, []byte(`{"kvevent_instance":{"x":{"type":"vLLM"}}}`), 0o600))
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--config", "nowhere.json"}, "CONDUCTOR_CONFIG_PATH"},
		{[]string{"--config", bad}, `"x"`},
		{[]string{"--max-blocks", "0"}, "--max-blocks"},
		{[]string{"--pool-events", "tcp://127.0.0.1:1"}, "--masters"},
		{[]string{"--log-level", "LOUD"}, "DEBUG"},
	} {
		var out output
		require.Equal(t, exitUsage, run(t.Context(), append([]string{"conductor"}, c.args...), &out, &out), "%v", c.args)
		require.Contains(t, out.String(), c.want)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	port := l.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // it is
	var out output
	require.Equal(t, exitFailed, run(t.Context(), []string{"conductor", "--state-dir", "none", "--listen", "127.0.0.1:" + strconv.Itoa(port)}, &out, &out))
	require.Contains(t, out.String(), "choose a free port")
}
