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

// StartKilled kills a member and starts it again after a run was cancelled, which fails, and ends it.
func StartKilled(ctx context.Context, log string, cancel func()) (again, end error) {
	p := &process{log: log, args: []string{"serve", "--help"}}
	if err := p.start(ctx); err != nil {
		return err, nil
	}
	if err := p.kill(); err != nil {
		return err, nil
	}
	cancel()
	return p.start(ctx), endAll([]*process{p})
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
