package kvevent

import (
	"encoding/binary"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// Decode reads a payload into the batch, whose memory it uses again. An error means that it is no batch at all. Events that
// cannot be read are counted and left out; if one cannot even be passed over, so is what follows it.
//
// A batch is an array [timestamp, [events], rank] or a map of these, RFC 1527's envelope a map that is an event by itself;
// a list of events alone is read, too.
func (b *Batch) Decode(payload []byte) error {
	b.reset()
	r := &reader{b: payload}
	switch r.peek() {
	case kindMap:
		return b.decodeMap(r)
	case kindArray:
		return b.decodeArray(r)
	default:
		return fmt.Errorf("%w: a batch is an array or a map", errType)
	}
}

func (b *Batch) decodeArray(r *reader) error {
	n, err := r.array()
	if err != nil || n == 0 {
		return err
	}
	switch r.peek() {
	case kindText: // an event without a batch around it
		r.p = 0
		b.event(r)
		return nil
	case kindMap, kindArray: // a list of events
		b.list(r, n)
		return nil
	case kindNil:
		err = r.skip()
	default:
		b.Timestamp, err = r.float()
	}
	if err != nil {
		return err
	}
	if n > 1 {
		if err := b.events(r); err != nil {
			return err
		}
	}
	if n > 2 {
		b.rank(r)
	}
	return nil
}

func (b *Batch) decodeMap(r *reader) error {
	n, err := r.dict()
	if err != nil {
		return err
	}
	for range n {
		key, err := r.text()
		if err != nil {
			return err
		}
		switch string(key) {
		case "events":
			err = b.events(r)
		case "ts", "timestamp":
			from := r.p
			if b.Timestamp, err = r.float(); err != nil {
				r.p = from
				err = r.skip()
			}
		case "data_parallel_rank", "dp_rank", "attn_dp_rank":
			b.rank(r)
		case "event_type", "type":
			r.p = 0 // it is an event by itself
			b.reset()
			b.event(r)
			return nil
		default:
			err = r.skip()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// rank reads the batch's rank; what is none is passed over.
func (b *Batch) rank(r *reader) {
	from := r.p
	v, err := r.integer()
	if err != nil {
		r.p = from
		_ = r.skip() // whoever reads on sees that it is cut short
		return
	}
	if v <= math.MaxInt32 {
		b.Rank = int(v)
	}
}

// events reads the list of a batch.
func (b *Batch) events(r *reader) error {
	if r.isNil() {
		return nil
	}
	n, err := r.array()
	if err != nil {
		return err
	}
	b.list(r, n)
	return nil
}

func (b *Batch) list(r *reader, n int) {
	for range n {
		from := r.p
		if err := r.skip(); err != nil {
			b.bad(err)
			r.p = len(r.b)
			return
		}
		b.event(&reader{b: r.b[from:r.p]})
	}
}

// event reads one event, which is all that the reader has.
func (b *Batch) event(r *reader) {
	if len(b.Events) < cap(b.Events) {
		b.Events = b.Events[:len(b.Events)+1]
	} else {
		b.Events = append(b.Events, Event{})
	}
	e := &b.Events[len(b.Events)-1]
	*e = Event{Rank: NoRank, BaseBlock: -1}
	hashes, tokens := len(b.hashes), len(b.tokens)
	var err error
	switch r.peek() {
	case kindArray:
		err = b.positional(r, e)
	case kindMap:
		err = b.tagged(r, e)
	default:
		err = errType
	}
	if err == nil && e.Kind != 0 {
		err = e.check()
	}
	if err == nil && e.Kind != 0 {
		return
	}
	b.Events = b.Events[:len(b.Events)-1]
	b.hashes, b.tokens = b.hashes[:hashes], b.tokens[:tokens]
	if err != nil {
		b.bad(err)
	} else {
		b.Unknown++
	}
}

const (
	maxBlockSize = 1 << 20 // tokens: more than any engine's
	maxText      = 4 << 10 // bytes of a name or a salt: they are kept
)

// check refuses what cannot be.
func (e *Event) check() error {
	if e.Group >= MaxGroups {
		return fmt.Errorf("kvevent: group %d of at most %d", e.Group, MaxGroups)
	}
	for _, text := range [][]byte{e.LoRA, e.Salt, e.Model, e.Tenant, e.Backend} {
		if len(text) > maxText || !utf8.Valid(text) {
			return fmt.Errorf("kvevent: a name of %d bytes: at most %d, in UTF-8", len(text), maxText)
		}
	}
	switch {
	case e.BlockSize < 0 || e.BlockSize > maxBlockSize:
		return fmt.Errorf("kvevent: a block of %d tokens", e.BlockSize)
	case e.Kind != Stored || len(e.Tokens) == 0:
		return nil
	case e.Extras != nil && len(e.Extras) != len(e.Hashes):
		return fmt.Errorf("kvevent: extra keys of %d blocks, of %d", len(e.Extras), len(e.Hashes))
	case e.BlockSize == 0 || len(e.Tokens) != e.BlockSize*len(e.Hashes):
		return fmt.Errorf("kvevent: %d tokens of %d blocks of %d", len(e.Tokens), len(e.Hashes), e.BlockSize)
	}
	return nil
}

// kinds are the names of events.
var kinds = map[string]Kind{
	"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared,
	"stored": Stored, "removed": Removed, "cleared": Cleared,
}

// positions are the fields of a positional event, after its name.
var positions = map[Kind][]field{
	Stored: {
		fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldNone, fieldMedium, fieldLoRA, fieldExtraKeys, fieldGroup, fieldNone,
		fieldWindow,
	},
	Removed: {fieldHashes, fieldMedium, fieldGroup},
	Cleared: {fieldMedium},
}

func (b *Batch) positional(r *reader, e *Event) error {
	n, err := r.array()
	if err != nil || n == 0 {
		return err
	}
	name, err := r.text()
	if err != nil {
		return err
	}
	e.begin(kinds[string(name)])
	for _, f := range positions[e.Kind][:min(n-1, len(positions[e.Kind]))] {
		if err := b.field(r, e, f); err != nil {
			return err
		}
	}
	return nil
}

// begin sets what an event is, and what it means if it does not say so.
func (e *Event) begin(k Kind) {
	e.Kind = k
	if k == Cleared {
		e.Medium = Media
	}
}

func (b *Batch) tagged(r *reader, e *Event) error {
	n, err := r.dict()
	if err != nil {
		return err
	}
	medium, extra := reader{}, reader{} // what they mean depends on others, which may come later
	for range n {
		key, err := r.text()
		if err != nil {
			return err
		}
		switch f := names[string(key)]; f {
		case fieldKind:
			var name []byte
			name, err = r.text()
			e.begin(kinds[string(name)])
		case fieldMedium:
			medium = *r
			err = r.skip()
		case fieldExtraKeys:
			extra = *r
			err = r.skip()
		default:
			e.Standard = e.Standard || f == fieldHashes && string(key) == "seq_hashes"
			err = b.field(r, e, f)
		}
		if err != nil {
			return err
		}
	}
	if e.Kind != 0 && medium.b != nil {
		err = b.field(&medium, e, fieldMedium)
	}
	if e.Kind != 0 && extra.b != nil && err == nil {
		err = b.field(&extra, e, fieldExtraKeys)
	}
	return err
}

// field is what a value of an event means.
type field uint8

const (
	fieldNone field = iota
	fieldKind
	fieldHashes
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldMedium
	fieldLoRA
	fieldSalt
	fieldExtraKeys
	fieldGroup
	fieldWindow
	fieldRank
	fieldModel
	fieldTenant
	fieldBackend
	fieldID
	fieldBase
)

// names are those of tagged events. The rest is passed over.
var names = map[string]field{
	"type": fieldKind, "event_type": fieldKind,
	"block_hashes": fieldHashes, "seq_hashes": fieldHashes,
	"parent_block_hash": fieldParent, "parent_hash": fieldParent,
	"token_ids": fieldTokens, "block_size": fieldBlockSize, "medium": fieldMedium,
	"lora_name": fieldLoRA, "cache_salt": fieldSalt, "additional_salt": fieldSalt, "extra_keys": fieldExtraKeys,
	"group_idx": fieldGroup, "sliding_window": fieldWindow, "kv_cache_spec_sliding_window": fieldWindow,
	"dp_rank": fieldRank, "model_name": fieldModel, "tenant_id": fieldTenant, "backend_id": fieldBackend,
	"event_id": fieldID, "base_block_idx": fieldBase,
}

// field reads one value. nil stands for a value that is not there.
func (b *Batch) field(r *reader, e *Event, f field) (err error) {
	if r.isNil() {
		return nil
	}
	switch f {
	case fieldHashes:
		e.Hashes, err = b.hashList(r)
	case fieldParent:
		e.Parent, err = hashOf(r)
		e.HasParent = err == nil
	case fieldTokens:
		e.Tokens, err = b.tokenList(r)
	case fieldMedium:
		e.Medium, err = mediumOf(r)
	case fieldLoRA:
		err = e.loraOrSalt(r)
	case fieldExtraKeys:
		err = b.extraKeys(r, e)
	case fieldSalt:
		e.Salt, err = r.text()
	case fieldModel:
		e.Model, err = r.text()
	case fieldTenant:
		e.Tenant, err = r.text()
	case fieldBackend:
		e.Backend, err = r.text()
	case fieldID:
		e.ID, err = r.integer()
	case fieldBlockSize:
		e.BlockSize, err = small(r)
	case fieldGroup:
		e.Group, err = small(r)
	case fieldWindow:
		e.Window, err = small(r)
	case fieldRank:
		e.Rank, err = small(r)
	case fieldBase:
		e.BaseBlock, err = small(r)
	default:
		err = r.skip()
	}
	return err
}

// small reads a count.
func small(r *reader) (int, error) {
	v, err := r.integer()
	if err == nil && v > math.MaxInt32 {
		err = fmt.Errorf("kvevent: %d where a small number was due", int64(v)) //nolint:gosec // to be read by people
	}
	return int(v), err //nolint:gosec // bounded
}

// hashList reads the names of blocks. A single one may stand for a list.
func (b *Batch) hashList(r *reader) ([]uint64, error) {
	n, from := 1, len(b.hashes)
	if r.peek() == kindArray {
		var err error
		if n, err = r.array(); err != nil {
			return nil, err
		}
	}
	for range n {
		h, err := hashOf(r)
		if err != nil {
			return nil, err
		}
		b.hashes = append(b.hashes, h)
	}
	return b.hashes[from:len(b.hashes):len(b.hashes)], nil
}

// hashOf reads a block's name: an integer, or a digest. Of a digest of 8 bytes or more the last 8 count, which is what vLLM
// makes of it where it publishes integers.
func hashOf(r *reader) (uint64, error) {
	if r.peek() == kindInt {
		return r.integer()
	}
	digest, err := r.text()
	switch {
	case err != nil:
		return 0, err
	case len(digest) >= 8:
		return binary.BigEndian.Uint64(digest[len(digest)-8:]), nil
	}
	return xxh3.Hash(digest), nil
}

// tokenList reads the tokens of blocks.
func (b *Batch) tokenList(r *reader) ([]uint32, error) {
	n, err := r.array()
	if err != nil {
		return nil, err
	}
	from := len(b.tokens)
	for range n {
		v, err := r.integer()
		if err != nil {
			return nil, err
		}
		if v > math.MaxUint32 {
			return nil, fmt.Errorf("kvevent: the token %d", v)
		}
		b.tokens = append(b.tokens, uint32(v))
	}
	return b.tokens[from:len(b.tokens):len(b.tokens)], nil
}

// media are the names of media in events.
var media = map[string]Medium{
	"GPU": GPU, "gpu": GPU, "CPU": CPU, "cpu": CPU, "CPU_PINNED": CPU, "cpu_pinned": CPU,
	"DISK": Disk, "disk": Disk, "STORAGE": Disk, "storage": Disk,
}

// mediumOf reads a medium. One that nobody knows is somewhere else.
func mediumOf(r *reader) (Medium, error) {
	name, err := r.text()
	if err != nil {
		return 0, err
	}
	if m, ok := media[string(name)]; ok || len(name) == 0 {
		return m, nil
	}
	return External, nil
}

// loraOrSalt reads the name of an adapter, in whose place SGLang has a map with the salt.
func (e *Event) loraOrSalt(r *reader) (err error) {
	if r.peek() != kindMap {
		e.LoRA, err = r.text()
		return err
	}
	n, err := r.dict()
	if err != nil {
		return err
	}
	for range n {
		key, err := r.text()
		if err != nil {
			return err
		}
		if string(key) == "cache_salt" && r.peek() == kindText {
			e.Salt, err = r.text()
		} else {
			err = r.skip()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// extraKeys reads what else went into the hashes of blocks: for each, nil or a list of the adapter's name, what came from
// images, the user's salt (in the first block of a prompt alone), and the digest of embeddings, in this order.
func (b *Batch) extraKeys(r *reader, e *Event) error {
	n, err := r.array()
	if err != nil {
		return err
	}
	from, all := len(b.extras), uint64(0)
	for i := range n {
		extra, err := e.keysOf(r, i == 0 && !e.HasParent)
		if err != nil {
			return err
		}
		b.extras = append(b.extras, extra)
		all |= extra
	}
	if all == 0 {
		b.extras = b.extras[:from]
		return nil
	}
	e.Extras = b.extras[from:len(b.extras):len(b.extras)]
	return nil
}

// keysOf reads the keys of a block. first says that it is the first of a prompt, whose salt is a text.
func (e *Event) keysOf(r *reader, first bool) (extra uint64, err error) {
	if r.isNil() {
		return 0, nil
	}
	n, err := r.array()
	if err != nil {
		return 0, err
	}
	for range n {
		from := r.p
		text := []byte(nil)
		if r.peek() == kindText {
			text, err = r.text()
		} else {
			err = r.skip()
		}
		switch {
		case err != nil:
			return 0, err
		case text != nil && string(text) == string(e.LoRA):
		case text != nil && first:
			e.Salt = text
		default:
			extra = max(xxh3.HashSeed(r.b[from:r.p], extra), 1)
		}
	}
	return extra, nil
}
