package kvevent

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// kept is what is left of an event after it was written and read.
func kept(f Format, e Event) Event {
	k := Event{Kind: e.Kind, Medium: e.Medium, Rank: NoRank, BaseBlock: -1}
	if e.Kind != Cleared {
		k.Hashes, k.Group = e.Hashes, e.Group
	}
	if e.Kind == Stored {
		k.Tokens, k.BlockSize, k.Window, k.LoRA = e.Tokens, e.BlockSize, e.Window, e.LoRA
		if e.HasParent {
			k.Parent, k.HasParent = e.Parent, true
		} else if len(e.Hashes) > 0 && !bytes.Equal(e.Salt, e.LoRA) {
			k.Salt = e.Salt
		}
		for _, x := range e.Extras { // as numbers of their own: whether there is one
			k.Extras = append(k.Extras, min(x, 1))
		}
		if len(k.Extras) == 0 || slices.Max(k.Extras) == 0 {
			k.Extras = nil
		}
	}
	if f == RFC1527 {
		k.Standard = e.Standard && e.Kind != Cleared
		k.Rank, k.Model, k.Tenant, k.Backend, k.ID = e.Rank, e.Model, e.Tenant, e.Backend, e.ID
		k.LoRA, k.Salt, k.BlockSize = e.LoRA, e.Salt, e.BlockSize
		if e.Kind == Stored {
			k.BaseBlock = e.BaseBlock
		}
	}
	for _, b := range []*[]byte{&k.LoRA, &k.Salt, &k.Model, &k.Tenant, &k.Backend} {
		if len(*b) == 0 {
			*b = nil
		}
	}
	if len(k.Hashes) == 0 {
		k.Hashes = nil
	}
	if len(k.Tokens) == 0 {
		k.Tokens = nil
	}
	return k
}

// requireRoundTrip writes events in a format and reads them back.
func requireRoundTrip(t *testing.T, f Format, rank int, events []Event) {
	t.Helper()
	c := Encoder{Format: f}
	c.Begin(12.5)
	var want []Event
	for i := range events {
		size := c.Size()
		if err := c.Add(&events[i]); err != nil {
			require.ErrorIs(t, err, ErrEvent)
			require.Equal(t, size, c.Size())
			continue
		}
		want = append(want, kept(f, events[i]))
	}
	require.Equal(t, len(want), c.Len())
	var b Batch
	require.NoError(t, b.Decode(c.End(rank)))
	require.NoError(t, b.Reason)
	require.Zero(t, b.Unknown)
	require.Equal(t, 12.5, b.Timestamp) //nolint:testifylint // to the bit
	require.Equal(t, rank, b.Rank)
	var got []Event
	for i := range b.Events {
		e := &b.Events[i]
		for i, x := range e.Extras {
			e.Extras[i] = min(x, 1)
		}
		same := kept(RFC1527, *e) // what is empty becomes nil
		got = append(got, same)
	}
	require.Equal(t, want, got)
}

// someEvents are events with all that they can have.
func someEvents() []Event {
	return []Event{
		{
			Kind: Stored, Medium: CPU, Rank: 3, Hashes: []uint64{1, math.MaxUint64, 1 << 40}, Parent: 1 << 63, HasParent: true, Standard: true,
			Tokens: []uint32{1, 2, 3, 70000, 1 << 31, 6}, BlockSize: 2, Group: 4, Window: 4096, LoRA: []byte("sql"), Salt: []byte("pepper"),
			Extras: []uint64{0, 7, 0}, Model: []byte("m"), Tenant: []byte("t"), Backend: []byte(strings.Repeat("b", 300)), ID: 9, BaseBlock: 17,
		},
		{Kind: Stored, Medium: GPU, Rank: NoRank, Hashes: []uint64{5}, Tokens: []uint32{1, 2}, BlockSize: 2, Salt: []byte("s"), BaseBlock: 0},
		{Kind: Stored, Medium: Disk, Rank: NoRank, Hashes: []uint64{5}, BlockSize: 256, BaseBlock: -1},
		{Kind: Stored, Rank: NoRank, Hashes: make([]uint64, 70_000), Group: 1, BaseBlock: -1},
		{Kind: Removed, Medium: External, Rank: NoRank, Hashes: []uint64{5, 6}, Group: 2, BaseBlock: -1, Tenant: []byte("t")},
		{Kind: Cleared, Medium: Media, Rank: NoRank, BaseBlock: -1, Tenant: []byte("t")},
		{Kind: Cleared, Medium: Disk, Rank: NoRank, BaseBlock: -1},
	}
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	for f := range Format(len(formats)) {
		for _, rank := range []int{NoRank, 0, 300} {
			requireRoundTrip(t, f, rank, nil)
			requireRoundTrip(t, f, rank, someEvents())
		}
		again, err := ParseFormat(f.String())
		require.NoError(t, err)
		require.Equal(t, f, again)
	}
	_, err := ParseFormat("vLLM")
	require.ErrorContains(t, err, "rfc1527")
}

// TestWhatCannotBeWritten is refused with an error that says why.
func TestWhatCannotBeWritten(t *testing.T) {
	sound := Event{Kind: Stored, Rank: NoRank, Hashes: []uint64{1}, Tokens: []uint32{1}, BlockSize: 1, BaseBlock: -1}
	for why, spoil := range map[string]func(e *Event){
		"kind":         func(e *Event) { e.Kind = 0 },
		"medium":       func(e *Event) { e.Medium = Media },
		"negative":     func(e *Event) { e.Group = -1 },
		"31 bits":      func(e *Event) { e.Window = 1 << 31 },
		"extra keys":   func(e *Event) { e.Extras = []uint64{1, 2} },
		"UTF-8":        func(e *Event) { e.Model = []byte{0xff} },
		"2 tokens":     func(e *Event) { e.Tokens = []uint32{1, 2} },
		"a block of 2": func(e *Event) { e.BlockSize = 2 << 20 },
	} {
		e := sound
		spoil(&e)
		var c Encoder
		c.Begin(0)
		err := c.Add(&e)
		require.ErrorIs(t, err, ErrEvent)
		require.ErrorContains(t, err, why)
		require.Zero(t, c.Len())
	}
}

// FuzzEncode: whatever events are, they read as they were written.
func FuzzEncode(f *testing.F) {
	for _, b := range samples(f) {
		f.Add(b, byte(0))
	}
	f.Fuzz(func(t *testing.T, payload []byte, format byte) {
		var b Batch
		if b.Decode(payload) != nil {
			return
		}
		requireRoundTrip(t, Format(format)%Format(len(formats)), max(b.Rank, NoRank), b.Events)
	})
}

// reader reads what is written here as subscribers do: vLLM's with msgspec's typed structs, the envelope with msgpack. It says
// what it has read as JSON.
const pythonReader = `
import sys, json
from typing import Any, Optional, Union
import msgpack, msgspec
def struct(name, fields, **o): return msgspec.defstruct(name, fields, omit_defaults=True, gc=False, **o)
def types(**o):
    stored = struct("BlockStored", [
        ("block_hashes", list[int]), ("parent_block_hash", Optional[int]), ("token_ids", list[int]), ("block_size", int),
        ("lora_id", Optional[int], None), ("medium", Optional[str], None), ("lora_name", Optional[str], None),
        ("extra_keys", Optional[list[Any]], None), ("group_idx", Optional[int], None), ("kv_cache_spec_kind", Optional[str], None),
        ("kv_cache_spec_sliding_window", Optional[int], None)], tag=True, **o)
    removed = struct("BlockRemoved", [("block_hashes", list[int]), ("medium", Optional[str], None), ("group_idx", Optional[int], None)], tag=True, **o)
    cleared = struct("AllBlocksCleared", [("medium", Optional[str], None)], tag=True, **o)
    return struct("Batch", [("ts", float), ("events", list[Union[stored, removed, cleared]]), ("data_parallel_rank", Optional[int], None)], array_like=True)
data, form = sys.stdin.buffer.read(), sys.argv[1]
if form == "rfc1527":
    ts, events, rank = msgpack.unpackb(data)
else:
    b = msgspec.msgpack.decode(data, type=types(array_like=form == "vllm"))
    ts, events, rank = b.ts, [dict(msgspec.structs.asdict(e), type=type(e).__name__) for e in b.events], b.data_parallel_rank
print(json.dumps([ts, events, rank]))
`

// TestOthersReadWhatIsWritten: what is written is what msgspec and msgpack of Python read.
func TestOthersReadWhatIsWritten(t *testing.T) {
	if exec.CommandContext(t.Context(), "python3", "-c", "import msgspec, msgpack").Run() != nil {
		t.Skip("no msgspec and msgpack for Python here: pip install msgspec msgpack")
	}
	events := slices.Delete(someEvents(), 3, 4) // but for the long one
	for f := range Format(len(formats)) {
		c := Encoder{Format: f}
		c.Begin(12.5)
		for i := range events {
			require.NoError(t, c.Add(&events[i]))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		cmd := exec.CommandContext(ctx, "python3", "-c", pythonReader, f.String())
		cmd.Stdin = bytes.NewReader(c.End(2))
		out, err := cmd.Output()
		cancel()
		require.NoError(t, err)
		var got []any
		d := json.NewDecoder(bytes.NewReader(out))
		d.UseNumber()
		require.NoError(t, d.Decode(&got))
		require.Equal(t, "2", got[2].(json.Number).String())
		list := got[1].([]any)
		require.Len(t, list, len(events))
		stored := list[0].(map[string]any)
		name := map[Format][2]string{RFC1527: {"seq_hashes", "parent_hash"}}[f]
		if f != RFC1527 {
			name = [2]string{"block_hashes", "parent_block_hash"}
			require.Equal(t, "BlockStored", stored["type"])
			require.Equal(t, "AllBlocksCleared", list[4].(map[string]any)["type"])
			require.Equal(t, []any{[]any{"s"}}, list[1].(map[string]any)["extra_keys"])
		} else {
			require.Equal(t, "stored", stored["event_type"])
			require.Equal(t, "pepper", stored["additional_salt"])
			require.Equal(t, json.Number("17"), stored["base_block_idx"])
			require.Equal(t, "t", stored["tenant_id"])
		}
		require.Equal(t, []any{json.Number("1"), json.Number("18446744073709551615"), json.Number("1099511627776")}, stored[name[0]])
		require.Equal(t, json.Number("9223372036854775808"), stored[name[1]])
		require.Len(t, stored["token_ids"], 6)
		require.Equal(t, "CPU", stored["medium"])
		require.Equal(t, "sql", stored["lora_name"])
		require.Equal(t, json.Number("4"), stored["group_idx"])
		require.Equal(t, "EXTERNAL", list[3].(map[string]any)["medium"])
	}
}

func BenchmarkEncode(b *testing.B) {
	var batch Batch
	require.NoError(b, batch.Decode(stored64()))
	for f := range Format(len(formats)) {
		b.Run(f.String(), func(b *testing.B) {
			c := Encoder{Format: f}
			b.ReportAllocs()
			for b.Loop() {
				c.Begin(1)
				if c.Add(&batch.Events[0]) != nil || len(c.End(NoRank)) == 0 {
					b.Fatal("not written")
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
		})
	}
}
