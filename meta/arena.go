package meta

import "encoding/binary"

// keyArena stores keys without a pointer per key. A key takes whole granules of a block; freed runs go to a list for
// their size, threaded through the freed memory itself.
type keyArena struct {
	blocks [][]byte
	used   int      // bytes of the last block
	free   []uint32 // head of the list of free runs by granules; 0 = none
	bytes  uint64   // in use
}

const (
	keyGranule = 8       // bytes; references count granules, so 32 bits reach 32 GiB of keys
	keyBlock   = 1 << 20 // bytes of a block: small beside what one garbage collection looks at
	// fewBlocks may have gaps of any size.
	fewBlocks = 64
)

func granules(n int) int { return max(1, (n+keyGranule-1)/keyGranule) }

// put stores a copy of key and returns its reference, which is never 0.
func (a *keyArena) put(key []byte) uint32 {
	g := granules(len(key))
	a.bytes += uint64(g) * keyGranule //nolint:gosec // small
	ref := uint32(0)
	if g < len(a.free) {
		ref = a.free[g]
	}
	if ref != 0 {
		a.free[g] = binary.LittleEndian.Uint32(a.at(ref, 4))
	} else {
		if len(a.blocks) == 0 || a.used+g*keyGranule > keyBlock {
			a.blocks = append(a.blocks, make([]byte, keyBlock))
			a.used = 0
			if len(a.blocks) == 1 {
				a.used = keyGranule // reference 0 means none
			}
		}
		ref = uint32((len(a.blocks)-1)*(keyBlock/keyGranule) + a.used/keyGranule) //nolint:gosec // 32 GiB of keys do not fit beside their entries
		a.used += g * keyGranule
	}
	copy(a.at(ref, len(key)), key)
	return ref
}

// drop frees the key of n bytes at ref.
func (a *keyArena) drop(ref uint32, n int) {
	g := granules(n)
	a.bytes -= uint64(g) * keyGranule //nolint:gosec // small
	for g >= len(a.free) {
		a.free = append(a.free, 0)
	}
	binary.LittleEndian.PutUint32(a.at(ref, 4), a.free[g])
	a.free[g] = ref
}

// wasted reports whether another key of n bytes would take a further block while less than half of those there are is in use: keys
// came and went whose lengths were others. The owner can then put its keys into another arena.
func (a *keyArena) wasted(n int) bool {
	g, blocks := granules(n), len(a.blocks)
	return blocks > fewBlocks && a.used+g*keyGranule > keyBlock && a.bytes < uint64(blocks)*keyBlock/2 &&
		(g >= len(a.free) || a.free[g] == 0)
}

// at returns the n bytes at ref.
func (a *keyArena) at(ref uint32, n int) []byte {
	const perBlock = keyBlock / keyGranule
	off := int(ref%perBlock) * keyGranule
	return a.blocks[ref/perBlock][off : off+n : off+n]
}
