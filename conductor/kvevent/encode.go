package kvevent

import (
	"errors"
	"fmt"
	"math"
	"unicode/utf8"
)

// Format is how events are encoded.
type Format uint8

// The formats that are written. All of them are read.
const (
	Positional Format = iota // vLLM's until 2026, which most subscribers know: an event is an array with its name in front
	Tagged                   // vLLM's since: a map with its type
	RFC1527                  // Mooncake's masters: a map that also names model, tenant, adapter and salt of what it tells
)

// formats are their names in configurations.
var formats = []string{"vllm", "vllm_map", "rfc1527"}

// String is the format's name in configurations.
func (f Format) String() string { return formats[f] }

// ParseFormat reads a format's name.
func ParseFormat(name string) (Format, error) {
	for i, f := range formats {
		if f == name {
			return Format(i), nil
		}
	}
	return 0, fmt.Errorf("the format %.40q of KV events: write one of %v", name, formats)
}

// ErrEvent says that an event cannot be encoded. It is left out.
var ErrEvent = errors.New("kvevent: an event that cannot be encoded")

// Encoder writes batches, [timestamp, [events], rank], event by event. Its memory is used again by the next batch, so that
// writing allocates nothing.
//
// vLLM's formats have no place for an event's rank, model, tenant, backend, id and first index, and for a salt only in the
// first block of a prompt. Extras, which are hashes of what their publisher had, are written as numbers: whoever reads them
// tells the same blocks apart by them, under other values.
type Encoder struct {
	Format Format

	w         writer
	events    int
	timestamp float64
}

// batchHead is what comes before the events: an array of three, the timestamp, and the events' number, in four bytes.
const batchHead = 1 + 9 + 5

// Begin starts a batch of a time, in seconds since 1970, and forgets the last one.
func (c *Encoder) Begin(timestamp float64) {
	c.events, c.timestamp = 0, timestamp
	c.w.b = append(c.w.b[:0], 0x93)
	c.w.float(timestamp)
	c.w.b = append(c.w.b, 0xdd, 0, 0, 0, 0)
}

// Len is how many events the batch has.
func (c *Encoder) Len() int { return c.events }

// Size is how many bytes the batch has so far.
func (c *Encoder) Size() int { return len(c.w.b) }

// Add appends an event. An error, which wraps ErrEvent, leaves the batch as it was.
func (c *Encoder) Add(e *Event) error {
	if err := e.encodable(); err != nil {
		return err
	}
	switch c.Format {
	case Tagged:
		c.tagged(e)
	case RFC1527:
		c.envelope(e)
	default:
		c.positional(e)
	}
	c.events++
	return nil
}

// End ends the batch, of a rank of data parallelism or NoRank, and returns its payload, which is valid until Begin.
func (c *Encoder) End(rank int) []byte {
	c.w.patch32(batchHead-4, c.events)
	if rank == NoRank {
		c.w.null()
	} else {
		c.w.integer(rank)
	}
	return c.w.b
}

// encodable refuses what readers would, or could not read.
func (e *Event) encodable() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrEvent}, args...)...)
	}
	if e.Kind < Stored || e.Kind > Cleared {
		return bad("of kind %d", e.Kind)
	}
	if e.Medium > Media || e.Medium == Media && e.Kind != Cleared {
		return bad("%v on the medium %d", e.Kind, e.Medium)
	}
	for _, v := range [...]int{e.Group, e.Window, e.BaseBlock + 1, e.Rank + 1, e.BlockSize} {
		if v < 0 || v > math.MaxInt32 {
			return bad("with a number that is negative, or has more than 31 bits: %d", v)
		}
	}
	if e.Extras != nil && len(e.Extras) != len(e.Hashes) {
		return bad("with extra keys of %d blocks, of %d", len(e.Extras), len(e.Hashes))
	}
	for _, text := range [...][]byte{e.LoRA, e.Salt, e.Model, e.Tenant, e.Backend} {
		if !utf8.Valid(text) {
			return bad("with a text that is not UTF-8")
		}
	}
	if err := e.check(); err != nil {
		return bad("%w", err)
	}
	return nil
}

// eventNames are vLLM's names of events.
var eventNames = [...]string{Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}

// positional writes an array. What has its default at the end is left out.
func (c *Encoder) positional(e *Event) {
	w := &c.w
	n := e.positions()
	w.array(n)
	w.text(eventNames[e.Kind])
	list := positions[e.Kind]
	for _, f := range list[:n-1] {
		c.position(e, f)
	}
}

// positions is how many elements a positional event needs, its name among them.
func (e *Event) positions() int {
	switch { // see the table of positions
	case e.Kind == Cleared && e.Medium == Media:
		return 1
	case e.Kind == Cleared:
		return 2
	case e.Kind == Removed && e.Group == 0:
		return 3
	case e.Kind == Removed:
		return 4
	case e.Window != 0:
		return 12
	case e.Group != 0:
		return 10
	case e.keyed():
		return 9
	case len(e.LoRA) > 0:
		return 8
	}
	return 7
}

// position writes one value of a positional event.
func (c *Encoder) position(e *Event, f field) {
	w := &c.w
	switch {
	case f == fieldHashes:
		w.numbers(e.Hashes)
	case f == fieldParent && e.HasParent:
		w.uint(e.Parent)
	case f == fieldTokens:
		w.tokens(e.Tokens)
	case f == fieldBlockSize:
		w.integer(e.BlockSize)
	case f == fieldMedium:
		w.text(e.Medium.String())
	case f == fieldLoRA && len(e.LoRA) > 0:
		w.bytes(e.LoRA)
	case f == fieldExtraKeys && e.keyed():
		c.extraKeys(e, true)
	case f == fieldGroup:
		w.integer(e.Group)
	case f == fieldWindow:
		w.integer(e.Window)
	default:
		w.null()
	}
}

// keyed reports whether blocks have extra keys in vLLM's formats.
func (e *Event) keyed() bool {
	return len(e.Hashes) > 0 && (e.Extras != nil || len(e.LoRA) > 0 || len(e.Salt) > 0 && !e.HasParent)
}

// extraKeys writes what else went into the hashes of blocks, each nil or a list, see [Batch.extraKeys]. With all, the
// adapter's name and the salt are among it.
func (c *Encoder) extraKeys(e *Event, all bool) {
	w := &c.w
	w.array(len(e.Hashes))
	for i := range e.Hashes {
		lora := all && len(e.LoRA) > 0
		salt := all && i == 0 && !e.HasParent && len(e.Salt) > 0
		extra := e.Extras != nil && e.Extras[i] != 0
		n := 0
		for _, there := range [...]bool{lora, salt, extra} {
			if there {
				n++
			}
		}
		if n == 0 {
			w.null()
			continue
		}
		w.array(n)
		if lora {
			w.bytes(e.LoRA)
		}
		if extra {
			w.uint(e.Extras[i])
		}
		if salt {
			w.bytes(e.Salt)
		}
	}
}

// tagged writes a map with what has not its default.
func (c *Encoder) tagged(e *Event) {
	w := &c.w
	m := w.dict()
	w.name(&m, "type").text(eventNames[e.Kind])
	if e.Kind != Cleared {
		w.name(&m, "block_hashes").numbers(e.Hashes)
	}
	if e.Kind == Stored {
		c.parent(&m, "parent_block_hash", e)
		w.name(&m, "token_ids").tokens(e.Tokens)
		w.name(&m, "block_size").integer(e.BlockSize)
		c.named(&m, "lora_name", e.LoRA)
		if e.keyed() {
			w.name(&m, "extra_keys")
			c.extraKeys(e, true)
		}
		c.number(&m, "kv_cache_spec_sliding_window", e.Window)
	}
	if e.Medium != Media {
		w.name(&m, "medium").text(e.Medium.String())
	}
	if e.Kind != Cleared {
		c.number(&m, "group_idx", e.Group)
	}
	w.end(m)
}

// parent writes an event's parent, nil if it has none.
func (c *Encoder) parent(m *dict, name string, e *Event) {
	if c.w.name(m, name); e.HasParent {
		c.w.uint(e.Parent)
	} else {
		c.w.null()
	}
}

// named writes a text, unless it is empty, and number a number, unless it is 0.
func (c *Encoder) named(m *dict, name string, text []byte) {
	if len(text) > 0 {
		c.w.name(m, name).bytes(text)
	}
}

func (c *Encoder) number(m *dict, name string, v int) {
	if v != 0 {
		c.w.name(m, name).integer(v)
	}
}

// envelope writes the map of RFC 1527. What it has in none of its versions, groups and windows of hybrid models and extra
// keys, has vLLM's names.
func (c *Encoder) envelope(e *Event) {
	w := &c.w
	m := w.dict()
	w.name(&m, "event_type").text(e.Kind.String())
	if e.Kind != Cleared {
		hashes := "block_hashes"
		if e.Standard {
			hashes = "seq_hashes"
		}
		w.name(&m, hashes).numbers(e.Hashes)
	}
	if e.Kind == Stored {
		if e.BaseBlock >= 0 {
			w.name(&m, "base_block_idx").integer(e.BaseBlock)
		}
		c.parent(&m, "parent_hash", e)
		w.name(&m, "token_ids").tokens(e.Tokens)
		if e.Extras != nil && len(e.Hashes) > 0 {
			w.name(&m, "extra_keys")
			c.extraKeys(e, false)
		}
		c.number(&m, "sliding_window", e.Window)
	}
	c.named(&m, "model_name", e.Model)
	c.number(&m, "block_size", e.BlockSize)
	c.named(&m, "additional_salt", e.Salt)
	c.named(&m, "lora_name", e.LoRA)
	c.named(&m, "tenant_id", e.Tenant)
	c.named(&m, "backend_id", e.Backend)
	if e.Medium != Media {
		w.name(&m, "medium").text(e.Medium.String())
	}
	if e.Kind != Cleared {
		c.number(&m, "group_idx", e.Group)
	}
	if e.Rank != NoRank {
		w.name(&m, "dp_rank").integer(e.Rank)
	}
	if e.ID != 0 {
		w.name(&m, "event_id").uint(e.ID)
	}
	w.name(&m, "timestamp").float(c.timestamp)
	w.end(m)
}
