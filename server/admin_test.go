package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
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
	"github.com/valyala/fasthttp/fasthttputil"

	"larder/meta"
	"larder/protocol"
)

// startAdminTest starts a cluster of one with an admin on a port of its own.
func startAdminTest(tb testing.TB, change func(*Config)) (*Server, *Admin) {
	tb.Helper()
	dir, err := os.MkdirTemp("", "larder-admin-") // short, for the socket's path
	require.NoError(tb, err)
	cfg := Default()
	cfg.DataDir = dir
	cfg.Listen, cfg.PeerListen, cfg.AdminListen = Off, Off, "127.0.0.1:0"
	cfg.Pool = []DeviceConfig{{Path: filepath.Join(dir, "pool"), Size: 16 << 20}}
	cfg.MinFreeDisk = 1 << 20
	if change != nil {
		change(&cfg)
	}
	logger := slog.New(slog.DiscardHandler)
	s, err := Start(cfg, logger)
	require.NoError(tb, err)
	a, err := StartAdmin(s, logger)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		// The test's context has ended by now.
		ctx, cancel := contextForStop()
		defer cancel()
		require.NoError(tb, a.Stop(ctx))
		require.NoError(tb, s.Stop(ctx))
		require.NoError(tb, os.RemoveAll(dir))
	})
	return s, a
}

// ask sends a request and returns status and body.
func ask(tb testing.TB, a *Admin, method, path, body string, headers ...string) (int, []byte) {
	tb.Helper()
	r, err := http.NewRequestWithContext(tb.Context(), method, "http://"+a.Addr()+path, strings.NewReader(body))
	require.NoError(tb, err)
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	require.NoError(tb, err)
	defer func() { require.NoError(tb, response.Body.Close()) }()
	b, err := io.ReadAll(response.Body)
	require.NoError(tb, err)
	return response.StatusCode, b
}

func TestAdminReads(t *testing.T) {
	s, a := startAdminTest(t, nil)
	for path := range adminRoutes {
		if adminRoutes[path].get == nil {
			continue
		}
		code, body := ask(t, a, "GET", path, "")
		require.Equal(t, http.StatusOK, code, "%s: %s", path, body)
		require.NotEmpty(t, body, path)
	}
	_, body := ask(t, a, "GET", "/status", "")
	var status StatusReply
	require.NoError(t, json.Unmarshal(body, &status))
	require.True(t, status.Serving)
	require.Equal(t, "lru", status.Settings.Policy)
	require.Equal(t, s.NodeID(), status.Leader)
	require.Equal(t, []string{"owned", "orphaned", "departed", "marked", "draining"}, stateNames())
	require.Contains(t, string(body), `"regions":{"departed":0,"draining":0,"marked":0,"orphaned":0,"owned":0}`)
	require.NotRegexp(t, `"[A-Z]\w*":`, strings.ReplaceAll(string(body), "/", ""), "field names are snake_case")
}

func stateNames() (names []string) {
	for _, s := range regionStateList {
		names = append(names, s.String())
	}
	return names
}

func TestAdminChanges(t *testing.T) {
	s, a := startAdminTest(t, nil)
	code, body := ask(t, a, "POST", "/policy", `{"policy":"sieve","page_size":131072}`)
	require.Equal(t, http.StatusOK, code, "%s", body)
	require.Equal(t, "sieve", s.Settings().Policy)
	require.Equal(t, uint64(131072), s.Settings().PageSize)
	require.Equal(t, uint64(64<<20), s.Settings().RegionSize, "what is absent stays")
	code, body = ask(t, a, "POST", "/pin", `{"keys":["nobody"]}`)
	require.Equal(t, http.StatusOK, code, "%s", body)
	require.JSONEq(t, `{"results":[false]}`, string(body))
	code, body = ask(t, a, "POST", "/clear", `{"all":true}`)
	require.Equal(t, http.StatusOK, code, "%s", body)
	code, body = ask(t, a, "POST", "/cluster-version", `{}`)
	require.Equal(t, http.StatusOK, code, "%s", body)
	code, body = ask(t, a, "POST", "/snapshot", `{}`)
	require.Equal(t, http.StatusOK, code)
	require.NotEmpty(t, body)

	cfg := s.Config()
	cfg.DataDir, cfg.NodeID = t.TempDir(), 0
	index, err := Restore(&cfg, bytes.NewReader(body), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.Positive(t, index)
	require.NotEqual(t, s.NodeID(), cfg.NodeID, "a restored member is a new one")
	half := cfg
	half.DataDir, half.NodeID = t.TempDir(), 0
	_, err = Restore(&half, bytes.NewReader(body[:len(body)-1]), slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "snapshot", "a cut stream is not restored")
	_, err = Restore(&cfg, bytes.NewReader(body), slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "already holds a member")
}

func TestAdminRefuses(t *testing.T) {
	_, a := startAdminTest(t, nil)
	long, name := strings.Repeat("k", protocol.MaxKeyBytes+1), strings.Repeat("n", protocol.MaxNameBytes+1)
	tests := []struct {
		name, method, path, body string
		code                     int
		want                     string
	}{
		{"no such path", "GET", "/nope", "", 404, "GET / lists them"},
		{"method", "DELETE", "/keys", "", 405, "use GET or HEAD"},
		{"get of a change", "GET", "/clear", "", 405, "use POST"},
		{"not JSON", "POST", "/policy", "policy=lru", 400, "not what is expected"},
		{"not UTF-8", "POST", "/clear", "{\"context\":{\"model\":\"\xff\"}}", 400, "not UTF-8"},
		{"half a surrogate pair", "POST", "/clear", `{"prefix":"p\udcff"}`, 400, "not UTF-8"},
		{"half a surrogate pair, then text", "POST", "/clear", `{"prefix":"\ud83dabcdef"}`, 400, "not UTF-8"},
		{"half a surrogate pair, then its like", "POST", "/clear", `{"prefix":"\ud83d\ud83d"}`, 400, "not UTF-8"},
		{"an escaped backslash", "POST", "/clear", `{"prefix":"\\udcff","all":true}`, 400, "exactly one"},
		{"a surrogate pair", "POST", "/clear", `{"prefix":"\ud83d\ude00","all":true}`, 400, "exactly one"},
		{"unknown field", "POST", "/policy", `{"polcy":"lru"}`, 400, "polcy"},
		{"two values", "POST", "/policy", `{} {}`, 400, "more than one value"},
		{"unknown policy", "POST", "/policy", `{"policy":"mru"}`, 400, "choose one of"},
		{"page size", "POST", "/policy", `{"page_size":5000}`, 400, "power of two"},
		{"region size", "POST", "/policy", `{"region_size":5000}`, 400, "times page_size"},
		{"huge page size", "POST", "/policy", `{"page_size":9223372036854775808}`, 400, "region_size"},
		{"tenant without a name", "POST", "/tenants", `{"max_pins":1}`, 400, "1 to 256 bytes"},
		{"long name of a tenant", "POST", "/tenants", `{"name":"` + name + `","max_pins":1}`, 400, "1 to 256 bytes"},
		{"no limit", "POST", "/tenants", `{"name":"a"}`, 400, "say which"},
		{"too many pins", "POST", "/tenants", `{"name":"a","max_pins":65537}`, 400, "at most 65536"},
		{"no such tenant", "POST", "/tenants", `{"name":"a","max_pins":0}`, 404, "larder ctl tenants"},
		{"more than the pool", "POST", "/tenants", `{"name":"a","guarantee":18446744073709551615}`, 409, "can be guaranteed"},
		{"version", "POST", "/cluster-version", `{"version":99}`, 400, "newer larder"},
		{"no keys", "POST", "/pin", `{}`, 400, "name 1 to 4096"},
		{"long key", "POST", "/pin", `{"keys":["` + long + `"]}`, 400, "1 to 1024 bytes"},
		{"hexadecimal", "POST", "/pin", `{"keys_hex":["xy"]}`, 400, "not hexadecimal"},
		{"endless soft pin", "POST", "/pin", `{"keys":["a"],"soft":true}`, 400, "ttl_ms"},
		{"overflowing pin", "POST", "/pin", `{"keys":["a"],"ttl_ms":18446744073709551615}`, 400, "at most"},
		{"no scope", "POST", "/clear", `{}`, 400, "exactly one"},
		{"two scopes", "POST", "/clear", `{"all":true,"prefix":"x"}`, 400, "exactly one"},
		{"empty context", "POST", "/clear", `{"context":{}}`, 400, "exactly one"},
		{"tenant of a context", "POST", "/clear", `{"context":{"tenant":"` + name + `"}}`, 400, "at most 256 bytes"},
		{"model of a context", "POST", "/clear", `{"context":{"model":"` + name + `"}}`, 400, "at most 256 bytes"},
		{"lora of a context", "POST", "/clear", `{"context":{"lora":"` + name + `"}}`, 400, "at most 256 bytes"},
		{"salt of a context", "POST", "/clear", `{"context":{"salt":"` + name + `"}}`, 400, "at most 256 bytes"},
		{"long prefix", "POST", "/clear", `{"prefix":"` + long + `"}`, 400, "at most 1024"},
		{"hexadecimal prefix", "POST", "/clear", `{"prefix_hex":"xy"}`, 400, "not hexadecimal"},
		{"long hexadecimal prefix", "POST", "/clear", `{"prefix_hex":"` + hex.EncodeToString([]byte(long)) + `"}`, 400, "at most 1024"},
		{"two prefixes", "POST", "/clear", `{"prefix":"a","prefix_hex":"61"}`, 400, "exactly one"},
		{"no member", "POST", "/members/remove", `{}`, 400, "say which"},
		{"unknown member", "POST", "/members/remove", `{"id":77}`, 404, "no member"},
		{"member address", "POST", "/members", `{"addr":"nowhere"}`, 400, "host:port"},
		{"no instance", "POST", "/drain", `{}`, 400, "say which"},
		{"no device", "POST", "/devices/drain", `{}`, 400, "name one"},
		{"device and node", "POST", "/devices/drain", `{"device":1,"node":"x"}`, 400, "name one"},
		{"unknown device", "POST", "/devices/drain", `{"device":77}`, 404, "larder ctl devices"},
		{"no task", "POST", "/tasks/cancel", `{}`, 400, "GET /tasks"},
		{"unknown task", "POST", "/tasks/cancel", `{"tasks":[77]}`, 404, "larder ctl tasks"},
		{"no place", "POST", "/copy", `{"keys":["a"]}`, 400, "name one of"},
		{"no such place", "POST", "/copy", `{"keys":["a"],"tier":"ssd"}`, 404, "no node serves"},
		{"nothing to copy", "POST", "/copy", `{"tier":"ssd"}`, 400, "name 1 to"},
		{"low watermark", "POST", "/policy", `{"tier_low":101}`, 400, "no percentage"},
		{"low watermark of the slowest tier", "POST", "/policy", `{"tier_lows":"ssd=5"}`, 400, "slowest tier"},
		{"low watermark of no device", "POST", "/policy", `{"tier_lows":"dram=5,#999=5"}`, 400, "no device #999"},
		{"limit", "GET", "/keys?limit=5000", "", 400, "up to 4096"},
		{"cursor", "GET", "/keys?cursor=x", "", 400, "whole number"},
		{"prefix", "GET", "/keys?prefix=" + long, "", 400, "longer than a key"},
		{"deep", "GET", "/check?deep=perhaps", "", 400, "true or false"},
		{"profile", "GET", "/debug/pprof/nope", "", 404, "lists them"},
		{"long profile", "GET", "/debug/pprof/profile?seconds=999", "", 400, "up to 50"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			code, body := ask(t, a, tt.method, tt.path, tt.body)
			require.Equal(t, tt.code, code, "%s", body)
			var e AdminError
			require.NoError(t, json.Unmarshal(body, &e), "%s", body)
			require.Contains(t, e.Error+" "+e.Hint, tt.want)
			require.NotEmpty(t, e.Code)
		})
	}
	code, _ := ask(t, a, "POST", "/clear", `{"all":true}`, "Content-Type", "text/plain")
	require.Equal(t, http.StatusUnsupportedMediaType, code, "what a page in a browser can send is refused")
	conn, err := net.Dial("tcp", a.Addr())
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	_, err = fmt.Fprintf(conn, "POST /pin HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", adminBody+1)
	require.NoError(t, err)
	answer, err := bufio.NewReader(conn).ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, answer, "413", "a body that is too long is refused before it is read")
}

func TestAdminToken(t *testing.T) {
	_, a := startAdminTest(t, func(cfg *Config) { cfg.AdminToken = "hunter2" })
	code, _ := ask(t, a, "GET", "/status", "")
	require.Equal(t, http.StatusOK, code, "reading needs no token")
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap"} {
		code, _ = ask(t, a, "GET", path, "")
		require.Equal(t, http.StatusUnauthorized, code, "profiles tell too much")
	}
	code, _ = ask(t, a, "POST", "/clear", `{"all":true}`)
	require.Equal(t, http.StatusUnauthorized, code)
	code, _ = ask(t, a, "POST", "/clear", `{"all":true}`, "Authorization", "Bearer hunter")
	require.Equal(t, http.StatusUnauthorized, code)
	code, _ = ask(t, a, "POST", "/clear", `{"all":true}`, "Authorization", "Bearer hunter2")
	require.Equal(t, http.StatusOK, code)
	_, body := ask(t, a, "GET", "/config", "")
	require.NotContains(t, string(body), "hunter2")
}

func TestAdminIsOffAndStopsTwice(t *testing.T) {
	s, a := startAdminTest(t, nil)
	_, err := StartAdmin(&Server{cfg: Config{AdminListen: a.Addr()}}, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "free port")
	cfg := s.Config()
	cfg.AdminListen = Off
	off, err := StartAdmin(&Server{cfg: cfg}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.Nil(t, off)
	require.Empty(t, off.Addr())
	require.NoError(t, off.Stop(t.Context()))
	require.NoError(t, a.Stop(t.Context()))
	require.NoError(t, a.Stop(t.Context()))
}

// metricLine is a sample of the text format.
var metricLine = regexp.MustCompile(`^([a-z_][a-z0-9_]*)(\{([a-z_]+="[^"]*",?)*\})? (\S+)$`)

func TestMetricsFollowTheConventions(t *testing.T) {
	s, a := startAdminTest(t, nil)
	s.Counters().Requests[protocol.TypeLookup].Add(3)
	s.Counters().Latency[protocol.TypeLookup].Observe(1500)
	_, body := ask(t, a, "GET", "/metrics", "")
	kinds := make(map[string]string)
	seen := make(map[string]bool)
	for line := range strings.Lines(string(body)) {
		line = strings.TrimSuffix(line, "\n")
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, kind, _ := strings.Cut(rest, " ")
			require.NotContains(t, kinds, name, "a family appears once")
			kinds[name] = kind
			continue
		}
		if strings.HasPrefix(line, "# HELP ") {
			continue
		}
		match := metricLine.FindStringSubmatch(line)
		require.NotNil(t, match, line)
		require.False(t, seen[match[1]+match[2]], "twice: %s", line)
		seen[match[1]+match[2]] = true
	}
	for name, kind := range kinds {
		if !strings.HasPrefix(name, metricPrefix) {
			continue
		}
		require.Equal(t, kind == "counter", strings.HasSuffix(name, "_total"), "%s is a %s", name, kind)
		require.NotRegexp(t, `_(ms|us|ns|kb|mb|milliseconds|percent)(_|$)`, name, "base units")
	}
	text := string(body)
	require.Contains(t, text, "larder_requests_total{type=\"LOOKUP_KV\"} 3\n")
	require.Contains(t, text, "larder_request_duration_seconds_bucket{type=\"LOOKUP_KV\",le=\"1.024e-06\"} 0\n")
	require.Contains(t, text, "larder_request_duration_seconds_bucket{type=\"LOOKUP_KV\",le=\"2.048e-06\"} 1\n")
	require.Contains(t, text, "larder_request_duration_seconds_count{type=\"LOOKUP_KV\"} 1\n")
	require.Contains(t, text, "larder_raft_is_leader 1\n")
	for _, state := range regionStateList {
		require.Contains(t, text, fmt.Sprintf("larder_regions{state=%q} 0\n", state))
	}
	require.Contains(t, text, "go_goroutines ")
}

func TestEveryReasonAndStateIsShown(t *testing.T) {
	require.Len(t, removalReasons, meta.Reasons-1, "a reason was added: show it")
	require.Len(t, regionStateList, int(meta.RegionDraining), "a state was added: show it")
}

// FuzzAdmin sends raw bytes as HTTP.
func FuzzAdmin(f *testing.F) {
	_, a := startAdminTest(f, nil)
	listener := fasthttputil.NewInmemoryListener()
	go func() { _ = a.http.Serve(listener) }() // until a is stopped, which closes the listener
	for _, seed := range []string{
		"GET /status HTTP/1.1\r\nHost: x\r\n\r\n",
		"GET /keys?prefix=%00%ff&limit=1&cursor=18446744073709551615 HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /policy HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n{\"policy\":\"lru\"}",
		"POST /pin HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
		"HEAD /metrics HTTP/1.0\r\n\r\n", "\x00\x01\x02", "GET  / HTTP/9.9\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, slow := range []string{"/debug/pprof/profile", "/debug/pprof/trace"} {
			if bytes.Contains(raw, []byte(slow)) {
				t.Skip("takes its time on purpose")
			}
		}
		conn, err := listener.Dial()
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		require.NoError(t, conn.SetDeadline(time.Now().Add(fuzzPatience)))
		if _, err := conn.Write(append(raw, "\r\n\r\n"...)); err != nil {
			return // it has seen enough
		}
		answer, err := bufio.NewReader(conn).ReadBytes('\n')
		if err == nil {
			require.True(t, bytes.HasPrefix(answer, []byte("HTTP/1.1 ")), "%q", answer)
		}
	})
}

// fuzzPatience is how long a request that may be half of one is waited for.
const fuzzPatience = 20 * time.Millisecond

// contextForStop bounds the end of a test's server.
func contextForStop() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 20*time.Second)
}
