package transfer

import (
	"os"

	"github.com/zeebo/xxh3"

	"larder/cxl"
)

// Memory behind a buffer, or a caller's, may be a mapping whose file is truncated by somebody: what this process does with
// it then faults. System calls fail with EFAULT instead. Both become [ErrMemory].

// sumOf is the checksum of bytes on the wire. It is never 0, which stands for none.
func sumOf(b []byte) (sum uint64, err error) {
	if cxl.Guard(func() { sum = xxh3.Hash(b) }) != nil {
		return 0, ErrMemory
	}
	return max(sum, 1), nil
}

// sumPieces is sumOf of what lies in pieces.
func sumPieces(pieces [][]byte) (sum uint64, err error) {
	if len(pieces) == 1 {
		return sumOf(pieces[0])
	}
	var h xxh3.Hasher
	if cxl.Guard(func() {
		for _, p := range pieces {
			_, _ = h.Write(p) // it does not fail
		}
	}) != nil {
		return 0, ErrMemory
	}
	return max(h.Sum64(), 1), nil
}

// fits reports whether bytes have a checksum, 0 being any.
func fits(sum uint64, pieces [][]byte) (bool, error) {
	if sum == 0 {
		return true, nil
	}
	is, err := sumPieces(pieces)
	return is == sum, err
}

// touch looks whether all of b is there.
func touch(b []byte) error {
	var last byte
	if cxl.Guard(func() {
		for i := 0; i < len(b); i += os.Getpagesize() {
			last ^= b[i]
		}
		if len(b) > 0 {
			last ^= b[len(b)-1]
		}
	}) != nil {
		return ErrMemory
	}
	return nil
}
