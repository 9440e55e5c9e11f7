package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/examples/proxy/engine"
)

const (
	patience  = 10 * time.Second // bounds what a test waits for
	model     = "m"
	blockSize = 4
)

type object = map[string]any

// startProxy serves engines, by their instance_id, with defaults that a test can change.
func startProxy(t *testing.T, conductor string, engines map[string]engineConfig, change func(*config)) (*Proxy, string) {
	t.Helper()
	cfg := config{Model: model, BlockSize: blockSize, Conductor: conductor, Engines: engines, RouteHeaders: true}
	if change != nil {
		change(&cfg)
	}
	require.NoError(t, cfg.complete())
	p := New(t.Context(), cfg, slog.New(slog.NewTextHandler(t.Output(), nil)))
	s := httptest.NewServer(p.Handler())
	t.Cleanup(func() {
		s.Close()
		p.Close()
	})
	return p, s.URL
}

// startEngine runs an engine that takes no time, unless cfg says so.
func startEngine(t *testing.T, cfg engine.Config) (*engine.Engine, string) {
	t.Helper()
	cfg.Model, cfg.BlockSize = model, blockSize
	if cfg.PrefillPerToken == 0 {
		cfg.PrefillPerToken, cfg.DecodePerToken = time.Nanosecond, time.Nanosecond
	}
	e, err := engine.New(t.Context(), cfg)
	require.NoError(t, err)
	s := httptest.NewServer(e.Handler())
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, e.Close())
	})
	return e, s.URL
}

// fakeEngine answers completions as a test wants, and tokenises.
func fakeEngine(t *testing.T, answer http.HandlerFunc) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, object{"tokens": []int{1, 2, 3, 4, 5}, "count": 5})
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body) // a server that has not read the request does not see the client go
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
		answer(w, r)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

// fine answers.
func fine(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, object{"choices": []int{}})
}

// send asks with a header, and gives the answer, whose body the caller closes.
func send(t *testing.T, url string, header http.Header, v any) *http.Response {
	t.Helper()
	b, ok := v.([]byte)
	if !ok {
		b = marshal(v)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader(b))
	require.NoError(t, err)
	maps.Copy(r.Header, header)
	a, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	return a
}

// post asks, and gives the status and the answer's body.
func post(t *testing.T, url string, v any) (int, []byte) {
	t.Helper()
	a := send(t, url, nil, v)
	defer func() { require.NoError(t, a.Body.Close()) }()
	b, err := io.ReadAll(a.Body)
	require.NoError(t, err)
	return a.StatusCode, b
}

// outcome is what tests look at of an answer.
type outcome struct {
	status int
	header http.Header
	body   string
	cached int
	error  struct {
		Message, Type, Param, Reason, Stage string
		Code                                any // engines' is a number
	}
}

// ask has a request answered through the proxy.
func ask(t *testing.T, url string, header http.Header, v any) (o outcome) {
	t.Helper()
	a := send(t, url, header, v)
	defer func() { require.NoError(t, a.Body.Close()) }()
	b, err := io.ReadAll(a.Body)
	require.NoError(t, err)
	o.status, o.header, o.body = a.StatusCode, a.Header, string(b)
	var fields struct {
		Usage usage
		Error json.RawMessage
	}
	if json.Unmarshal(b, &fields) == nil {
		if fields.Usage.Details != nil {
			o.cached = fields.Usage.Details.CachedTokens
		}
		if fields.Error != nil {
			require.NoError(t, json.Unmarshal(fields.Error, &o.error), o.body)
		}
	}
	return o
}

// metric is a line of the proxy's metrics, without its value.
func metric(t *testing.T, url, series string) string {
	t.Helper()
	r, err := http.Get(url + "/metrics")
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Body.Close()) }()
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), series+" "); ok {
			return v
		}
	}
	return ""
}

func engines(urls ...string) map[string]engineConfig {
	all := map[string]engineConfig{}
	for i, url := range urls {
		all[fmt.Sprintf("engine-%d", i+1)] = engineConfig{URL: url}
	}
	return all
}

// sentence has n words that no other sentence has.
func sentence(name string, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, " %s%d", name, i)
	}
	return b.String()
}

// TestPrefixesFindTheirEngine: what an engine has computed makes requests that begin the same go there, although each engine
// names its blocks differently, and although they come from clients that know nothing of each other. Others spread.
func TestPrefixesFindTheirEngine(t *testing.T) {
	conductor := startConductor(t, `{}`)
	e1, url1 := startEngine(t, engine.Config{HashSeed: "1"})
	e2, url2 := startEngine(t, engine.Config{HashSeed: "2"})
	register(t, conductor, "engine-1", e1, url1)
	register(t, conductor, "engine-2", e2, url2)
	_, url := startProxy(t, conductor, engines(url1, url2), nil)

	at := map[string]string{} // by prompt
	used := map[string]int{}
	for i := range 8 {
		system := sentence(fmt.Sprintf("s%d-", i), 40)
		o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": system, "max_tokens": 1})
		require.Equal(t, http.StatusOK, o.status, o.body)
		require.Equal(t, byQuery, o.header.Get("X-Larder-Route"))
		require.Zero(t, o.cached)
		at[system] = o.header.Get("X-Larder-Decode")
		used[at[system]]++
	}
	require.Len(t, used, 2, "new prompts spread")
	for system, id := range at {
		var tokens struct{ Tokens []uint32 }
		_, body := post(t, url1+"/tokenize", object{"prompt": system})
		require.NoError(t, json.Unmarshal(body, &tokens))
		require.Eventually(t, func() bool { return matched(t, conductor, tokens.Tokens)[id] == 40 }, patience, time.Millisecond)
		o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": system + " and more", "max_tokens": 1})
		require.Equal(t, id, o.header.Get("X-Larder-Decode"))
		require.Equal(t, "40", o.header.Get("X-Larder-Prefix-Len"))
		require.Equal(t, 40, o.cached, "the engine has what the conductor says")
	}
	var predicted, cached float64
	for id := range used {
		var a, b float64
		_, err := fmt.Sscan(metric(t, url, `larder_proxy_predicted_tokens_total{instance="`+id+`"}`), &a)
		require.NoError(t, err)
		_, err = fmt.Sscan(metric(t, url, `larder_proxy_cached_tokens_total{instance="`+id+`"}`), &b)
		require.NoError(t, err)
		predicted, cached = predicted+a, cached+b
	}
	require.InDelta(t, 8*40, predicted, 0)
	require.InDelta(t, predicted, cached, 0)
}

// TestChatsFindTheirEngine: the next turn of a chat goes where the one before was answered, its answer included. Salts keep
// chats apart.
func TestChatsFindTheirEngine(t *testing.T) {
	conductor := startConductor(t, `{}`)
	e1, url1 := startEngine(t, engine.Config{HashSeed: "1"})
	e2, url2 := startEngine(t, engine.Config{HashSeed: "2"})
	register(t, conductor, "engine-1", e1, url1)
	register(t, conductor, "engine-2", e2, url2)
	_, url := startProxy(t, conductor, engines(url1, url2), nil)
	chat := []object{{"role": "user", "content": sentence("question", 30)}}
	first := ask(t, url+pathChat, nil, object{"model": model, "messages": chat, "max_tokens": 12})
	require.Equal(t, http.StatusOK, first.status, first.body)
	var said struct {
		Choices []struct{ Message struct{ Content string } }
	}
	require.NoError(t, json.Unmarshal([]byte(first.body), &said))
	chat = append(chat, object{"role": "assistant", "content": said.Choices[0].Message.Content}, object{"role": "user", "content": "why?"})
	var next outcome
	require.Eventually(t, func() bool {
		next = ask(t, url+pathChat, nil, object{"model": model, "messages": chat, "max_tokens": 1})
		return next.header.Get("X-Larder-Prefix-Len") >= "44"
	}, patience, time.Millisecond)
	require.Equal(t, first.header.Get("X-Larder-Decode"), next.header.Get("X-Larder-Decode"))
	salted := ask(t, url+pathChat, nil, object{"model": model, "messages": chat, "cache_salt": "pepper"})
	require.Equal(t, "0", salted.header.Get("X-Larder-Prefix-Len"))
	require.Zero(t, salted.cached)
}

// TestBusyEnginesAreSpared: what is cached draws requests, until too many are there.
func TestBusyEnginesAreSpared(t *testing.T) {
	for name, c := range map[string]struct {
		outstanding int64
		at          string
	}{"idle": {0, "engine-1"}, "busy": {1, "engine-1"}, "too busy": {2, "engine-2"}} {
		t.Run(name, func(t *testing.T) {
			conductor := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				writeJSON(w, http.StatusOK, object{"default": object{"engine-1": object{"longest_matched": 1000}}})
			}))
			defer conductor.Close()
			p, url := startProxy(t, conductor.URL, engines(fakeEngine(t, fine), fakeEngine(t, fine)), nil)
			p.fleet.byID["engine-1"].outstanding.Add(c.outstanding)
			o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": make([]int, 1000)})
			require.Equal(t, c.at, o.header.Get("X-Larder-Decode"))
		})
	}
}

// TestScheduled: the conductor's choice is followed, and it is told what comes of it.
func TestScheduled(t *testing.T) {
	s := startScript(t)
	_, url1 := startEngine(t, engine.Config{LoRAs: []string{"sql"}})
	_, url2 := startEngine(t, engine.Config{LoRAs: []string{"sql"}})
	_, url := startProxy(t, s.URL, engines(url1, url2), func(c *config) {
		c.Mode, c.ConductorToken, c.LoRAs = modeSchedule, "secret", []string{"sql"}
	})
	s.plan = schedule{Prefill: "engine-2", Decode: "engine-2", PrefixLen: 3, TransferFrom: "engine-1", Reason: "cache"}
	header := http.Header{headerClass: {"batch"}, headerPriority: {"2"}, headerOutputLength: {"9"}, "Authorization": {"Bearer mine"}}
	o := ask(t, url+pathCompletion, header, object{"model": model, "prompt": "a b c", "max_tokens": 5, "cache_salt": "pepper"})
	require.Equal(t, http.StatusOK, o.status, o.body)
	require.Equal(t, "engine-2", o.header.Get("X-Larder-Decode"))
	require.Equal(t, "engine-1", o.header.Get("X-Larder-Transfer-From"))
	require.Equal(t, "cache", o.header.Get("X-Larder-Reason"))
	s.awaitEvents(t, "engine-2 prefill_done", "engine-2 decode_start", "engine-2 hit", "engine-2 decode_done")
	require.Equal(t, 5, s.reported[3].progress.OutputTokens)
	require.Equal(t, 0, *s.reported[2].progress.Cached)
	require.Zero(t, s.reported[0].progress.Seconds, "nobody sees when the prompt of an answer at once was computed")
	require.Equal(t, []string{"Bearer secret"}, s.tokens)
	asked := s.asked[0]
	require.Len(t, asked.TokenIDs, 3)
	asked.TokenIDs, asked.RequestID = nil, ""
	require.Equal(t, scheduling{
		prompt: prompt{Model: model, BlockSize: blockSize, TenantID: "default", CacheSalt: "pepper"},
		Class:  "batch", Priority: 2, OutputLength: 9,
	}, asked)

	o = ask(t, url+pathCompletion, nil, object{"model": "sql", "prompt": "a", "stream": true, "max_tokens": 4})
	require.Equal(t, "sql", s.asked[1].LoRAName)
	require.Equal(t, 4, strings.Count(o.body, `"text"`))
	s.awaitEvents(t, "engine-2 prefill_done", "engine-2 decode_start", "engine-2 decode_done")
	require.Equal(t, 4, s.reported[len(s.reported)-1].progress.OutputTokens)
	require.Positive(t, s.reported[len(s.reported)-3].progress.Seconds)
}

// TestConductorSchedules: the real conductor has prompts computed where they are cached, and what it rejects clients are told.
func TestConductorSchedules(t *testing.T) {
	conductor := startConductor(t, `{"scheduler": {"classes": {"strict": {"ttft_slo": "1ms"}}}}`)
	e1, url1 := startEngine(t, engine.Config{HashSeed: "1"})
	e2, url2 := startEngine(t, engine.Config{HashSeed: "2"})
	register(t, conductor, "engine-1", e1, url1)
	register(t, conductor, "engine-2", e2, url2)
	_, url := startProxy(t, conductor, engines(url1, url2), func(c *config) { c.Mode = modeSchedule })
	q := object{"model": model, "prompt": make([]uint32, 4001), "max_tokens": 2, "stream": true}
	first := ask(t, url+pathCompletion, nil, q)
	require.Equal(t, http.StatusOK, first.status, first.body)
	require.Equal(t, bySchedule, first.header.Get("X-Larder-Route"))
	var again outcome
	require.Eventually(t, func() bool {
		again = ask(t, url+pathCompletion, nil, q)
		return again.header.Get("X-Larder-Prefix-Len") == "4000"
	}, patience, time.Millisecond)
	require.Equal(t, http.StatusOK, again.status)
	require.Equal(t, 2, strings.Count(again.body, `"text"`))

	q["prompt"] = slices.Repeat([]int{9}, 4001) // is nowhere, and takes longer
	o := ask(t, url+pathCompletion, http.Header{headerClass: {"strict"}}, q)
	require.Equal(t, http.StatusTooManyRequests, o.status, o.body)
	require.NotEmpty(t, o.header.Get("Retry-After"))
	require.NotEmpty(t, o.error.Reason)
	require.Equal(t, "prefill", o.error.Stage)
	require.Equal(t, "0", metric(t, url, "larder_proxy_lost_reports_total"))
}

// TestRejection: the client of a request that the conductor rejects is told why, and when to come back.
func TestRejection(t *testing.T) {
	s := startScript(t)
	_, url1 := startEngine(t, engine.Config{})
	_, url := startProxy(t, s.URL, engines(url1), func(c *config) { c.Mode = modeSchedule })
	s.status, s.refusal = http.StatusTooManyRequests, object{"error": "no instance can", "reason": "ttft_slo", "stage": "prefill"}
	o := ask(t, url+pathChat, nil, object{"model": model, "messages": []object{{"role": "user", "content": "hi"}}})
	require.Equal(t, http.StatusTooManyRequests, o.status)
	require.Equal(t, "7", o.header.Get("Retry-After"))
	require.Equal(t, "rate_limit_exceeded", o.error.Code)
	require.Equal(t, "ttft_slo", o.error.Reason)
	require.Equal(t, "prefill", o.error.Stage)
	require.Contains(t, o.error.Message, "no instance can (ttft_slo)")
	require.Equal(t, "1", metric(t, url, "larder_proxy_rejections_total"))
}

// TestPrefillThenDecode: one instance computes the prompt, another has its KV cache and answers.
func TestPrefillThenDecode(t *testing.T) {
	s := startScript(t)
	_, url1 := startEngine(t, engine.Config{HashSeed: "1", PrefillPerToken: time.Millisecond, DecodePerToken: time.Nanosecond})
	_, url2 := startEngine(t, engine.Config{HashSeed: "2"})
	fleet := map[string]engineConfig{"p": {url1, "prefill"}, "d": {url2, "decode"}}
	_, url := startProxy(t, s.URL, fleet, func(c *config) { c.Mode = modeSchedule })
	s.plan = schedule{Prefill: "p", Decode: "d"}
	q := object{
		"model": model, "prompt": sentence("w", 41), "max_tokens": 6, "min_tokens": 6, "stream": true,
		"stream_options": object{"include_usage": true},
	}
	o := ask(t, url+pathCompletion, nil, q)
	require.Equal(t, http.StatusOK, o.status, o.body)
	require.Equal(t, "p", o.header.Get("X-Larder-Prefill"))
	require.Equal(t, "d", o.header.Get("X-Larder-Decode"))
	require.Equal(t, 6, strings.Count(o.body, `"text"`))
	require.Contains(t, o.body, `"cached_tokens":40`, "the decode instance has what was sent")
	s.awaitEvents(t, "p prefill_done", "d decode_start", "d decode_done")
	for _, x := range s.reported {
		switch x.progress.Event {
		case eventPrefillDone:
			require.GreaterOrEqual(t, x.progress.Seconds, 0.041)
		case eventDecodeDone:
			require.Equal(t, 6, x.progress.OutputTokens)
		}
	}
	require.Equal(t, "p", s.reported[0].instance)
	require.Zero(t, *s.reported[0].progress.Cached)

	s.full = true
	o = ask(t, url+pathCompletion, nil, q)
	require.Equal(t, http.StatusTooManyRequests, o.status, "the decode instance has no room when the prompt has been computed")
	require.Equal(t, "decode", o.error.Stage)
	s.awaitEvents(t, "p prefill_done", "d decode_start")
	q["prompt"] = []string{"a", "b"}
	o = ask(t, url+pathCompletion, nil, q)
	require.Equal(t, http.StatusBadRequest, o.status)
	s.awaitEvents(t, "p failed")
}

// TestTransferParams: what vLLM's NixlConnector needs goes from one instance to the other as it is, and none of a client's.
func TestTransferParams(t *testing.T) {
	s := startScript(t)
	got := make(chan object, 2)
	answer := func(w http.ResponseWriter, r *http.Request) {
		var q object
		_ = json.NewDecoder(r.Body).Decode(&q)
		got <- q
		writeJSON(w, http.StatusOK, object{"kv_transfer_params": object{"do_remote_prefill": true, "remote_port": 5}})
	}
	at := fakeEngine(t, answer)
	fleet := map[string]engineConfig{"p": {at, "prefill"}, "d": {at, "decode"}, "b": {at, "both"}}
	_, url := startProxy(t, s.URL, fleet, func(c *config) { c.Mode = modeSchedule })
	q := object{
		"model": model, "messages": []object{}, "max_completion_tokens": 7, "min_tokens": 3, "n": 2, "temperature": 0.5,
		"kv_transfer_params": object{"do_remote_prefill": true, "remote_host": "elsewhere"},
	}
	s.plan = schedule{Prefill: "p", Decode: "d"}
	require.Equal(t, http.StatusOK, ask(t, url+pathChat, nil, q).status)
	require.Equal(t, object{
		"model": model, "messages": []any{}, "max_completion_tokens": 1., "max_tokens": 1., "temperature": 0.5, "stream": false,
		"kv_transfer_params": object{
			"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil,
			"remote_host": nil, "remote_port": nil,
		},
	}, <-got)
	require.Equal(t, object{
		"model": model, "messages": []any{}, "max_completion_tokens": 7., "min_tokens": 3., "n": 2., "temperature": 0.5,
		"kv_transfer_params": object{"do_remote_prefill": true, "remote_port": 5.},
	}, <-got)
	s.plan = schedule{Prefill: "b", Decode: "b"}
	require.Equal(t, http.StatusOK, ask(t, url+pathChat, nil, q).status)
	require.NotContains(t, <-got, "kv_transfer_params")
}

// TestWithoutConductor: the proxy is not down because the conductor is, and says so.
func TestWithoutConductor(t *testing.T) {
	release := make(chan struct{})
	silent := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	defer silent.Close()
	defer close(release)
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }))
	defer broken.Close()
	strict := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusBadRequest, object{"error": "no such model", "reason": "unknown", "field": "model"})
	}))
	defer strict.Close()
	for name, conductor := range map[string]string{
		"gone": "http://127.0.0.1:1", "silent": silent.URL, "broken": broken.URL, "strict": strict.URL,
	} {
		for _, mode := range []string{modeQuery, modeSchedule} {
			t.Run(name+" "+mode, func(t *testing.T) {
				_, url := startProxy(t, conductor, engines(fakeEngine(t, fine), fakeEngine(t, fine)), func(c *config) {
					c.Mode, c.ConductorTimeout = mode, 50*time.Millisecond
				})
				used := map[string]int{}
				for range 4 {
					o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"})
					require.Equal(t, http.StatusOK, o.status, o.body)
					require.Equal(t, fallbackConductor, o.header.Get("X-Larder-Route"))
					used[o.header.Get("X-Larder-Decode")]++
				}
				require.Equal(t, map[string]int{"engine-1": 2, "engine-2": 2}, used)
				require.Equal(t, "4", metric(t, url, `larder_proxy_routes_total{by="fallback_conductor"}`))
			})
		}
	}
}

// TestConductorComesBack: it is asked again after some time.
func TestConductorComesBack(t *testing.T) {
	s := startScript(t)
	p, url := startProxy(t, s.URL, engines(fakeEngine(t, fine)), func(c *config) { c.Mode = modeSchedule })
	s.plan = schedule{Prefill: "engine-1", Decode: "engine-1"}
	s.status = http.StatusInternalServerError
	ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"})
	s.mu.Lock()
	s.status = http.StatusOK
	s.mu.Unlock()
	require.True(t, p.conductor.down.on())
	require.Eventually(t, func() bool {
		return ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"}).header.Get("X-Larder-Route") == bySchedule
	}, patience, 50*time.Millisecond)
}

// TestUnknownInstance: a conductor that chooses an engine that this proxy does not have is not followed.
func TestUnknownInstance(t *testing.T) {
	s := startScript(t)
	_, url := startProxy(t, s.URL, engines(fakeEngine(t, fine)), func(c *config) { c.Mode = modeSchedule })
	s.plan = schedule{Prefill: "engine-1", Decode: "engine-9"}
	o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"})
	require.Equal(t, http.StatusOK, o.status)
	require.Equal(t, fallbackInstance, o.header.Get("X-Larder-Route"))
	s.awaitEvents(t, "engine-9 failed")
}

// TestEngineFails: before the first byte of an answer another engine gives it.
func TestEngineFails(t *testing.T) {
	hijack := func(w http.ResponseWriter, says string) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_, _ = conn.Write([]byte(says))
			_ = conn.Close()
		}
	}
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		down   bool // it is passed over afterwards
	}{
		"it breaks off at once": {func(w http.ResponseWriter, _ *http.Request) { hijack(w, "") }, true},
		"it breaks off after a header": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		}, true},
		"it ends after a header": {func(w http.ResponseWriter, _ *http.Request) {
			hijack(w, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
		}, true},
		"it speaks no HTTP": {func(w http.ResponseWriter, _ *http.Request) { hijack(w, "SSH-2.0\r\n") }, true},
		"it says nothing":   {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, true},
		"it says nothing after headers": {func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, true},
		"it cannot now": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := startScript(t)
			s.plan = schedule{Prefill: "engine-1", Decode: "engine-1"}
			p, url := startProxy(t, s.URL, engines(fakeEngine(t, c.answer), fakeEngine(t, fine)), func(c *config) {
				c.Mode, c.FirstByteTimeout = modeSchedule, 100*time.Millisecond
			})
			o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": []int{1}, "stream": true})
			require.Equal(t, http.StatusOK, o.status, o.body)
			require.Equal(t, "engine-2", o.header.Get("X-Larder-Decode"))
			require.Equal(t, "1", metric(t, url, `larder_proxy_retries_total{instance="engine-1"}`))
			require.Equal(t, c.down, p.fleet.byID["engine-1"].down.on())
			s.awaitEvents(t, "engine-1 failed")
			require.Zero(t, p.fleet.byID["engine-1"].outstanding.Load())
		})
	}
}

// TestAllEnginesFail: the client is told, after a bounded number of tries, in OpenAI's form or in the engine's words.
func TestAllEnginesFail(t *testing.T) {
	tries := make(chan struct{}, 10)
	broken := fakeEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		tries <- struct{}{}
		writeJSON(w, http.StatusInternalServerError, object{"error": object{"message": "EngineDeadError"}})
	})
	_, url := startProxy(t, "http://127.0.0.1:1", engines(broken, broken, broken, broken), nil)
	o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"})
	require.Equal(t, http.StatusInternalServerError, o.status)
	require.Equal(t, "EngineDeadError", o.error.Message)
	require.Len(t, tries, maxAttempts)

	_, url = startProxy(t, "http://127.0.0.1:1", engines("http://127.0.0.1:1", "http://127.0.0.1:1"), nil)
	o = ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"})
	require.Equal(t, http.StatusBadGateway, o.status)
	require.Equal(t, "no_engine", o.error.Code)
	require.NotContains(t, o.body, "127.0.0.1", "clients do not learn where engines are")
	r, err := http.Get(url + "/health")
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	require.Equal(t, http.StatusServiceUnavailable, r.StatusCode)
}

// TestRequestsOfItsOwnMaking: what an engine finds wrong with a request no other engine is bothered with.
func TestRequestsOfItsOwnMaking(t *testing.T) {
	tries := make(chan struct{}, 10)
	strict := fakeEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		tries <- struct{}{}
		writeJSON(w, http.StatusBadRequest, object{"error": object{"message": "temperature"}})
	})
	s := startScript(t)
	_, url := startProxy(t, s.URL, engines(strict, strict), func(c *config) { c.Mode = modeSchedule })
	for decode := 1; decode <= 2; decode++ {
		s.plan = schedule{Prefill: "engine-1", Decode: fmt.Sprintf("engine-%d", decode)}
		o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"})
		require.Equal(t, http.StatusBadRequest, o.status)
		require.Equal(t, "temperature", o.error.Message)
		require.Len(t, tries, decode)
		s.awaitEvents(t, "engine-1 failed")
	}
}

// TestAnswerBreaksOff: once a part of an answer has been passed on nobody else can give the rest, and the client sees that.
func TestAnswerBreaksOff(t *testing.T) {
	for name, rest := range map[string]http.HandlerFunc{
		"it breaks off": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"it stalls":     func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	} {
		t.Run(name, func(t *testing.T) {
			s := startScript(t)
			s.plan = schedule{Prefill: "engine-1", Decode: "engine-1"}
			_, url := startProxy(t, s.URL, engines(fakeEngine(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = w.Write([]byte("data: {}\n\n"))
				_ = http.NewResponseController(w).Flush()
				rest(w, r)
			}), fakeEngine(t, fine)), func(c *config) { c.Mode, c.StallTimeout = modeSchedule, 100*time.Millisecond })
			a := send(t, url+pathCompletion, nil, object{"model": model, "prompt": "a", "stream": true})
			defer func() { require.NoError(t, a.Body.Close()) }()
			b, err := io.ReadAll(a.Body)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.Equal(t, "data: {}\n\n", string(b))
			s.awaitEvents(t, "engine-1 prefill_done", "engine-1 decode_start", "engine-1 failed")
		})
	}
}

// TestStreaming: each piece of an answer reaches the client before the engine makes the next.
func TestStreaming(t *testing.T) {
	next := make(chan struct{})
	_, url := startProxy(t, "http://127.0.0.1:1", engines(fakeEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 5 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
			<-next
		}
	})), func(c *config) { c.ClientTimeout = 50 * time.Millisecond })
	a := send(t, url+pathCompletion, nil, object{"model": model, "prompt": "a", "stream": true})
	defer func() { require.NoError(t, a.Body.Close()) }()
	require.Equal(t, "text/event-stream", a.Header.Get("Content-Type"))
	lines := bufio.NewReader(a.Body)
	for i := range 5 {
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("data: %d\n", i), line)
		_, err = lines.ReadString('\n')
		require.NoError(t, err)
		time.Sleep(20 * time.Millisecond) // all of it takes longer than client_timeout, no piece does
		next <- struct{}{}
	}
	_, err := lines.ReadByte()
	require.ErrorIs(t, err, io.EOF)
}

// TestClientGoes: an engine learns that nobody waits for its answer any more, at whichever point that happens.
func TestClientGoes(t *testing.T) {
	for name, begins := range map[string]bool{"before the answer": false, "during the answer": true} {
		t.Run(name, func(t *testing.T) {
			s := startScript(t)
			s.plan = schedule{Prefill: "engine-1", Decode: "engine-1"}
			reached, ended := make(chan struct{}), make(chan struct{})
			p, url := startProxy(t, s.URL, engines(fakeEngine(t, func(w http.ResponseWriter, r *http.Request) {
				if begins {
					_, _ = w.Write([]byte("data: {}\n\n"))
					_ = http.NewResponseController(w).Flush()
				}
				if !begins {
					close(reached)
				}
				<-r.Context().Done()
				close(ended)
			}), fakeEngine(t, fine)), func(c *config) { c.Mode = modeSchedule })
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			left := make(chan struct{})
			go func() {
				defer close(left)
				r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+pathCompletion, bytes.NewReader(marshal(object{
					"model": model, "prompt": []int{1}, "stream": true,
				})))
				if err != nil {
					return
				}
				if a, err := http.DefaultClient.Do(r); err == nil {
					if begins {
						close(reached)
					}
					_, _ = io.ReadAll(a.Body)
					_ = a.Body.Close()
				}
			}()
			<-reached
			leave()
			<-left
			select {
			case <-ended:
			case <-time.After(patience):
				t.Fatal("the engine goes on for nobody")
			}
			require.Eventually(t, func() bool {
				return metric(t, url, `larder_proxy_requests_total{status="499"}`) == "1"
			}, patience, time.Millisecond)
			if begins {
				s.awaitEvents(t, "engine-1 prefill_done", "engine-1 decode_start", "engine-1 failed")
			} else {
				s.awaitEvents(t, "engine-1 failed")
			}
			require.False(t, p.fleet.byID["engine-1"].down.on(), "it is not to blame")
			require.Zero(t, p.fleet.byID["engine-1"].outstanding.Load())
		})
	}
}

// TestWithoutTokenizer: engines need not tokenise, or all of them.
func TestWithoutTokenizer(t *testing.T) {
	mute := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/tokenize" {
			http.NotFound(w, r)
			return
		}
		fine(w, r)
	}))
	defer mute.Close()
	s := startScript(t)
	_, url := startProxy(t, s.URL, engines(mute.URL), func(c *config) { c.Mode = modeSchedule })
	o := ask(t, url+pathCompletion, nil, object{"model": model, "prompt": "a"})
	require.Equal(t, http.StatusOK, o.status)
	require.Equal(t, fallbackTokenize, o.header.Get("X-Larder-Route"))
	s.plan = schedule{Prefill: "engine-1", Decode: "engine-1"}
	for _, prompt := range []any{[]int{1, 2}, [][]int{{1, 2}, {3}}} {
		o = ask(t, url+pathCompletion, nil, object{"model": model, "prompt": prompt})
		require.Equal(t, bySchedule, o.header.Get("X-Larder-Route"), "the client has told the tokens")
		require.Equal(t, []uint32{1, 2}, s.asked[len(s.asked)-1].TokenIDs)
	}
}

// TestHeaders: engines see of a client what is theirs to see, and clients see of engines the same.
func TestHeaders(t *testing.T) {
	got := make(chan http.Header, 1)
	answer := func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header.Clone()
		w.Header().Set("Server", "uvicorn")
		w.Header().Set("Set-Cookie", "a=b")
		fine(w, r)
	}
	header := http.Header{
		"Cookie": {"a=b"}, "X-Forwarded-For": {"10.0.0.1"}, "Connection": {"Authorization"}, "Traceparent": {"00-1-2-03"},
		"Authorization": {"Bearer mine"}, "X-Request-Id": {"7"},
	}
	for token, want := range map[string]string{"": "Bearer mine", "theirs": "Bearer theirs"} {
		_, url := startProxy(t, "http://127.0.0.1:1", engines(fakeEngine(t, answer)), func(c *config) {
			c.EngineToken, c.RouteHeaders = token, false
		})
		o := ask(t, url+pathCompletion, header, object{"model": model, "prompt": []int{1}})
		require.Equal(t, http.StatusOK, o.status)
		require.Equal(t, "7", o.header.Get("X-Request-Id"))
		for name := range o.header {
			require.NotContains(t, []string{"Server", "Set-Cookie", "X-Larder-Prefill", "X-Larder-Prefix-Len"}, name)
		}
		h := <-got
		require.Equal(t, want, h.Get("Authorization"))
		require.Equal(t, "00-1-2-03", h.Get("Traceparent"))
		require.Equal(t, "7", h.Get("X-Request-Id"))
		require.Equal(t, "application/json", h.Get("Content-Type"))
		for _, name := range []string{"Cookie", "X-Forwarded-For", "Connection"} {
			require.Empty(t, h.Get(name), name)
		}
	}
}

// TestBadRequests cost nobody but their sender, who is told what is wrong.
func TestBadRequests(t *testing.T) {
	_, url := startProxy(t, "http://127.0.0.1:1", engines(fakeEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		t.Error("an engine is asked")
		w.WriteHeader(http.StatusTeapot)
	})), func(c *config) { c.MaxBody = 1000 })
	good := object{"model": model, "prompt": "a"}
	for name, c := range map[string]struct {
		path   string
		header http.Header
		q      any
		status int
		param  string
		says   string
	}{
		"no JSON":           {pathChat, nil, []byte("{"), 400, "", "JSON object"},
		"no object":         {pathChat, nil, []byte("null"), 400, "", "JSON object"},
		"too large":         {pathChat, nil, bytes.Repeat([]byte(" "), 1001), 413, "", "1000 bytes"},
		"no model":          {pathChat, nil, object{}, 400, "model", "model"},
		"another model":     {pathChat, nil, object{"model": "x"}, 404, "model", "does not exist"},
		"a number as model": {pathChat, nil, object{"model": 1}, 400, "model", "model"},
		"no messages":       {pathChat, nil, object{"model": model}, 400, "messages", "messages"},
		"no prompt":         {pathCompletion, nil, object{"model": model}, 400, "prompt", "prompt"},
		"an empty prompt":   {pathCompletion, nil, object{"model": model, "prompt": []int{}}, 400, "prompt", "empty"},
		"a stream of words": {pathCompletion, nil, object{"model": model, "prompt": "a", "stream": "yes"}, 400, "stream", "true or false"},
		"a salt of numbers": {pathCompletion, nil, object{"model": model, "prompt": "a", "cache_salt": 1}, 400, "cache_salt", "text"},
		"a long class":      {pathCompletion, http.Header{headerClass: {strings.Repeat("x", 65)}}, good, 400, "", "64 bytes"},
		"a high priority":   {pathCompletion, http.Header{headerPriority: {"8"}}, good, 400, "", "0 to 7"},
		"no priority":       {pathCompletion, http.Header{headerPriority: {"high"}}, good, 400, "", headerPriority},
		"a negative length": {pathCompletion, http.Header{headerOutputLength: {"-1"}}, good, 400, "", headerOutputLength},
	} {
		t.Run(name, func(t *testing.T) {
			o := ask(t, url+c.path, c.header, c.q)
			require.Equal(t, c.status, o.status)
			require.Equal(t, "invalid_request_error", o.error.Type)
			require.Equal(t, c.param, o.error.Param)
			require.Contains(t, o.error.Message, c.says)
		})
	}
}

// TestSlowClients: who does not send what it has announced is not waited for, and does not hold a place for ever.
func TestSlowClients(t *testing.T) {
	_, url := startProxy(t, "http://127.0.0.1:1", engines(fakeEngine(t, fine)), func(c *config) {
		c.ClientTimeout, c.MaxOutstanding = 200*time.Millisecond, 1
	})
	r, w := io.Pipe()
	slow := make(chan int, 1)
	go func() {
		a, err := http.Post(url+pathChat, "application/json", r)
		if err != nil {
			slow <- http.StatusBadRequest // its connection was closed before it had sent all
			return
		}
		_ = a.Body.Close()
		slow <- a.StatusCode
	}()
	_, err := w.Write([]byte(`{"model":`))
	require.NoError(t, err)
	var o outcome
	require.Eventually(t, func() bool {
		o = ask(t, url+pathCompletion, nil, object{"model": model, "prompt": []int{1}})
		return o.status == http.StatusServiceUnavailable
	}, patience, time.Millisecond)
	require.Equal(t, "overloaded", o.error.Code)
	require.Equal(t, "1", o.header.Get("Retry-After"))
	require.Equal(t, http.StatusBadRequest, <-slow)
	require.NoError(t, w.Close())
	require.Eventually(t, func() bool {
		return ask(t, url+pathCompletion, nil, object{"model": model, "prompt": []int{1}}).status == http.StatusOK
	}, patience, time.Millisecond)
}

// TestModels lists the model and its adapters.
func TestModels(t *testing.T) {
	_, url := startProxy(t, "http://127.0.0.1:1", engines("http://127.0.0.1:1"), func(c *config) { c.LoRAs = []string{"sql"} })
	r, err := http.Get(url + "/v1/models")
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Body.Close()) }()
	var got struct{ Data []struct{ ID string } }
	require.NoError(t, json.NewDecoder(r.Body).Decode(&got))
	require.Equal(t, []struct{ ID string }{{model}, {"sql"}}, got.Data)
}
