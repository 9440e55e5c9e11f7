package ssd

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzSuperblock decodes any bytes, with the checksum made right, so that the numbers are what is tested: what is
// accepted is encoded to the same bytes.
func FuzzSuperblock(f *testing.F) {
	sb := superblock{
		sequence: 3, salt: 4, device: 5, generation: 6, size: 7, segment: minSegmentBytes, floor: 1, next: 9,
		slots: make([]slotState, minSlots),
	}
	sb.slots[2] = slotState{first: 5, last: 7, footer: 3, records: 2}
	sb.slots[3] = slotState{first: 8}
	f.Add(sb.appendTo(nil))
	f.Add(make([]byte, superHead))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= superHead {
			n := int(binary.LittleEndian.Uint32(b[80:]))
			if n <= maxSlots && len(b) >= superHead+n*slotEntry {
				b = b[:superHead+n*slotEntry]
				binary.LittleEndian.PutUint32(b[offSuperCRC:], crcAround(b, offSuperCRC))
			}
		}
		got, err := decodeSuperblock(b)
		if err != nil {
			return
		}
		again, err := decodeSuperblock(got.appendTo(nil))
		require.NoError(t, err)
		require.Equal(t, got, again)
	})
}

// FuzzRecord decodes any block as a group's header, with the checksum made right: its records lie within the segment
// and the logical size, and it is encoded to an equal one.
func FuzzRecord(f *testing.F) {
	p := place{salt: 1, size: 1 << 20, first: 5, at: 2, end: 100}
	g := group{first: 5, seq: 7, blocks: 4, records: []record{
		{off: 1, length: 5000, kind: kindData, stored: 5000, crc: 9, pos: 3},
		{off: 1, length: 1 << 19, kind: kindDiscard},
		{off: 7, length: 5000, kind: kindZstd, stored: 50, crc: 9, pos: 5},
	}}
	f.Add(g.appendTo(nil, 1))
	f.Add(make([]byte, block))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == block {
			for _, c := range [][]byte{b[:headerCopy], b[headerCopy:]} {
				binary.LittleEndian.PutUint32(c[offGroupCRC:], crcAround(c, offGroupCRC))
			}
		}
		got, err := decodeGroup(b, p)
		if err != nil {
			return
		}
		require.LessOrEqual(t, p.at+got.blocks, p.end)
		for _, r := range got.records {
			require.LessOrEqual(t, r.off+r.length, p.size)
			require.LessOrEqual(t, r.pos+r.blocks(), p.end)
		}
		again, err := decodeGroup(got.appendTo(nil, p.salt), p)
		require.NoError(t, err)
		require.Equal(t, got, again)
	})
}

// FuzzFooter does the same for footers.
func FuzzFooter(f *testing.F) {
	records := []record{
		{off: 1, length: 5000, kind: kindData, stored: 5000, crc: 9, pos: 3},
		{off: 1, length: 1 << 19, kind: kindDiscard},
	}
	state := slotState{first: 5, last: 9, footer: 10, records: 2}
	f.Add(appendFooter(nil, 1, state.first, state.last, records), uint32(2))
	f.Add(make([]byte, block), uint32(1))
	f.Fuzz(func(t *testing.T, b []byte, n uint32) {
		state := state
		state.records = n % 1000
		if len(b) >= footerHead {
			binary.LittleEndian.PutUint32(b[offFooterCRC:], crcAround(b, offFooterCRC))
		}
		got, err := decodeFooter(b, 1, 1<<20, state)
		if err != nil {
			return
		}
		for _, r := range got {
			require.LessOrEqual(t, r.off+r.length, uint64(1<<20))
			require.LessOrEqual(t, r.pos+r.blocks(), state.footer)
		}
		again, err := decodeFooter(appendFooter(nil, 1, state.first, state.last, got), 1, 1<<20, state)
		require.NoError(t, err)
		require.Equal(t, got, again)
	})
}
