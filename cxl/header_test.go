package cxl

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

// sampleHeader has a distinct value in every field.
func sampleHeader() Header {
	return Header{
		Pool: [16]byte{1, 2}, Device: [16]byte{3, 4}, DeviceID: 5, Generation: 0xfeedfacecafe, Incarnation: 7,
		Size: 8 << 20, BootID: [16]byte{9}, Volatile: true, Coherence: CoherenceHardware,
		Claim:    Claim{Host: [16]byte{10}, Boot: [16]byte{11}, PIDNamespace: 12, PID: 13, Start: 14, Since: -15},
		sequence: 16,
	}
}

func encode(tb testing.TB, h Header) []byte {
	tb.Helper()
	b, err := h.AppendBinary(nil)
	require.NoError(tb, err)
	require.Len(tb, b, HeaderSize)
	return b
}

// twoSlots lays out the start of a device with these slots; nil leaves one blank.
func twoSlots(a, b []byte) []byte {
	out := make([]byte, headerBytes)
	copy(out, a)
	copy(out[slotStride:], b)
	return out
}

func TestHeaderRoundTrip(t *testing.T) {
	for _, h := range []Header{{}, sampleHeader()} {
		got, err := DecodeHeader(encode(t, h))
		require.NoError(t, err)
		require.Equal(t, h, got)
	}
}

func TestHeaderLayoutIsStable(t *testing.T) {
	b := encode(t, sampleHeader())
	require.Equal(t, "LARDERDV", string(b[:8]))
	require.EqualValues(t, 1, binary.LittleEndian.Uint16(b[8:]))
	require.EqualValues(t, 0xfeedfacecafe, binary.LittleEndian.Uint64(b[72:]))
	require.EqualValues(t, 0x34c94504, binary.LittleEndian.Uint32(b[12:]), "the checksum of a known header")
}

func TestDecodeHeaderRefuses(t *testing.T) {
	good := encode(t, sampleHeader())
	reseal := func(b []byte) []byte { // damage with a right checksum: only the format's own rules can tell
		binary.LittleEndian.PutUint32(b[offCRC:], headerCRC(b))
		return b
	}
	change := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	for name, c := range map[string]struct {
		in   []byte
		want error
	}{
		"short":             {good[:HeaderSize-1], ErrCorruptHeader},
		"empty":             {nil, ErrCorruptHeader},
		"blank":             {make([]byte, HeaderSize), ErrNoHeader},
		"other magic":       {change(0, 'M'), ErrForeignHeader},
		"later version":     {reseal(change(8, 2)), ErrHeaderVersion},
		"version zero":      {reseal(change(8, 0)), ErrCorruptHeader},
		"wrong size":        {reseal(change(10, 1)), ErrCorruptHeader},
		"unknown flag":      {reseal(change(27, 0x80)), ErrCorruptHeader},
		"reserved not zero": {reseal(change(HeaderSize-1, 1)), ErrCorruptHeader},
		"padding not zero":  {reseal(change(156, 1)), ErrCorruptHeader},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := DecodeHeader(c.in)
			require.ErrorIs(t, err, c.want)
		})
	}
}

func TestEveryFlippedBitIsSeen(t *testing.T) {
	good := encode(t, sampleHeader())
	for bit := range len(good) * 8 {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		_, err := DecodeHeader(b)
		require.Error(t, err, "bit %d", bit)
	}
}

func TestDecodeSlots(t *testing.T) {
	older, newer := sampleHeader(), sampleHeader()
	newer.sequence, newer.Generation = older.sequence+1, 99
	same := older
	same.sequence++
	later := encode(t, newer)
	later[8] = 2
	binary.LittleEndian.PutUint32(later[offCRC:], headerCRC(later))
	o, n := encode(t, older), encode(t, newer)
	torn := bytes.Clone(n)
	copy(torn[72:], o[72:])
	for name, c := range map[string]struct {
		in   []byte
		want slots
		err  error
	}{
		"both, same content":       {in: twoSlots(o, encode(t, same)), want: slots{header: same, which: 1}},
		"newer in B":               {in: twoSlots(o, n), want: slots{header: newer, which: 1, torn: true}},
		"newer in A":               {in: twoSlots(n, o), want: slots{header: newer, which: 0, torn: true}},
		"torn write of B":          {in: twoSlots(o, torn), want: slots{header: older, which: 0, torn: true}},
		"torn write of A":          {in: twoSlots(torn, o), want: slots{header: older, which: 1, torn: true}},
		"A alone":                  {in: twoSlots(o, nil), want: slots{header: older, which: 0, torn: true}},
		"both torn":                {in: twoSlots(torn, torn), err: ErrCorruptHeader},
		"equal sequence":           {in: twoSlots(n, n), err: ErrCorruptHeader},
		"torn beside foreign":      {in: twoSlots(torn, []byte("who")), err: ErrCorruptHeader},
		"foreign beside blank":     {in: twoSlots(nil, []byte("who")), err: ErrForeignHeader},
		"blank":                    {in: twoSlots(nil, nil), err: ErrNoHeader},
		"later version beside old": {in: twoSlots(o, later), err: ErrHeaderVersion},
		"cut in slot B":            {in: twoSlots(o, n)[:slotStride+8], want: slots{header: older, torn: true}},
		"nothing":                  {in: nil, err: ErrNoHeader},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := decodeSlots(c.in)
			if c.err != nil {
				require.ErrorIs(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func FuzzDecodeHeader(f *testing.F) {
	h := sampleHeader()
	good, err := h.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(good)
	f.Add(make([]byte, HeaderSize))
	f.Add([]byte("LARDERDV"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= HeaderSize && string(b[:8]) == headerMagic {
			b = bytes.Clone(b) // let the fuzzer past the checksum
			binary.LittleEndian.PutUint32(b[offCRC:], headerCRC(b))
		}
		h, err := DecodeHeader(b)
		if err != nil {
			require.True(t, isAny(err, ErrNoHeader, ErrForeignHeader, ErrCorruptHeader, ErrHeaderVersion), err)
			return
		}
		require.Equal(t, b[:HeaderSize], encode(t, h), "what decodes is what encodes")
	})
}

func FuzzDecodeSlots(f *testing.F) {
	h := sampleHeader()
	good, err := h.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(good, good, 0)
	f.Add(good, []byte{}, 40)
	f.Add([]byte{}, []byte("x"), 4096)
	f.Fuzz(func(t *testing.T, a, b []byte, cut int) {
		in := twoSlots(a[:min(len(a), slotStride)], b[:min(len(b), slotStride)])
		s, err := decodeSlots(in[:max(0, len(in)-max(cut, 0))])
		if err == nil {
			require.Contains(t, [][]byte{in[:HeaderSize], in[slotStride:][:HeaderSize]}, encode(t, s.header))
		}
	})
}

func TestCoherenceNames(t *testing.T) {
	for _, c := range []Coherence{CoherenceNone, CoherenceHardware} {
		got, err := ParseCoherence(c.String())
		require.NoError(t, err)
		require.Equal(t, c, got)
	}
	_, err := ParseCoherence("maybe")
	require.ErrorContains(t, err, "hardware or none")
}
