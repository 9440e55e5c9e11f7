package service

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor"
	"larder/conductor/kvevent"
)

// launch begins a service with a configuration, at a port of its own.
func launch(t *testing.T, config string) *Service {
	t.Helper()
	file, err := ParseFile([]byte(config))
	require.NoError(t, err)
	s, err := Start(Config{Listen: "127.0.0.1:0", File: file, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// ask sends a request and returns the status and what the answer says.
func ask(t *testing.T, s *Service, token, method, path, body string) (int, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "http://"+s.Addr()+path, strings.NewReader(body))
	require.NoError(t, err)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(req)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	answer := map[string]any{}
	if bytes.HasPrefix(bytes.TrimSpace(b), []byte("{")) {
		require.NoError(t, json.Unmarshal(b, &answer), "%s", b)
	} else {
		answer["text"] = string(b)
	}
	return resp.StatusCode, answer
}

// post is ask for most.
func post(t *testing.T, s *Service, path, body string) (int, map[string]any) {
	t.Helper()
	return ask(t, s, "", "POST", path, body)
}

// compact is a value as JSON.
func compact(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	require.NoError(t, err)
	return string(b)
}

// object is a value that is one.
func object(t *testing.T, v any) map[string]any {
	t.Helper()
	m, ok := v.(map[string]any)
	require.True(t, ok, "%v", v)
	return m
}

// holds has the index know that an engine holds the blocks of tokens from 0 to n, of 4 each.
func holds(t *testing.T, s *Service, tenant, instance string, rank, n int, medium kvevent.Medium) {
	t.Helper()
	e := &kvevent.Event{Kind: kvevent.Stored, Medium: medium, Rank: rank, BlockSize: 4, BaseBlock: -1}
	for i := range n {
		e.Tokens = append(e.Tokens, uint32(i))
		if i%4 == 3 {
			e.Hashes = append(e.Hashes, uint64(1000*len(instance)+i))
		}
	}
	src := &conductor.Source{Instance: instance, Scope: conductor.Scope{Tenant: tenant, Model: "m", BlockSize: 4}, Rank: rank}
	require.NoError(t, s.x.Apply(src, e, rank))
}

// TestQuery: the answers are as other conductors give them.
func TestQuery(t *testing.T) {
	s := launch(t, `{}`)
	holds(t, s, "default", "a", 0, 12, kvevent.GPU)
	holds(t, s, "default", "a", 1, 4, kvevent.GPU)
	holds(t, s, "default", "bb", 0, 8, kvevent.CPU)
	code, answer := post(t, s, "/query", `{"model":"m","block_size":4,"token_ids":[0,1,2,3,4,5,6,7,8,9,10,11,12]}`)
	require.Equal(t, 200, code)
	require.JSONEq(t, `{"default":{
		"a":{"longest_matched":12,"GPU":12,"DP":{"0":12,"1":4},"CPU":0,"DISK":0},
		"bb":{"longest_matched":8,"GPU":0,"DP":{"0":0},"CPU":8,"DISK":0}}}`, compact(t, answer))
	_, one := post(t, s, "/query", `{"model":"m","block_size":4,"token_ids":[0,1,2,3],"instance_id":"bb","lora_id":-1,"tenant_id":null}`)
	require.JSONEq(t, `{"default":{"bb":{"longest_matched":4,"GPU":0,"DP":{"0":0},"CPU":4,"DISK":0}}}`, compact(t, one))
	for _, other := range []string{
		`"model":"n","block_size":4`, `"model":"m","block_size":2`, `"model":"m","block_size":4,"lora_name":"l"`,
		`"model":"m","block_size":4,"tenant_id":"t"`, `"model":"m","block_size":4,"additionalsalt":"w8a8"`,
	} {
		code, answer := post(t, s, "/query", `{"token_ids":[0,1,2,3],`+other+`}`)
		require.Equal(t, 200, code)
		require.Equal(t, `{}`, compact(t, slices.Collect(maps.Values(answer))[0]), other)
	}
	_, salted := post(t, s, "/query", `{"model":"m","block_size":4,"token_ids":[0,1,2,3],"cache_salt":"s"}`)
	require.NotContains(t, compact(t, salted), `"longest_matched":4`)
	of := &conductor.Source{Instance: "s", Scope: conductor.Scope{Tenant: "default", Model: "m", BlockSize: 4, Salt: "s"}}
	own := &kvevent.Event{
		Kind: kvevent.Stored, Rank: kvevent.NoRank, BlockSize: 4, BaseBlock: -1, Hashes: []uint64{5}, Tokens: []uint32{0, 1, 2, 3}, Salt: []byte("s"),
	}
	require.NoError(t, s.x.Apply(&conductor.Source{Instance: "a", Scope: conductor.Scope{Tenant: "default", Model: "m", BlockSize: 4}}, own, 0))
	own.Salt = nil
	require.NoError(t, s.x.Apply(of, own, 0))
	_, salted = post(t, s, "/query", `{"model":"m","block_size":4,"token_ids":[0,1,2,3],"cache_salt":"s"}`)
	require.JSONEq(t, `{"default":{
		"a":{"longest_matched":4,"GPU":4,"DP":{"0":4,"1":0},"CPU":0,"DISK":0},"bb":{"longest_matched":0,"GPU":0,"DP":{"0":0},"CPU":0,"DISK":0},
		"s":{"longest_matched":4,"GPU":4,"DP":{"0":4},"CPU":0,"DISK":0}}}`, compact(t, salted), "a salt of the request, and of an engine")
	_, salted = post(t, s, "/query_by_hash", `{"model":"m","block_size":4,"seq_hashes":[5],"cache_salt":"s"}`)
	require.JSONEq(t, `{"default":{"s":{"longest_matched":4,"GPU":4,"DP":{"0":4},"CPU":0,"DISK":0}}}`, compact(t, salted))

	names := conductor.Names(nil, 0, []uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 4, nil)
	_, hashed := post(t, s, "/query_by_hash", `{"model":"m","block_size":4,"seq_hashes":`+compact(t, names)+`}`)
	require.Equal(t, compact(t, answer), compact(t, hashed))
	_, hashed = post(t, s, "/query_by_hash", `{"model":"m","block_size":4,"block_hash":["1003","1007","1011"]}`)
	require.Equal(t, compact(t, answer), compact(t, hashed), "as an engine calls them")
}

// TestErrors: what is wrong is answered with error, reason, field and index.
func TestErrors(t *testing.T) {
	s := launch(t, `{}`)
	engine := `"type":"vLLM","modelname":"m","instance_id":"a","block_size":4`
	for _, c := range []struct {
		method, path, body string
		code               int
		want               string
	}{
		{"GET", "/query", ``, 405, `method_not_allowed`},
		{"POST", "/services", `{}`, 405, `method_not_allowed`},
		{"GET", "/nowhere", ``, 404, `not_found`},
		{"POST", "/query", `{"token_ids":[1],"block_size":4}`, 400, `missing model`},
		{"POST", "/query", `{"model":"m","block_size":4}`, 400, `missing token_ids`},
		{"POST", "/query", `{"model":"m","token_ids":[1]}`, 400, `missing block_size`},
		{"POST", "/query", `{"model":"","token_ids":[1],"block_size":4}`, 400, `invalid_value model`},
		{"POST", "/query", `{"model":"m","token_ids":[1,"2"],"block_size":4}`, 400, `invalid_type token_ids 1`},
		{"POST", "/query_by_hash", `{"model":"m","block_size":4}`, 400, `missing seq_hashes`},
		{"POST", "/register", `{"endpoint":"tcp://127.0.0.1:1",` + engine + `}`, 400, `missing dp_rank`},
		{"POST", "/register", `{"endpoint":"127.0.0.1:1",` + engine + `,"dp_rank":0}`, 400, `invalid_value endpoint`},
		{"POST", "/register", `{"endpoint":"tcp://h:1","type":"TGI","modelname":"m","instance_id":"a","block_size":4,"dp_rank":0}`, 400, `invalid_value type`},
		{"POST", "/register", `{"endpoint":"tcp://127.0.0.1:1",` + engine + `,"dp_rank":0,"role":"cook"}`, 400, `invalid_value role`},
		{"POST", "/unregister", `{"instance_id":"a"}`, 404, `not_found instance_id`},
		{"POST", "/resync", `{"instance_id":"a"}`, 404, `not_found instance_id`},
		{"POST", "/schedule", `{"model":"m","token_ids":[1],"block_size":4}`, 404, `not_found model`},
		{"POST", "/report", `{"instance_id":"a"}`, 400, `missing model`},
		{"POST", "/report", `{"instance_id":"a","model":"m","requests":[{"request_id":"r","event":"eaten"}]}`, 400, `invalid_value requests 0`},
		{"POST", "/report", `{"instance_id":"a","model":"m","requests":[{"event":"failed"}]}`, 400, `missing requests 0`},
		{
			"POST", "/report", `{"instance_id":"a","model":"m","requests":[{"request_id":"r","event":"prefill_done","seconds":-1}]}`, 400,
			`out_of_range requests 0`,
		},
		{"POST", "/report", `{"instance_id":"a","model":"m","decode":{"batsch":1}}`, 400, `invalid_type decode`},
	} {
		code, answer := ask(t, s, "", c.method, c.path, c.body)
		got, _ := answer["reason"].(string)
		if field, ok := answer["field"].(string); ok {
			got += " " + field
		}
		if index, ok := answer["index"]; ok {
			got += " " + compact(t, index)
		}
		require.Equal(t, c.code, code, "%s %s: %v", c.path, c.body, answer)
		require.Equal(t, c.want, got, "%s %s: %v", c.path, c.body, answer)
		require.NotEmpty(t, answer["error"])
	}
}

// TestTenants: a tenant's token asks for that tenant, sees what is its own, and learns of nobody else.
func TestTenants(t *testing.T) {
	s := launch(t, `{"tokens":{"red":"r-token","blue":"b-token"},"operator_token":"o-token"}`)
	holds(t, s, "red", "a", 0, 8, kvevent.GPU)
	holds(t, s, "blue", "b", 0, 4, kvevent.GPU)
	query := `{"model":"m","block_size":4,"token_ids":[0,1,2,3,4,5,6,7]}`
	for _, token := range []string{"", "wrong", "o-toke"} {
		code, _ := ask(t, s, token, "POST", "/query", query)
		require.Equal(t, 401, code)
	}
	code, answer := ask(t, s, "r-token", "POST", "/query", query)
	require.Equal(t, 200, code)
	require.Contains(t, compact(t, answer), `{"red":{"a":`)
	_, answer = ask(t, s, "b-token", "POST", "/query", query)
	require.Contains(t, compact(t, answer), `{"blue":{"b":`)
	for path, body := range map[string]string{
		"/query":      `{"tenant_id":"red","model":"m","block_size":4,"token_ids":[0,1,2,3]}`,
		"/unregister": `{"tenant_id":"red","instance_id":"a"}`,
		"/report":     `{"tenant_id":"red","instance_id":"a"}`,
		"/schedule":   `{"tenant_id":"red","model":"m","token_ids":[1]}`,
		"/register":   `{"endpoint":"tcp://h:1","type":"vLLM","modelname":"m","instance_id":"a","block_size":4,"dp_rank":0,"tenant_id":"red"}`,
		"/resync":     `{"instance_id":"a"}`,
	} {
		code, answer = ask(t, s, "b-token", "POST", path, body)
		require.Equal(t, 403, code, path)
		require.Equal(t, "forbidden", answer["reason"], path)
	}
	code, _ = ask(t, s, "b-token", "GET", "/metrics", "")
	require.Equal(t, 403, code, "metrics tell of all tenants")
	_, answer = ask(t, s, "b-token", "GET", "/global_view", "")
	require.Contains(t, compact(t, answer), `"blue"`)
	require.NotContains(t, compact(t, answer), `"red"`)
	_, answer = ask(t, s, "o-token", "GET", "/global_view", "")
	require.EqualValues(t, 2, answer["context_count"])
	_, answer = ask(t, s, "o-token", "POST", "/query", `{"tenant_id":"red",`+query[1:])
	require.Contains(t, compact(t, answer), `{"red":{"a":`)
	code, _ = ask(t, s, "", "GET", "/healthz", "")
	require.Equal(t, 200, code)
}

// TestGlobalView: replicas, media, ranks and accesses, by context.
func TestGlobalView(t *testing.T) {
	s := launch(t, `{}`)
	holds(t, s, "default", "a", 1, 8, kvevent.GPU)
	holds(t, s, "default", "bb", 0, 4, kvevent.Disk)
	_, _ = post(t, s, "/query", `{"model":"m","block_size":4,"token_ids":[0,1,2,3,4,5,6,7]}`)
	code, answer := ask(t, s, "", "GET", "/global_view", "")
	require.Equal(t, 200, code)
	contexts, ok := answer["model_contexts"].([]any)
	require.True(t, ok)
	require.Len(t, contexts, 1)
	c := object(t, contexts[0])
	for _, i := range object(t, c["instances"]) {
		text, ok := object(t, i)["last_access"].(string)
		require.True(t, ok)
		at, err := time.Parse(time.RFC3339, text)
		require.NoError(t, err)
		require.WithinDuration(t, time.Now(), at, time.Minute)
		delete(object(t, i), "last_access")
	}
	require.JSONEq(t, `{"tenant_id":"default","model_name":"m","lora_name":"","block_size":4,"additional_salt":"","prefix_count":2,
		"replica_count":3,"orphan_count":0,"media":{"GPU":2,"DISK":1},"dp_ranks":[0,1],"instances":{
		"a":{"block_count":2,"media":{"GPU":2},"dp_ranks":[1],"hit_queries":1,"hit_tokens":8},
		"bb":{"block_count":1,"media":{"DISK":1},"dp_ranks":[0],"hit_queries":1,"hit_tokens":4}}}`, compact(t, c))
}

// TestOpenAPI: the description has just the paths that there are, and the fields that they take.
func TestOpenAPI(t *testing.T) {
	s := launch(t, `{}`)
	code, doc := ask(t, s, "", "GET", "/openapi.json", "")
	require.Equal(t, 200, code)
	paths := object(t, doc["paths"])
	require.ElementsMatch(t, slices.Collect(maps.Keys(routes)), slices.Collect(maps.Keys(paths)))
	for path, rt := range routes {
		op := object(t, object(t, paths[path])[strings.ToLower(rt.method)])
		if rt.method != "POST" {
			continue
		}
		// A field that nobody knows is refused with the list of those that are known.
		_, answer := post(t, s, path, `{"no such field":1}`)
		text, ok := answer["error"].(string)
		require.True(t, ok)
		_, list, ok := strings.Cut(text, "there are ")
		require.True(t, ok, "%s: %v", path, answer)
		content := object(t, object(t, object(t, op["requestBody"])["content"])["application/json"])
		fields := object(t, object(t, content["schema"])["properties"])
		require.ElementsMatch(t, strings.Split(list, ", "), slices.Collect(maps.Keys(fields)), path)
	}
}

// TestMetrics: they can be scraped, and count.
func TestMetrics(t *testing.T) {
	s := launch(t, `{}`)
	holds(t, s, "default", "a", 0, 8, kvevent.GPU)
	_, _ = post(t, s, "/query", `{"model":"m","block_size":4,"token_ids":[0,1,2,3]}`)
	_, _ = post(t, s, "/query", `{`)
	code, answer := ask(t, s, "", "GET", "/metrics", "")
	require.Equal(t, 200, code)
	for _, line := range []string{
		`larder_conductor_requests_total{path="/query",status="200"} 1`, `larder_conductor_requests_total{path="/query",status="400"} 1`,
		`larder_conductor_blocks 2`, `larder_conductor_stored_blocks_total 2`, `larder_conductor_sources{state="live"} 0`,
	} {
		require.Contains(t, answer["text"], line+"\n")
	}
}
