package sched

import "math/bits"

// lengths is the distribution of how many tokens the requests of a class were answered with: a histogram whose bins are a
// quarter of a power of two wide, exact up to 8 tokens. Old answers fade, so that it follows what is asked.
type lengths struct {
	// Over has how many answers are in a bin or a later one; Over[0] is all of them.
	Over [lengthBins + 1]uint32 `json:"over"`
	mean float64
}

const (
	lengthBins = 80        // the last one begins at 1.75 * 2^20 tokens
	learned    = 100       // answers after which the distribution is trusted
	mostSeen   = 1 << 12   // answers, before they all count half
	mostLength = 1<<21 - 1 // tokens
)

// bin is where a length is counted.
func bin(n int) int {
	if n < 4 {
		return n
	}
	e := bits.Len(uint(n)) - 1
	return (e-1)*4 + n>>(e-2)&3
}

// binStart is the least length of a bin.
func binStart(b int) int {
	if b < 4 {
		return b
	}
	return (4 + b%4) << (b/4 - 1)
}

// add takes note of an answer.
func (l *lengths) add(n int) {
	for i := range bin(min(n, mostLength)) + 1 {
		l.Over[i]++
	}
	if l.Over[0] >= mostSeen {
		for i := range l.Over {
			l.Over[i] /= 2
		}
	}
	l.average()
}

func (l *lengths) average() {
	l.mean = 0
	if l.Over[0] == 0 {
		return
	}
	for b := range lengthBins {
		middle := float64(binStart(b)+binStart(b+1)-1) / 2
		l.mean += middle * float64(l.Over[b]-l.Over[b+1])
	}
	l.mean /= float64(l.Over[0])
}

func (l *lengths) known() bool { return l.Over[0] >= learned }

// beyond is how many answers are longer than so many tokens. Within a bin they are taken as spread evenly.
func (l *lengths) beyond(tokens float64) float64 {
	n := int(min(max(0, tokens), mostLength))
	b := bin(n)
	width := 1 << max(0, b/4-1)
	left := float64(width-1-n&(width-1)) / float64(width) // part of the bin that is longer
	return float64(l.Over[b+1]) + left*float64(l.Over[b]-l.Over[b+1])
}

// stays is the share of those that have got so many tokens already that get more than a later number.
func (l *lengths) stays(got, later float64) float64 {
	now := l.beyond(got)
	if now == 0 {
		return 0 // longer than any so far: it is taken to end soon
	}
	return l.beyond(later) / now
}

func (l *lengths) sane() bool {
	for b := range lengthBins {
		if l.Over[b] < l.Over[b+1] {
			return false
		}
	}
	return l.Over[0] <= mostSeen && l.Over[lengthBins] == 0
}
