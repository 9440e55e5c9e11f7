package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const streamed = "data: {\"choices\":[{\"text\":\" a\"}]}\n\ndata: {\"choices\":[{\"text\":\" b\"}],\"usage\":null}\n\n"

// TestMeter counts the tokens of answers by what they say, and otherwise by their chunks.
func TestMeter(t *testing.T) {
	const said = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":3}}}\n\ndata: [DONE]\n\n"
	for name, c := range map[string]struct {
		stream bool
		answer string
		tokens int
		cached int
	}{
		"a stream":           {true, streamed + "data: [DONE]\n\n", 2, 0},
		"one that says":      {true, streamed + said, 7, 3},
		"lines with CR":      {true, strings.ReplaceAll(streamed+said, "\n", "\r\n"), 7, 3},
		"comments":           {true, ": ping\n\nevent: x\n\n" + streamed, 2, 0},
		"one that breaks":    {true, streamed + "data: {\"cho", 2, 0},
		"a line too long":    {true, "data: \"usage\"" + strings.Repeat("x", maxKept) + "\n\n" + streamed, 3, 0},
		"usage without text": {true, "data: {\"choices\":[],\"usage\":{\"completion_tokens\":0}}\n\n", 0, 0},
		"at once":            {false, `{"choices":[{}],"usage":{"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}`, 7, 3},
		"no usage":           {false, `{"choices":[{}]}`, 0, 0},
		"too long":           {false, strings.Repeat(" ", maxKept) + `{"usage":{"completion_tokens":7}}`, 0, 0},
		"no JSON":            {false, "<html>", 0, 0},
	} {
		for _, size := range []int{1, 7, 1 << 30} {
			if len(c.answer) > maxKept && size < 1<<20 {
				size = 64 << 10 // byte by byte it would take long
			}
			t.Run(name, func(t *testing.T) {
				m := meter{streamed: c.stream}
				for b := []byte(c.answer); len(b) > 0; {
					n := min(size, len(b))
					m.add(b[:n])
					b = b[n:]
				}
				require.Equal(t, c.tokens, m.tokens())
				cached := 0
				if m.usage.Details != nil {
					cached = m.usage.Details.CachedTokens
				}
				require.Equal(t, c.cached, cached)
			})
		}
	}
}

// FuzzMeter: where an answer is cut on its way does not change what is counted.
func FuzzMeter(f *testing.F) {
	f.Add([]byte(streamed), 5, true)
	f.Add([]byte(`{"usage":{"completion_tokens":7}}`), 9, false)
	f.Fuzz(func(t *testing.T, b []byte, at int, stream bool) {
		whole, cut := meter{streamed: stream}, meter{streamed: stream}
		whole.add(b)
		if at < 0 || at > len(b) {
			at = len(b)
		}
		cut.add(b[:at])
		cut.add(b[at:])
		require.Equal(t, whole.tokens(), cut.tokens())
		require.Equal(t, whole.usage, cut.usage)
	})
}

// FuzzRequest: whatever a client sends is refused with a 4xx, or can be sent on.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"model":"m","prompt":"a","stream":true}`), false)
	f.Add([]byte(`{"model":"m","prompt":[[1],["b"]],"kv_transfer_params":{}}`), false)
	f.Add([]byte(`{"model":"m","messages":[{"role":"user"}],"max_completion_tokens":3,"max_tokens":null}`), true)
	cfg := config{Model: "m", Engines: map[string]engineConfig{"a": {URL: "http://a"}}}
	require.NoError(f, cfg.complete())
	f.Fuzz(func(t *testing.T, b []byte, chat bool) {
		path := pathCompletion
		if chat {
			path = pathChat
		}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, bytes.NewReader(b))
		q, e := readRequest(httptest.NewRecorder(), r, &cfg)
		if e != nil {
			require.GreaterOrEqual(t, e.status, 400)
			require.Less(t, e.status, 500)
			return
		}
		for _, body := range [][]byte{q.body, q.tokenizeBody(), q.prefillBody(), q.decodeBody(nil)} {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, bytes.NewReader(body))
			_, e := readRequest(httptest.NewRecorder(), r, &cfg)
			require.Nil(t, e, "%s", body)
		}
	})
}
