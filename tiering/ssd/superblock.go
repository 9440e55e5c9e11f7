package ssd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

const (
	superblockName    = "superblock"
	superblockMagic   = "LARDERSS"
	superblockVersion = 1

	offSuperCRC  = 12
	superHead    = 128
	slotEntry    = 24
	superCopies  = 2
	superStride  = (superHead + maxSlots*slotEntry + block - 1) / block * block // one place for all sizes of tables
	unsealedLast = 0
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// slotState is what the superblock knows of one segment file.
type slotState struct {
	first   uint64 // sequence of the first group of the segment; 0: free
	last    uint64 // of the last one; 0 while the segment is written to
	footer  uint32 // block of the footer; 0: none
	records uint32 // in the footer
}

// superblock says which segments exist; they are the truth about everything else.
type superblock struct {
	sequence   uint64 // counts writes of copies; the valid one with the higher holds
	salt       uint64 // random; closes every checksum, so that nothing that a client wrote is taken for a header
	pool       [16]byte
	device     uint64
	generation uint64
	size       uint64 // logical bytes
	segment    uint64 // bytes of a segment
	floor      uint64 // groups below it do not count
	next       uint64 // no group up to here, but those of the segments listed, is to be believed
	uuid       [16]byte
	slots      []slotState
}

// appendTo appends the encoded copy to b.
func (s *superblock) appendTo(b []byte) []byte {
	e := make([]byte, superHead+len(s.slots)*slotEntry)
	le := binary.LittleEndian
	copy(e, superblockMagic)
	le.PutUint16(e[8:], superblockVersion)
	le.PutUint64(e[16:], s.sequence)
	le.PutUint64(e[24:], s.salt)
	copy(e[32:48], s.pool[:])
	le.PutUint64(e[48:], s.device)
	le.PutUint64(e[56:], s.generation)
	le.PutUint64(e[64:], s.size)
	le.PutUint64(e[72:], s.segment)
	le.PutUint32(e[80:], uint32(len(s.slots))) //nolint:gosec // bounded by maxSlots
	le.PutUint64(e[88:], s.floor)
	le.PutUint64(e[96:], s.next)
	copy(e[104:120], s.uuid[:])
	for i, t := range s.slots {
		at := e[superHead+i*slotEntry:]
		le.PutUint64(at, t.first)
		le.PutUint64(at[8:], t.last)
		le.PutUint32(at[16:], t.footer)
		le.PutUint32(at[20:], t.records)
	}
	le.PutUint32(e[offSuperCRC:], crcAround(e, offSuperCRC))
	return append(b, e...)
}

// crcAround is the CRC32C of b with the four bytes at off taken as zero.
func crcAround(b []byte, off int) uint32 {
	var zero [4]byte
	c := crc32.Update(0, crcTable, b[:off])
	c = crc32.Update(c, crcTable, zero[:])
	return crc32.Update(c, crcTable, b[off+4:])
}

// decodeSuperblock reads one copy. The error is ErrNoStore for zeros, ErrVersion for a later format, ErrCorrupt for
// everything else that appendTo would not have written.
func decodeSuperblock(b []byte) (*superblock, error) {
	le := binary.LittleEndian
	if len(b) < superHead {
		return nil, fmt.Errorf("%w: %d bytes", ErrCorrupt, len(b))
	}
	if allZero(b[:superHead]) {
		return nil, ErrNoStore
	}
	n := int(le.Uint32(b[80:]))
	if string(b[:8]) != superblockMagic || n > maxSlots || len(b) < superHead+n*slotEntry {
		return nil, fmt.Errorf("%w: not a header, or cut off", ErrCorrupt)
	}
	b = b[:superHead+n*slotEntry]
	if le.Uint32(b[offSuperCRC:]) != crcAround(b, offSuperCRC) {
		return nil, fmt.Errorf("%w: checksum", ErrCorrupt)
	}
	if v := le.Uint16(b[8:]); v > superblockVersion {
		return nil, fmt.Errorf("%w: %d", ErrVersion, v)
	}
	s := &superblock{
		sequence: le.Uint64(b[16:]), salt: le.Uint64(b[24:]), device: le.Uint64(b[48:]), generation: le.Uint64(b[56:]),
		size: le.Uint64(b[64:]), segment: le.Uint64(b[72:]), floor: le.Uint64(b[88:]), next: le.Uint64(b[96:]),
		slots: make([]slotState, n),
	}
	copy(s.pool[:], b[32:48])
	copy(s.uuid[:], b[104:120])
	for i := range s.slots {
		at := b[superHead+i*slotEntry:]
		s.slots[i] = slotState{le.Uint64(at), le.Uint64(at[8:]), le.Uint32(at[16:]), le.Uint32(at[20:])}
	}
	return s, s.check()
}

// check refuses numbers that no store has, so that nothing behind here need doubt them.
func (s *superblock) check() error {
	bad := len(s.slots) < minSlots || s.segment < minSegmentBytes || s.segment > maxSegmentBytes ||
		s.segment%(block*recordShare) != 0 || s.size == 0 || s.size > 1<<62 || s.next == 0 || s.next > 1<<62 || s.floor > s.next
	unsealed := 0
	seen := map[uint64]bool{}
	for _, t := range s.slots {
		switch {
		case t.first == 0:
			bad = bad || t != slotState{}
			continue
		case t.last == unsealedLast:
			unsealed++
			bad = bad || t.footer != 0
		default:
			bad = bad || t.last < t.first
		}
		bad = bad || seen[t.first] || t.first > 1<<62 || t.last > 1<<62
		bad = bad || t.footer != 0 && uint64(t.footer)+uint64(footerBlocks(int(t.records))) > s.segment/block
		seen[t.first] = true
	}
	if bad || unsealed > 1 {
		return fmt.Errorf("%w: impossible numbers", ErrCorrupt)
	}
	return nil
}

// readSuperblock reads both copies. torn says that one of them is to be written anew.
func readSuperblock(f file) (s *superblock, torn bool, err error) {
	var got [superCopies]*superblock
	var errs [superCopies]error
	for i := range superCopies {
		b := make([]byte, superStride)
		n, err := f.ReadAt(b, int64(i)*superStride)
		if err != nil && !errors.Is(err, io.EOF) && n < superHead {
			errs[i] = fmt.Errorf("%w: %w", ErrCorrupt, err)
			continue
		}
		got[i], errs[i] = decodeSuperblock(b[:n])
		if n == 0 {
			errs[i] = ErrNoStore
		}
	}
	for _, err := range errs {
		if errors.Is(err, ErrVersion) {
			return nil, false, err // a valid old copy beside it must not be mistaken for the truth
		}
	}
	a, z := got[0], got[1]
	switch {
	case errs[0] == nil && errs[1] == nil:
		if z.sequence > a.sequence {
			return z, z.sequence != a.sequence+1, nil
		}
		return a, true, nil // the second copy is written last
	case errs[0] == nil:
		return a, true, nil
	case errs[1] == nil:
		return z, true, nil
	case errors.Is(errs[1], ErrNoStore):
		return nil, false, ErrNoStore // also if the first copy is torn: the store was never made whole
	}
	return nil, false, fmt.Errorf("%w: %w; %w", ErrCorrupt, errs[0], errs[1])
}

// writeSuperblock writes one copy, makes it durable, and then writes the other: a torn write leaves the one before,
// and once it has returned, the loss of either copy brings back nothing.
func writeSuperblock(f file, s *superblock) error {
	for i := range superCopies {
		s.sequence++
		if err := f.writeVec([][]byte{s.appendTo(nil)}, int64(i)*superStride); err != nil {
			return err
		}
		if err := f.sync(); err != nil {
			return err
		}
	}
	return nil
}

func allZero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}
