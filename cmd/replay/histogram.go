package replay

import (
	"math/bits"
	"time"
)

// subBits gives a histogram 64 buckets to each power of two: values are kept to within 1.6%.
const subBits = 6

// Histogram counts durations in buckets whose width grows with the value. It is not safe for concurrent use.
type Histogram struct {
	counts [(64 - subBits) << subBits]uint32
	n      uint64
	max    int64
}

// Add counts one duration.
func (h *Histogram) Add(d time.Duration) {
	v := max(int64(d), 0)
	h.counts[bucket(uint64(v))]++
	h.n++
	h.max = max(h.max, v)
}

// bucket is exact below 2^subBits and then log-linear.
func bucket(v uint64) int {
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	return (shift+1)<<subBits + int(v>>shift) - 1<<subBits //nolint:gosec // below 2^(subBits+1)
}

// floor is the least value of a bucket.
func floor(i int) int64 {
	if i < 1<<subBits {
		return int64(i)
	}
	shift := i>>subBits - 1
	return int64(i&(1<<subBits-1)+1<<subBits) << shift
}

// Merge adds another's counts.
func (h *Histogram) Merge(o *Histogram) {
	for i, n := range o.counts {
		h.counts[i] += n
	}
	h.n += o.n
	h.max = max(h.max, o.max)
}

// Count is how many durations were added.
func (h *Histogram) Count() uint64 { return h.n }

// Quantile returns the duration that a share q of all does not exceed, to within the width of a bucket.
func (h *Histogram) Quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	rank := uint64(q * float64(h.n))
	if rank >= h.n {
		return time.Duration(h.max)
	}
	var seen uint64
	for i, n := range h.counts {
		if seen += uint64(n); seen > rank {
			return time.Duration(min((floor(i)+floor(i+1))/2, h.max))
		}
	}
	return time.Duration(h.max)
}
