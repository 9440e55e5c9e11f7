package shm

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// p50 reports the median of the times of b's rounds, which a busy machine's mean tells little of.
func p50(b *testing.B, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(times[len(times)*9/10].Nanoseconds()), "p90-ns")
}

// BenchmarkRoundTrip is 8 bytes to another process and back.
func BenchmarkRoundTrip(b *testing.B) {
	for _, spin := range []time.Duration{0, 50 * time.Microsecond} {
		b.Run(fmt.Sprintf("spin=%v", spin), func(b *testing.B) {
			bell, p, c := echo(b, 1<<16, spin)
			var times []time.Duration
			ready := func() bool { return len(c.Ready()) >= 8 }
			for b.Loop() {
				start := time.Now()
				p.Free()[0] = 1
				p.Commit(8)
				for !bell.Wait(ready, spin, time.Second) {
					continue
				}
				c.Consume(8)
				times = append(times, time.Since(start))
			}
			p50(b, times)
		})
	}
}
