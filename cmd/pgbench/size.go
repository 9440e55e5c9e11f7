package pgbench

import (
	"fmt"
	"strconv"
	"strings"
)

// Size is a number of bytes as nccl-tests takes it: 8, 4K, 1M or 2G, in units of 1024.
type Size int

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Size) UnmarshalText(text []byte) error {
	number, shift := strings.TrimSuffix(strings.ToUpper(string(text)), "B"), 0
	for i, unit := range []string{"K", "M", "G"} {
		if rest, ok := strings.CutSuffix(number, unit); ok {
			number, shift = rest, 10*(i+1)
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 32)
	if err != nil || n < 0 || n<<shift > MaxBytes {
		return fmt.Errorf("a size of %.20q: a number of bytes, or of K, M or G, as in 4K, at most 4G", text)
	}
	*s = Size(n << shift)
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (s Size) MarshalText() ([]byte, error) { return strconv.AppendInt(nil, int64(s), 10), nil }
