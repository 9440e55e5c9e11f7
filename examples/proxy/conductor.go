package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

const (
	maxConductorAnswer = 4 << 20     // bytes: thousands of instances
	conductorCooloff   = time.Second // after it could not be reached: requests do without it until then
)

// conductor asks a conductor. Its methods may be called concurrently.
type conductor struct {
	url     string
	token   string
	timeout time.Duration
	http    *http.Client
	down    cooloff
}

// errCooling says that the conductor could not be reached a moment ago.
var errCooling = errors.New("the conductor could not be reached a moment ago")

// conductorError is what a conductor has answered.
type conductorError struct {
	status     int
	retryAfter string

	Message string `json:"error"`
	Reason  string `json:"reason"`
	Stage   string `json:"stage"`
	Field   string `json:"field"`
}

// Error implements error.
func (e *conductorError) Error() string {
	return fmt.Sprintf("the conductor answers %d: %s (reason %q, field %q)", e.status, e.Message, e.Reason, e.Field)
}

// prompt is what query and schedule tell of a request.
type prompt struct {
	Model     string   `json:"model"`
	TokenIDs  []uint32 `json:"token_ids"`
	BlockSize int      `json:"block_size"`
	TenantID  string   `json:"tenant_id"`
	LoRAName  string   `json:"lora_name,omitempty"`
	CacheSalt string   `json:"cache_salt,omitempty"`
}

// match is how much of a prompt an instance has, as /query answers.
type match struct {
	LongestMatched int `json:"longest_matched"` // tokens
}

// query asks how much of a prompt each instance has.
func (c *conductor) query(ctx context.Context, p prompt) (map[string]match, error) {
	var all map[string]map[string]match // by tenant
	err := c.post(ctx, "/query", p, &all)
	return all[p.TenantID], err
}

// scheduling is what schedule asks.
type scheduling struct {
	prompt

	RequestID    string `json:"request_id"`
	Class        string `json:"class,omitempty"`
	Priority     int    `json:"priority,omitempty"`
	OutputLength int    `json:"output_length,omitempty"`
}

// schedule is what it is answered.
type schedule struct {
	RequestID    string  `json:"request_id"`
	Prefill      string  `json:"prefill"`
	Decode       string  `json:"decode"`
	PrefixLen    int     `json:"prefix_len"` // tokens
	TransferFrom string  `json:"transfer_from"`
	TTFT         float64 `json:"ttft"` // seconds, as is TBT
	TBT          float64 `json:"tbt"`
	Reason       string  `json:"reason"`
}

// schedule asks where a request is to go.
func (c *conductor) schedule(ctx context.Context, s scheduling) (answer schedule, err error) {
	err = c.post(ctx, "/schedule", s, &answer)
	return answer, err
}

// What becomes of a scheduled request.
const (
	eventPrefillDone = "prefill_done"
	eventDecodeStart = "decode_start"
	eventDecodeDone  = "decode_done"
	eventFailed      = "failed"
	eventHit         = "hit" // what an instance had of a prompt
)

// progress is what is reported of a request.
type progress struct {
	RequestID    string  `json:"request_id"`
	Event        string  `json:"event"`
	Seconds      float64 `json:"seconds,omitempty"`
	OutputTokens int     `json:"output_tokens,omitempty"`
	Cached       *int    `json:"cached_tokens,omitempty"`    // of the prompt, as the instance says
	Predicted    *int    `json:"predicted_tokens,omitempty"` // as the conductor has said, if it does not know the request any more
}

// reported is what a report is answered.
type reported struct {
	Rejected []string `json:"rejected"` // requests that are not to be decoded
}

// report tells how requests at an instance go.
func (c *conductor) report(ctx context.Context, instance, tenant string, requests ...progress) (answer reported, err error) {
	err = c.post(ctx, "/report", map[string]any{"instance_id": instance, "tenant_id": tenant, "requests": requests}, &answer)
	return answer, err
}

// post asks, unless the conductor could not be reached a moment ago.
func (c *conductor) post(ctx context.Context, path string, in, out any) error {
	if c.down.on() {
		return errCooling
	}
	err := c.exchange(ctx, path, in, out)
	if ctx.Err() != nil {
		return err // who asked is gone: that says nothing of the conductor
	}
	if e, ok := errors.AsType[*conductorError](err); err == nil || ok && e.status < http.StatusInternalServerError {
		c.down.end()
	} else {
		c.down.begin(conductorCooloff)
	}
	return err
}

func (c *conductor) exchange(ctx context.Context, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+path, bytes.NewReader(marshal(in)))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	if c.token != "" {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}
	a, err := c.http.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = a.Body.Close() }() // it has been read, or does not matter
	body, err := io.ReadAll(io.LimitReader(a.Body, maxConductorAnswer+1))
	switch {
	case err != nil:
		return err
	case len(body) > maxConductorAnswer:
		return fmt.Errorf("the conductor answers %s with more than %d bytes", path, maxConductorAnswer)
	case a.StatusCode != http.StatusOK:
		e := &conductorError{status: a.StatusCode, retryAfter: a.Header.Get("Retry-After")}
		if json.Unmarshal(body, e) != nil {
			e.Message = "what is no JSON"
		}
		return e
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(body, out); err != nil {
		return fmt.Errorf("the conductor answers %s with what cannot be read: %w", path, err)
	}
	return nil
}
