package store_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/store"
)

// BenchmarkPut compares and sets an entry, as those do who agree on something.
func BenchmarkPut(b *testing.B) {
	for _, x := range backends(b) {
		b.Run(x.name, func(b *testing.B) {
			s := x.open(b, x.fresh(b))
			e, took := store.Entry{}, make([]time.Duration, 0, 1<<16)
			value := make([]byte, 500)
			for b.Loop() {
				at := time.Now()
				var err error
				e, err = s.Put(b.Context(), "k", value, store.IfRevision(e.Modified), store.Leased())
				require.NoError(b, err)
				took = append(took, time.Since(at))
			}
			report(b, took)
		})
	}
}

// BenchmarkPutToWatch is the time from a Put until a watch of another Store tells of it.
func BenchmarkPutToWatch(b *testing.B) {
	for _, x := range backends(b) {
		b.Run(x.name, func(b *testing.B) {
			url := x.fresh(b)
			s, other := x.open(b, url), x.open(b, url)
			ctx, cancel := context.WithCancel(b.Context())
			told, ended := make(chan time.Time, 1), make(chan error)
			go func() {
				ended <- other.Watch(ctx, "", func([]store.Change) error {
					told <- time.Now()
					return nil
				})
			}()
			<-told
			took := make([]time.Duration, 0, 1<<16)
			value := make([]byte, 500)
			for b.Loop() {
				at := time.Now()
				_, err := s.Put(b.Context(), "k", value)
				require.NoError(b, err)
				took = append(took, (<-told).Sub(at))
			}
			report(b, took)
			cancel()
			require.ErrorIs(b, <-ended, context.Canceled)
		})
	}
}

// BenchmarkList reads what a group of 64 has: three entries each.
func BenchmarkList(b *testing.B) {
	for _, x := range backends(b) {
		b.Run(x.name, func(b *testing.B) {
			s := x.open(b, x.fresh(b))
			for i := range 3 * 64 {
				_, err := s.Put(b.Context(), fmt.Sprint("job/rank/", i), make([]byte, 500))
				require.NoError(b, err)
			}
			for b.Loop() {
				list, _, err := s.List(b.Context(), "job/")
				require.NoError(b, err)
				require.Len(b, list, 3*64)
			}
		})
	}
}

func report(b *testing.B, took []time.Duration) {
	b.Helper()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e3, "p50-us")
	b.ReportMetric(float64(took[len(took)*99/100])/1e3, "p99-us")
}
