package cluster

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/zeebo/xxh3"
)

// headBytes is what a value begins with: hash of the key, version, length, and a sum of these three.
const headBytes = 32

// MakeValue makes the value of a version of a key: its bytes depend on both, and on nothing else.
func MakeValue(dst []byte, key string, version uint64, size int) []byte {
	size = max(size, headBytes)
	if cap(dst) < size {
		dst = make([]byte, size)
	}
	dst = dst[:size]
	id := xxh3.HashString(key)
	binary.LittleEndian.PutUint64(dst[0:], id)
	binary.LittleEndian.PutUint64(dst[8:], version)
	binary.LittleEndian.PutUint64(dst[16:], uint64(size))
	binary.LittleEndian.PutUint64(dst[24:], xxh3.Hash(dst[:24]))
	x := id ^ version*0x9E3779B97F4A7C15 | 1
	rest := dst[headBytes:]
	for ; len(rest) >= 8; rest = rest[8:] {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(rest, x)
	}
	for i := range rest {
		rest[i] = byte(x >> (8 * i))
	}
	return dst
}

// valueSize is the length of a version's value: from a part of a page to several, and never a multiple of it.
func valueSize(key string, version uint64) int {
	r := rand.New(rand.NewPCG(xxh3.HashString(key), version))
	return headBytes + r.IntN(40<<10) | 1
}

// ValueOf is makeValue of the usual length.
func ValueOf(dst []byte, key string, version uint64) []byte {
	return MakeValue(dst, key, version, valueSize(key, version))
}

// CheckValue verifies all bytes of a value and returns the version that it is.
func CheckValue(key string, value []byte) (version uint64, err error) {
	if len(value) < headBytes {
		return 0, fmt.Errorf("key %s: %d bytes are not a value", key, len(value))
	}
	if binary.LittleEndian.Uint64(value[24:]) != xxh3.Hash(value[:24]) {
		return 0, fmt.Errorf("key %s: the head is not one: % x", key, value[:headBytes])
	}
	if binary.LittleEndian.Uint64(value) != xxh3.HashString(key) {
		return 0, fmt.Errorf("key %s: the value of another key", key)
	}
	version = binary.LittleEndian.Uint64(value[8:])
	if binary.LittleEndian.Uint64(value[16:]) != uint64(len(value)) {
		return version, fmt.Errorf("key %s, version %d: %d bytes of %d", key, version, len(value), binary.LittleEndian.Uint64(value[16:]))
	}
	want := MakeValue(nil, key, version, len(value))
	for i := range value {
		if value[i] != want[i] {
			return version, fmt.Errorf("key %s, version %d, %d bytes: wrong from byte %d on", key, version, len(value), i)
		}
	}
	return version, nil
}
