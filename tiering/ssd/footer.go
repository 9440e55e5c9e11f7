package ssd

import (
	"encoding/binary"
	"errors"
)

const (
	footerHead   = 64
	footerMagic  = "LARDERFT"
	offFooterCRC = 8
)

// errNoFooter means that the segment is to be indexed from its headers.
var errNoFooter = errors.New("ssd: no footer")

// footerBlocks gives how many blocks the footer of n records takes.
func footerBlocks(n int) uint32 {
	return uint32((footerHead + n*recordBytes + block - 1) / block) //nolint:gosec // records of a segment are bounded
}

// appendFooter encodes the summary of a segment: all its records, in order, in whole blocks.
func appendFooter(b []byte, salt, first, last uint64, records []record) []byte {
	e := alignedBytes(int(footerBlocks(len(records))) * block)
	le := binary.LittleEndian
	copy(e, footerMagic)
	le.PutUint32(e[12:], uint32(len(records))) //nolint:gosec // as above
	le.PutUint64(e[16:], salt)
	le.PutUint64(e[24:], first)
	le.PutUint64(e[32:], last)
	for i := range records {
		records[i].put(e[footerHead+i*recordBytes:])
	}
	le.PutUint32(e[offFooterCRC:], crcAround(e, offFooterCRC))
	if b == nil {
		return e // stays aligned
	}
	return append(b, e...)
}

// decodeFooter reads a summary of n records that the superblock announced for a segment; end is the block it lies at.
func decodeFooter(b []byte, salt, size uint64, s slotState) ([]record, error) {
	n := int(s.records)
	le := binary.LittleEndian
	if len(b) != int(footerBlocks(n))*block || string(b[:8]) != footerMagic || int(le.Uint32(b[12:])) != n ||
		le.Uint64(b[16:]) != salt || le.Uint64(b[24:]) != s.first || le.Uint64(b[32:]) != s.last ||
		le.Uint32(b[offFooterCRC:]) != crcAround(b, offFooterCRC) {
		return nil, errNoFooter
	}
	records := make([]record, n)
	for i := range records {
		r, ok := getRecord(b[footerHead+i*recordBytes:], size)
		if !ok || r.kind != kindDiscard && (r.pos >= s.footer || r.blocks() > s.footer-r.pos) {
			return nil, errNoFooter
		}
		records[i] = r
	}
	return records, nil
}
