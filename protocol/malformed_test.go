package protocol

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
)

func sameType(a, b any) bool { return reflect.TypeOf(a) == reflect.TypeOf(b) }

func equalResults(a, b []LookupResult) bool { return reflect.DeepEqual(a, b) }

func requireDecodeError(t *testing.T, err error, field string, code Code) {
	t.Helper()
	de, ok := errors.AsType[*DecodeError](err)
	require.Truef(t, ok, "%v", err)
	require.Equal(t, field, de.Field, de.Reason)
	require.Equal(t, code, de.Code, de.Reason)
	require.NotEmpty(t, de.Reason)
	require.Equal(t, code, CodeOf(fmt.Errorf("wrapped: %w", err)))
	require.Equal(t, code, de.Reply().Code)
	require.Contains(t, de.Reply().Message, de.Reason)
}

type object = map[string]any

// pack encodes v, the fields of its maps by their names: one after another that it depends on as well as before it.
func pack(t *testing.T, v any) []byte {
	t.Helper()
	var b bytes.Buffer
	e := msgpack.NewEncoder(&b)
	e.SetSortMapKeys(true)
	require.NoError(t, e.Encode(v))
	return b.Bytes()
}

// entry is a REGISTER entry with one field set otherwise, or left out if the value is nil.
func entry(field string, value any) object {
	m := object{"key": "k", "region_id": 1, "kv_offset": 2, "kv_length": 3}
	if value == nil {
		delete(m, field)
	} else if field != "" {
		m[field] = value
	}
	return m
}

func repeated[T any](v T, n int) []T { return slices.Repeat([]T{v}, n) }

func TestMalformed(t *testing.T) {
	long := strings.Repeat("k", MaxKeyBytes+1)
	name := strings.Repeat("n", MaxNameBytes+1)
	register := new(RegisterRequest)
	cases := []struct {
		name  string
		msg   any
		typ   Type
		in    any
		field string
		code  Code
	}{
		{"no key", new(KeysRequest), TypeExists, object{}, "key", CodeBadRequest},
		{"keys for a key", new(KeysRequest), TypeExists, object{"keys": []string{"k"}}, "key", CodeBadRequest},
		{"a key for keys", new(KeysRequest), TypeBatchExists, object{"key": "k"}, "keys", CodeBadRequest},
		{"key of nil", new(LookupRequest), TypeLookup, object{"key": nil}, "key", CodeBadRequest},
		{"key too long", new(LookupRequest), TypeLookup, object{"key": long}, "key", CodeKeyTooLong},
		{"bin too long", new(LookupRequest), TypeLookup, object{"key": []byte(long)}, "key", CodeKeyTooLong},
		{
			"one key too long", new(LookupRequest), TypeBatchLookup,
			object{"keys": []string{"a", long}},
			"keys", CodeKeyTooLong,
		},
		{"a key as list", new(LookupRequest), TypeBatchLookup, object{"keys": "a"}, "keys", CodeBadRequest},
		{
			"batch too large", new(LookupRequest), TypeBatchLookup,
			object{"keys": repeated("k", MaxBatch+1)},
			"keys", CodeLimit,
		},
		{"too many leases", new(LeasesRequest), TypeRenew, object{"leases": repeated(1, MaxBatch+1)}, "leases", CodeLimit},
		{
			"too many hashes", new(PrefixMatchRequest), TypePrefixMatch,
			object{"hashes": repeated(1, MaxBatch+1)},
			"hashes", CodeLimit,
		},
		{"page of blocks too large", new(ListBlocksRequest), TypeListBlocks, object{"limit": MaxBatch + 1}, "limit", CodeLimit},
		{"half a block", new(ListBlocksReply), TypeListBlocks, object{"contexts": []any{}, "blocks": make([]byte, 48)}, "blocks", CodeBadRequest},
		{
			"a block of no context", new(ListBlocksReply), TypeListBlocks,
			object{"contexts": []any{}, "blocks": make([]byte, 32)},
			"blocks", CodeBadRequest,
		},
		{"page too large", new(ListKeysRequest), TypeListKeys, object{"limit": MaxBatch + 1}, "limit", CodeLimit},
		{
			"a name too long", new(AllocRequest), TypeRequestAlloc,
			object{"instance_id": name, "size": 1},
			"instance_id", CodeBadRequest,
		},
		{"a name of bytes", new(HandshakeRequest), TypeHandshake, object{"tenant": "\xff"}, "tenant", CodeBadRequest},
		{"no size", new(AllocRequest), TypeRequestAlloc, object{"instance_id": "i"}, "size", CodeBadRequest},
		{
			"negative size", new(AllocRequest), TypeRequestAlloc,
			object{"instance_id": "i", "size": -1},
			"size", CodeBadRequest,
		},
		{
			"size of 2.0", new(AllocRequest), TypeRequestAlloc,
			object{"instance_id": "i", "size": 2.0},
			"size", CodeBadRequest,
		},
		{
			"size as text", new(AllocRequest), TypeRequestAlloc,
			object{"instance_id": "i", "size": "2"},
			"size", CodeBadRequest,
		},
		{
			"evict of 1", new(AllocRequest), TypeRequestAlloc,
			object{"instance_id": "i", "size": 1, "evict": 1},
			"evict", CodeBadRequest,
		},
		{"no entries", register, TypeBatchRegister, object{}, "entries", CodeBadRequest},
		{
			"entry without key", register, TypeBatchRegister,
			object{"entries": []any{entry("", 0), entry("key", nil)}},
			"entries[1].key", CodeBadRequest,
		},
		{
			"entry without length", register, TypeBatchRegister,
			object{"entries": []any{entry("kv_length", nil)}},
			"entries[0].kv_length", CodeBadRequest,
		},
		{
			"entry of wrong type", register, TypeBatchRegister,
			object{"entries": []any{entry("epoch", "x")}},
			"entries[0].epoch", CodeBadRequest,
		},
		{
			"entry that is none", register, TypeBatchRegister,
			object{"entries": []any{entry("", 0), 5}},
			"entries[1]", CodeBadRequest,
		},
		{"first entry is none", register, TypeBatchRegister, object{"entries": []any{5}}, "entries[0]", CodeBadRequest},
		{"context of wrong type", register, TypeRegister, entry("context", 5), "context", CodeBadRequest},
		{
			"model too long", register, TypeRegister,
			entry("context", object{"model": name}),
			"context.model", CodeBadRequest,
		},
		{"lookup without handle", new(LookupReply), TypeLookup, object{"found": true}, "handle", CodeBadRequest},
		{"lookup without found", new(LookupReply), TypeLookup, object{}, "found", CodeBadRequest},
		{
			"half a handle", new(LookupReply), TypeLookup,
			object{"found": true, "handle": object{"region_id": 1}},
			"handle.offset", CodeBadRequest,
		},
		{
			"a handle of 5", new(LookupReply), TypeBatchLookup,
			object{"entries": []any{object{"handle": 5}}},
			"entries[0].handle", CodeBadRequest,
		},
		{
			"packed in part", new(LookupReply), TypeBatchLookup,
			object{"packed": make([]byte, PackedSize+1)},
			"packed", CodeBadRequest,
		},
		{
			"too much packed", new(LookupReply), TypeBatchLookup,
			object{"packed": make([]byte, PackedSize*(MaxBatch+1))},
			"packed", CodeLimit,
		},
		{
			"copies that are not there", new(LookupReply), TypeBatchLookup,
			object{"packed": append([]byte{1, 2}, make([]byte, PackedSize-2)...), "copies": make([]byte, 8+PackedCopySize)},
			"copies", CodeBadRequest,
		},
		{
			"copies that nobody has", new(LookupReply), TypeBatchLookup,
			object{"packed": append([]byte{1, 1}, make([]byte, PackedSize-2)...), "copies": make([]byte, 9+PackedCopySize)},
			"copies", CodeBadRequest,
		},
		{
			"too many packed copies", new(LookupReply), TypeBatchLookup,
			object{"packed": append([]byte{1, MaxCopies + 1}, make([]byte, PackedSize-2)...), "copies": make([]byte, 1<<10)},
			"copies", CodeBadRequest,
		},
		{
			"too many copies", new(TasksReply), TypeTasks,
			object{"tasks": []any{object{"id": 1, "items": []any{object{"copies": repeated(object{}, MaxCopies+1)}}}}},
			"tasks[0].items[0].copies", CodeLimit,
		},
		{
			"an item without a place", new(TasksReply), TypeTasks,
			object{"tasks": []any{object{"id": 1, "items": []any{object{}, object{"key": "k"}}}}},
			"tasks[0].items[1].handle", CodeBadRequest,
		},
		{
			"too many items", new(TasksReply), TypeTasks,
			object{"tasks": []any{object{"id": 1, "items": repeated(object{}, MaxTaskItems+1)}}},
			"tasks[0].items", CodeLimit,
		},
		{
			"too many places", new(AllocRequest), TypeRequestAlloc,
			object{"instance_id": "i", "size": 1, "near": repeated("h", MaxPlaces+1)},
			"near", CodeLimit,
		},
		{
			"too many rails", new(AccessReply), TypeAccess,
			object{"endpoint": object{"rails": repeated("h:1", MaxPlaces+1)}},
			"endpoint.rails", CodeLimit,
		},
		{"a name without a key", new(PutNameRequest), TypePutName, object{"value": "v"}, "key", CodeBadRequest},
		{
			"a name's key too long", new(DeleteNameRequest), TypeDeleteName,
			object{"key": long[:MaxNameKeyBytes+1]},
			"key", CodeKeyTooLong,
		},
		{
			"a name's value too long", new(PutNameRequest), TypePutName,
			object{"key": "k", "value": make([]byte, MaxNameValueBytes+1)},
			"value", CodeLimit,
		},
		{
			"a change without a revision", new(WatchNamesReply), TypeWatchNames,
			object{"changes": []any{object{"key": "k", "created": 1}}},
			"changes[0].modified", CodeBadRequest,
		},
		{
			"too many names", new(ListNamesReply), TypeListNames,
			object{"names": repeated(object{"key": "k", "created": 1, "modified": 1}, MaxNames+1)},
			"names", CodeLimit,
		},
		{"a watch from nowhere", new(WatchNamesRequest), TypeWatchNames, object{"prefix": "p"}, "after", CodeBadRequest},
		{
			"too many NICs", new(AccessReply), TypeAccess,
			object{"endpoint": object{"nics": repeated("mlx5_0", MaxNICs+1)}},
			"endpoint.nics", CodeLimit,
		},
		{"attach without uuid", new(AttachRequest), TypeAttach, object{"ready": true}, "uuid", CodeBadRequest},
		{"a grant of nothing", new(GrantPush), TypeGrant, object{"id": 1}, "region_id", CodeBadRequest},
		{
			"existing beyond the results", new(RegisterReply), TypeBatchRegister,
			object{"success": true, "results": []bool{false}, "existing": []any{object{"index": 1}}},
			"existing[0]", CodeBadRequest,
		},
		{
			"code over 65535", new(SuccessReply), TypeReturnAlloc,
			object{"success": false, "code": 65536},
			"code", CodeBadRequest,
		},
		{"clear without scope", new(ClearRequest), TypeClear, object{"seq": 1}, "", CodeBadRequest},
		{"clear with two scopes", new(ClearRequest), TypeClear, object{"all": true, "tenant": "t"}, "", CodeBadRequest},
		{"clear of the empty prefix", new(ClearRequest), TypeClear, object{"prefix": ""}, "", CodeBadRequest},
		{"cleared without index", new(ClearedPush), TypeCleared, object{"all": true}, "index", CodeBadRequest},
		{"a name of an int", new(SuccessReply), TypeReturnAlloc, map[int]int{1: 2}, "", CodeBadRequest},
		{"too deep", new(HandshakeRequest), TypeHandshake, object{"x": deep(MaxDepth + 2)}, "x", CodeBadRequest},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			err := wireCodec(t, c.msg, c.typ).decode(c.msg, pack(t, c.in))
			requireDecodeError(t, err, c.field, c.code)
		})
	}
}

func deep(n int) any {
	var v any = 1
	for range n {
		v = []any{v}
	}
	return v
}

func TestDepthLimit(t *testing.T) {
	require.NoError(t, new(HandshakeRequest).Decode(pack(t, object{"x": deep(MaxDepth)})), "as deep as is allowed")
}

func TestTrailingBytes(t *testing.T) {
	for _, c := range codecs() {
		err := c.decode(c.make(), []byte{0x81, 0xa1, 'x', 0xc0, 0x80})
		require.Error(t, err, c.name)
	}
	requireDecodeError(t, new(HandshakeRequest).Decode([]byte{0x80, 0x80}), "", CodeBadRequest)
}

// TestTruncated cuts every message at every byte: it is refused, and nothing is read beyond the end.
func TestTruncated(t *testing.T) {
	for _, c := range codecs() {
		t.Run(c.name, func(t *testing.T) {
			whole := c.append(sample(c), nil)
			if len(whole) > 1500 {
				whole = whole[:1500]
			}
			for n := range whole {
				cut := slices.Clip(slices.Clone(whole[:n]))
				_, ok := errors.AsType[*DecodeError](c.decode(c.make(), cut))
				require.True(t, ok, "cut at %d", n)
			}
		})
	}
}

// TestAnnouncedSizes checks that a length is not believed before the bytes are there.
func TestAnnouncedSizes(t *testing.T) {
	heads := []string{
		"\xdd\xff\xff\xff\xff", "\xdc\xff\xff", "\xdf\xff\xff\xff\xff", "\xdb\xff\xff\xff\xff", "\xc6\xff\xff\xff\xff",
		"\xc9\xff\xff\xff\xff\x01", "\xc1", "\xde\xff\xff", "\x9f", "\x8f", "\xbf", "\xdd\x00\x00\x10\x00", "\xd8",
	}
	fields := []string{"keys", "key", "entries", "packed", "leases", "hashes", "x", "handle", "members", "stats_manager"}
	for _, c := range codecs() {
		for _, f := range fields {
			for _, h := range heads {
				in := []byte("\x81" + string([]byte{0xa0 | byte(len(f))}) + f + h)
				m := c.make()
				allocs := testing.AllocsPerRun(1, func() {
					require.Error(t, c.decode(m, in), "%s: %q", c.name, in)
				})
				require.Less(t, allocs, 40.0, "%s: %q", c.name, in)
			}
		}
		for _, h := range heads {
			require.Error(t, c.decode(c.make(), []byte(h)), "%s: %q", c.name, h)
		}
		require.Error(t, c.decode(c.make(), nil), c.name)
	}
}

// TestNumbers checks every form in which msgpack can say an int.
func TestNumbers(t *testing.T) {
	for _, c := range []struct {
		in   string
		want uint64
	}{
		{"\x00", 0},
		{"\x7f", 127},
		{"\xcc\x05", 5},
		{"\xcd\x00\x05", 5},
		{"\xce\x00\x00\x00\x05", 5},
		{"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", 1<<64 - 1},
		{"\xd0\x05", 5},
		{"\xd1\x01\x00", 256},
		{"\xd2\x7f\xff\xff\xff", 1<<31 - 1},
		{"\xd3\x7f\xff\xff\xff\xff\xff\xff\xff", 1<<63 - 1},
	} {
		var m HandshakeRequest
		require.NoError(t, m.Decode([]byte("\x81\xa7session"+c.in)))
		require.Equal(t, c.want, m.Session, "%q", c.in)
	}
	for _, in := range []string{
		"\xff", "\xe0", "\xd0\xff", "\xd1\xff\xff", "\xd2\xff\xff\xff\xff", "\xd3\xff\xff\xff\xff\xff\xff\xff\xff",
	} {
		err := new(HandshakeRequest).Decode([]byte("\x81\xa7session" + in))
		requireDecodeError(t, err, "session", CodeBadRequest)
		require.ErrorContains(t, err, "negative")
	}
	for v := range 64 {
		for _, u := range []uint64{1 << v, 1<<v - 1} {
			var m HandshakeRequest
			require.NoError(t, m.Decode((&HandshakeRequest{Session: u}).Append(nil)))
			require.Equal(t, u, m.Session)
		}
	}
}

func TestErrorTexts(t *testing.T) {
	in := SuccessReply{Error: Error{Code: CodeBusy, Message: "bad \xff" + strings.Repeat("é", MaxTextBytes)}}
	var out SuccessReply
	require.NoError(t, out.Decode(in.Append(nil)))
	require.LessOrEqual(t, len(out.Message), MaxTextBytes)
	require.True(t, strings.HasPrefix(out.Message, "bad \uFFFDéé"), "a text is repaired and cut, not lost")
	require.True(t, strings.HasSuffix(out.Message, "é"), "it is cut between characters")
}

func TestCodes(t *testing.T) {
	seen := map[string]bool{}
	for c := range Code(len(codeNames)) {
		require.NotEmpty(t, c.String())
		require.Equal(t, strings.ToUpper(c.String()), c.String())
		require.False(t, seen[c.String()], c)
		seen[c.String()] = true
	}
	require.Equal(t, "WRONG_POOL", CodeWrongPool.String())
	require.Equal(t, "CODE_999", Code(999).String())
	require.False(t, Code(999).Retryable())
	var retry []Code
	for c := range Code(len(codeNames)) {
		if c.Retryable() {
			retry = append(retry, c)
		}
	}
	require.Equal(t, []Code{2, 3, 14, 15, 21, 23, 24, 26}, retry)

	e := Error{Code: CodeNotLeader, Message: "ask the leader", Leader: "b:1"}
	require.EqualError(t, e.Err(), "NOT_LEADER: ask the leader (leader: b:1)")
	require.NoError(t, (&Error{}).Err())
	err := fmt.Errorf("store: %w", e.Err())
	e.Code = CodeBusy
	require.Equal(t, CodeNotLeader, CodeOf(err), "an error outlives the reply that it came in")
	require.Equal(t, CodeOK, CodeOf(nil))
	require.Equal(t, CodeInternal, CodeOf(errors.New("other")))
	require.Equal(t, CodeBadRequest, CodeOf(&FrameError{}))
}

func TestTypes(t *testing.T) {
	require.Equal(t, "BATCH_LOOKUP_KV", TypeBatchLookup.String())
	require.Equal(t, "BATCH_LOOKUP_KV", TypeBatchLookup.Reply().String())
	require.Equal(t, "HANDSHAKE", TypeHandshake.Reply().String())
	require.Equal(t, "TYPE_0x7E", Type(0x7e).String())
	require.True(t, TypeBatchDelete.Reply().Batch())
	require.False(t, TypeDelete.Batch())
	require.True(t, TypeFreed.Known())
	require.False(t, TypeLookup.Reply().Known())
}
