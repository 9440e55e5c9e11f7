// Package engine is a serving engine as vLLM is one, but without a model: it tokenises, keeps a prefix cache of blocks
// whose changes it publishes as KV events over ZeroMQ, takes its time for the tokens that are not cached, streams an answer
// of made-up words, and hands prompts from prefill to decode instances by kv_transfer_params. What goes over the network is
// what vLLM's does; what happens in between is made up. It lets routers and conductors be tried where there is no GPU.
package engine

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"larder/conductor/kvevent"
	"larder/conductor/kvpub"
)

// Config is what an engine is. The zero value of each field but Model stands for its default.
type Config struct {
	ID    string   // that other engines know it by; "engine"
	Model string   // the name that requests must give
	LoRAs []string // names of adapters, which requests may give instead

	BlockSize   int    // tokens; 16, as vLLM's
	Blocks      int    // that the prefix cache holds; 4096
	MaxModelLen int    // tokens of a prompt and its answer; 32768
	HashSeed    string // of the blocks' names, which are as different between engines as their seeds; see PYTHONHASHSEED

	Events string // where KV events are published; tcp://127.0.0.1:*, a free port
	Replay string // where those that were missed are asked for; tcp://127.0.0.1:*

	PrefillPerToken time.Duration // for each token that is not cached; 200 us
	DecodePerToken  time.Duration // 20 ms
	// MaxRequests bounds what is served or waits at once; 256, as vLLM's max_num_seqs. More are answered with 503.
	MaxRequests int
}

// Engine serves requests. Its methods may be called concurrently.
type Engine struct {
	cfg     Config
	slots   chan struct{} // one for each request
	prefill chan struct{} // one prompt is computed at a time, in the order of their arrival

	mu     sync.Mutex // events are published in the order of the changes that they tell of
	cache  *cache
	events *kvpub.Publisher
}

// New starts an engine's publisher. What it serves over HTTP is for the caller to listen for: see Handler.
func New(ctx context.Context, cfg Config) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, slots: make(chan struct{}, cfg.MaxRequests), prefill: make(chan struct{}, 1)}
	e.cache = newCache(cfg.Blocks, cfg.BlockSize, cfg.HashSeed)
	if e.events, err = kvpub.New(ctx, kvpub.Config{Listen: cfg.Events, Replay: cfg.Replay, Rank: kvevent.NoRank}); err != nil {
		return nil, err
	}
	return e, nil
}

func (c Config) withDefaults() (Config, error) {
	if c.Model == "" {
		return c, errors.New("engine: the model has no name: requests must give one")
	}
	if slices.Contains(c.LoRAs, c.Model) {
		return c, fmt.Errorf("engine: the adapter %q is called as the model is: give it another name", c.Model)
	}
	for _, v := range []struct {
		field *string
		value string
	}{{&c.ID, "engine"}, {&c.Events, "tcp://127.0.0.1:*"}, {&c.Replay, "tcp://127.0.0.1:*"}} {
		if *v.field == "" {
			*v.field = v.value
		}
	}
	for _, v := range []struct {
		field *int
		value int
	}{{&c.BlockSize, 16}, {&c.Blocks, 4096}, {&c.MaxModelLen, 32768}, {&c.MaxRequests, 256}} {
		if *v.field < 0 {
			return c, fmt.Errorf("engine: a size of %d: give a positive one, or 0 for the default", *v.field)
		}
		if *v.field == 0 {
			*v.field = v.value
		}
	}
	if c.PrefillPerToken == 0 {
		c.PrefillPerToken = 200 * time.Microsecond
	}
	if c.DecodePerToken == 0 {
		c.DecodePerToken = 20 * time.Millisecond
	}
	return c, nil
}

// EventsEndpoint is where KV events are published.
func (e *Engine) EventsEndpoint() string { return e.events.Endpoint() }

// ReplayEndpoint is where events that were missed are asked for.
func (e *Engine) ReplayEndpoint() string { return e.events.ReplayEndpoint() }

// Close ends the publisher. Requests that are being served go on, unheard.
func (e *Engine) Close() error { return e.events.Close() }

// Handler serves /tokenize, /v1/completions, /v1/chat/completions, /v1/models, /health and /reset_prefix_cache as vLLM does.
func (e *Engine) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /tokenize", e.serveTokenize)
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) { e.serveCompletion(w, r, false) })
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { e.serveCompletion(w, r, true) })
	mux.HandleFunc("GET /v1/models", e.serveModels)
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /reset_prefix_cache", e.serveReset)
	return mux
}

// reset forgets all blocks, as long as no request holds any.
func (e *Engine) reset() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.cache.clear() {
		return false
	}
	e.publish(cleared())
	return true
}

// generation is one request while it is served.
type generation struct {
	tokens   []uint32 // of the prompt, then of the answer, too
	scope    scope
	received int // tokens of the prompt whose KV cache a prefill instance has sent
	held     []*block
}

// compute computes the prompt: what is not cached takes its time. It gives how many tokens were, and holds the blocks until
// release is called.
func (e *Engine) compute(ctx context.Context, g *generation) (cached int, err error) {
	select {
	case e.prefill <- struct{}{}:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	defer func() { <-e.prefill }()
	last := max(0, len(g.tokens)-1) // is always computed: what comes after it is what was asked for
	names := e.cache.names(g.tokens[:last], g.scope)
	e.mu.Lock()
	g.held = e.cache.hold(names)
	e.mu.Unlock()
	cached = max(len(g.held)*e.cfg.BlockSize, min(g.received, last))
	if err := pause(ctx, time.Duration(len(g.tokens)-cached)*e.cfg.PrefillPerToken); err != nil {
		return cached, err
	}
	e.store(g)
	return cached, nil
}

// store has the cache hold the blocks that g does not hold yet, as far as there is room, and tells of it.
func (e *Engine) store(g *generation) {
	names := e.cache.names(g.tokens, g.scope)
	e.mu.Lock()
	defer e.mu.Unlock()
	known := e.cache.len()
	held, evicted := e.cache.store(g.held, names)
	g.held = held
	added := e.cache.len() + len(evicted) - known // the last ones: a block is not kept longer than those before it
	var events []kvevent.Event
	if len(evicted) > 0 {
		events = append(events, removed(evicted))
	}
	if added > 0 {
		events = append(events, stored(names[:len(held)], added, g.tokens[:len(held)*e.cfg.BlockSize], e.cfg.BlockSize, g.scope))
	}
	if len(events) > 0 {
		e.publish(events...)
	}
}

// release gives back the blocks that g holds: they stay cached until others need the room.
func (e *Engine) release(g *generation) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cache.release(g.held)
	g.held = nil
}
