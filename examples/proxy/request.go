package main

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// request is what a client has asked.
type request struct {
	id     string // that engines and the conductor know it by
	path   string
	fields map[string]json.RawMessage
	body   []byte // fields, as the client wrote them
	header http.Header

	lora    string
	salt    string
	stream  bool
	prompts int             // 1 for a chat
	first   json.RawMessage // the first of a list of prompts

	// For the scheduler, from headers; zero for what is not told.
	class        string
	priority     int
	outputLength int

	tokens []uint32 // of the prompt, nil while nobody has tokenised it
}

// The headers by which clients tell the scheduler about a request.
const (
	headerClass        = "X-Larder-Class"
	headerPriority     = "X-Larder-Priority"
	headerOutputLength = "X-Larder-Output-Length"
)

// passed are the headers that engines get from clients.
var passed = []string{"Accept", "Authorization", "Content-Type", "Traceparent", "Tracestate"}

const (
	maxRequestID = 128 // bytes of an X-Request-Id that is taken over
	maxClass     = 64
	maxPriority  = 7       // the conductor's
	maxOutput    = 1 << 20 // tokens, the conductor's
)

// readRequest reads and checks a request for a completion.
func readRequest(w http.ResponseWriter, r *http.Request, c *config) (*request, *apiError) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(now().Add(c.ClientTimeout)) // if the connection is gone it cannot be read
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, c.MaxBody))
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		e := invalid("", fmt.Sprintf("the request has more than %d bytes: send less, or set the proxy's max_body", c.MaxBody))
		e.status = http.StatusRequestEntityTooLarge
		return nil, e
	}
	if err != nil {
		return nil, invalid("", "the request did not come whole: "+err.Error())
	}
	_ = rc.SetReadDeadline(time.Time{}) // else it would end the request while it is answered
	q := &request{path: r.URL.Path, body: body, header: http.Header{}}
	if err := json.Unmarshal(body, &q.fields); err != nil || q.fields == nil {
		return nil, invalid("", "the request is no JSON object")
	}
	if e := q.readFields(c); e != nil {
		return nil, e
	}
	return q, q.readHeader(r.Header, c)
}

// readFields takes from the request what routing needs. All else is the engine's to judge.
func (q *request) readFields(c *config) *apiError {
	var model string
	if !q.read("model", &model) || model == "" {
		return invalid("model", "model: give a model's name")
	}
	switch {
	case slices.Contains(c.LoRAs, model):
		q.lora = model
	case model != c.Model:
		e := invalid("model", fmt.Sprintf("The model `%s` does not exist.", model))
		e.status, e.code = http.StatusNotFound, "model_not_found"
		return e
	}
	if !q.read("stream", &q.stream) {
		return invalid("stream", "stream: true or false")
	}
	if !q.read("cache_salt", &q.salt) {
		return invalid("cache_salt", "cache_salt: a text")
	}
	// How a KV cache is moved is between this proxy and the engines: a client could have one fetch from anywhere.
	if _, ok := q.fields["kv_transfer_params"]; ok {
		delete(q.fields, "kv_transfer_params")
		q.body = q.with(nil)
	}
	return q.readPrompt()
}

// read takes a field, if it is there. It reports false if it is of another type.
func (q *request) read(name string, into any) bool {
	raw, ok := q.fields[name]
	return !ok || json.Unmarshal(raw, into) == nil
}

// readPrompt counts prompts, and takes the first, whose place decides where the request goes.
func (q *request) readPrompt() *apiError {
	q.prompts = 1
	if q.chat() {
		if _, ok := q.fields["messages"]; !ok {
			return invalid("messages", "messages: give the messages of the chat")
		}
		return nil
	}
	raw := q.fields["prompt"]
	switch {
	case len(raw) == 0:
		return invalid("prompt", "prompt: give a text, or a list of tokens")
	case raw[0] != '[': // a text, or what the engine will refuse
		return nil
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &q.tokens) != nil && json.Unmarshal(raw, &list) == nil {
		if q.tokens, q.prompts = nil, len(list); json.Unmarshal(list[0], &q.tokens) != nil {
			q.tokens, q.first = nil, list[0]
		}
	} else if len(q.tokens) == 0 {
		return invalid("prompt", "prompt: the list is empty")
	}
	return nil
}

// chat reports whether the request has messages in place of a prompt.
func (q *request) chat() bool { return q.path == pathChat }

// readHeader takes what the scheduler minds, and what engines may see.
func (q *request) readHeader(h http.Header, c *config) *apiError {
	for _, name := range passed {
		if v := h.Values(name); len(v) > 0 {
			q.header[name] = v[:1]
		}
	}
	if c.EngineToken != "" {
		q.header.Set("Authorization", "Bearer "+c.EngineToken)
	}
	q.header.Set("Content-Type", "application/json")
	q.id = rand.Text()
	if id := h.Get("X-Request-Id"); id != "" && len(id) <= maxRequestID {
		q.header.Set("X-Request-Id", id)
	} else {
		q.header.Set("X-Request-Id", q.id)
	}
	if q.class = h.Get(headerClass); len(q.class) > maxClass {
		return invalid("", fmt.Sprintf("%s: at most %d bytes", headerClass, maxClass))
	}
	for _, v := range []struct {
		name string
		into *int
		most int
	}{{headerPriority, &q.priority, maxPriority}, {headerOutputLength, &q.outputLength, maxOutput}} {
		s := h.Get(v.name)
		if s == "" {
			continue
		}
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 || n > v.most {
			return invalid("", fmt.Sprintf("%s: a number from 0 to %d", v.name, v.most))
		}
		*v.into = n
	}
	return nil
}

// with is the request's body with some fields changed; those that are null are left out.
func (q *request) with(changes map[string]json.RawMessage) []byte {
	fields := maps.Clone(q.fields)
	for name, raw := range changes {
		if raw == nil {
			delete(fields, name)
		} else {
			fields[name] = raw
		}
	}
	return marshal(fields)
}

// marshal encodes what is made of texts, numbers and JSON that has been read.
func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("proxy: cannot be written as JSON: %v", err))
	}
	return b
}

// tokenizeFields are those of a request that /tokenize takes, too, and that change the tokens.
var tokenizeFields = []string{
	"model", "prompt", "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
	"chat_template_kwargs", "mm_processor_kwargs",
}

// tokenizeBody asks for the tokens of the prompt, as vLLM has it.
func (q *request) tokenizeBody() []byte {
	fields := map[string]json.RawMessage{}
	for _, name := range tokenizeFields {
		if raw, ok := q.fields[name]; ok {
			fields[name] = raw
		}
	}
	if q.first != nil {
		fields["prompt"] = q.first
	}
	return marshal(fields)
}

// prefillBody asks an instance to compute the prompt, and to keep its KV cache for a decode instance. Both this and
// decodeBody are what vLLM's proxies for its NixlConnector send.
func (q *request) prefillBody() []byte {
	changes := map[string]json.RawMessage{
		"stream":                json.RawMessage("false"),
		"max_tokens":            json.RawMessage("1"),
		"stream_options":        nil,
		"min_tokens":            nil,
		"min_completion_tokens": nil,
		"n":                     nil,
		"kv_transfer_params": json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
			`"remote_block_ids":null,"remote_host":null,"remote_port":null}`),
	}
	if _, ok := q.fields["max_completion_tokens"]; ok {
		changes["max_completion_tokens"] = json.RawMessage("1")
	}
	return q.with(changes)
}

// decodeBody asks an instance to go on from where another one has left off, which has given params.
func (q *request) decodeBody(params json.RawMessage) []byte {
	return q.with(map[string]json.RawMessage{"kv_transfer_params": params})
}
