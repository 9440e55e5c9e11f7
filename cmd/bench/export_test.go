package bench

import (
	"context"
	"time"
)

// Failover measures the group failover with fewer kills and keys than a run does.
func Failover(ctx context.Context, dir string, kills, keys int) ([]Row, error) {
	b := &bench{Config: Config{Dir: dir}, ctx: ctx, report: &Report{}}
	err := b.failoverWith(kills, keys) //nolint:contextcheck // b has it
	return b.report.Rows, err
}

// FailoverRows makes the rows of measured times, and of how many keys were found.
func FailoverRows(took []time.Duration, found, keys int) []Row {
	b := &bench{report: &Report{}}
	b.failoverRows(took, found, keys)
	return b.report.Rows
}

// PolicyRows makes the rows of a policy.
func PolicyRows(rate, tail, noneRate, noneTail float64) []Row {
	b := &bench{report: &Report{}}
	b.policyRows("p", policyFigures{rate: rate, tail: tail}, policyFigures{rate: noneRate, tail: noneTail})
	return b.report.Rows
}
