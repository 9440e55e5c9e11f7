package main

import (
	"bytes"
	"encoding/json"
)

// maxKept bounds what is kept of an answer to find its usage: a line of a stream, or an answer at once.
const maxKept = 1 << 20

// meter counts what an answer says as it goes by.
type meter struct {
	streamed bool
	kept     []byte // of the line that has not ended; of all, if it is not a stream
	over     bool   // it was too long to be kept
	chunks   int    // of a stream
	usage    usage
	ended    bool // the stream has said that it is
}

// usage is what an answer says of itself.
type usage struct {
	CompletionTokens int `json:"completion_tokens"`
	Details          *struct {
		CachedTokens int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// cached is how many tokens of the prompt were cached, nil if the answer does not say.
func (u *usage) cached() *int {
	if u.Details == nil {
		return nil
	}
	return &u.Details.CachedTokens
}

// add takes note of the next piece.
func (m *meter) add(b []byte) {
	for m.streamed {
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			break
		}
		m.keep(b[:i])
		m.line()
		m.kept, m.over = m.kept[:0], false
		b = b[i+1:]
	}
	m.keep(b)
}

func (m *meter) keep(b []byte) {
	n := min(len(b), maxKept-len(m.kept))
	m.kept = append(m.kept, b[:n]...)
	m.over = m.over || n < len(b)
}

var (
	dataPrefix = []byte("data:")
	usageField = []byte(`"usage"`)
	done       = []byte("[DONE]")
)

// line reads a line of a stream.
func (m *meter) line() {
	data, ok := bytes.CutPrefix(m.kept, dataPrefix)
	if data = bytes.TrimSpace(data); !ok {
		return
	}
	if bytes.Equal(data, done) {
		m.ended = true
		return
	}
	m.chunks++
	if !m.over && bytes.Contains(data, usageField) {
		m.read(data)
	}
}

func (m *meter) read(b []byte) {
	var v struct {
		Usage   *usage            `json:"usage"`
		Choices []json.RawMessage `json:"choices"`
	}
	if json.Unmarshal(b, &v) != nil || v.Usage == nil {
		return
	}
	m.usage = *v.Usage
	if m.streamed && len(v.Choices) == 0 {
		m.chunks-- // it has nothing but the usage
	}
}

// tokens is how many the answer has. A stream that does not say has one in each chunk, nearly.
func (m *meter) tokens() int {
	if !m.streamed && !m.over {
		m.read(m.kept)
	}
	if m.usage.CompletionTokens > 0 {
		return m.usage.CompletionTokens
	}
	return m.chunks
}
