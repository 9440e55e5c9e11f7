package conductor

import (
	"encoding/binary"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// hasher names blocks as RFC 1527 has it: a block's own hash is XXH3-64 of its tokens, as u32 little-endian, with a seed; the
// first block of a prompt is named by that, and each later one by XXH3-64 of the name before it and its own hash. What beside
// the tokens tells a block from others (a salt, images) goes in between, so that prompts without such things have the
// standard's names.
type hasher struct {
	seed uint64
	buf  []byte
}

// local is a block's own hash.
func (h *hasher) local(tokens []uint32, extra uint64) uint64 {
	v := xxh3.HashSeed(h.bytes(tokens), h.seed)
	if extra != 0 {
		v = h.pair(v, extra)
	}
	return v
}

// bytes are tokens in little-endian order, until the next call.
func (h *hasher) bytes(tokens []uint32) []byte {
	if littleEndian {
		return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens)) //nolint:gosec // as long as they are
	}
	h.buf = h.buf[:0]
	for _, t := range tokens {
		h.buf = binary.LittleEndian.AppendUint32(h.buf, t)
	}
	return h.buf
}

// littleEndian says that numbers lie in memory as they are hashed.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// pair is the hash of two numbers.
func (h *hasher) pair(a, b uint64) uint64 {
	var p [16]byte
	binary.LittleEndian.PutUint64(p[:], a)
	binary.LittleEndian.PutUint64(p[8:], b)
	return xxh3.HashSeed(p[:], h.seed)
}

// first is the name of a prompt's first block, with the salt of its user.
func (h *hasher) first(local uint64, salt []byte) uint64 {
	if len(salt) > 0 {
		local = h.pair(local, xxh3.HashSeed(salt, h.seed))
	}
	return named(local)
}

// next is the name of the block after parent.
func (h *hasher) next(parent, local uint64) uint64 { return named(h.pair(parent, local)) }

// named keeps 0 free: it stands for no block in tables.
func named(v uint64) uint64 { return max(v, 1) }

// Names appends the names of a prompt's whole blocks to list; what is left of it at the end is not one. seed is the index's.
func Names(list []uint64, seed uint64, tokens []uint32, blockSize int, salt []byte) []uint64 {
	h := hasher{seed: seed, buf: make([]byte, 0, 4*min(blockSize, len(tokens)))}
	for i := 0; blockSize > 0 && len(tokens) >= blockSize; i++ {
		local := h.local(tokens[:blockSize], 0)
		if i == 0 {
			list = append(list, h.first(local, salt))
		} else {
			list = append(list, h.next(list[len(list)-1], local))
		}
		tokens = tokens[blockSize:]
	}
	return list
}
