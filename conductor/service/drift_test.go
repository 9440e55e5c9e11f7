package service

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDrift: an engine that finds other than predicted is asked for everything, once enough reports say so, and less and less
// often if that does not help; one that finds what is predicted, or nearly, is left alone.
func TestDrift(t *testing.T) {
	for _, c := range []struct {
		name              string
		predicted, actual int
		want              int // resyncs in 2 hours
	}{
		{"as predicted", 1024, 1024, 0},
		{"a little less", 1024, 768, 0},
		{"nothing to find", 0, 0, 0},
		{"half and more is not there", 1024, 256, 7}, // after 1, 1, 2, 4, 8, 16, 32 minutes and then an hour
		{"more than known", 256, 1024, 7},
	} {
		t.Run(c.name, func(t *testing.T) {
			resyncs := 0
			d := newDrift(slog.New(slog.DiscardHandler), func(instance string) int {
				require.Equal(t, "a", instance)
				resyncs++
				return 1
			})
			at := time.Duration(0)
			for at < 100*time.Minute {
				at += 500 * time.Millisecond
				d.note(at, engine{"default", "a"}, c.predicted, c.actual)
			}
			require.Equal(t, c.want, resyncs)
		})
	}
}

// TestDriftIsForgotten: engines that are not heard of do not stay.
func TestDriftIsForgotten(t *testing.T) {
	d := newDrift(slog.New(slog.DiscardHandler), func(string) int { return 0 })
	d.note(0, engine{"default", "old"}, 1, 1)
	d.note(driftKeep+2*driftForget, engine{"default", "new"}, 1, 1)
	require.Len(t, d.by, 1)
}
