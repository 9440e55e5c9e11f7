package protocol

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.NewReplacer(" ", "", "|", "").Replace(s))
	require.NoError(t, err)
	return b
}

func keysOf(names ...string) [][]byte {
	keys := make([][]byte, 0, len(names))
	for _, n := range names {
		keys = append(keys, []byte(n))
	}
	return keys
}

const (
	wireHandle = "84a9726567696f6e5f6964cc93a66f666673657400a66c656e677468ce00400000aa617574685f746f6b656ecf" +
		"d15d9cdc5f2d0575"
	wireOK     = "a773756363657373c3"
	wireFailed = "a773756363657373c2"
	wireSorry  = "81a56572726f72b5696e7465726e616c20736572766572206572726f72"
)

func wireRegion() Region {
	return Region{Handle: Handle{RegionID: 147, Length: 4194304, AuthToken: 15086386797064553845}}
}

// wireFound is where a key was registered by the examples below.
func wireFound(offset, length uint64) LookupResult {
	return LookupResult{Found: true, Location: Location{Region: wireRegion(), KVOffset: offset, KVLength: length}}
}

func wireEntry(key string, offset, length uint64) RegisterEntry {
	return RegisterEntry{Key: []byte(key), RegionID: 147, KVOffset: offset, KVLength: length}
}

func requestCodec(t *testing.T, m any, typ Type) codec {
	t.Helper()
	for _, c := range codecs() {
		if c.typ == typ && sameType(c.make(), m) {
			return c
		}
	}
	require.Failf(t, "no codec", "%T as %s", m, typ)
	return codec{}
}

// TestMaru checks every message against bytes that Maru's own code sent and received.
func TestMaru(t *testing.T) {
	cases := []struct {
		name string
		typ  Type
		seq  uint32
		msg  any // nil: the empty map
		wire string
	}{
		{"handshake", TypeHandshake, 1, &HandshakeRequest{}, "cf0001fe000000000000000100000001 | 80"},
		{
			"handshake reply", TypeHandshake, 1, &HandshakeReply{Success: true, RMAddress: "127.0.0.1:9850"},
			"cf0001fe000000000000000100000024 | 82" + wireOK + "aa726d5f61646472657373ae3132372e302e302e313a39383530",
		},
		{
			"alloc", TypeRequestAlloc, 3, &AllocRequest{InstanceID: "inst-A", Size: 4194304},
			"cf00010100000000000000030000001e | 82ab696e7374616e63655f6964a6696e73742d41a473697a65ce00400000",
		},
		{
			"alloc reply", TypeRequestAlloc | ReplyBit, 3, &AllocReply{Success: true, Region: wireRegion()},
			"cf000181000000000000000300000046 | 82" + wireOK + "a668616e646c65" + wireHandle,
		},
		{
			"alloc refused", TypeRequestAlloc | ReplyBit, 4, &AllocReply{Error: Error{Message: "Allocation failed"}},
			"cf000181000000000000000400000022 | 82" + wireFailed + "a56572726f72b1416c6c6f636174696f6e206661696c6564",
		},
		{
			"return", TypeReturnAlloc, 0x26, &ReturnAllocRequest{InstanceID: "inst-A", RegionID: 147},
			"cf0001030000000000000026 00000020 | 82ab696e7374616e63655f6964a6696e73742d41a9726567696f6e5f6964cc93",
		},
		{
			"return reply", TypeReturnAlloc | ReplyBit, 0x26, &SuccessReply{Success: true},
			"cf00018300000000000000260000000a | 81" + wireOK,
		},
		{"list", TypeListAllocations, 6, &ListAllocationsRequest{}, "cf000104000000000000000600000001 | 80"},
		{
			"list reply", TypeListAllocations | ReplyBit, 6,
			&ListAllocationsReply{Success: true, Allocations: []Region{wireRegion()}},
			"cf00018400000000000000060000004c | 82" + wireOK + "ab616c6c6f636174696f6e7391" + wireHandle,
		},
		{
			"list others", TypeListAllocations, 7, &ListAllocationsRequest{ExcludeInstanceID: "inst-A"},
			"cf00010400000000000000070000001c | 81b36578636c7564655f696e7374616e63655f6964a6696e73742d41",
		},
		{
			"list others reply", TypeListAllocations | ReplyBit, 7, &ListAllocationsReply{Success: true},
			"cf000184000000000000000700000017 | 82" + wireOK + "ab616c6c6f636174696f6e7390",
		},
		{
			"register", TypeRegister, 8, &RegisterRequest{Entries: []RegisterEntry{wireEntry("k1", 0, 100)}},
			"cf00011000000000000000080000002a | 84a36b6579a26b31a9726567696f6e5f6964cc93a96b765f6f666673657400a96b" +
				"765f6c656e67746864",
		},
		{
			"register reply", TypeRegister | ReplyBit, 8,
			&RegisterReply{Success: true, Results: []RegisterResult{{IsNew: true}}},
			"cf000190000000000000000800000012 | 82" + wireOK + "a669735f6e6577c3",
		},
		{
			"register duplicate", TypeRegister | ReplyBit, 9,
			&RegisterReply{Success: true, Results: []RegisterResult{{}}},
			"cf000190000000000000000900000012 | 82" + wireOK + "a669735f6e6577c2",
		},
		{"lookup", TypeLookup, 11, &LookupRequest{Keys: keysOf("k1")}, "cf000111000000000000000b00000008 | 81a36b6579a26b31"},
		{
			"lookup reply", TypeLookup | ReplyBit, 11, &LookupReply{Results: []LookupResult{wireFound(0, 100)}},
			"cf000191000000000000000b0000005a | 84a5666f756e64c3a668616e646c65" + wireHandle +
				"a96b765f6f666673657400a96b765f6c656e67746864",
		},
		{
			"lookup miss", TypeLookup | ReplyBit, 12, &LookupReply{Results: []LookupResult{{}}},
			"cf000191000000000000000c00000008 | 81a5666f756e64c2",
		},
		{"exists", TypeExists, 15, &KeysRequest{Keys: keysOf("k1")}, "cf000112000000000000000f00000008 | 81a36b6579a26b31"},
		{
			"exists reply", TypeExists | ReplyBit, 15, &KeysReply{Results: []bool{true}},
			"cf000192000000000000000f00000009 | 81a6657869737473c3",
		},
		{"pin", TypePin, 16, &KeysRequest{Keys: keysOf("k1")}, "cf000114000000000000001000000008 | 81a36b6579a26b31"},
		{
			"pin reply", TypePin | ReplyBit, 16, &KeysReply{Results: []bool{true}},
			"cf000194000000000000001000000009 | 81a6657869737473c3",
		},
		{"delete", TypeDelete, 17, &KeysRequest{Keys: keysOf("k1")}, "cf000113000000000000001100000008 | 81a36b6579a26b31"},
		{
			"delete pinned", TypeDelete | ReplyBit, 17, &KeysReply{Results: []bool{false}},
			"cf00019300000000000000110000000a | 81" + wireFailed,
		},
		{
			"unpin reply", TypeUnpin | ReplyBit, 18, &KeysReply{Results: []bool{true}},
			"cf00019500000000000000120000000a | 81" + wireOK,
		},
		{
			"batch register", TypeBatchRegister, 20,
			&RegisterRequest{Entries: []RegisterEntry{wireEntry("b1", 0, 10), wireEntry("k1", 1, 11)}},
			"cf00012000000000000000140000005e | 81a7656e74726965739284a36b6579a26231a9726567696f6e5f6964cc93a96b76" +
				"5f6f66667365" +
				"7400a96b765f6c656e6774680a84a36b6579a26b31a9726567696f6e5f6964cc93a96b765f6f666673657401a96b765f6c656e6774680b",
		},
		{
			"batch register reply", TypeBatchRegister | ReplyBit, 20,
			&RegisterReply{Success: true, Results: []RegisterResult{{IsNew: true}, {}}},
			"cf0001a00000000000000014 00000015 | 82" + wireOK + "a7726573756c747392c3c2",
		},
		{
			"batch lookup", TypeBatchLookup, 21, &LookupRequest{Keys: keysOf("b1", "nope")},
			"cf00012100000000000000150000000f | 81a46b65797392a26231a46e6f7065",
		},
		{
			"batch lookup reply", TypeBatchLookup | ReplyBit, 21,
			&LookupReply{Results: []LookupResult{wireFound(0, 10), {}}},
			"cf0001a100000000000000150000006c | 81a7656e74726965739284a5666f756e64c3a668616e646c65" + wireHandle +
				"a96b765f6f666673657400a96b765f6c656e6774680a81a5666f756e64c2",
		},
		{
			"batch exists", TypeBatchExists, 22, &KeysRequest{Keys: keysOf("b1", "nope", "k1")},
			"cf000122000000000000001600000012 | 81a46b65797393a26231a46e6f7065a26b31",
		},
		{
			"batch exists reply", TypeBatchExists | ReplyBit, 22, &KeysReply{Results: []bool{true, false, true}},
			"cf0001a200000000000000160000000d | 81a7726573756c747393c3c2c3",
		},
		{
			"batch pin", TypeBatchPin, 23, &KeysRequest{Keys: keysOf("b1", "nope", "k1")},
			"cf000123000000000000001700000012 | 81a46b65797393a26231a46e6f7065a26b31",
		},
		{
			"batch pin reply", TypeBatchPin | ReplyBit, 23, &KeysReply{Results: []bool{true, false, false}},
			"cf0001a300000000000000170000000d | 81a7726573756c747393c3c2c2",
		},
		{
			"batch unpin reply", TypeBatchUnpin | ReplyBit, 24, &KeysReply{Results: []bool{true, false, false}},
			"cf0001a400000000000000180000000d | 81a7726573756c747393c3c2c2",
		},
		{"heartbeat", TypeHeartbeat, 2, nil, "cf0001f1000000000000000200000001 | 80"},
		{"heartbeat reply", TypeHeartbeat, 2, &HeartbeatReply{}, "cf0001f1000000000000000200000001 | 80"},
		{
			// Of the second entry only the size is known: it fills the frame of 0x98 bytes.
			"report stats", TypeReportStats, 25, &ReportStatsRequest{Entries: []StatsEntry{
				{ClientID: "inst-A", OpType: "store", Result: "none", Size: 100, LatencyUS: 12.5},
				{ClientID: "inst-A", OpType: "retrieve", Result: "hit", Size: 100, LatencyUS: 12.5},
			}},
			"cf0001f2000000000000001900000098 | 81a7656e747269657392" +
				"85a9636c69656e745f6964a6696e73742d41a76f705f74797065a573746f7265a6726573756c74a46e6f6e65a473697a6564" +
				"aa6c6174656e63795f7573cb4029000000000000" +
				"85a9636c69656e745f6964a6696e73742d41a76f705f74797065a87265747269657665a6726573756c74a3686974a473697a" +
				"6564aa6c6174656e63795f7573cb4029000000000000",
		},
		{
			"report stats reply", TypeReportStats, 25, &SuccessReply{Success: true},
			"cf0001f200000000000000190000000a | 81" + wireOK,
		},
		{"get usage", TypeGetUsage, 27, nil, "cf0001f3000000000000001b00000001 | 80"},
		{
			"get usage reply", TypeGetUsage, 27, &GetUsageReply{
				Instances: []InstanceUsage{{InstanceID: "inst-A", Regions: 1, Allocated: 4194304, Used: 110}},
				PoolTotal: 2147483648, PoolFree: 2143289344,
			},
			"cf0001f3000000000000001b0000005d | 83a9696e7374616e6365739184ab696e7374616e63655f6964a6696e73742d41a7" +
				"726567696f6e7301" +
				"a9616c6c6f6361746564ce00400000a4757365646eaa706f6f6c5f746f74616cce80000000a9706f6f6c5f66726565ce7fc00000",
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			wire := unhex(t, c.wire)
			h, payload, err := ParseFrame(wire)
			require.NoError(t, err)
			require.Equal(t, Header{Type: c.typ, Sequence: c.seq, Length: uint32(len(payload))}, h)

			frame, mark := BeginFrame(nil, c.typ, c.seq)
			if c.msg == nil {
				frame = AppendEmpty(frame)
			} else {
				frame = wireCodec(t, c.msg, c.typ).append(c.msg, frame)
			}
			require.Equal(t, hex.EncodeToString(wire), hex.EncodeToString(EndFrame(frame, mark)))

			if c.msg != nil {
				got := wireCodec(t, c.msg, c.typ)
				m := got.make()
				require.NoError(t, got.decode(m, payload))
				if e, ok := m.(interface{ Err() error }); ok && e.Err() != nil {
					require.Equal(t, CodeInternal, CodeOf(e.Err()), "an error that came without a code")
					return
				}
				again := got.append(m, nil)
				require.Equal(t, hex.EncodeToString(payload), hex.EncodeToString(again))
			}
		})
	}
}

// wireCodec returns the codec of the message m in a frame of type typ.
func wireCodec(t *testing.T, m any, typ Type) codec {
	t.Helper()
	if _, ok := m.(*SuccessReply); ok {
		return oneShape[SuccessReply](typ)
	}
	if typ < TypeGetStats {
		typ &^= ReplyBit
	}
	return requestCodec(t, m, typ)
}

// TestMaruErrors checks the replies that say no more than that something failed.
func TestMaruErrors(t *testing.T) {
	frame := unhex(t, "cf000192 00000000 00000021 0000001d"+wireSorry)
	sorry := &Error{Message: "internal server error"}

	buf, mark := BeginReply(nil, Header{Type: TypeExists, Sequence: 0x21})
	require.Equal(t, frame, EndFrame(AppendErrorReply(buf, sorry), mark))

	unknown := unhex(t, "cf000180 00000000 00000000 0000001d"+wireSorry)
	buf, mark = BeginReply(nil, Header{})
	require.Equal(t, unknown, EndFrame(AppendErrorReply(buf, sorry), mark))

	shutdown := unhex(t, "cf0001ff 00000000 00000024 00000021"+
		"81a56572726f72b9556e6b6e6f776e206d65737361676520747970653a20323535")
	buf, mark = BeginReply(nil, Header{Type: TypeShutdown, Sequence: 0x24})
	require.Equal(t, shutdown, EndFrame(AppendErrorReply(buf, &Error{Message: "Unknown message type: 255"}), mark))

	for _, c := range codecs() { // an error alone fits every reply
		m := c.make()
		e, ok := m.(interface{ Err() error })
		if !ok {
			continue
		}
		require.NoError(t, c.decode(m, unhex(t, wireSorry)), c.name)
		require.Equal(t, CodeInternal, CodeOf(e.Err()), c.name)
		require.ErrorContains(t, e.Err(), "internal server error", c.name)
	}
}

// TestMaruRequests checks what a server must take, or refuse without losing the connection, beyond the above.
func TestMaruRequests(t *testing.T) {
	t.Run("an unknown type is a frame like any other", func(t *testing.T) {
		h, _, err := ParseFrame(unhex(t, "cf00017e 00000000 0000004d 00000001 80"))
		require.NoError(t, err)
		require.False(t, h.Type.Known())
	})
	t.Run("a key that is no string", func(t *testing.T) {
		_, payload, err := ParseFrame(unhex(t, "cf000112 00000000 00000021 00000007 81a36b65799101"))
		require.NoError(t, err)
		requireDecodeError(t, new(KeysRequest).DecodeAs(payload, TypeExists), "key", CodeBadRequest)
	})
	t.Run("an int as a key", func(t *testing.T) {
		_, payload, err := ParseFrame(unhex(t, "cf000110000000000000001c00000028 |"+
			"84a36b65792aa9726567696f6e5f6964cc93a96b765f6f666673657400a96b765f6c656e67746801"))
		require.NoError(t, err)
		requireDecodeError(t, new(RegisterRequest).DecodeAs(payload, TypeRegister), "key", CodeBadRequest)
	})
	t.Run("an array in place of a map without required fields", func(t *testing.T) {
		require.NoError(t, new(HandshakeRequest).Decode([]byte{0x90}))
		requireDecodeError(t, new(KeysRequest).DecodeAs([]byte{0x90}, TypeExists), "key", CodeBadRequest)
	})
	t.Run("nil in place of an optional field", func(t *testing.T) {
		var m ListAllocationsRequest
		require.NoError(t, m.Decode(append(unhex(t, "81b36578636c7564655f696e7374616e63655f6964"), 0xc0)))
		require.Empty(t, m.ExcludeInstanceID)
	})
}

// TestKeyForms checks that keys travel as str where that is valid, and mean the same as bin.
func TestKeyForms(t *testing.T) {
	for _, c := range []struct {
		key  string
		head byte
	}{{"ascii", 0xa5}, {"", 0xa0}, {strings.Repeat("k", 32), 0xd9}, {"\xff\x00", 0xc4}, {"é", 0xc4}} {
		b := appendKey(nil, []byte(c.key))
		require.Equal(t, c.head, b[0], "%q", c.key)
		var m KeysRequest
		require.NoError(t, m.DecodeAs(append([]byte("\x81\xa3key"), b...), TypeExists))
		require.Equal(t, keysOf(c.key), m.Keys)
	}
	for _, form := range []string{"\xa2k1", "\xd9\x02k1", "\xda\x00\x02k1", "\xc4\x02k1", "\xc6\x00\x00\x00\x02k1"} {
		var m KeysRequest
		require.NoError(t, m.DecodeAs([]byte("\x81\xa3key"+form), TypeExists))
		require.Equal(t, keysOf("k1"), m.Keys, "%q", form)
	}
}

// TestPacked checks the layout that the package's documentation promises to authors of other clients.
func TestPacked(t *testing.T) {
	r := LookupResult{
		Found: true,
		Location: Location{
			Region: Region{
				Handle: Handle{RegionID: 2, Offset: 3, Length: 4, AuthToken: 99},
				Device: 1, Generation: 5, Epoch: 6, PageSize: 99,
			},
			KVOffset: 7, KVLength: 8, Checksum: 9,
		},
		Lease: 10, LeaseMS: 0x0b,
	}
	b := AppendPacked(nil, &r)
	require.Len(t, b, PackedSize)
	require.Equal(t, "010000000b000000"+"0100000000000000"+"0200000000000000"+"0300000000000000"+"0400000000000000"+
		"0500000000000000"+"0600000000000000"+"0700000000000000"+"0800000000000000"+"0900000000000000"+
		"0a00000000000000", hex.EncodeToString(b))
	r.AuthToken, r.PageSize = 0, 0

	for n := range 300 { // across the lengths at which the head grows
		m := LookupReply{}
		for i := range n {
			m.Results = append(m.Results, LookupResult{})
			if i%3 != 0 {
				m.Results[i] = r
				m.Results[i].KVOffset = uint64(i)
			}
		}
		whole := m.AppendPacked(nil)
		parts := AppendPackedHead(nil, n)
		open, mark := BeginPacked(nil)
		for i := range m.Results {
			parts = AppendPacked(parts, &m.Results[i])
			open = AppendPacked(open, &m.Results[i])
		}
		require.Equal(t, whole, parts)
		for _, b := range [][]byte{whole, EndPacked(open, mark)} {
			got := LookupReply{Results: []LookupResult{{Found: true, Lease: 5}}[:0]}
			require.NoError(t, got.DecodeAs(b, TypeBatchLookup))
			require.Len(t, got.Results, n)
			require.True(t, n == 0 || equalResults(m.Results, got.Results))
		}
	}
	huge := LookupResult{Found: true, LeaseMS: 1 << 40}
	var got LookupReply
	require.NoError(t, got.DecodeAs(AppendPacked(AppendPackedHead(nil, 1), &huge), TypeBatchLookup))
	require.Equal(t, uint64(1<<32-1), got.Results[0].LeaseMS, "clamped, not wrapped")
}

// TestPackedCopies checks the layout of what a packed reply says beyond the first locations.
func TestPackedCopies(t *testing.T) {
	r := wireFound(7, 8)
	r.AuthToken, r.Version = 0, 0x11
	r.Copies = []Location{{
		Region: Region{
			Handle: Handle{RegionID: 2, Offset: 3, Length: 4}, Device: 1, Generation: 5, Epoch: 6,
		},
		KVOffset: 7, KVLength: 8, Checksum: 9,
	}}
	wanted := wireFound(9, 10)
	wanted.AuthToken, wanted.Version, wanted.Promote = 0, 0x12, true
	m := LookupReply{Results: []LookupResult{{}, r, wireFound(1, 2), wanted}}
	m.Results[2].AuthToken = 0
	b := m.AppendPacked(nil)
	records := b[len("\x82\xa6packed\xc5\x01\x60"):]
	require.Equal(t, "0101000000000000", hex.EncodeToString(records[PackedSize:][:8]), "found, one copy")
	require.Equal(t, "0300000000000000", hex.EncodeToString(records[3*PackedSize:][:8]), "found, promote")
	require.Equal(t, hex.EncodeToString([]byte("\xa6copies\xc4\x50"))+"1100000000000000"+
		"0100000000000000"+"0200000000000000"+"0300000000000000"+"0400000000000000"+
		"0500000000000000"+"0600000000000000"+"0700000000000000"+"0900000000000000"+
		"1200000000000000", hex.EncodeToString(records[4*PackedSize:]))

	var got LookupReply
	for range 2 { // also into a struct that is used again
		require.NoError(t, got.DecodeAs(b, TypeBatchLookup))
		require.Equal(t, m, got)
	}
	without := AppendPacked(AppendPackedHead(nil, 1), &m.Results[2])
	require.NoError(t, got.DecodeAs(without, TypeBatchLookup))
	require.Equal(t, m.Results[2:3], got.Results, "nothing of an earlier reply is left")

	older := dec{b: b} // one that does not know of copies reads what it knows
	n := older.top()
	require.True(t, older.next(&n))
	require.Equal(t, "packed", string(older.name()))
	results, _ := older.packed(nil)
	require.True(t, older.next(&n))
	older.name()
	older.skip()
	require.NoError(t, older.end())
	require.Equal(t, m.Results[1].Location, results[1].Location)
}

// TestLookupParts checks that a reply that is written result by result is that of AppendAs.
func TestLookupParts(t *testing.T) {
	for _, n := range []int{0, 1, 15, 16, 200} {
		m := LookupReply{}
		for i := range n {
			m.Results = append(m.Results, wireFound(uint64(i), 1))
			m.Results[i].Found = i%2 == 0
		}
		parts := AppendLookupHead(nil, n)
		open, mark := BeginLookup(nil)
		for i := range m.Results {
			parts = AppendLookupResult(parts, &m.Results[i])
			open = AppendLookupResult(open, &m.Results[i])
		}
		require.Equal(t, m.AppendAs(nil, TypeBatchLookup), parts)
		var a, b LookupReply
		require.NoError(t, a.DecodeAs(parts, TypeBatchLookup))
		require.NoError(t, b.DecodeAs(EndLookup(open, mark, n), TypeBatchLookup))
		require.Equal(t, a, b)
	}
}
