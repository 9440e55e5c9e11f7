package kvevent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// describe writes a batch as people read it.
func describe(b *Batch) string {
	var w strings.Builder
	fmt.Fprintf(&w, "at %v", b.Timestamp)
	if b.Rank != NoRank {
		fmt.Fprintf(&w, " rank %d", b.Rank)
	}
	fmt.Fprintln(&w)
	for i := range b.Events {
		e := &b.Events[i]
		fmt.Fprintf(&w, "%v %v", e.Kind, e.Medium)
		list := func(name string, there bool, format string, args ...any) {
			if there {
				fmt.Fprintf(&w, " "+name+"="+format, args...)
			}
		}
		list("hashes", e.Hashes != nil, "%d", e.Hashes)
		list("standard", e.Standard, "%v", e.Standard)
		list("parent", e.HasParent, "%d", e.Parent)
		list("tokens", e.Tokens != nil, "%d", e.Tokens)
		list("block", e.BlockSize != 0, "%d", e.BlockSize)
		list("group", e.Group != 0, "%d", e.Group)
		list("window", e.Window != 0, "%d", e.Window)
		list("lora", e.LoRA != nil, "%s", e.LoRA)
		list("salt", e.Salt != nil, "%s", e.Salt)
		list("extras", e.Extras != nil, "%x", e.Extras)
		list("rank", e.Rank != NoRank, "%d", e.Rank)
		list("model", e.Model != nil, "%s", e.Model)
		list("tenant", e.Tenant != nil, "%s", e.Tenant)
		list("backend", e.Backend != nil, "%s", e.Backend)
		list("id", e.ID != 0, "%d", e.ID)
		list("base", e.BaseBlock >= 0, "%d", e.BaseBlock)
		fmt.Fprintln(&w)
	}
	if b.Bad+b.Unknown > 0 {
		fmt.Fprintf(&w, "%d bad, %d unknown; first: %v\n", b.Bad, b.Unknown, b.Reason)
	}
	return w.String()
}

// TestSamples reads what publishers encode: see testdata/make.py.
func TestSamples(t *testing.T) {
	var b Batch // one for all: its memory is used again
	datadriven.RunTest(t, "testdata/samples", func(t *testing.T, d *datadriven.TestData) string {
		t.Helper()
		payload, err := os.ReadFile(filepath.Join("testdata", d.CmdArgs[0].Key+".msgpack"))
		require.NoError(t, err)
		if err := b.Decode(payload); err != nil {
			return err.Error() + "\n"
		}
		return describe(&b)
	})
}

// samples are the payloads in testdata.
func samples(tb testing.TB) (all [][]byte) {
	tb.Helper()
	paths, err := filepath.Glob("testdata/*.msgpack")
	require.NoError(tb, err)
	require.NotEmpty(tb, paths)
	for _, p := range paths {
		b, err := os.ReadFile(p)
		require.NoError(tb, err)
		all = append(all, b)
	}
	return all
}

// TestCutShort: what is cut anywhere gives an error, or the events that came before, and never more of them.
func TestCutShort(t *testing.T) {
	for _, whole := range samples(t) {
		var all, part Batch
		require.NoError(t, all.Decode(whole))
		for n := range whole {
			if part.Decode(whole[:n]) != nil {
				continue
			}
			require.LessOrEqual(t, len(part.Events), len(all.Events))
			for i := range part.Events {
				require.Equal(t, all.Events[i].Hashes, part.Events[i].Hashes)
			}
		}
	}
}

// TestRankAfterABadEvent: what follows the events of a batch is read also if one of them is bad.
func TestRankAfterABadEvent(t *testing.T) {
	var b Batch
	require.NoError(t, b.Decode([]byte("\x93\x00\x92\x11\x91\xb0AllBlocksCleared\x03")))
	require.Equal(t, 1, b.Bad)
	require.Len(t, b.Events, 1)
	require.Equal(t, 3, b.RankOf(&b.Events[0]))
}

// TestEventsThatAskForTooMuch: what an index would keep for an event has bounds.
func TestEventsThatAskForTooMuch(t *testing.T) {
	var b Batch
	long := string(make([]byte, maxText+1))
	for name, event := range map[string]string{
		"a group":   "\x82\xa4type\xacBlockRemoved\xa9group_idx\xcd\x04\x00",
		"a name":    "\x82\xa4type\xabBlockStored\xa9lora_name\xda\x10\x01" + long,
		"no UTF-8":  "\x82\xa4type\xabBlockStored\xa9lora_name\xa1\xff",
		"a backend": "\x82\xa4type\xacBlockRemoved\xaabackend_id\xda\x10\x01" + long,
	} {
		require.NoError(t, b.Decode([]byte("\x92\x00\x92"+event+"\x91\xb0AllBlocksCleared")), name)
		require.Equal(t, 1, b.Bad, name)
		require.Len(t, b.Events, 1, name)
	}
}

// TestWhatIsNoBatch is an error that says why.
func TestWhatIsNoBatch(t *testing.T) {
	var b Batch
	for name, payload := range map[string]string{
		"nothing":                     "",
		"a number":                    "\x05",
		"a text":                      "\xa1x",
		"an array cut short":          "\xdc\x00",
		"a map cut short":             "\x82\xa1x\x01",
		"a map with a number as name": "\x81\x01\x01",
		"more events than bytes":      "\x92\x00\xdd\xff\xff\xff\xff",
		"a time that is a boolean":    "\x92\xc3\x90",
	} {
		require.Error(t, b.Decode([]byte(payload)), name)
	}
	require.NoError(t, b.Decode([]byte("\x90")), "an empty array says nothing")
	require.Empty(t, b.Events)
	deep := append([]byte("\x92\x00\x92"), make([]byte, 0, 100)...)
	for range 50 {
		deep = append(deep, 0x91)
	}
	require.NoError(t, b.Decode(append(deep, 0, 0)))
	require.ErrorIs(t, b.Reason, errDeep)
}

// FuzzDecode: whatever comes, what is read holds together.
func FuzzDecode(f *testing.F) {
	for _, b := range samples(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var b Batch
		if b.Decode(payload) != nil {
			return
		}
		for i := range b.Events {
			e := &b.Events[i]
			require.Contains(t, []Kind{Stored, Removed, Cleared}, e.Kind)
			require.LessOrEqual(t, e.Medium, Media)
			require.GreaterOrEqual(t, e.Rank, NoRank)
			if len(e.Tokens) > 0 && e.Kind == Stored {
				require.Equal(t, e.BlockSize*len(e.Hashes), len(e.Tokens)) //nolint:testifylint // the message would be the tokens
			}
			if e.Extras != nil {
				require.Len(t, e.Extras, len(e.Hashes))
			}
		}
		require.LessOrEqual(t, len(b.Events)+b.Bad+b.Unknown, len(payload)+1)
		first := describe(&b)
		require.NoError(t, b.Decode(payload))
		require.Equal(t, first, describe(&b), "a batch that is used again reads the same")
	})
}

// stored64 is a batch with an event of 64 blocks of 16 tokens, as vLLM sends it.
func stored64() []byte {
	b := []byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x97, 0xab}
	b = append(b, "BlockStored"...)
	b = append(b, 0xdc, 0, 64)
	for i := range 64 {
		b = append(b, 0xcf, byte(i), 1, 2, 3, 4, 5, 6, 7)
	}
	b = append(b, 0xc0, 0xdc, 4, 0)
	for i := range 1024 {
		b = append(b, 0xcd, byte(i>>8)+1, byte(i))
	}
	return append(b, 16, 0xc0, 0xa3, 'G', 'P', 'U')
}

func BenchmarkDecode(b *testing.B) {
	payload := stored64()
	var batch Batch
	b.ReportAllocs()
	for b.Loop() {
		if err := batch.Decode(payload); err != nil || len(batch.Events) != 1 || batch.Bad > 0 {
			b.Fatal(err, batch.Reason)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
}
