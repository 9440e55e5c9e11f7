package client

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"larder/protocol"
)

// PrefixContext scopes prefix hashes: two blocks are the same only within the same model, LoRA adapter, salt, block
// size and seed. The tenant is the session's.
type PrefixContext = protocol.Context

// PrefixHashes returns the rolling hash of each whole block of blockSize tokens (RFC 1527 of Mooncake, XXH3-64 with
// seed S = context.Seed):
//
//	local[i] = XXH3(tokens of block i, each as u32 little-endian, S)
//	seq[0]   = local[0]
//	seq[i]   = XXH3(seq[i-1] as u64 little-endian || local[i] as u64 little-endian, S)
//
// seq[i] thus names block i and everything before it. A trailing partial block has no hash. blockSize 0 stands for
// context.BlockSize; the result is nil if that is 0 too. Model, LoRA and salt are not hashed: they scope the hashes in
// the index. It is the only implementation: whoever stores and whoever asks must agree to the bit.
func PrefixHashes(tokens []uint32, blockSize int, context PrefixContext) []uint64 {
	return AppendPrefixHashes(nil, tokens, blockSize, context)
}

// AppendPrefixHashes is PrefixHashes into memory that the caller brings: dst is extended and returned. It does not
// allocate if dst has the capacity and a block has at most 1024 tokens.
func AppendPrefixHashes(dst []uint64, tokens []uint32, blockSize int, context PrefixContext) []uint64 {
	if blockSize <= 0 {
		blockSize = int(min(context.BlockSize, 1<<31-1))
	}
	if blockSize <= 0 {
		return dst
	}
	var small [4 * 1024]byte
	buf := small[:0]
	if 4*blockSize > len(small) {
		buf = make([]byte, 0, 4*min(blockSize, len(tokens)))
	}
	var prior uint64
	for i := 0; blockSize <= len(tokens); i++ {
		buf = buf[:0]
		for _, t := range tokens[:blockSize] {
			buf = binary.LittleEndian.AppendUint32(buf, t)
		}
		tokens = tokens[blockSize:]
		local := xxh3.HashSeed(buf, context.Seed)
		if i == 0 {
			prior = local
		} else {
			var pair [16]byte
			binary.LittleEndian.PutUint64(pair[:8], prior)
			binary.LittleEndian.PutUint64(pair[8:], local)
			prior = xxh3.HashSeed(pair[:], context.Seed)
		}
		dst = append(dst, prior)
	}
	return dst
}
