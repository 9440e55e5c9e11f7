package protocol

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

// sample returns a message with every field set.
func sample(c codec) any {
	m := c.make()
	fill(rand.New(rand.NewPCG(7, 8)), reflect.ValueOf(m).Elem())
	normalise(m, c.typ)
	return m
}

// FuzzDecode decodes any bytes as any message: it never panics, it refuses with a *DecodeError or accepts, and what
// it accepts means the same when it is sent on.
func FuzzDecode(f *testing.F) {
	all := codecs()
	for i, c := range all {
		f.Add(uint8(i), c.append(sample(c), nil))
		f.Add(uint8(i), c.append(c.make(), nil))
	}
	f.Add(uint8(0), []byte("\x81\xa1x\xc7\x01\x05a"))
	f.Fuzz(func(t *testing.T, which uint8, b []byte) {
		c := all[int(which)%len(all)]
		m := c.make()
		if err := c.decode(m, b); err != nil {
			_, ok := errors.AsType[*DecodeError](err)
			require.True(t, ok, "%T: %v", err, err)
			return
		}
		once := c.append(m, nil)
		again := c.make()
		require.NoError(t, c.decode(again, once), "%s: %x", c.name, once)
		twice := c.append(again, nil)
		require.Equal(t, once, twice, c.name)
		require.NoError(t, c.decode(m, once), "into a struct that is used again")
		require.Equal(t, once, c.append(m, nil), c.name)
	})
}

// FuzzPacked decodes any two bins as a packed reply, which FuzzDecode reaches only through the maps of an unpacked one.
func FuzzPacked(f *testing.F) {
	m := LookupReply{Results: []LookupResult{wireFound(1, 2), {}, wireFound(3, 4)}}
	m.Results[0].Copies = []Location{wireFound(5, 2).Location, wireFound(6, 2).Location}
	m.Results[2].Promote = true
	f.Add(m.AppendPacked(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var got, again LookupReply
		if got.DecodeAs(b, TypeBatchLookup) != nil {
			return
		}
		once := got.AppendPacked(nil)
		require.NoError(t, again.DecodeAs(once, TypeBatchLookup), "%x", once)
		require.Equal(t, once, again.AppendPacked(nil))
	})
}

// FuzzQuick checks that the order of fields, on which the quick paths depend, never changes what a message means.
func FuzzQuick(f *testing.F) {
	entry := RegisterEntry{
		Key: []byte("key"), RegionID: 1, KVOffset: 300, KVLength: 1 << 20, Epoch: 1 << 40, HasPrefix: true, Hash: 5,
	}
	e := enc{}
	s := e.open()
	e.registerEntry(&entry)
	e.close(s)
	f.Add(e.b)
	r := wireFound(5, 6)
	r.Lease, r.LeaseMS = 7, 8
	f.Add(AppendLookupResult(nil, &r))
	r.Version, r.Promote, r.Copies = 9, true, []Location{r.Location}
	f.Add(AppendLookupResult(nil, &r))
	f.Fuzz(func(t *testing.T, b []byte) {
		var quick, slow RegisterEntry
		d, g := dec{b: b}, dec{b: b}
		have, n := d.quickEntry(&quick, d.element())
		for d.next(&n) {
			have |= d.registerField(d.name(), &quick)
		}
		want := uint(0)
		for n := g.element(); g.next(&n); {
			want |= g.registerField(g.name(), &slow)
		}
		require.Equal(t, g.end() == nil, d.end() == nil)
		if g.err == nil {
			require.Equal(t, slow, quick)
			require.Equal(t, want, have)
		}

		var quickly, slowly LookupResult
		d, g = dec{b: b}, dec{b: b}
		have = d.lookupResult(&quickly, nil, d.element())
		want = g.lookupFields(&slowly, nil, g.element())
		require.Equal(t, g.end() == nil, d.end() == nil)
		if g.err == nil {
			require.Equal(t, slowly, quickly)
			require.Equal(t, want, have)
		}
	})
}

// FuzzReader reads any stream in pieces of any size: it never panics, ends, and finds the same frames as ParseFrame.
func FuzzReader(f *testing.F) {
	all, _ := stream(rand.New(rand.NewPCG(9, 9)), 5, 200)
	f.Add(all, uint16(1))
	f.Add(all[:len(all)-1], uint16(7))
	buf, mark := BeginFrame(nil, TypeListKeys, 3)
	f.Add(endCompressed(append(buf, make([]byte, 2*CompressAbove)...), mark), uint16(100))
	f.Add(Header{Length: MaxPayload}.Append(nil), uint16(3))
	f.Fuzz(func(t *testing.T, in []byte, piece uint16) {
		r := NewReader(&pieces{b: in, n: int(piece) + 1})
		rest := in
		for {
			h, payload, err := r.Next()
			if err != nil {
				_, bad := errors.AsType[*FrameError](err)
				require.True(t, bad || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), "%v", err)
				if errors.Is(err, io.EOF) {
					require.Empty(t, rest)
				}
				require.LessOrEqual(t, len(r.buf), 2*max(len(in), readBuffer))
				return
			}
			want, p, err := ParseFrame(rest)
			require.NoError(t, err)
			rest = rest[HeaderSize+len(p):]
			if want.Flags&FlagCompressed != 0 {
				p, err = Decompress(nil, p)
				require.NoError(t, err)
				want.Length = uint32(len(p))
			}
			require.Equal(t, want, h)
			require.True(t, bytes.Equal(p, payload))
		}
	})
}

// pieces delivers b in pieces of n bytes.
type pieces struct {
	b []byte
	n int
}

func (p *pieces) Read(to []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(to, p.b[:min(p.n, len(p.b))])
	p.b = p.b[n:]
	return n, nil
}
