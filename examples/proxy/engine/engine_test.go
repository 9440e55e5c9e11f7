package engine

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
	"larder/zmtp"
)

// start runs an engine that takes no time, unless cfg says so, and gives its URL.
func start(t *testing.T, cfg Config) (*Engine, string) {
	t.Helper()
	if cfg.PrefillPerToken == 0 {
		cfg.PrefillPerToken, cfg.DecodePerToken = time.Nanosecond, time.Nanosecond
	}
	cfg.Model = "m"
	e, err := New(t.Context(), cfg)
	require.NoError(t, err)
	s := httptest.NewServer(e.Handler())
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, e.Close())
	})
	return e, s.URL
}

// post asks, and gives the status and the answer's body.
func post(t *testing.T, url string, v any) (int, []byte) {
	t.Helper()
	b, err := json.Marshal(v)
	require.NoError(t, err)
	r, err := http.Post(url, "application/json", bytes.NewReader(b))
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Body.Close()) }()
	body, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return r.StatusCode, body
}

type object = map[string]any

// ask has a prompt completed and gives how many of its tokens were cached.
func ask(t *testing.T, url string, v object) (cached int, text string) {
	t.Helper()
	v["model"] = "m"
	status, body := post(t, url+"/v1/completions", v)
	require.Equal(t, http.StatusOK, status, string(body))
	var got struct {
		Choices []struct{ Text string }
		Usage   usage
	}
	require.NoError(t, json.Unmarshal(body, &got))
	require.Len(t, got.Choices, 1)
	require.Equal(t, got.Usage.PromptTokens+got.Usage.CompletionTokens, got.Usage.TotalTokens)
	return got.Usage.Details.CachedTokens, got.Choices[0].Text
}

// count is a list of tokens.
func count(from, n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = from + i
	}
	return list
}

// TestPrefixCache: whole blocks are found again, but the last token is always computed; the coldest blocks make room.
func TestPrefixCache(t *testing.T) {
	_, url := start(t, Config{BlockSize: 4, Blocks: 4})
	for _, c := range []struct {
		what   string
		prompt []int
		salt   string
		cached int
	}{
		{"nothing yet", count(0, 9), "", 0},
		{"the same", count(0, 9), "", 8},
		{"its last token", count(0, 8), "", 4},
		{"a longer one", count(0, 20), "", 8},
		{"what does not fit is not kept", count(0, 21), "", 16},
		{"with a salt", count(0, 9), "pepper", 0},
		{"the salt again", count(0, 9), "pepper", 8},
		{"the end made room, the beginning is there", count(0, 20), "", 8},
	} {
		cached, _ := ask(t, url, object{"prompt": c.prompt, "max_tokens": 1, "cache_salt": c.salt})
		require.Equal(t, c.cached, cached, c.what)
	}
}

// TestAnswersAreCached: the next turn of a chat finds the answer of the one before.
func TestAnswersAreCached(t *testing.T) {
	_, url := start(t, Config{BlockSize: 1})
	_, text := ask(t, url, object{"prompt": "Tell me a story", "max_tokens": 8})
	require.Len(t, pieces(text), 8)
	cached, _ := ask(t, url, object{"prompt": "Tell me a story" + text + " Go on"})
	require.Equal(t, 4+8, cached)
}

// TestTokenize answers as vLLM does, for texts and chats, and as completions count.
func TestTokenize(t *testing.T) {
	_, url := start(t, Config{})
	for _, q := range []object{
		{"prompt": "some words of\nmany"},
		{"messages": []object{{"role": "user", "content": "hi"}, {"role": "user", "content": []object{{"type": "text", "text": "you"}}}}},
	} {
		status, body := post(t, url+"/tokenize", q)
		require.Equal(t, http.StatusOK, status)
		var got struct {
			Tokens      []uint32
			Count       int
			MaxModelLen int `json:"max_model_len"`
		}
		require.NoError(t, json.Unmarshal(body, &got))
		require.Len(t, got.Tokens, got.Count)
		require.Equal(t, 32768, got.MaxModelLen)
		if q["prompt"] != nil {
			require.Equal(t, 4, got.Count)
		} else {
			require.Equal(t, 7, got.Count, "role, text and end of each, and the assistant's role")
		}
	}
}

// TestStream: pieces come one by one, then what was used, then the end.
func TestStream(t *testing.T) {
	_, url := start(t, Config{})
	b := `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":3,"stream_options":{"include_usage":true}}`
	r, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(b))
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Body.Close()) }()
	require.Contains(t, r.Header.Get("Content-Type"), "text/event-stream")
	var events []string
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			events = append(events, data)
		}
	}
	require.Len(t, events, 5)
	require.Contains(t, events[0], `"role":"assistant"`)
	require.Contains(t, events[2], `"finish_reason":"length"`)
	require.Contains(t, events[3], `"completion_tokens":3`)
	require.Equal(t, "[DONE]", events[4])
}

// TestBadRequests are answered with what is wrong, in vLLM's form.
func TestBadRequests(t *testing.T) {
	_, url := start(t, Config{MaxModelLen: 10})
	for name, c := range map[string]struct {
		q      any
		status int
		says   string
	}{
		"no object":       {[]int{1}, 400, "JSON object"},
		"another model":   {object{"model": "x", "prompt": "a"}, 404, "does not exist"},
		"no model":        {object{"prompt": "a"}, 400, "has a model"},
		"no prompt":       {object{"model": "m"}, 400, "prompt"},
		"many prompts":    {object{"model": "m", "prompt": []string{"a", "b"}}, 400, "several prompts"},
		"too long":        {object{"model": "m", "prompt": "a", "max_tokens": 10}, 400, "maximum context length"},
		"min beyond max":  {object{"model": "m", "prompt": "a", "max_tokens": 1, "min_tokens": 2}, 400, "min_tokens"},
		"an empty prompt": {object{"model": "m", "prompt": ""}, 400, "a token at least"},
	} {
		t.Run(name, func(t *testing.T) {
			status, body := post(t, url+"/v1/completions", c.q)
			require.Equal(t, c.status, status)
			require.Contains(t, string(body), c.says)
		})
	}
}

// TestTransfer: a decode instance need not compute what a prefill instance has sent.
func TestTransfer(t *testing.T) {
	_, prefill := start(t, Config{BlockSize: 4, HashSeed: "1"})
	_, decode := start(t, Config{BlockSize: 4, HashSeed: "2"})
	prompt := count(0, 10)
	status, body := post(t, prefill+"/v1/completions", object{
		"model": "m", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": object{"do_remote_decode": true},
	})
	require.Equal(t, http.StatusOK, status)
	var got struct {
		Params object `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal(body, &got))
	require.Equal(t, true, got.Params["do_remote_prefill"])
	require.Len(t, got.Params["remote_block_ids"], 2)
	cached, _ := ask(t, decode, object{"prompt": prompt, "kv_transfer_params": got.Params})
	require.Equal(t, 8, cached)
	cached, _ = ask(t, decode, object{"prompt": prompt})
	require.Equal(t, 8, cached, "what was received is cached")
}

// TestEvents: what the cache holds is what subscribers are told, and who missed it can ask for it.
func TestEvents(t *testing.T) {
	e, url := start(t, Config{BlockSize: 4, Blocks: 4})
	c, err := zmtp.Dial(t.Context(), e.EventsEndpoint(), zmtp.Config{Type: zmtp.SUB})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.Subscribe(""))
	time.Sleep(50 * time.Millisecond) // a subscription has no answer
	ask(t, url, object{"prompt": count(0, 8), "max_tokens": 1, "cache_salt": "pepper"})
	ask(t, url, object{"prompt": count(0, 12), "max_tokens": 1, "cache_salt": "pepper"})
	ask(t, url, object{"prompt": count(50, 8), "max_tokens": 1})
	status, _ := post(t, url+"/reset_prefix_cache", object{})
	require.Equal(t, http.StatusOK, status)

	var payloads [][]byte
	var b kvevent.Batch
	events := func(payload []byte) (list []kvevent.Event) {
		require.NoError(t, b.Decode(payload))
		require.Zero(t, b.Bad)
		return b.Events
	}
	next := func() []kvevent.Event {
		m, err := c.Read()
		require.NoError(t, err)
		require.Len(t, m, 3)
		require.Equal(t, uint64(len(payloads)), binary.BigEndian.Uint64(m[1]))
		payloads = append(payloads, bytes.Clone(m[2]))
		return events(payloads[len(payloads)-1])
	}
	first := next()
	require.Len(t, first, 1)
	require.Equal(t, kvevent.Stored, first[0].Kind)
	require.Equal(t, []uint32{0, 1, 2, 3, 4, 5, 6, 7}, first[0].Tokens)
	require.Equal(t, "pepper", string(first[0].Salt))
	require.False(t, first[0].HasParent)
	parent := first[0].Hashes[1]

	second := next()
	require.Len(t, second, 1)
	require.Equal(t, []uint32{8, 9, 10, 11}, second[0].Tokens)
	require.True(t, second[0].HasParent)
	require.Equal(t, parent, second[0].Parent)
	tail := second[0].Hashes[0]

	third := next()
	require.Len(t, third, 2)
	require.Equal(t, kvevent.Removed, third[0].Kind)
	require.Equal(t, []uint64{tail}, third[0].Hashes, "the end of a prompt goes first")
	require.Equal(t, kvevent.Stored, third[1].Kind)
	require.Equal(t, kvevent.Cleared, next()[0].Kind)

	d, err := zmtp.Dial(t.Context(), e.ReplayEndpoint(), zmtp.Config{Type: zmtp.DEALER})
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	require.NoError(t, d.Write(nil, binary.BigEndian.AppendUint64(nil, 1)))
	for i := 1; ; i++ {
		m, err := d.Read()
		require.NoError(t, err)
		require.Len(t, m, 3)
		if binary.BigEndian.Uint64(m[1]) == math.MaxUint64 {
			require.Equal(t, len(payloads), i)
			break
		}
		require.Equal(t, payloads[i], m[2])
	}
}

// TestTime: what is cached takes none, and prompts are computed one by one.
func TestTime(t *testing.T) {
	_, url := start(t, Config{BlockSize: 4, PrefillPerToken: 2 * time.Millisecond, DecodePerToken: time.Nanosecond})
	took := func(prompt []int) time.Duration {
		began := time.Now()
		ask(t, url, object{"prompt": prompt, "max_tokens": 1})
		return time.Since(began)
	}
	require.GreaterOrEqual(t, took(count(0, 101)), 202*time.Millisecond)
	require.Less(t, took(count(0, 101)), 150*time.Millisecond)
	done := make(chan time.Duration, 2)
	for i := range 2 {
		go func() { done <- took(count(1000*(i+1), 50)) }()
	}
	require.GreaterOrEqual(t, max(<-done, <-done), 200*time.Millisecond)
}

// TestConfigs that cannot be are refused.
func TestConfigs(t *testing.T) {
	for _, cfg := range []Config{{}, {Model: "m", LoRAs: []string{"m"}}, {Model: "m", Blocks: -1}, {Model: "m", Events: "udp://x"}, {Model: "m", Replay: "udp://x"}} {
		_, err := New(t.Context(), cfg)
		require.Error(t, err)
	}
}
