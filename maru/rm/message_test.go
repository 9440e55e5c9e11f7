package rm

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// handle is the region of the examples.
var handle = Handle{Region: 148, Offset: 2 << 20, Length: 4 << 20, Token: 0xb5568682440c55be}

const handleHex = "9400000000000000" + "0000200000000000" + "0000400000000000" + "be550c44828656b5"

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	require.NoError(t, err)
	return b
}

// Requests are byte for byte what Maru's client sends, and are read as what it means.
func TestRequests(t *testing.T) {
	const id = "0900 636170747572653a31"
	for _, v := range []struct {
		name string
		hex  string
		want request
	}{
		{
			"alloc", "5552414d 0200 0100 23000000 c0c62d0000000000 00000000 00000000" + id + "0b00000000000000",
			request{kind: KindAlloc, size: 3_000_000, client: "capture:1", id: 11},
		},
		{
			"alloc of a pool", "5552414d 0200 0100 2e000000 c0c62d0000000000 0b000000 00000000 2f6465762f646178302e30" + id + "0b00000000000000",
			request{kind: KindAlloc, size: 3_000_000, path: "/dev/dax0.0", client: "capture:1", id: 11},
		},
		{
			"free", "5552414d 0200 0300 33000000" + handleHex + id + "0c00000000000000",
			request{kind: KindFree, handle: handle, client: "capture:1", id: 12},
		},
		{"access", "5552414d 0200 0900 2b000000" + handleHex + id, request{kind: KindAccess, handle: handle, client: "capture:1"}},
		{"access without a name", "5552414d 0200 0900 20000000" + handleHex, request{kind: KindAccess, handle: handle}},
		{"stats", "5552414d 0200 0500 00000000", request{kind: KindStats}},
	} {
		t.Run(v.name, func(t *testing.T) {
			b := unhex(t, v.hex)
			kind, length, err := parseHeader(b, maxRequest)
			require.NoError(t, err)
			require.Len(t, b[headerSize:], length)
			q, fault := parseRequest(kind, b[headerSize:])
			require.Nil(t, fault)
			require.Equal(t, v.want, q)
			require.Equal(t, hex.EncodeToString(b), hex.EncodeToString(requestFrame(&q)))
		})
	}
}

// Replies are byte for byte what Maru's resource manager sends.
func TestReplies(t *testing.T) {
	region := Region{Handle: handle, Path: "/dev/shm/pool.dat"}
	const path = "11000000 2f6465762f73686d2f706f6f6c2e646174"
	for _, v := range []struct {
		name string
		got  []byte
		want string
	}{
		{
			"alloc", allocFrame(StatusOK, &region, 3_000_000),
			"5552414d 0200 0200 47000000 00000000 00000000" + handleHex + "c0c62d0000000000" + path + "0000",
		},
		{"alloc refused", allocFrame(StatusNoRoom, &Region{}, 0), "5552414d 0200 0200 36000000 f4ffffff 00000000" +
			strings.Repeat("00", 32) + "0000000000000000 00000000 0000"},
		{"free", freeFrame(StatusOK), "5552414d 0200 0400 04000000 00000000"},
		{"free of an unknown region", freeFrame(StatusNotFound), "5552414d 0200 0400 04000000 feffffff"},
		{"free by another", freeFrame(StatusOwner), "5552414d 0200 0400 04000000 ffffffff"},
		{
			"access", accessFrame(StatusOK, &region),
			"5552414d 0200 0a00 2b000000 00000000" + path + "0000200000000000 0000400000000000 0000",
		},
		{
			"access to an unknown region", accessFrame(StatusNotFound, &Region{}),
			"5552414d 0200 0a00 1a000000 feffffff 00000000 0000000000000000 0000000000000000 0000",
		},
		{"bad token", errorFrame(errAccessToken), "5552414d 0200 ff00 1a000000 f3ffffff 12000000 696e76616c6964206175746820746f6b656e"},
		{"stats", statsFrame([]Pool{
			{Path: "/dev/dax0.0", Total: 2 << 30, Free: 1 << 30, Align: 2 << 20},
			{Path: "/dev/shm/pool.dat", File: true, Total: 1 << 30, Align: 2 << 20},
		}), "5552414d 0200 0600 60000000 02000000" +
			"0b000000 00000000 0000008000000000 0000004000000000 0000200000000000 2f6465762f646178302e30" +
			"11000000 01000000 0000004000000000 0000000000000000 0000200000000000 2f6465762f73686d2f706f6f6c2e646174"},
		{"stats of no pool", statsFrame(nil), "5552414d 0200 0600 04000000 00000000"},
	} {
		t.Run(v.name, func(t *testing.T) { require.Equal(t, strings.ReplaceAll(v.want, " ", ""), hex.EncodeToString(v.got)) })
	}
}

func TestBadRequests(t *testing.T) {
	alloc := func(pathLen uint32, path, rest string) []byte {
		b := make([]byte, 8, 64)
		b = binary.LittleEndian.AppendUint32(b, pathLen)
		return append(append(binary.LittleEndian.AppendUint32(b, 0), path...), rest...)
	}
	for _, v := range []struct {
		name    string
		kind    Kind
		payload []byte
		want    *Error
	}{
		{"short alloc", KindAlloc, make([]byte, 15), errAlloc},
		{"path too long", KindAlloc, alloc(maxPath+1, strings.Repeat("p", maxPath+1), ""), errPathLen},
		{"path cut off", KindAlloc, alloc(5, "/dev", ""), errPathCut},
		{"path with NUL", KindAlloc, alloc(4, "/d\x00v", ""), errPathNUL},
		{"no name", KindAlloc, alloc(0, "", ""), errNoClient},
		{"empty name", KindAlloc, alloc(0, "", "\x00\x00\x01"), errNoClient},
		{"name cut off", KindAlloc, alloc(0, "", "\x05\x00abcd"), errNoClient},
		{"name with NUL", KindAlloc, alloc(0, "", "\x03\x00a\x00b"), errNoClient},
		{"name too long", KindAlloc, alloc(0, "", "\x80\x00"+strings.Repeat("n", 128)), errNoClient},
		{"short free", KindFree, make([]byte, 31), errFree},
		{"free without a name", KindFree, make([]byte, 32), errNoClient},
		{"short access", KindAccess, make([]byte, 31), errAccess},
		{"a reply", KindAllocReply, nil, errKind},
		{"what nobody knows", 77, nil, errKind},
	} {
		t.Run(v.name, func(t *testing.T) {
			_, fault := parseRequest(v.kind, v.payload)
			require.Same(t, v.want, fault)
		})
	}
	t.Run("the longest that is allowed", func(t *testing.T) {
		q, fault := parseRequest(KindAlloc, alloc(maxPath, strings.Repeat("p", maxPath), "\x7f\x00"+strings.Repeat("n", 127)))
		require.Nil(t, fault)
		require.Len(t, q.path, maxPath)
		require.Len(t, q.client, maxClientID)
		require.Zero(t, q.id, "a request without a number is never a repeat")
	})
}

func TestBadHeaders(t *testing.T) {
	for _, v := range []struct {
		name, hex string
		want      *Error
	}{
		{"magic", "5552414e 0200 0500 00000000", errHeader},
		{"version", "5552414d 0100 0500 00000000", errHeader},
		{"payload", "5552414d 0200 0500 01200000", errLarge},
	} {
		t.Run(v.name, func(t *testing.T) {
			_, _, err := parseHeader(unhex(t, v.hex), maxRequest)
			require.Same(t, v.want, err)
		})
	}
}

func TestToken(t *testing.T) {
	var s Secret
	for i := range s {
		s[i] = byte(i)
	}
	token := s.Token(148, 2<<20, 4<<20, 7, "capture:1")
	require.Equal(t, uint64(0xa3232678537cf436), token, "as Maru's resource manager makes it")
	for name, other := range map[string]uint64{
		"region": s.Token(149, 2<<20, 4<<20, 7, "capture:1"), "offset": s.Token(148, 0, 4<<20, 7, "capture:1"),
		"length": s.Token(148, 2<<20, 2<<20, 7, "capture:1"), "nonce": s.Token(148, 2<<20, 4<<20, 8, "capture:1"),
		"owner": s.Token(148, 2<<20, 4<<20, 7, "capture:2"), "secret": new(Secret).Token(148, 2<<20, 4<<20, 7, "capture:1"),
	} {
		require.NotEqual(t, token, other, "another %s", name)
	}
}

// FuzzRequest: what is accepted is what is read again when it is written.
func FuzzRequest(f *testing.F) {
	for _, q := range []request{
		{kind: KindAlloc, size: 1 << 20, path: "/dev/dax0.0", client: "host:1", id: 5},
		{kind: KindFree, handle: handle, client: "host:1", id: 6},
		{kind: KindAccess, handle: handle, client: "host:1"},
		{kind: KindAccess, handle: handle},
		{kind: KindStats},
	} {
		f.Add(requestFrame(&q))
	}
	f.Add([]byte("URAM\x02\x00\x01\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headerSize {
			return
		}
		kind, length, err := parseHeader(b, maxRequest)
		if err != nil || length > len(b)-headerSize {
			return
		}
		q, fault := parseRequest(kind, b[headerSize:headerSize+length])
		if fault != nil {
			return
		}
		require.LessOrEqual(t, len(q.client), maxClientID)
		require.LessOrEqual(t, len(q.path), maxPath)
		again, fault := parseRequest(kind, requestFrame(&q)[headerSize:])
		require.Nil(t, fault)
		require.Equal(t, q, again)
	})
}

// FuzzReply: whatever a peer answers, the client takes no more of it than it says.
func FuzzReply(f *testing.F) {
	f.Add(uint16(KindAllocReply), allocFrame(StatusOK, &Region{Handle: handle, Path: "/dev/dax0.0"}, 1)[headerSize:])
	f.Add(uint16(KindAccessReply), accessFrame(StatusOK, &Region{Handle: handle, Path: "/dev/dax0.0"})[headerSize:])
	f.Add(uint16(KindStatsReply), statsFrame([]Pool{{Path: "/p", File: true, Total: 1}})[headerSize:])
	f.Add(uint16(KindError), errorFrame(errNoClient)[headerSize:])
	f.Fuzz(func(t *testing.T, kind uint16, b []byte) {
		switch Kind(kind) {
		case KindAllocReply:
			if status, r, err := parseAllocReply(b); err == nil {
				same, again, err := parseAllocReply(allocFrame(status, &r, 0)[headerSize:])
				require.NoError(t, err)
				require.Equal(t, status, same)
				require.Equal(t, r, again)
			}
		case KindAccessReply:
			if status, r, err := parseAccessReply(b); err == nil {
				same, again, err := parseAccessReply(accessFrame(status, &r)[headerSize:])
				require.NoError(t, err)
				require.Equal(t, status, same)
				require.Equal(t, r, again)
			}
		case KindStatsReply:
			if pools, err := parseStatsReply(b); err == nil {
				again, err := parseStatsReply(statsFrame(pools)[headerSize:])
				require.NoError(t, err)
				require.Equal(t, pools, again)
			}
		default:
			require.Error(t, parseError(b))
		}
	})
}
