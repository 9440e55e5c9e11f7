package protocol

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// endCompressed ends a frame and compresses it.
func endCompressed(buf []byte, mark int) []byte { return CompressFrames(EndFrame(buf, mark), mark) }

// stream returns n frames of random sizes up to limit, and their payloads.
func stream(rnd *rand.Rand, n, limit int) (all []byte, payloads [][]byte) {
	for i := range n {
		p := make([]byte, rnd.IntN(limit))
		for k := range p {
			p[k] = byte(rnd.Uint32() & 3)
		}
		buf, mark := BeginFrame(all, TypeLookup, uint32(i))
		buf = append(buf, p...)
		if i%3 == 0 {
			all = endCompressed(buf, mark)
		} else {
			all = EndFrame(buf, mark)
		}
		payloads = append(payloads, p)
	}
	return all, payloads
}

func TestReader(t *testing.T) {
	chunks := map[string]func(io.Reader) io.Reader{
		"whole":     func(r io.Reader) io.Reader { return r },
		"halves":    iotest.HalfReader,
		"with eof":  iotest.DataErrReader,
		"one byte":  iotest.OneByteReader,
		"one block": func(r io.Reader) io.Reader { return io.MultiReader(io.LimitReader(r, readBuffer), r) },
	}
	for name, chunk := range chunks {
		for _, limit := range []int{100, readBuffer, 4 * readBuffer, 1 << 20} {
			if name == "one byte" && limit > readBuffer {
				continue
			}
			rnd := rand.New(rand.NewPCG(5, uint64(limit)))
			all, payloads := stream(rnd, 12, limit)
			r := NewReader(chunk(bytes.NewReader(all)))
			for i, want := range payloads {
				h, got, err := r.Next()
				require.NoError(t, err, name)
				require.True(t, bytes.Equal(want, got), "%s: frame %d of %d bytes", name, i, len(want))
				require.Equal(t, uint32(i), h.Sequence)
				require.Equal(t, uint32(len(want)), h.Length)
			}
			_, _, err := r.Next()
			require.ErrorIs(t, err, io.EOF)
			_, _, err = r.Next()
			require.ErrorIs(t, err, io.EOF, "errors stick")
			require.Len(t, r.buf, readBuffer, "a large buffer is given back")
		}
	}
}

func TestReaderBuffered(t *testing.T) {
	var all []byte
	for range 3 {
		buf, mark := BeginFrame(all, TypeHeartbeat, 1)
		all = EndFrame(AppendEmpty(buf), mark)
	}
	r := NewReader(bytes.NewReader(all[:len(all)-1]))
	require.False(t, r.Buffered(), "nothing has been read")
	_, _, err := r.Next()
	require.NoError(t, err)
	require.True(t, r.Buffered())
	_, _, err = r.Next()
	require.NoError(t, err)
	require.False(t, r.Buffered(), "a byte is missing")
	_, _, err = r.Next()
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.True(t, r.Buffered(), "the error is there")
}

func TestReaderBadFrames(t *testing.T) {
	good := Header{Type: TypeHeartbeat, Sequence: 1, Length: 1}.Append(nil)
	bad := func(at int, v byte) []byte {
		b := append(bytes.Clone(good), 0x80)
		b[at] = v
		return b
	}
	for name, in := range map[string][]byte{
		"magic":      bad(0, 0xce),
		"version":    bad(2, 2),
		"length":     bad(12, 1),
		"http":       []byte("GET / HTTP/1.1\r\n\r\n"),
		"compressed": bad(4, FlagCompressed),
	} {
		t.Run(name, func(t *testing.T) {
			r := NewReader(bytes.NewReader(in))
			for range 2 {
				_, _, err := r.Next()
				_, ok := errors.AsType[*FrameError](err)
				require.True(t, ok, "%v", err)
			}
		})
	}
	t.Run("reserved bytes are ignored", func(t *testing.T) {
		in := bad(5, 1)
		in[6], in[7] = 2, 3
		h, p, err := NewReader(bytes.NewReader(in)).Next()
		require.NoError(t, err)
		require.Equal(t, Header{Type: TypeHeartbeat, Sequence: 1, Length: 1}, h)
		require.Equal(t, []byte{0x80}, p)
	})
	t.Run("cut off", func(t *testing.T) {
		for n := range good {
			_, _, err := NewReader(bytes.NewReader(good[:n])).Next()
			want := io.ErrUnexpectedEOF
			if n == 0 {
				want = io.EOF
			}
			require.ErrorIs(t, err, want)
			_, _, err = ParseFrame(good[:n])
			_, ok := errors.AsType[*FrameError](err)
			require.True(t, ok)
		}
	})
	t.Run("a reader that brings nothing", func(t *testing.T) {
		_, _, err := NewReader(emptyReader{}).Next()
		require.ErrorIs(t, err, io.ErrNoProgress)
	})
}

type emptyReader struct{}

func (emptyReader) Read([]byte) (int, error) { return 0, nil }

// TestReaderTimeout checks that a read deadline that passes within a frame costs nothing.
func TestReaderTimeout(t *testing.T) {
	all, _ := stream(rand.New(rand.NewPCG(1, 1)), 1, 100)
	r := NewReader(io.MultiReader(bytes.NewReader(all[:20]), iotest.ErrReader(os.ErrDeadlineExceeded)))
	_, _, err := r.Next()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	r.r = bytes.NewReader(all[20:])
	_, _, err = r.Next()
	require.NoError(t, err)
}

// TestReaderMemory checks that a header alone does not make the reader reserve what it announces.
func TestReaderMemory(t *testing.T) {
	head := Header{Type: TypeLookup, Length: MaxPayload}.Append(nil)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	readers := make([]*Reader, 100)
	for i := range readers {
		readers[i] = NewReader(bytes.NewReader(append(bytes.Clone(head), make([]byte, 1000)...)))
		_, _, err := readers[i].Next()
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, (after.TotalAlloc-before.TotalAlloc)/uint64(len(readers)), uint64(2*readBuffer))
	runtime.KeepAlive(readers)
}

func TestLargestFrame(t *testing.T) {
	buf, mark := BeginFrame(nil, TypeLookup, 9)
	buf = EndFrame(append(buf, make([]byte, MaxPayload)...), mark)
	h, p, err := NewReader(bytes.NewReader(buf)).Next()
	require.NoError(t, err)
	require.Equal(t, uint32(MaxPayload), h.Length)
	require.Len(t, p, MaxPayload)

	for _, end := range []func([]byte, int) []byte{EndFrame, endCompressed} {
		buf, mark = BeginFrame([]byte("before"), TypeLookup|ReplyBit, 9)
		buf = end(append(buf, make([]byte, MaxPayload+1)...), mark)
		h, p, err = NewReader(bytes.NewReader(buf[len("before"):])).Next()
		require.NoError(t, err)
		require.Equal(t, uint32(9), h.Sequence)
		var m LookupReply
		require.NoError(t, m.DecodeAs(p, TypeLookup))
		require.Equal(t, CodeLimit, m.Code, "too long a frame is not sent, and the stream goes on")
	}
}

func TestCompression(t *testing.T) {
	rnd := rand.New(rand.NewPCG(6, 6))
	random := make([]byte, 2*CompressAbove)
	for i := range random {
		random[i] = byte(rnd.Uint32())
	}
	for _, c := range []struct {
		name    string
		payload []byte
		smaller bool
	}{
		{"small", make([]byte, CompressAbove), false},
		{"random", random, false},
		{"zeros", make([]byte, CompressAbove+1), true},
		{"largest", make([]byte, MaxPayload), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			buf, mark := BeginFrame(nil, TypeListKeys, 3)
			buf = endCompressed(append(buf, c.payload...), mark)
			require.Equal(t, c.smaller, len(buf) < HeaderSize+len(c.payload))
			h, err := ParseHeader(buf)
			require.NoError(t, err)
			require.Equal(t, c.smaller, h.Flags&FlagCompressed != 0)
			_, got, err := NewReader(bytes.NewReader(buf)).Next()
			require.NoError(t, err)
			require.True(t, bytes.Equal(c.payload, got))
		})
	}
	t.Run("a bomb", func(t *testing.T) {
		w, err := zstd.NewWriter(nil)
		require.NoError(t, err)
		bomb := w.EncodeAll(make([]byte, MaxPayload+1), nil)
		_, err = Decompress(nil, bomb)
		_, ok := errors.AsType[*FrameError](err)
		require.True(t, ok, "%v", err)
		twice := append(w.EncodeAll(make([]byte, MaxPayload), nil), w.EncodeAll(make([]byte, 1), nil)...)
		_, err = Decompress(nil, twice)
		_, ok = errors.AsType[*FrameError](err)
		require.True(t, ok, "%v", err)
	})
	t.Run("of frames that are complete", func(t *testing.T) {
		before, mark := BeginFrame(nil, TypeLookup, 1)
		before = EndFrame(append(before, make([]byte, 2*CompressAbove)...), mark)
		buf, sizes := before, []int{10, CompressAbove + 1, 0, CompressAbove, 3 * CompressAbove, 20}
		for i, n := range sizes {
			buf, mark = BeginFrame(buf, TypeLookup, uint32(i))
			buf = EndFrame(append(buf, make([]byte, n)...), mark)
		}
		buf = CompressFrames(buf, len(before))
		require.Equal(t, buf, CompressFrames(bytes.Clone(buf), len(before)), "what is compressed stays as it is")
		require.Less(t, len(buf), len(before)+2*CompressAbove)
		require.Zero(t, buf[4], "what lies before stays as it is")
		r := NewReader(bytes.NewReader(buf[len(before):]))
		for i, n := range sizes {
			h, got, err := r.Next()
			require.NoError(t, err)
			require.Equal(t, uint32(i), h.Sequence)
			require.Equal(t, n > CompressAbove, h.Flags&FlagCompressed != 0)
			require.True(t, bytes.Equal(make([]byte, n), got))
		}
		_, _, err := r.Next()
		require.ErrorIs(t, err, io.EOF)
	})
	t.Run("of small frames allocates nothing", func(t *testing.T) {
		var buf []byte
		for len(buf) < 4*CompressAbove {
			var mark int
			buf, mark = BeginFrame(buf, TypeLookup, 1)
			buf = EndFrame(append(buf, make([]byte, 1000)...), mark)
		}
		require.Zero(t, testing.AllocsPerRun(10, func() { buf = CompressFrames(buf, 0) }))
	})
	t.Run("flags of a request are echoed, but not this one", func(t *testing.T) {
		b, _ := BeginReply(nil, Header{Type: TypeLookup, Flags: FlagCompressed | 4, Sequence: 8})
		h, err := ParseHeader(b)
		require.NoError(t, err)
		require.Equal(t, Header{Type: TypeLookup | ReplyBit, Flags: 4, Sequence: 8}, h)
	})
}

func TestOnlyFramesThatCrossANetworkAreWorthCompressing(t *testing.T) {
	for name, tc := range map[string]struct {
		local, remote string
		want          bool
	}{
		"network":          {"192.0.2.1:7400", "192.0.2.2:9", true},
		"network, IPv6":    {"[2001:db8::1]:7400", "[2001:db8::2]:9", true},
		"link-local":       {"[fe80::1%eth0]:7400", "[fe80::2%eth0]:9", true},
		"loopback":         {"127.0.0.1:7400", "127.0.0.2:9", false},
		"loopback, IPv6":   {"[::1]:7400", "[::1]:9", false},
		"loopback, mapped": {"[::ffff:127.0.0.1]:7400", "[::ffff:127.0.0.1]:9", false},
		"own address":      {"192.0.2.1:7400", "192.0.2.1:9", false},
		"Unix socket":      {"/run/larder.sock", "@", false},
		"none":             {"", "", false},
	} {
		require.Equal(t, tc.want, Distant(tc.local, tc.remote), name)
	}
}

// TestLargestBatchFits checks what MaxPayload promises: no batch within its limits is too long for a frame.
func TestLargestBatchFits(t *testing.T) {
	const most = 1<<64 - 1
	key := bytes.Repeat([]byte{0xff}, MaxKeyBytes)
	where := Location{
		Region: Region{
			Handle: Handle{RegionID: most, Offset: most, Length: most, AuthToken: most},
			Device: most, Generation: most, Epoch: most, PageSize: most,
		},
		KVOffset: most, KVLength: most, Checksum: most,
	}
	register := RegisterRequest{Entries: make([]RegisterEntry, MaxBatch)}
	registered := RegisterReply{Results: make([]RegisterResult, MaxBatch)}
	found := LookupReply{Results: make([]LookupResult, MaxBatch)}
	evicted := AllocReply{Evicted: make([]Page, MaxBatch), Found: make([]bool, MaxBatch)}
	listed := ListKeysReply{Keys: make([]KeyInfo, MaxBatch)}
	for i := range MaxBatch {
		register.Entries[i] = RegisterEntry{
			Key: key, RegionID: most, KVOffset: most, KVLength: most, Epoch: most, Checksum: most, TTLMS: most,
			HasPrefix: true, Hash: most, Parent: most, Index: most, Group: most, Touch: true,
		}
		registered.Results[i] = RegisterResult{Code: CodeDuplicate, Existing: where, ExistingKey: key}
		found.Results[i] = LookupResult{Found: true, Location: where, Lease: most, LeaseMS: most}
		evicted.Evicted[i] = Page{Key: key, RegionID: most, KVOffset: most, KVLength: most, FreeAfterMS: most}
		listed.Keys[i] = KeyInfo{Key: key, Location: where, Pins: most, Class: "hard"}
	}
	for name, b := range map[string][]byte{
		"register":       register.AppendAs(nil, TypeBatchRegister),
		"register reply": registered.AppendAs(nil, TypeBatchRegister),
		"lookup reply":   found.AppendAs(nil, TypeBatchLookup),
		"packed reply":   found.AppendPacked(nil),
		"alloc reply":    evicted.Append(nil),
		"keys":           listed.Append(nil),
	} {
		require.LessOrEqual(t, len(b), MaxPayload, name)
	}
}
