package paper

import (
	"math"
	"slices"
	"strings"
)

// movingMean replaces each value by the mean of the window of n around it, which is shorter at the ends.
func movingMean(values []float64, n int) []float64 {
	out := make([]float64, len(values))
	for i := range values {
		out[i] = mean(values[max(0, i-n/2):min(len(values), i+n/2+1)])
	}
	return out
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(max(1, len(values)))
}

// deviation is the standard deviation.
func deviation(values []float64) float64 {
	m, sum := mean(values), 0.0
	for _, v := range values {
		sum += (v - m) * (v - m)
	}
	return math.Sqrt(sum / float64(max(1, len(values))))
}

// correlation is Pearson's, of two lists of the same length; 0 where one of them is constant.
func correlation(a, b []float64) float64 {
	ma, mb, ab, aa, bb := mean(a), mean(b), 0.0, 0.0, 0.0
	for i := range a {
		ab += (a[i] - ma) * (b[i] - mb)
		aa += (a[i] - ma) * (a[i] - ma)
		bb += (b[i] - mb) * (b[i] - mb)
	}
	if aa == 0 || bb == 0 {
		return 0
	}
	return ab / math.Sqrt(aa*bb)
}

// greatest is the place of the greatest value.
func greatest(values []float64) int { return slices.Index(values, slices.Max(values)) }

// capital begins a sentence.
func capital(s string) string { return strings.ToUpper(s[:1]) + s[1:] }
