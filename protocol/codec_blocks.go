package protocol

import (
	"encoding/binary"
	"slices"
)

// PackedBlockSize is the size of the record of a block in the reply to LIST_BLOCKS. It has four words, u64 little-endian: bits
// 0 to 15 of the first are the place of the block's context in the list, bit 16 says that it is in memory, 17 that it is on
// disk and 18 that its parent is known, and bits 32 to 63 are its group; then come hash, parent and index.
const PackedBlockSize = 32

const (
	blockInMemory  = 1 << 16
	blockOnDisk    = 1 << 17
	blockHasParent = 1 << 18
	blockGroup     = 32 // shift
)

// Append appends m as the payload of LIST_BLOCKS.
func (m *ListBlocksRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.optUint("cursor", m.Cursor)
	e.optUint("limit", m.Limit)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *ListBlocksRequest) Decode(b []byte) error {
	*m = ListBlocksRequest{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "cursor":
			m.Cursor = d.uint()
		case "limit":
			m.Limit = d.uint()
			if m.Limit > MaxBatch {
				d.fail(CodeLimit, "%d is over the limit of %d", m.Limit, MaxBatch)
			}
		default:
			d.skip()
		}
	}
	return d.end()
}

// Append appends m as the payload of LIST_BLOCKS' reply.
func (m *ListBlocksReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.array("contexts", len(m.Contexts))
	for i := range m.Contexts {
		e.contextMap(&m.Contexts[i])
	}
	e.field("blocks")
	e.b = appendBinHead(e.b, len(m.Blocks)*PackedBlockSize)
	for i := range m.Blocks {
		e.b = appendBlock(e.b, &m.Blocks[i])
	}
	e.optUint("cursor", m.Cursor)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

func appendBlock(b []byte, k *BlockInfo) []byte {
	head := uint64(k.Context) | uint64(k.Group)<<blockGroup
	for _, bit := range [...]struct {
		on  bool
		bit uint64
	}{{k.InMemory, blockInMemory}, {k.OnDisk, blockOnDisk}, {k.HasParent, blockHasParent}} {
		if bit.on {
			head |= bit.bit
		}
	}
	for _, v := range [...]uint64{head, k.Hash, k.Parent, k.Index} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *ListBlocksReply) Decode(b []byte) error {
	*m = ListBlocksReply{Contexts: m.Contexts[:0], Blocks: m.Blocks[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "contexts":
			for c := range elements(&d, &m.Contexts, MaxBatch, "contexts") {
				d.context(c)
			}
			have |= 1
		case "blocks":
			m.Blocks = d.blocks(m.Blocks)
			have |= 2
		case "cursor":
			m.Cursor = d.uint()
		default:
			d.fault(name, &m.Error)
		}
	}
	for i := range m.Blocks {
		if k := &m.Blocks[i]; int(k.Context) >= len(m.Contexts) && m.Code == 0 {
			d.failAt("blocks", "block %d is of context %d of %d", i, k.Context, len(m.Contexts))
			break
		}
	}
	return d.endReply(&m.Error, have, "contexts", "blocks")
}

// blocks reads the records of a reply.
func (d *dec) blocks(s []BlockInfo) []BlockInfo {
	p := d.bytes(MaxBatch*PackedBlockSize, CodeLimit)
	if len(p)%PackedBlockSize != 0 {
		d.fail(CodeBadRequest, "%d bytes are no multiple of %d", len(p), PackedBlockSize)
		return s
	}
	s = slices.Grow(s, len(p)/PackedBlockSize)
	for ; len(p) > 0; p = p[PackedBlockSize:] {
		head := binary.LittleEndian.Uint64(p)
		s = append(s, BlockInfo{
			Context: uint16(head), Group: uint32(head >> blockGroup), //nolint:gosec // cut on purpose
			InMemory: head&blockInMemory != 0, OnDisk: head&blockOnDisk != 0, HasParent: head&blockHasParent != 0,
			Hash: binary.LittleEndian.Uint64(p[8:]), Parent: binary.LittleEndian.Uint64(p[16:]), Index: binary.LittleEndian.Uint64(p[24:]),
		})
	}
	return s
}
