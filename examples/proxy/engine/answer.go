package engine

import (
	"encoding/json"
	"net/http"
)

// writer writes an answer in OpenAI's form, whole or as a stream of server-sent events.
type writer struct {
	w       http.ResponseWriter
	q       *request
	chat    bool
	id      string
	created int64
	usage   usage
	params  *transferParams
	begun   bool
}

// object is what all answers and chunks have.
func (a *writer) object(name string, choices []any) map[string]any {
	return map[string]any{"id": a.id, "object": name, "created": a.created, "model": a.q.Model, "choices": choices}
}

// whole writes the answer at once.
func (a *writer) whole(text string) {
	choice := map[string]any{"index": 0, "finish_reason": "length"}
	name := "text_completion"
	if a.chat {
		name = "chat.completion"
		choice["message"] = map[string]any{"role": "assistant", "content": text}
	} else {
		choice["text"] = text
	}
	v := a.object(name, []any{choice})
	v["usage"] = a.usage
	v["kv_transfer_params"] = a.params
	answer(a.w, http.StatusOK, v)
}

// chunk writes the next piece of the answer.
func (a *writer) chunk(text string, last bool) error {
	choice := map[string]any{"index": 0, "finish_reason": nil}
	if last {
		choice["finish_reason"] = "length"
	}
	if a.chat {
		delta := map[string]any{"content": text}
		if !a.begun {
			delta["role"] = "assistant"
		}
		choice["delta"] = delta
	} else {
		choice["text"] = text
	}
	return a.event(a.object(a.streamed(), []any{choice}))
}

// streamed is what chunks call themselves.
func (a *writer) streamed() string {
	if a.chat {
		return "chat.completion.chunk"
	}
	return "text_completion"
}

// end writes what comes after the last piece.
func (a *writer) end() {
	if a.q.StreamOptions != nil && a.q.StreamOptions.IncludeUsage {
		v := a.object(a.streamed(), []any{})
		v["usage"] = a.usage
		if a.event(v) != nil {
			return
		}
	}
	_, _ = a.w.Write([]byte("data: [DONE]\n\n")) // who asked may have gone
}

// event writes one server-sent event.
func (a *writer) event(v any) error {
	if !a.begun {
		a.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		a.begun = true
	}
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := a.w.Write(append(append([]byte("data: "), b...), "\n\n"...)); err != nil {
		return err
	}
	return http.NewResponseController(a.w).Flush()
}
