package bench

import (
	"fmt"
	"time"

	"larder/conductor/sim"
)

// simulator measures how many requests are simulated a second: a generated workload like the papers' conversation trace.
func (b *bench) simulator() error {
	trace, err := sim.Generate(sim.Workload{Name: "conversation", BlockSize: 512, Seed: 1})
	if err != nil {
		return fmt.Errorf("generate: %w", err)
	}
	s := sim.Default()
	s.Trace = trace
	serving, err := b.simulated(len(trace), func() error {
		_, err := sim.Run(b.ctx, &s)
		return err //nolint:wrapcheck // simulated wraps
	})
	if err != nil {
		return err
	}
	b.aim(Row{Name: "simulated requests, 8 prefill and 8 decode nodes, per second of one core", Value: serving, Unit: "requests/s"},
		">= 20k/s", serving >= 20e3)
	cached, err := b.simulated(len(trace), func() error {
		_, err := sim.HitRatios(trace, []string{"lru"}, []int{10_000})
		return err //nolint:wrapcheck // simulated wraps
	})
	if err != nil {
		return err
	}
	b.aim(Row{Name: "simulated requests, one cache alone, per second of one core", Value: cached, Unit: "requests/s"},
		">= 100k/s", cached >= 100e3)
	return nil
}

// simulated is how many requests a second of processor time simulates.
func (b *bench) simulated(requests int, run func() error) (float64, error) {
	done, from, start := 0, processorTime(self), time.Now()
	for time.Since(start) < b.Time {
		if err := run(); err != nil {
			return 0, fmt.Errorf("simulate: %w", err)
		}
		done += requests
	}
	return float64(done) / (processorTime(self) - from).Seconds(), nil
}
