package replay

import (
	"encoding/binary"
	"fmt"
)

// A block's bytes follow from its id and size alone: a header, and words that a mixing sequence gives, so that every
// byte of a page is checked, and one page is never taken for another.
//
//	 0  magic
//	 8  id
//	16  size in bytes
//	24  words: word i is mix(id, i)
const (
	blockMagic  = 0x6b636f6c_4264724c // "LrdBlock"
	blockHeader = 24
	// MinBlock is the smallest block in bytes: the header and a word.
	MinBlock = 32

	golden = 0x9e3779b97f4a7c15
)

// start is the state of a block's words before the first: distinct ids give distinct sequences.
func start(id uint64) uint64 {
	x := (id + 1) * golden
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return x ^ x>>32
}

// FillBlock writes the bytes of a block. len(b) is a multiple of 8, at least MinBlock.
func FillBlock(b []byte, id uint64) {
	binary.LittleEndian.PutUint64(b[0:], blockMagic)
	binary.LittleEndian.PutUint64(b[8:], id)
	binary.LittleEndian.PutUint64(b[16:], uint64(len(b)))
	w := start(id)
	for p := b[blockHeader:]; len(p) >= 8; p = p[8:] {
		w += golden
		binary.LittleEndian.PutUint64(p, w^w>>29)
	}
}

// CheckBlock compares every byte with what FillBlock writes, and says where the first difference is.
func CheckBlock(b []byte, id uint64, size int) error {
	if len(b) != size {
		return fmt.Errorf("block %d has %d bytes, not %d", id, len(b), size)
	}
	if m := binary.LittleEndian.Uint64(b); m != blockMagic {
		return fmt.Errorf("block %d: begins with %#x: no block at all", id, m)
	}
	if got := binary.LittleEndian.Uint64(b[8:]); got != id {
		return fmt.Errorf("block %d: holds block %d", id, got)
	}
	if got := binary.LittleEndian.Uint64(b[16:]); got != uint64(size) { //nolint:gosec // not negative
		return fmt.Errorf("block %d: says that it has %d bytes, not %d", id, got, size)
	}
	w := start(id)
	p := b[blockHeader:]
	// Four words at a time: this is the main cost of a replay that hits.
	for len(p) >= 32 {
		w1, w2, w3, w4 := w+golden, w+2*golden&(1<<64-1), w+3*golden&(1<<64-1), w+4*golden&(1<<64-1)
		d := binary.LittleEndian.Uint64(p) ^ w1 ^ w1>>29
		d |= binary.LittleEndian.Uint64(p[8:]) ^ w2 ^ w2>>29
		d |= binary.LittleEndian.Uint64(p[16:]) ^ w3 ^ w3>>29
		d |= binary.LittleEndian.Uint64(p[24:]) ^ w4 ^ w4>>29
		if d != 0 {
			break
		}
		w, p = w4, p[32:]
	}
	for ; len(p) >= 8; p = p[8:] {
		w += golden
		if binary.LittleEndian.Uint64(p) != w^w>>29 {
			return fmt.Errorf("block %d: wrong bytes at offset %d", id, len(b)-len(p))
		}
	}
	return nil
}
