package service

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
)

// enroll registers an engine whose events never come.
func enroll(t *testing.T, s *Service, instance, more string) {
	t.Helper()
	code, answer := post(t, s, "/register", fmt.Sprintf(`{"endpoint":"tcp://127.0.0.1:1","type":"vLLM","modelname":"m","instance_id":%q,`+
		`"block_size":4,"dp_rank":0%s}`, instance, more))
	require.Equal(t, 200, code, "%v", answer)
	require.Equal(t, map[string]any{"status": "registered successfully", "instance_id": instance}, answer)
}

// prompt is the tokens from 0 to n.
func prompt(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%d,", i)
	}
	return "[" + strings.TrimSuffix(b.String(), ",") + "]"
}

// TestSchedule: the engine that has the prompt prefills it, one whose role it is decodes, and reports end requests.
func TestSchedule(t *testing.T) {
	s := launch(t, `{"scheduler":{"presume":false}}`)
	enroll(t, s, "a", `,"role":"prefill"`)
	enroll(t, s, "bb", `,"role":"prefill"`)
	code, answer := post(t, s, "/report", `{"instance_id":"d","model":"m","role":"decode","kv_capacity":100000,"decode":{"batch":0,"kv_tokens":0}}`)
	require.Equal(t, 200, code, "%v", answer)
	holds(t, s, "default", "bb", 0, 8000, kvevent.GPU)

	code, answer = post(t, s, "/schedule", `{"model":"m","request_id":"r1","token_ids":`+prompt(8100)+`}`)
	require.Equal(t, 200, code, "%v", answer)
	require.Equal(t, "bb", answer["prefill"])
	require.Equal(t, "d", answer["decode"])
	require.EqualValues(t, 8000, answer["prefix_len"])
	require.Empty(t, answer["transfer_from"])
	require.Equal(t, "r1", answer["request_id"])
	require.Greater(t, answer["ttft"], 0.0)
	require.Greater(t, answer["tbt"], 0.0)

	code, answer = post(t, s, "/report", `{"instance_id":"bb","requests":[{"request_id":"r1","event":"prefill_done","seconds":0.02,"cached_tokens":7990},
		{"request_id":"r1","event":"decode_start"},{"request_id":"r1","event":"decode_done","output_tokens":10},{"request_id":"r1","event":"failed"}]}`)
	require.Equal(t, 200, code)
	require.Equal(t, map[string]any{"accepted": 3.0, "unknown": 1.0, "rejected": []any{}}, answer)
	_, metrics := ask(t, s, "", "GET", "/metrics", "")
	for _, line := range []string{
		`larder_conductor_predicted_hit_tokens_total{instance="bb",tenant="default"} 8000`,
		`larder_conductor_actual_hit_tokens_total{instance="bb",tenant="default"} 7990`,
		`larder_conductor_pending_requests{model="m",tenant="default"} 0`,
	} {
		require.Contains(t, metrics["text"], line+"\n")
	}

	code, answer = post(t, s, "/unregister", `{"instance_id":"bb"}`)
	require.Equal(t, 200, code)
	require.Equal(t, map[string]any{"status": "unregistered successfully", "removed_instances": []any{"bb|default|0"}}, answer)
	code, answer = post(t, s, "/schedule", `{"model":"m","token_ids":[1,2,3]}`)
	require.Equal(t, 200, code)
	require.Equal(t, "a", answer["prefill"], "the other one is gone, and the one that only reports is not")
	require.Equal(t, "d", answer["decode"])
	require.NotEmpty(t, answer["request_id"])
}

// TestRejection: a request that cannot be served in time is answered with 429, why, and when to come back.
func TestRejection(t *testing.T) {
	s := launch(t, `{"scheduler":{"classes":{"":{"ttft_slo":"30s","tbt_slo":"100ms"},"now":{"ttft_slo":"1ms"}}}}`)
	enroll(t, s, "a", "")
	code, answer := post(t, s, "/schedule", `{"model":"m","class":"now","token_ids":`+prompt(8000)+`}`)
	require.Equal(t, 429, code)
	require.Equal(t, "ttft", answer["reason"])
	require.Equal(t, "prefill", answer["stage"])
	require.NotEmpty(t, answer["error"])
	code, _ = post(t, s, "/schedule", `{"model":"m","token_ids":`+prompt(8000)+`}`)
	require.Equal(t, 200, code)
	_, metrics := ask(t, s, "", "GET", "/metrics", "")
	require.Contains(t, metrics["text"], `larder_conductor_rejected_total{reason="ttft",stage="prefill"} 1`+"\n")
}

// TestRegisterAgain: the same again changes nothing, another one under the same name is refused.
func TestRegisterAgain(t *testing.T) {
	s := launch(t, `{}`)
	enroll(t, s, "a", "")
	enroll(t, s, "a", "")
	code, answer := post(t, s, "/register", `{"endpoint":"tcp://127.0.0.1:2","type":"vLLM","modelname":"m","instance_id":"a","block_size":4,"dp_rank":0}`)
	require.Equal(t, 400, code)
	require.Equal(t, "conflict", answer["reason"])
	code, answer = post(t, s, "/register", `{"endpoint":"tcp://127.0.0.1:2","type":"vLLM","modelname":"m","instance_id":"pool","block_size":4,"dp_rank":0}`)
	require.Equal(t, 400, code)
	require.Equal(t, "instance_id", answer["field"], "the pool is called that")
	_, answer = ask(t, s, "", "GET", "/services", "")
	require.EqualValues(t, 1, answer["count"])
}

// TestConfig: a file says all that is wrong with its instances at once, and names them.
func TestConfig(t *testing.T) {
	for _, c := range []struct{ config, want string }{
		{`{"http_server_prt":1}`, "http_server_prt"},
		{`{"http_server_port":70000}`, "1 to 65535"},
		{`{"kvevent_instance":{"x":{"endpoint":"tcp://h:1","type":"vLLM","modelname":"m","block_size":0,"dp_rank":0}}}`, `"x": block_size`},
		{`{"kvevent_instance":{"x":{"type":"vLLM"},"y":{"endpont":"tcp://h:1"}}}`, `"y": unknown field "endpont"`},
		{`{"tokens":{"":"t"}}`, "needs a name and a token"},
	} {
		_, err := ParseFile([]byte(c.config))
		require.ErrorContains(t, err, c.want)
	}
	for _, c := range []struct{ scheduler, want string }{
		{`{"polcy":"random"}`, "polcy"},
		{`{"policy":"rondom"}`, "choose one of"},
		{`{"decode_time":"soon"}`, "soon"},
		{`{"preset":"abacus"}`, "choose one of"},
		{`{"classes":{"a":{"ttft":"1s"}}}`, "ttft"},
	} {
		_, err := parseScheduler([]byte(c.scheduler))
		require.ErrorContains(t, err, c.want)
	}
}

// TestRestart: a conductor that is started again knows what it knew: engines, what they are for, what they hold.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	again := func(config string) *Service {
		file, err := ParseFile([]byte(config))
		require.NoError(t, err)
		s, err := Start(Config{Listen: "127.0.0.1:0", File: file, StateDir: dir})
		require.NoError(t, err)
		return s
	}
	s := again(`{"kvevent_instance":{"bb":{"endpoint":"tcp://127.0.0.1:1","type":"vLLM","modelname":"m","block_size":4,"dp_rank":0}}}`)
	enroll(t, s, "a", `,"role":"decode"`)
	require.NoError(t, s.Close())

	s = again(`{"kvevent_instance":{"bb":{"endpoint":"tcp://127.0.0.1:2","type":"vLLM","modelname":"m","block_size":4,"dp_rank":0}}}`)
	_, answer := ask(t, s, "", "GET", "/services", "")
	require.EqualValues(t, 2, answer["count"])
	require.Contains(t, compact(t, answer), "tcp://127.0.0.1:2", "the configuration counts for more than what was kept")
	for range 4 {
		code, answer := post(t, s, "/schedule", `{"model":"m","token_ids":[1,2,3]}`)
		require.Equal(t, 200, code)
		require.Equal(t, "bb", answer["prefill"], "the other one decodes")
	}
	require.NoError(t, s.Close())
}

// TestModelsOfATenant: what one tenant says leaves room for others, and models without engines are forgotten.
func TestModelsOfATenant(t *testing.T) {
	s := launch(t, `{}`)
	for i := range maxModels {
		code, answer := post(t, s, "/report", fmt.Sprintf(`{"instance_id":"a","tenant_id":"greedy","model":"m%d"}`, i))
		require.Equal(t, 200, code, "%v", answer)
	}
	code, answer := post(t, s, "/report", `{"instance_id":"a","tenant_id":"greedy","model":"one more"}`)
	require.Equal(t, 503, code)
	require.Equal(t, "full", answer["reason"])
	code, _ = post(t, s, "/report", `{"instance_id":"a","tenant_id":"modest","model":"m"}`)
	require.Equal(t, 200, code)
	s.schedulers.expire(now() + defaultRequestTTL + time.Second)
	require.Empty(t, s.schedulers.list())
	code, _ = post(t, s, "/report", `{"instance_id":"a","tenant_id":"greedy","model":"one more"}`)
	require.Equal(t, 200, code)
}

// TestReportedInstances: an instance that is known by its reports alone stays for as long as it sends some, whatever they say; and
// what it has said of itself once counts until it says otherwise.
func TestReportedInstances(t *testing.T) {
	s := launch(t, `{}`)
	say := func(more string) {
		code, answer := post(t, s, "/report", `{"instance_id":"d","model":"m"`+more+`}`)
		require.Equal(t, 200, code, "%v", answer)
	}
	caps := func() Capacity {
		sc := s.schedulers.find(schedulerKey{"default", "m"})
		require.NotNil(t, sc)
		return sc.caps["d"]
	}
	say(`,"role":"decode","kv_capacity":1000,"bandwidth":1e9`)
	id := s.schedulers.find(schedulerKey{"default", "m"}).ids["d"]
	say(`,"role":"decode"`)
	say(``)
	require.Equal(t, Capacity{Role: "decode", KVCapacity: 1000, Bandwidth: 1e9}, caps())
	require.Equal(t, id, s.schedulers.find(schedulerKey{"default", "m"}).ids["d"], "it is the same one")
	for _, report := range []string{``, `,"role":"decode"`} {
		s.schedulers.find(schedulerKey{"default", "m"}).heard["d"] -= defaultRequestTTL
		say(report)
		s.schedulers.expire(now() + time.Second)
		require.NotNil(t, s.schedulers.find(schedulerKey{"default", "m"}))
	}
	say(`,"kv_capacity":2000`)
	require.Equal(t, Capacity{Role: "decode", KVCapacity: 2000, Bandwidth: 1e9}, caps())
}

// TestReportedQueue: an instance's own queue counts, also if it only knows how many tokens wait.
func TestReportedQueue(t *testing.T) {
	s := launch(t, `{}`)
	enroll(t, s, "a", "")
	enroll(t, s, "bb", "")
	ask := func() (string, float64) {
		code, answer := post(t, s, "/schedule", `{"model":"m","token_ids":[1,2,3]}`)
		require.Equal(t, 200, code)
		return answer["prefill"].(string), answer["ttft"].(float64) //nolint:forcetypeassert // fails the test
	}
	for _, queue := range []string{`{"seconds":7}`, `{"tokens":100000,"requests":10}`} {
		code, _ := post(t, s, "/report", `{"instance_id":"a","queue":`+queue+`}`)
		require.Equal(t, 200, code)
		where, ttft := ask()
		require.Equal(t, "bb", where)
		require.Less(t, ttft, 1.0)
	}
	code, _ := post(t, s, "/report", `{"instance_id":"a","queue":{"tokens":-1}}`)
	require.Equal(t, 400, code)
}
