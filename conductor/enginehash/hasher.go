package enginehash

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

// The algorithms, by the names that engines' options have; SGLang has only one.
const (
	SHA256        = "sha256" // over pickle: vLLM's default
	SHA256CBOR    = "sha256_cbor"
	SHA256Msgpack = "sha256_msgpack"
	XXHash        = "xxhash" // XXH3-128 over pickle
	XXHashCBOR    = "xxhash_cbor"
	XXHashMsgpack = "xxhash_msgpack"
	SGLang        = "sglang"
)

// DefaultSeed is what vLLM takes where PYTHONHASHSEED is not set, since August 2026, for algorithms that are SHA-256.
const DefaultSeed = "vllm-none-hash"

// What is refused.
var (
	// ErrAlgorithm says that an algorithm is not known.
	ErrAlgorithm = errors.New("enginehash: the algorithms are sha256, sha256_cbor, sha256_msgpack, xxhash, xxhash_cbor, " +
		"xxhash_msgpack, sglang")
	// ErrSeed says that an algorithm has no default seed.
	ErrSeed = errors.New("enginehash: xxhash begins with a random name unless PYTHONHASHSEED is set: set it, and give it as the seed")
	// ErrBlockSize says that no engine has such blocks.
	ErrBlockSize = errors.New("enginehash: a block has 1 to 8192 tokens")
	// ErrKey says that an extra key is of a type that cannot be encoded.
	ErrKey = errors.New("enginehash: an extra key is a string, []byte, int, nil, or Keys")
)

// maxBlock bounds the tokens of a block: Python cuts longer pickles into frames.
const maxBlock = 8192

// Keys are what beside its tokens tells a block from others, in the engine's order: the adapter's name, an identifier and a
// place for each image, the user's salt in a prompt's first block, and a digest of embeddings. Each is a string, a []byte, an
// int, nil, or Keys again.
type Keys []any

// Text are the keys of n blocks of a prompt without images: the adapter's name in all, and the salt in the first.
func Text(lora, salt string, n int) []Keys {
	if lora == "" && salt == "" {
		return nil
	}
	list := make([]Keys, n)
	for i := range list {
		if lora != "" {
			list[i] = append(list[i], lora)
		}
		if salt != "" && i == 0 {
			list[i] = append(list[i], salt)
		}
	}
	return list
}

// Hasher names blocks with one algorithm and seed. It may be used concurrently.
type Hasher struct {
	encoding encoding // nil for SGLang
	sum      func([]byte) []byte
	none     []byte // what comes before a first block
}

// encoding writes values as a library of Python does.
type encoding interface {
	// block appends what is hashed of a block.
	block(b, parent []byte, tokens []uint32, keys Keys) ([]byte, error)
	// text appends a text by itself.
	text(b []byte, s string) []byte
}

// New makes a hasher. An empty seed stands for the engine's default.
func New(algorithm, seed string) (*Hasher, error) {
	h := &Hasher{sum: sha}
	switch algorithm {
	case SHA256, XXHash:
		h.encoding = pickle{}
	case SHA256CBOR, XXHashCBOR:
		h.encoding = cbor{}
	case SHA256Msgpack, XXHashMsgpack:
		h.encoding = msgpack{}
	case SGLang:
		return h, nil
	default:
		return nil, fmt.Errorf("%w, not %.40q", ErrAlgorithm, algorithm)
	}
	switch algorithm {
	case XXHash, XXHashCBOR, XXHashMsgpack:
		if h.sum = xxh; seed == "" {
			return nil, ErrSeed
		}
	}
	if seed == "" {
		seed = DefaultSeed
	}
	h.none = h.sum(h.encoding.text(nil, seed))
	return h, nil
}

func sha(b []byte) []byte {
	sum := sha256.Sum256(b)
	return sum[:]
}

func xxh(b []byte) []byte {
	sum := xxh3.Hash128(b).Bytes()
	return sum[:]
}

// None is what stands for the block before a first one.
func (h *Hasher) None() []byte { return h.none }

// Blocks are the digests of a prompt's whole blocks; what is left of it at the end is not one. extras are the blocks' extra keys;
// those that are not given have none.
func (h *Hasher) Blocks(tokens []uint32, blockSize int, extras []Keys) ([][]byte, error) {
	if blockSize < 1 || blockSize > maxBlock {
		return nil, fmt.Errorf("%w, not %d", ErrBlockSize, blockSize)
	}
	list := make([][]byte, 0, len(tokens)/blockSize)
	parent, b := h.none, []byte(nil)
	for len(tokens) >= blockSize {
		var keys Keys
		if len(list) < len(extras) {
			keys = extras[len(list)]
		}
		var err error
		if b, err = h.append(b[:0], parent, tokens[:blockSize], keys); err != nil {
			return nil, err
		}
		parent = h.sum(b)
		list = append(list, parent)
		tokens = tokens[blockSize:]
	}
	return list, nil
}

// append appends what is hashed of a block.
func (h *Hasher) append(b, parent []byte, tokens []uint32, keys Keys) ([]byte, error) {
	if h.encoding != nil {
		return h.encoding.block(b, parent, tokens, keys)
	}
	b = append(b, parent...)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b, nil
}

// Short is a digest as engines publish it where they publish numbers: vLLM's its last 8 bytes, SGLang's its first.
func (h *Hasher) Short(digest []byte) uint64 {
	if h.encoding == nil {
		return binary.BigEndian.Uint64(digest)
	}
	return binary.BigEndian.Uint64(digest[len(digest)-8:])
}
