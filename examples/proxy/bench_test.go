package main

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkCompletion is a request of a thousand tokens, answered at once: by an engine that computes nothing, and by the same
// through the proxy, which asks a conductor that knows nothing.
func BenchmarkCompletion(b *testing.B) {
	direct := httptest.NewServer(http.HandlerFunc(fine))
	defer direct.Close()
	conductor := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		writeJSON(w, http.StatusOK, object{"default": object{}})
	}))
	defer conductor.Close()
	cfg := config{Model: model, Conductor: conductor.URL, Engines: engines(direct.URL, direct.URL)}
	require.NoError(b, cfg.complete())
	p := New(b.Context(), cfg, slog.New(slog.DiscardHandler))
	defer p.Close()
	s := httptest.NewServer(p.Handler())
	defer s.Close()
	body := marshal(object{"model": model, "prompt": make([]int, 1000)})
	for name, url := range map[string]string{"direct": direct.URL, "proxy": s.URL} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				a, err := http.Post(url+pathCompletion, "application/json", bytes.NewReader(body))
				require.NoError(b, err)
				_, _ = io.Copy(io.Discard, a.Body)
				require.NoError(b, a.Body.Close())
			}
		})
	}
}
