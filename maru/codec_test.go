package maru

import (
	"bytes"
	"encoding/hex"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
)

// unhex reads hexadecimal with anything between the bytes.
func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(strings.NewReplacer(" ", "", "|", "").Replace(s))
	require.NoError(tb, err)
	return b
}

// decode reads a body.
func decode(tb testing.TB, body string) (Request, error) {
	tb.Helper()
	h, _, payload, err := parseHeader(unhex(tb, body))
	var q Request
	if err == nil {
		err = q.Decode(h, payload)
	}
	return q, err
}

func n(v uint64) meta.MaruInt { return meta.MaruInt{Abs: v} }

func keys(s ...string) (out [][]byte) {
	for _, k := range s {
		out = append(out, []byte(k))
	}
	return out
}

// TestRequestsOfMaru: what Maru's own clients send.
func TestRequestsOfMaru(t *testing.T) {
	for _, c := range []struct {
		body string
		want Request
	}{
		{"cf0001fe000000000000000100000001 | 80", Request{Header: Header{Handshake, 0, 1}}},
		{
			"cf00010100000000000000030000001e | 82ab696e7374616e63655f6964a6696e73742d41a473697a65ce00400000",
			Request{Header: Header{RequestAlloc, 0, 3}, Instance: "inst-A", Size: 4 << 20},
		},
		{
			"cf000103000000000000002600000020 | 82ab696e7374616e63655f6964a6696e73742d41a9726567696f6e5f6964cc93",
			Request{Header: Header{ReturnAlloc, 0, 0x26}, Instance: "inst-A", Region: n(147)},
		},
		{
			"cf00010400000000000000070000001c | 81b36578636c7564655f696e7374616e63655f6964a6696e73742d41",
			Request{Header: Header{ListAllocations, 0, 7}, Instance: "inst-A"},
		},
		{
			"cf00011000000000000000080000002a | 84a36b6579a26b31a9726567696f6e5f6964cc93a96b765f6f666673657400a96b765f6c656e67746864",
			Request{Header: Header{Register, 0, 8}, Entries: []meta.MaruEntry{{Key: []byte("k1"), Region: n(147), Length: n(100)}}},
		},
		{
			"cf000110000000000000001c00000028 | 84a36b65792aa9726567696f6e5f6964cc93a96b765f6f666673657400a96b765f6c656e67746801",
			Request{Header: Header{Register, 0, 0x1c}, Entries: []meta.MaruEntry{{
				Key: []byte("\xff+\x00\x00\x00\x00\x00\x00\x00\x2a"), Region: n(147), Length: n(1),
			}}},
		},
		{"cf000111000000000000000b00000008 | 81a36b6579a26b31", Request{Header: Header{Lookup, 0, 11}, Keys: keys("k1")}},
		{
			"cf00012000000000000000140000005e | 81a7656e74726965739284a36b6579a26231a9726567696f6e5f6964cc93a96b765f6f666673657400" +
				"a96b765f6c656e6774680a84a36b6579a26b31a9726567696f6e5f6964cc93a96b765f6f666673657401a96b765f6c656e6774680b",
			Request{Header: Header{BatchRegister, 0, 0x14}, Entries: []meta.MaruEntry{
				{Key: []byte("b1"), Region: n(147), Length: n(10)}, {Key: []byte("k1"), Region: n(147), Offset: n(1), Length: n(11)},
			}},
		},
		{
			"cf000123000000000000001700000012 | 81a46b65797393a26231a46e6f7065a26b31",
			Request{Header: Header{BatchPin, 0, 0x17}, Keys: keys("b1", "nope", "k1")},
		},
		{"cf000122000000000000001600000001 | 80", Request{Header: Header{BatchExists, 0, 0x16}}},
		{"cf0001f1000000000000000200000001 | 90", Request{Header: Header{Heartbeat, 0, 2}}}, // needs no map, since it needs nothing
	} {
		q, err := decode(t, c.body)
		require.NoError(t, err, c.body)
		require.Equal(t, c.want.Header, q.Header)
		require.ElementsMatch(t, c.want.Keys, q.Keys, c.body)
		require.ElementsMatch(t, c.want.Entries, q.Entries, c.body)
		require.Equal(t, []any{c.want.Instance, c.want.Region, c.want.Size}, []any{q.Instance, q.Region, q.Size}, c.body)
	}
}

// TestRepliesOfMaru: what Maru's server answers, byte for byte.
func TestRepliesOfMaru(t *testing.T) {
	h := Handle{147, 0, 4 << 20, 15086386797064553845}
	handle := func(meta.MaruFound) (Handle, bool) { return h, true }
	bools := func(v ...bool) func() bool {
		return func() bool { x := v[0]; v = v[1:]; return x }
	}
	for name, c := range map[string]struct {
		h       Header
		payload func(b []byte) []byte
		want    string
	}{
		"alloc": {
			Header{RequestAlloc, 0, 3},
			func(b []byte) []byte { return appendAlloc(b, h, true) },
			"cf000181000000000000000300000046 | 82a773756363657373c3a668616e646c6584a9726567696f6e5f6964cc93a66f666673657400" +
				"a66c656e677468ce00400000aa617574685f746f6b656ecfd15d9cdc5f2d0575",
		},
		"alloc, refused": {
			Header{RequestAlloc, 0, 4},
			func(b []byte) []byte { return appendAlloc(b, h, false) },
			"cf000181000000000000000400000022 | 82a773756363657373c2a56572726f72b1416c6c6f636174696f6e206661696c6564",
		},
		"return": {
			Header{ReturnAlloc, 0, 0x26},
			func(b []byte) []byte { return AppendBools(b, ReturnAlloc, 1, bools(true)) },
			"cf00018300000000000000260000000a | 81a773756363657373c3",
		},
		"list": {
			Header{ListAllocations, 0, 6},
			func(b []byte) []byte { return AppendHandles(b, []Handle{h}) },
			"cf00018400000000000000060000004c | 82a773756363657373c3ab616c6c6f636174696f6e739184a9726567696f6e5f6964cc93" +
				"a66f666673657400a66c656e677468ce00400000aa617574685f746f6b656ecfd15d9cdc5f2d0575",
		},
		"list of none": {
			Header{ListAllocations, 0, 7},
			func(b []byte) []byte { return AppendHandles(b, nil) },
			"cf000184000000000000000700000017 | 82a773756363657373c3ab616c6c6f636174696f6e7390",
		},
		"register": {
			Header{Register, 0, 8},
			func(b []byte) []byte { return AppendBools(b, Register, 1, bools(true)) },
			"cf000190000000000000000800000012 | 82a773756363657373c3a669735f6e6577c3",
		},
		"lookup": {
			Header{Lookup, 0, 11},
			func(b []byte) []byte {
				return AppendLookup(b, Lookup, 1, func() meta.MaruFound { return meta.MaruFound{Region: 147, Length: n(100)} }, handle)
			},
			"cf000191000000000000000b0000005a | 84a5666f756e64c3a668616e646c6584a9726567696f6e5f6964cc93a66f666673657400" +
				"a66c656e677468ce00400000aa617574685f746f6b656ecfd15d9cdc5f2d0575a96b765f6f666673657400a96b765f6c656e67746864",
		},
		"lookup, missed": {
			Header{Lookup, 0, 12},
			func(b []byte) []byte {
				return AppendLookup(b, Lookup, 1, func() meta.MaruFound { return meta.MaruFound{} }, handle)
			},
			"cf000191000000000000000c00000008 | 81a5666f756e64c2",
		},
		"exists": {
			Header{Exists, 0, 15},
			func(b []byte) []byte { return AppendBools(b, Exists, 1, bools(true)) },
			"cf000192000000000000000f00000009 | 81a6657869737473c3",
		},
		"pin": {
			Header{Pin, 0, 16},
			func(b []byte) []byte { return AppendBools(b, Pin, 1, bools(true)) },
			"cf000194000000000000001000000009 | 81a6657869737473c3",
		},
		"batch_register": {
			Header{BatchRegister, 0, 0x14},
			func(b []byte) []byte { return AppendBools(b, BatchRegister, 2, bools(true, false)) },
			"cf0001a0000000000000001400000015 | 82a773756363657373c3a7726573756c747392c3c2",
		},
		"batch_unpin": {
			Header{BatchUnpin, 0, 0x18},
			func(b []byte) []byte { return AppendBools(b, BatchUnpin, 3, bools(true, false, false)) },
			"cf0001a400000000000000180000000d | 81a7726573756c747393c3c2c2",
		},
		"get_usage": {
			Header{GetUsage, 0, 0x1b},
			func(b []byte) []byte {
				b, _ = AppendUsage(b, []Usage{{"inst-A", 1, 4 << 20, meta.MaruSum{Lo: 10}}}, 2<<30, 2<<30-4<<20)
				return b
			},
			"cf0001f3000000000000001b0000005d | 83a9696e7374616e6365739184ab696e7374616e63655f6964a6696e73742d41a7726567696f6e7301" +
				"a9616c6c6f6361746564ce00400000a4757365640aaa706f6f6c5f746f74616cce80000000a9706f6f6c5f66726565ce7fc00000",
		},
	} {
		b, mark := beginReply(nil, c.h)
		require.Equal(t, unhex(t, c.want), endReply(c.payload(b), mark), name)
	}
	require.Equal(t, unhex(t, "cf000180 00000000 00000000 0000001d 81a56572726f72b5696e7465726e616c20736572766572206572726f72"),
		appendFailure(nil, Header{}, internalError))
}

// TestBadRequests: what cannot be decoded, and what can but makes Maru's server fail.
func TestBadRequests(t *testing.T) {
	for body, want := range map[string]error{
		"": errBody, "cf0001": errBody,
		"cf000112 00000000 00000001 00000001 80":                           errBody,    // a field is missing
		"cf010112 00000000 00000001 00000008 81a36b6579a26b31":             errBody,    // another magic
		"cf000212 00000000 00000001 00000008 81a36b6579a26b31":             errBody,    // another version
		"cf000112 00000000 00000001 00000009 81a36b6579a26b31":             errBody,    // it ends early
		"cf000112 00000000 00000001 00000009 81a36b6579a26b3180":           errBody,    // there is more behind the map
		"cf000112 00000000 00000001 00000007 81a36b6579a1ff":               errBody,    // no UTF-8
		"cf000112 00000000 00000001 00000004 81012a2a":                     errBody,    // a name that is no str
		"cf00017e 00000000 0000004d 00000001 80":                           errBody,    // an unknown type
		"cf000102 00000000 0000004d 00000001 80":                           errBody,    // one that was never given
		"cf000112 00000000 00000007 00000007 81a36b65799101":               errRequest, // a list is no key
		"cf000121 00000000 00000007 00000007 81a46b65797380":               errRequest, // keys that are no list
		"cf000112 00000000 00000007 0000000e 81a36b6579cb7ff8000000000000": errRequest, // what equals nothing
	} {
		_, err := decode(t, body)
		require.ErrorIs(t, err, want, body)
	}
	q, err := decode(t, "cf000112 00000000 00000001 00000008 81a36b6579a26b31 ffff")
	require.NoError(t, err, "what is behind the payload is nothing")
	require.Equal(t, keys("k1"), q.Keys)
}

// TestKeysAreEqualAsInPython: keys of any scalar, in the ways in which they can be written.
func TestKeysAreEqualAsInPython(t *testing.T) {
	for i, group := range [][]string{
		{"2a", "cc2a", "cd002a", "d02a", "d3000000000000002a", "ca42280000", "cb4045000000000000"}, // 42, 42.0
		{"01", "c3", "cb3ff0000000000000"},                                   // 1, true, 1.0
		{"00", "c2", "cb0000000000000000", "cb8000000000000000"},             // 0, false, 0.0, -0.0
		{"ff", "d0ff", "d3ffffffffffffffff", "cbbff0000000000000"},           // -1
		{"cfffffffffffffffff"}, {"d38000000000000000", "cbc3e0000000000000"}, // the ends
		{"cb7ff0000000000000"}, {"cb3fe0000000000000"}, {"cb7e37e43c8800759c"}, // inf, 0.5, 1e300
		{"c0"}, {"a23432"}, {"a0"}, {"c4023432"}, {"c400"},
	} {
		var first []byte
		for _, form := range group {
			v := (&reader{b: unhex(t, form)}).next()
			k, ok := appendCanonical(nil, v)
			require.True(t, ok, form)
			if first == nil {
				first = append([]byte{}, k...)
			}
			require.Equal(t, first, append([]byte{}, k...), "%d: %s", i, form)
		}
	}
	seen := map[string]bool{}
	for _, form := range []string{"2a", "01", "00", "ff", "cb7ff0000000000000", "c0", "a23432", "a0", "c4023432", "c400", "cfffffffffffffffff"} {
		k, _ := appendCanonical(nil, (&reader{b: unhex(t, form)}).next())
		require.False(t, seen[string(k)], form)
		seen[string(k)] = true
	}
}

// TestNumbersComeBackAsTheyWere: nobody checks that a location is one.
func TestNumbersComeBackAsTheyWere(t *testing.T) {
	for _, form := range []string{
		"00", "7f", "cc80", "cd0100", "ce00010000", "cf0000000100000000", "cfffffffffffffffff", "ff", "e0", "d0df", "d180ff" + "",
		"d2ffff7fff", "d3ffffffff7fffffff", "d38000000000000000", "cb3fe0000000000000", "a33130 30", "c0", "c3", "920102",
	} {
		raw := unhex(t, form)
		var q Request
		v := q.number(&reader{b: raw})
		require.False(t, q.odd)
		require.Equal(t, raw, appendNumber(nil, v), form)
	}
}

// TestTenth: Python's round(v, 1), whose ties go by the exact value.
func TestTenth(t *testing.T) {
	for v, want := range map[float64]float64{
		12.5: 12.5, 0.05: 0.1, 0.15: 0.1, 0.25: 0.2, 0.35: 0.3, 0.45: 0.5, 2.675: 2.7, 1e22: 1e22, -0.25: -0.2, 0.75: 0.8, 1234.55: 1234.5,
	} {
		require.InDelta(t, want, tenth(v), 0, "%v", v)
	}
	require.True(t, math.IsInf(tenth(math.Inf(1)), 1))
}

func TestStats(t *testing.T) {
	var s Stats
	b := unhex(t, "81a7656e74726965739385a9636c69656e745f6964a6696e73742d41a76f705f74797065a573746f7265a6726573756c74a46e6f6e65a473697a6564"+
		"aa6c6174656e63795f7573cb4029000000000000"+
		"85a9636c69656e745f6964a6696e73742d41a76f705f74797065a872657472696576 65a6726573756c74a3686974a473697a6564aa6c6174656e63795f7573cb4014000000000000"+
		"80")
	var q Request
	require.NoError(t, q.Decode(Header{Type: ReportStats}, b))
	require.Equal(t, []Report{
		{"store", "none", "inst-A", n(100), 12.5}, {"retrieve", "hit", "inst-A", n(100), 5}, {Op: "unknown", Result: "none", Client: "_unknown"},
	}, q.Reports)
	s.Record(q.Reports)
	first := s.append(nil)
	require.True(t, bytes.Contains(first, []byte("\xa4_all\x81\xaaoperations\x83")), "three operations in all")
	require.True(t, bytes.Contains(first, append([]byte("\xaeinterval_count"), 1)))
	second := s.append(nil)
	require.False(t, bytes.Contains(second, append([]byte("\xaeinterval_count"), 1)), "GET_STATS begins intervals anew")
	require.True(t, bytes.Contains(second, append([]byte("\xafinterval_avg_us"), 0)), "of none the average is an integer")
}

// FuzzRequest: whatever comes is decoded or refused, and what is decoded stays within its bounds.
func FuzzRequest(f *testing.F) {
	for _, body := range []string{
		"cf00012000000000000000140000005e81a7656e74726965739284a36b6579a26231a9726567696f6e5f6964cc93a96b765f6f666673657400" +
			"a96b765f6c656e6774680a84a36b6579a26b31a9726567696f6e5f6964cc93a96b765f6f666673657401a96b765f6c656e6774680b",
		"cf000123000000000000001700000012 81a46b65797393a26231a46e6f7065a26b31", "cf000112 00000000 00000007 00000007 81a36b65799101",
		"cf000103000000000000002600000020 82ab696e7374616e63655f6964a6696e73742d41a9726567696f6e5f6964cc93",
		"cf0001f2000000000000001900000009 81a7656e747269657390",
	} {
		f.Add(unhex(f, body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		h, _, payload, err := parseHeader(body)
		if err != nil {
			require.ErrorIs(t, err, errBody)
			return
		}
		var q Request
		if q.Decode(h, payload) != nil {
			return
		}
		require.LessOrEqual(t, len(q.Keys)+len(q.Entries)+len(q.Reports), len(payload)+1)
		if c := q.Command(); c != nil {
			for _, e := range c.Entries {
				require.LessOrEqual(t, len(e.Key), meta.MaxMaruKeyBytes)
			}
		}
	})
}
