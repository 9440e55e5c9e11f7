package service

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Limits of what a request may name.
const (
	maxTokens = 1 << 20 // of a prompt: above the longest context of any engine
	maxHashes = maxTokens
	maxText   = 1024 // bytes of a name
	maxDepth  = 32   // of JSON within JSON
)

// apiError is what is answered to a request that cannot be served: {"error","reason","field","index"}.
type apiError struct {
	status  int
	Message string `json:"error"`
	Reason  string `json:"reason"`
	Field   string `json:"field,omitempty"`
	Index   *int   `json:"index,omitempty"`
	Stage   string `json:"stage,omitempty"` // of a rejection: before prefill, or at decode

	retryAfter int // seconds; 0 for none
}

// Error implements error.
func (e *apiError) Error() string { return e.Message }

// bad is an error in a field of a request.
func bad(reason, field, format string, args ...any) *apiError {
	return &apiError{status: 400, Reason: reason, Field: field, Message: fmt.Sprintf(format, args...)}
}

// badAt is an error in an element of a list.
func badAt(reason, field string, index int, format string, args ...any) *apiError {
	e := bad(reason, field, format, args...)
	e.Index = &index
	return e
}

// request is a JSON object cut into its fields. Long lists of numbers are most of what is sent here, and are read straight from
// the body: encoding/json takes longer for them than all that follows.
type request struct {
	body   []byte
	fields []field
}

type field struct {
	name string
	raw  []byte
}

// cut reads a JSON object. A field that is not known is refused, so that a misspelt one is not lost.
func cut(body []byte, known []string) (*request, error) {
	if !utf8.Valid(body) {
		return nil, bad("invalid_json", "", "the body is not UTF-8")
	}
	c := cutter{b: body}
	r := &request{body: body}
	c.space()
	if !c.take('{') {
		return nil, bad("invalid_json", "", "send a JSON object as the body")
	}
	for c.space(); !c.take('}'); {
		name, err := c.name()
		if err != nil {
			return nil, err
		}
		if !slices.Contains(known, name) {
			return nil, bad("unknown_field", name, "unknown field %.64q: there are %s", name, strings.Join(known, ", "))
		}
		if r.raw(name) != nil {
			return nil, bad("invalid_json", name, "field %.64q stands there twice", name)
		}
		raw, err := c.value()
		if err != nil {
			return nil, err
		}
		r.fields = append(r.fields, field{name, raw})
		c.space()
		if c.take(',') {
			c.space()
		} else if !c.at('}') {
			return nil, c.broken("a comma or } is missing")
		}
	}
	c.space()
	if c.p != len(body) {
		return nil, c.broken("something follows the JSON object")
	}
	return r, nil
}

// cutter finds where values end. What is within them is checked when they are read.
type cutter struct {
	b []byte
	p int
}

func (c *cutter) broken(what string) error {
	return bad("invalid_json", "", "not JSON: %s, at byte %d of %d", what, c.p, len(c.b))
}

func (c *cutter) space() {
	for c.p < len(c.b) && (c.b[c.p] == ' ' || c.b[c.p] == '\n' || c.b[c.p] == '\t' || c.b[c.p] == '\r') {
		c.p++
	}
}

func (c *cutter) at(x byte) bool { return c.p < len(c.b) && c.b[c.p] == x }

func (c *cutter) take(x byte) bool {
	if c.at(x) {
		c.p++
		return true
	}
	return false
}

// name reads the name of a field and the colon behind it.
func (c *cutter) name() (string, error) {
	from := c.p
	if !c.at('"') {
		return "", c.broken("a field's name in quotes is missing")
	}
	if !c.text() {
		return "", c.broken("a text does not end")
	}
	var name string
	if err := json.Unmarshal(c.b[from:c.p], &name); err != nil {
		return "", c.broken("a field's name is not text")
	}
	c.space()
	if !c.take(':') {
		return "", c.broken("a colon is missing")
	}
	c.space()
	return name, nil
}

// text passes over a text in quotes.
func (c *cutter) text() bool {
	for c.p++; c.p < len(c.b); c.p++ {
		switch c.b[c.p] {
		case '\\':
			c.p++
		case '"':
			c.p++
			return true
		}
	}
	return false
}

// value passes over a value, and returns it.
func (c *cutter) value() ([]byte, error) {
	from, depth := c.p, 0
	for c.p < len(c.b) {
		switch c.b[c.p] {
		case '"':
			if !c.text() {
				return nil, c.broken("a text does not end")
			}
			if depth == 0 {
				return c.b[from:c.p], nil
			}
			continue
		case '[', '{':
			if depth++; depth > maxDepth {
				return nil, c.broken("too much within each other")
			}
		case ']', '}':
			if depth--; depth < 0 { // the end of what this is in
				return c.end(from)
			}
			if depth == 0 {
				c.p++
				return c.b[from:c.p], nil
			}
		case ',', ' ', '\n', '\t', '\r':
			if depth == 0 {
				return c.end(from)
			}
		}
		c.p++
	}
	return nil, c.broken("a value does not end")
}

func (c *cutter) end(from int) ([]byte, error) {
	if c.p == from {
		return nil, c.broken("a value is missing")
	}
	return c.b[from:c.p], nil
}

// raw is a field's value as it was sent, nil if it was not; null counts as not sent.
func (r *request) raw(name string) []byte {
	for i := range r.fields {
		if r.fields[i].name == name && string(r.fields[i].raw) != "null" {
			return r.fields[i].raw
		}
	}
	return nil
}

// need is an error if a field was not sent.
func (r *request) need(names ...string) error {
	for _, name := range names {
		if r.raw(name) == nil {
			return bad("missing", name, "%s is required", name)
		}
	}
	return nil
}

// text is a field that is a text, "" if it was not sent.
func (r *request) text(name string) (s string, err error) {
	raw := r.raw(name)
	if raw == nil {
		return "", nil
	}
	if json.Unmarshal(raw, &s) != nil {
		return "", bad("invalid_type", name, "%s must be a text", name)
	}
	if len(s) > maxText {
		return "", bad("out_of_range", name, "%s has %d bytes, at most %d", name, len(s), maxText)
	}
	return s, nil
}

// texts reads several fields.
func (r *request) texts(into map[string]*string) error {
	for name, to := range into {
		s, err := r.text(name)
		if err != nil {
			return err
		}
		*to = s
	}
	return nil
}

// number is a field that is a whole number within bounds, or what it is if it was not sent.
func (r *request) number(name string, least, most, otherwise int) (int, error) {
	raw := r.raw(name)
	if raw == nil {
		return otherwise, nil
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil {
		return 0, bad("invalid_type", name, "%s must be a whole number", name)
	}
	if n < int64(least) || n > int64(most) {
		return 0, bad("out_of_range", name, "%s is %d: from %d to %d", name, n, least, most)
	}
	return int(n), nil
}

// decode reads a field with encoding/json.
func (r *request) decode(name string, into any) error {
	raw := r.raw(name)
	if raw == nil {
		return nil
	}
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return bad("invalid_type", name, "%s is not what is expected: %v", name, err)
	}
	return nil
}

// tokens is a field that is a list of token ids.
func (r *request) tokens() ([]uint32, error) {
	const name = "token_ids"
	raw := r.raw(name)
	if raw == nil {
		return nil, bad("missing", name, "%s is required", name)
	}
	list := make([]uint32, 0, len(raw)/2) // there is a comma behind each
	err := numbers(raw, name, maxTokens, func(i int, neg bool, v uint64) error {
		if neg || v > math.MaxUint32 {
			return badAt("out_of_range", name, i, "%s[%d] is not a token id: from 0 to %d", name, i, uint32(math.MaxUint32))
		}
		list = append(list, uint32(v))
		return nil
	})
	return list, err
}

// hashes is a field that is a list of block hashes: 64 bits each, as numbers that may be signed, or as texts of such or of
// "0x" and hexadecimal digits, since not everybody's JSON keeps 64 bits.
func (r *request) hashes(name string) ([]uint64, error) {
	raw := r.raw(name)
	if raw == nil {
		return nil, bad("missing", name, "%s is required", name)
	}
	if strings.ContainsRune(string(raw[:min(len(raw), 64)]), '"') {
		return r.hashTexts(name)
	}
	list := make([]uint64, 0, len(raw)/2)
	err := numbers(raw, name, maxHashes, func(i int, neg bool, v uint64) error {
		if neg {
			if v > 1<<63 {
				return badAt("out_of_range", name, i, "%s[%d] is not a number of 64 bits", name, i)
			}
			v = -v
		}
		list = append(list, v)
		return nil
	})
	return list, err
}

func (r *request) hashTexts(name string) ([]uint64, error) {
	var texts []string
	if json.Unmarshal(r.raw(name), &texts) != nil {
		return nil, bad("invalid_type", name, "%s must be a list of numbers of 64 bits, or of texts of such", name)
	}
	list := make([]uint64, len(texts))
	for i, s := range texts {
		v, err := strconv.ParseUint(s, 0, 64)
		if err != nil {
			n, err := strconv.ParseInt(s, 0, 64)
			if err != nil {
				return nil, badAt("invalid_value", name, i, "%s[%d] is not a number of 64 bits", name, i)
			}
			v = uint64(n) //nolint:gosec // engines that sign their hashes mean the same bits
		}
		list[i] = v
	}
	return list, nil
}

// numbers reads a JSON list of whole numbers, and gives each as sign and value.
func numbers(raw []byte, name string, most int, each func(i int, neg bool, v uint64) error) error {
	c := cutter{b: raw}
	if !c.take('[') {
		return bad("not_array", name, "%s must be a list", name)
	}
	for i := 0; ; i++ {
		c.space()
		if i == 0 && c.take(']') {
			return nil
		}
		if i >= most {
			return badAt("out_of_range", name, i, "%s has more than %d elements", name, most)
		}
		neg := c.take('-')
		from, v := c.p, uint64(0)
		for c.p < len(raw) && raw[c.p] >= '0' && raw[c.p] <= '9' {
			d := uint64(raw[c.p] - '0')
			if v > (math.MaxUint64-d)/10 {
				return badAt("out_of_range", name, i, "%s[%d] is not a number of 64 bits", name, i)
			}
			v = v*10 + d
			c.p++
		}
		if n := c.p - from; n == 0 || n > 1 && raw[from] == '0' {
			return badAt("invalid_type", name, i, "%s[%d] must be a whole number", name, i)
		}
		if err := each(i, neg, v); err != nil {
			return err
		}
		c.space()
		switch {
		case c.take(','):
		case c.take(']'):
			return nil // the list ends where cut has found its end
		default:
			return badAt("invalid_type", name, i, "%s[%d] must be a whole number", name, i)
		}
	}
}
