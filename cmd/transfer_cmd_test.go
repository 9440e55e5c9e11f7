package cmd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/cmd/bench"
)

// target runs larder transfer target, and returns where it listens.
func target(t *testing.T, args ...string) (address string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, append([]string{"transfer", "target"}, args...), w, io.Discard)
		_ = w.Close()
	}()
	line, err := bufio.NewReader(r).ReadString('\n')
	require.NoError(t, err)
	address, ok := strings.CutPrefix(strings.TrimSpace(line), "listening at ")
	require.True(t, ok, line)
	t.Cleanup(func() {
		stop()
		require.Equal(t, exitDone, <-done)
	})
	return address
}

func TestTransferProbe(t *testing.T) {
	at := target(t, "--name", "n1", "--size", "1MiB", "--token", "t")
	var out, failed bytes.Buffer
	require.Equal(t, exitDone, run(t.Context(), []string{"transfer", "probe", at, "--token", "t"}, &out, &failed), failed.String())
	require.Regexp(t, `(?m)^Segment n1, engine [0-9a-f]{32}$`, out.String())
	require.Regexp(t, `(?m)^bench +1 +1MiB +read, write +memory$`, out.String())
	require.Regexp(t, `(?m)^shm +any +this host +memory +active +\d+ us +200 +0$`, out.String())
	require.Regexp(t, `(?m)^tcp +any +`+at+` +memory +active +\d+ us +200 +0$`, out.String())
	file := filepath.Join(t.TempDir(), "topology")
	matrix := `{"nics":[{"name":"a"},{"name":"b"}],"matrix":{"gpu:7":{"preferred":["a"],"secondary":["b"]}}}`
	require.NoError(t, os.WriteFile(file, []byte(matrix), 0o600))
	out.Reset()
	args := []string{"transfer", "probe", at, "--token", "t", "--topology", file}
	require.Equal(t, exitDone, run(t.Context(), args, &out, &failed), failed.String())
	require.Regexp(t, `(?m)^MEMORY HERE +PREFERRED NICS +OTHERS\ngpu:7 +a +b$`, out.String())
	require.Equal(t, exitUsage, run(t.Context(), append(args, "--topology", file+"x"), &out, &failed))
	out.Reset()
	require.Equal(t, exitDone, run(t.Context(), []string{"transfer", "probe", at, "--token", "t", "--json"}, &out, &failed))
	var p probed
	require.NoError(t, json.Unmarshal(out.Bytes(), &p))
	require.Len(t, p.Paths, 2)
	require.Empty(t, p.Failed)
	require.Equal(t, exitFailed, run(t.Context(), []string{"transfer", "probe", at}, io.Discard, &failed))
	require.Contains(t, failed.String(), "token")
}

// TestTransferToAFile has a target's buffer lie in a file of 1 TiB that takes no space.
func TestTransferToAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	at := target(t, "--size", "1TiB", "--file", path)
	var out, failed bytes.Buffer
	require.Equal(t, exitDone, run(t.Context(), []string{"transfer", "probe", at}, &out, &failed), failed.String())
	require.Regexp(t, `(?m)^bench +\d+ +1TiB +read, write +storage$`, out.String())
	require.Regexp(t, `(?m)^tcp +any +`+at+` +storage +active +\d+ us +200 +0$`, out.String())
	out.Reset()
	args := []string{"transfer", "bench", "--to", at, "--time", "10ms", "--block", "4KiB", "--json"}
	require.Equal(t, exitDone, run(t.Context(), args, &out, &failed), failed.String())
	var r bench.TransferReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Len(t, r.Rows, 2, "one transport leads there")
	require.Equal(t, exitUsage, run(t.Context(), []string{"transfer", "target", "--file", t.TempDir()}, &out, &failed))
}

func TestTransferBench(t *testing.T) {
	plain, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go bench.ServePlain(plain)
	defer func() { require.NoError(t, plain.Close()) }()
	at := target(t, "--size", "1MiB")
	var out, failed bytes.Buffer
	args := []string{
		"transfer", "bench", "--to", at, "--plain", plain.Addr().String(), "--time", "10ms", "--block", "4KiB,32KiB", "--rounds", "3",
		"--json",
	}
	require.Equal(t, exitDone, run(t.Context(), args, &out, &failed), failed.String())
	var r bench.TransferReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Len(t, r.Rows, 8, "two transports, two sizes, two operations")
	for _, row := range r.Rows {
		require.Positive(t, row.Rate)
		require.LessOrEqual(t, row.P50, row.P999)
		require.Positive(t, row.Share)
		require.Positive(t, row.Submit)
	}
	file := filepath.Join(t.TempDir(), "f")
	for _, local := range [][]string{{}, {"--file", file, "--size", "1MiB"}} {
		out.Reset()
		args := append([]string{"transfer", "bench", "--transport", "local", "--time", "10ms", "--block", "4KiB", "--span", "1MiB"}, local...)
		require.Equal(t, exitDone, run(t.Context(), args, &out, &failed), failed.String())
		require.Contains(t, out.String(), "local")
	}
	for want, flags := range map[string][]string{
		"larger --size":        {"--to", at, "--block", "1MiB"},
		"a plain stream to":    {"--to", at, "--plain", "127.0.0.1:1"},
		"from 4KiB to 64GiB":   {"--span", "1KiB"},
		`no buffer "x"`:        {"--to", at, "--buffer", "x"},
		"connection refused":   {"--to", "127.0.0.1:1"},
		"--block 0":            {"--block", "0B"},
		"--batch 0: from 1":    {"--batch", "0"},
		"--threads -1":         {"--threads=-1"},
		"at least 10ms":        {"--time", "1ms"},
		"one of local, shm":    {"--transport", "pigeon"},
		"at least two --rails": {"--dead-rail"},
		"at most 64 rails":     {"--rails", "65"},
		"from 4KiB to 16MiB":   {"--slice", "1KiB"},
		"no_such/file":         {"--transport", "local", "--file", "no_such/file"},
	} {
		failed.Reset()
		args := append([]string{"transfer", "bench", "--time", "10ms"}, flags...)
		require.NotEqual(t, exitDone, run(t.Context(), args, io.Discard, &failed), want)
		require.Contains(t, failed.String(), want)
	}
}
