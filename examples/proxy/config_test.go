package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
)

const demo = "demo/proxy.yaml"

// TestDemo: the demo's file has every option with its default, and the two files are about the same engines.
func TestDemo(t *testing.T) {
	c, err := load(demo)
	require.NoError(t, err)
	require.NoError(t, c.complete())
	defaults := config{Model: "mock", LoRAs: []string{}, RouteHeaders: true, Engines: c.Engines}
	require.NoError(t, defaults.complete())
	require.Equal(t, defaults, c)

	b, err := os.ReadFile("demo/conductor.json")
	require.NoError(t, err)
	var conductor struct {
		Port    int                     `json:"http_server_port"`
		Engines map[string]registration `json:"kvevent_instance"`
	}
	require.NoError(t, json.Unmarshal(b, &conductor))
	require.Len(t, conductor.Engines, len(c.Engines))
	for id, e := range conductor.Engines {
		require.Contains(t, c.Engines, id)
		require.Equal(t, registration{e.Endpoint, e.ReplayEndpoint, "vLLM", c.Model, id, c.BlockSize, 0}, e)
	}
}

// TestConfigs that cannot be are refused, with all that is wrong.
func TestConfigs(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		says []string
	}{
		"nothing": {"{}", []string{"model", "engines"}},
		"a typo":  {"models: x", []string{"models"}},
		"JSON":    {`{"model": "m", "loras": ["m"], "engines": {"a": {"url": "http://a"}}}`, []string{"loras"}},
		"much": {
			"{model: m, mode: guess, conductor: nowhere, engines: {a: {url: 'ftp://a'}, b: {url: 'http://b', role: boss}}}",
			[]string{`"guess"`, `"nowhere"`, `a: url: "ftp://a"`, `b: role: "boss"`},
		},
		"nobody decodes": {"{model: m, engines: {a: {url: 'http://a', role: prefill}}}", []string{"somebody decode"}},
		"no duration":    {"{model: m, stall_timeout: soon}", []string{"line 1", "soon"}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "proxy.yaml")
			require.NoError(t, os.WriteFile(path, []byte(c.file), 0o600))
			cfg, err := load(path)
			if err == nil {
				err = cfg.complete()
			}
			for _, says := range c.says {
				require.ErrorContains(t, err, says)
			}
		})
	}
}

// TestRun serves until it is told to end; flags go before the file.
func TestRun(t *testing.T) {
	var f flags
	parser, err := kong.New(&f)
	require.NoError(t, err)
	_, err = parser.Parse([]string{demo, "--listen", "127.0.0.1:0", "--mode", "schedule"})
	require.NoError(t, err)
	require.Equal(t, 30*time.Second, f.ShutdownTimeout)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, f, slog.New(slog.NewTextHandler(w, nil))) }()
	line, err := bufio.NewReader(r).ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, "mode=schedule")
	url := regexp.MustCompile(`url=(\S+)`).FindStringSubmatch(line)
	require.Len(t, url, 2, line)
	a, err := http.Get(url[1] + "/health")
	require.NoError(t, err)
	require.NoError(t, a.Body.Close())
	require.Equal(t, http.StatusOK, a.StatusCode)
	stop()
	require.NoError(t, <-ended)

	f.Check = true
	require.NoError(t, run(t.Context(), f, slog.New(slog.DiscardHandler)))
	f.Config = "demo/conductor.json"
	require.Error(t, run(t.Context(), f, slog.New(slog.DiscardHandler)))
}
