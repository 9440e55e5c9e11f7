package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

const (
	maxBody          = 16 << 20 // bytes of a request: more than a prompt of the longest models has
	defaultMaxTokens = 16       // of an answer, as vLLM's
)

// request is what engines are asked, as far as this one minds it.
type request struct {
	Model               string          `json:"model"`
	Prompt              json.RawMessage `json:"prompt"`
	Messages            []message       `json:"messages"`
	MaxTokens           int             `json:"max_tokens"`
	MaxCompletionTokens int             `json:"max_completion_tokens"`
	MinTokens           int             `json:"min_tokens"`
	Stream              bool            `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	CacheSalt        string          `json:"cache_salt"`
	AddGeneration    *bool           `json:"add_generation_prompt"`
	KVTransferParams *transferParams `json:"kv_transfer_params"`
}

// transferParams are how a prompt's KV cache goes from a prefill to a decode instance, in the words of vLLM's NixlConnector.
// No bytes are sent here: a decode instance believes that it has received the blocks that it is told of.
type transferParams struct {
	DoRemotePrefill bool    `json:"do_remote_prefill"`
	DoRemoteDecode  bool    `json:"do_remote_decode"`
	RemoteEngineID  *string `json:"remote_engine_id"`
	RemoteRequestID *string `json:"remote_request_id,omitempty"`
	RemoteBlockIDs  []name  `json:"remote_block_ids"`
	RemoteHost      *string `json:"remote_host"`
	RemotePort      *int    `json:"remote_port"`
}

// usage is what an answer took.
type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	Details          struct {
		CachedTokens int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// fail answers with an error in vLLM's form.
func fail(w http.ResponseWriter, status int, kind, message string) {
	answer(w, status, map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": status}})
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // whoever asked may have gone
}

// read takes a request and the tokens of its prompt. It reports false when it has answered with what is wrong.
func (e *Engine) read(w http.ResponseWriter, r *http.Request) (q request, tokens []uint32, ok bool) {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&q); err != nil {
		fail(w, http.StatusBadRequest, "BadRequestError", "the request is no JSON object of the fields that are known: "+err.Error())
		return q, nil, false
	}
	if q.Model != "" && q.Model != e.cfg.Model && !slices.Contains(e.cfg.LoRAs, q.Model) {
		fail(w, http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", q.Model))
		return q, nil, false
	}
	tokens, err := q.tokens()
	if err != nil {
		fail(w, http.StatusBadRequest, "BadRequestError", err.Error())
		return q, nil, false
	}
	return q, tokens, true
}

// tokens are those of the prompt or of the chat.
func (q *request) tokens() ([]uint32, error) {
	if q.Messages != nil {
		return tokenise(template(q.Messages, q.AddGeneration == nil || *q.AddGeneration)), nil
	}
	var text string
	if json.Unmarshal(q.Prompt, &text) == nil {
		return tokenise(text), nil
	}
	var tokens []uint32
	if json.Unmarshal(q.Prompt, &tokens) == nil {
		return tokens, nil
	}
	return nil, errors.New("prompt: a text or a list of tokens; several prompts in one request are not served here")
}

func (e *Engine) serveTokenize(w http.ResponseWriter, r *http.Request) {
	if _, tokens, ok := e.read(w, r); ok {
		answer(w, http.StatusOK, map[string]any{
			"tokens": tokens, "count": len(tokens), "max_model_len": e.cfg.MaxModelLen, "token_strs": nil,
		})
	}
}

func (e *Engine) serveModels(w http.ResponseWriter, _ *http.Request) {
	list := make([]map[string]any, 0, 1+len(e.cfg.LoRAs))
	for _, id := range append([]string{e.cfg.Model}, e.cfg.LoRAs...) {
		list = append(list, map[string]any{"id": id, "object": "model", "owned_by": e.cfg.ID, "max_model_len": e.cfg.MaxModelLen})
	}
	answer(w, http.StatusOK, map[string]any{"object": "list", "data": list})
}

func (e *Engine) serveReset(w http.ResponseWriter, _ *http.Request) {
	if !e.reset() {
		fail(w, http.StatusServiceUnavailable, "ServiceUnavailableError", "requests are running: their blocks cannot be forgotten")
	}
}

func (e *Engine) serveCompletion(w http.ResponseWriter, r *http.Request, chat bool) {
	q, tokens, ok := e.read(w, r)
	if !ok {
		return
	}
	most := max(q.MaxTokens, q.MaxCompletionTokens)
	if most == 0 {
		most = defaultMaxTokens
	}
	switch {
	case q.Model == "" || len(tokens) == 0:
		fail(w, http.StatusBadRequest, "BadRequestError", "a request has a model and a prompt with a token at least")
		return
	case q.MinTokens > most:
		fail(w, http.StatusBadRequest, "BadRequestError", fmt.Sprintf("min_tokens must be at most max_tokens=%d", most))
		return
	case len(tokens)+most > e.cfg.MaxModelLen:
		fail(w, http.StatusBadRequest, "BadRequestError", fmt.Sprintf(
			"This model's maximum context length is %d tokens. However, you requested %d tokens.", e.cfg.MaxModelLen, len(tokens)+most))
		return
	}
	select {
	case e.slots <- struct{}{}:
		defer func() { <-e.slots }()
	default:
		fail(w, http.StatusServiceUnavailable, "ServiceUnavailableError", "as many requests wait as may")
		return
	}
	a := &writer{w: w, q: &q, chat: chat, id: "cmpl-" + r.Header.Get("X-Request-Id"), created: now().Unix()}
	if chat {
		a.id = "chat" + a.id
	}
	e.generate(r.Context(), a, tokens, most)
}

// generate computes the prompt, and then token by token the answer.
func (e *Engine) generate(ctx context.Context, a *writer, tokens []uint32, most int) {
	g := &generation{tokens: tokens}
	g.scope.salt = a.q.CacheSalt
	if a.q.Model != e.cfg.Model {
		g.scope.lora = a.q.Model
	}
	params := a.q.KVTransferParams
	if params != nil && params.DoRemotePrefill {
		g.received = len(params.RemoteBlockIDs) * e.cfg.BlockSize
	}
	defer e.release(g)
	cached, err := e.compute(ctx, g)
	if err != nil {
		return // who asked is gone
	}
	a.usage.PromptTokens, a.usage.Details.CachedTokens = len(tokens), cached
	prompt := len(g.held)
	var text strings.Builder
	for i := range most {
		if i > 0 && pause(ctx, e.cfg.DecodePerToken) != nil {
			return
		}
		w := word(g.tokens)
		g.tokens = append(g.tokens, tokenise(w)...)
		a.usage.CompletionTokens++
		text.WriteString(w)
		if a.q.Stream && a.chunk(w, i == most-1) != nil {
			return
		}
	}
	e.store(g)
	a.usage.TotalTokens = a.usage.PromptTokens + a.usage.CompletionTokens
	if a.q.Stream {
		a.end()
		return
	}
	if params != nil && params.DoRemoteDecode {
		a.params = e.remote(g.held[:prompt], a.id)
	}
	a.whole(text.String())
}

// remote tells a decode instance where the blocks of a prompt are.
func (e *Engine) remote(held []*block, request string) *transferParams {
	host, port := "localhost", 0
	p := &transferParams{DoRemotePrefill: true, RemoteEngineID: &e.cfg.ID, RemoteRequestID: &request, RemoteHost: &host, RemotePort: &port}
	for _, b := range held {
		p.RemoteBlockIDs = append(p.RemoteBlockIDs, b.name)
	}
	return p
}
