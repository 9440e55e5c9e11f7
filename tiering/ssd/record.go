package ssd

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	headerCopy   = 2048 // a group's header is one block that holds it twice
	groupHead    = 64
	recordBytes  = 32
	maxRecords   = 60 // in a group: what fits into a copy of its header
	offGroupCRC  = 8
	groupVersion = 1
)

// errNoGroup means that a block is not the header looked for. It is the end of a log, or damage.
var errNoGroup = errors.New("ssd: no group header")

// kind is what a record says.
type kind uint8

const (
	kindData    kind = 1 // the extent's bytes are the payload
	kindZstd    kind = 2 // the same, compressed
	kindDiscard kind = 3 // the extent is gone
)

// record is one entry of the log.
type record struct {
	off, length uint64 // the extent
	kind        kind
	stored      uint32 // bytes of payload
	crc         uint32 // CRC32C of the payload
	pos         uint32 // block of the segment where the payload starts
}

// blocks gives how many blocks the payload takes.
func (r *record) blocks() uint32 { return (r.stored + block - 1) / block }

// put encodes r into recordBytes of b.
func (r *record) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint64(b, r.off)
	le.PutUint64(b[8:], r.length)
	le.PutUint32(b[16:], r.stored)
	le.PutUint32(b[20:], r.crc)
	le.PutUint32(b[24:], r.pos)
	le.PutUint32(b[28:], uint32(r.kind))
}

// getRecord decodes what put wrote, and reports whether it is a record that a store of size logical bytes may hold.
func getRecord(b []byte, size uint64) (record, bool) {
	le := binary.LittleEndian
	r := record{
		off: le.Uint64(b), length: le.Uint64(b[8:]), stored: le.Uint32(b[16:]), crc: le.Uint32(b[20:]), pos: le.Uint32(b[24:]),
		kind: kind(b[28]),
	}
	if le.Uint32(b[28:]) > uint32(kindDiscard) || r.length == 0 || r.length > size || r.off > size-r.length {
		return r, false
	}
	switch r.kind {
	case kindData:
		return r, uint64(r.stored) == r.length && r.stored <= maxRecordBytes && r.pos != 0
	case kindZstd:
		return r, r.stored > 0 && uint64(r.stored) < r.length && r.length <= maxRecordBytes && r.pos != 0
	case kindDiscard:
		return r, r.stored == 0 && r.crc == 0 && r.pos == 0
	}
	return r, false
}

// group is one write to the log: a header, and the payloads of its records.
type group struct {
	first   uint64 // sequence of the first group of the segment, which names the segment
	seq     uint64 // counts the groups of a store; those of a segment follow each other
	blocks  uint32 // the header included
	moved   bool   // all records are copies by compaction, of what still lies where it was until the group is durable
	records []record
}

// appendTo encodes the header, a block.
func (g *group) appendTo(b []byte, salt uint64) []byte {
	var e [headerCopy]byte
	le := binary.LittleEndian
	le.PutUint64(e[0:], salt)
	e[12] = groupVersion
	if g.moved {
		e[13] = 1
	}
	le.PutUint16(e[14:], uint16(len(g.records))) //nolint:gosec // bounded by maxRecords
	le.PutUint64(e[16:], g.first)
	le.PutUint64(e[24:], g.seq)
	le.PutUint32(e[32:], g.blocks)
	for i := range g.records {
		g.records[i].put(e[groupHead+i*recordBytes:])
	}
	le.PutUint32(e[offGroupCRC:], crcAround(e[:], offGroupCRC))
	return append(append(b, e[:]...), e[:]...)
}

// place is where a header is read, and what it must agree with.
type place struct {
	salt, size, first uint64
	at, end           uint32 // blocks: of the header, and of the segment's end
}

// decodeGroup reads a header from a block, from whichever copy is whole.
func decodeGroup(b []byte, p place) (group, error) {
	if len(b) != block {
		return group{}, fmt.Errorf("%w: %d bytes", errNoGroup, len(b))
	}
	g, err := decodeCopy(b[:headerCopy], p)
	if err != nil {
		g, err = decodeCopy(b[headerCopy:], p)
	}
	return g, err
}

func decodeCopy(b []byte, p place) (group, error) {
	le := binary.LittleEndian
	g := group{first: le.Uint64(b[16:]), seq: le.Uint64(b[24:]), blocks: le.Uint32(b[32:]), moved: b[13] == 1}
	if le.Uint64(b) != p.salt || g.first != p.first || le.Uint32(b[offGroupCRC:]) != crcAround(b, offGroupCRC) {
		return g, errNoGroup
	}
	n := int(le.Uint16(b[14:]))
	if b[12] != groupVersion || b[13] > 1 || n == 0 || n > maxRecords || g.seq < g.first || g.blocks == 0 || g.blocks > p.end-p.at {
		return g, fmt.Errorf("%w: impossible numbers", errNoGroup)
	}
	g.records = make([]record, n)
	pos := p.at + 1
	for i := range g.records {
		r, ok := getRecord(b[groupHead+i*recordBytes:], p.size)
		if !ok || r.kind != kindDiscard && r.pos != pos {
			return g, fmt.Errorf("%w: impossible record", errNoGroup)
		}
		pos += r.blocks()
		g.records[i] = r
	}
	if pos != p.at+g.blocks {
		return g, fmt.Errorf("%w: impossible length", errNoGroup)
	}
	return g, nil
}
