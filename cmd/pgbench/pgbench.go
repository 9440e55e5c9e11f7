// Package pgbench measures the collectives of process groups, with the flags and columns of Mooncake's pgbench, which has those of
// NVIDIA's nccl-tests. Every rank runs [Run] with the same [Config]; rank 0's rows are those to show.
package pgbench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"larder/pg"
	"larder/pg/reduce"
)

// Bounds of what can be asked for.
const (
	// MaxBytes bounds sizes: each rank has a few buffers of them.
	MaxBytes = 4 << 30
	// MaxIterations bounds iterations and warm-ups.
	MaxIterations = 1 << 20
)

// Config says what to measure.
type Config struct {
	Collective string // one of Collectives
	Min, Max   int    // bytes
	Step       int    // bytes from one size to the next, if Factor is 1
	Factor     int    // from one size to the next
	Iterations int    // that are measured
	Warmup     int    // iterations before those
	Aggregate  int    // calls that are started together
	Check      int    // checks of each result; 0: none
	Average    int    // time that is shown: 0 rank 0's, 1 the ranks' mean, 2 the least, 3 the most
	DTypes     []pg.DType
	Ops        []pg.Op
	Root       int // -1: all
}

// Collectives are those that can be measured.
var Collectives = []string{
	"all_reduce", "all_gather", "broadcast", "reduce_scatter", "alltoall", "sendrecv", "reduce", "gather", "scatter", "barrier",
}

// Validate says what cannot be.
func (c *Config) Validate(ranks int) error {
	var errs []error
	bad := func(is bool, format string, a ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, a...))
		}
	}
	bad(!slices.Contains(Collectives, c.Collective), "%.20q is none of %s", c.Collective, strings.Join(Collectives, ", "))
	bad(c.Min < 0 || c.Max < c.Min || c.Max > MaxBytes, "sizes from %d to %d: 0 to %d bytes, the least first", c.Min, c.Max, MaxBytes)
	bad(c.Factor < 1, "a factor of %d: 1 or more", c.Factor)
	bad(c.Factor == 1 && c.Step < 1 && c.Min != c.Max, "a step of %d bytes: 1 or more", c.Step)
	bad(c.Iterations < 1 || c.Iterations > MaxIterations, "%d iterations: 1 to %d", c.Iterations, MaxIterations)
	bad(c.Warmup < 0 || c.Warmup > MaxIterations, "%d iterations to warm up: 0 to %d", c.Warmup, MaxIterations)
	bad(c.Aggregate < 1 || c.Aggregate > 1<<10, "%d calls together: 1 to 1024", c.Aggregate)
	bad(c.Average < 0 || c.Average > 3, "an average of %d: 0 to 3", c.Average)
	bad(c.Root < -1 || c.Root >= ranks, "root %d of %d ranks", c.Root, ranks)
	bad(len(c.DTypes) == 0 || len(c.Ops) == 0, "a dtype and an operation are needed")
	return errors.Join(errs...)
}

// Row is what was measured of one size.
type Row struct {
	Size  int    `json:"size"`  // bytes: the larger one of what a rank sends and receives
	Count int    `json:"count"` // elements of that
	Type  string `json:"type"`
	Op    string `json:"redop"`
	Root  int    `json:"root"`
	Out   Point  `json:"out_of_place"`
	In    Point  `json:"in_place"`
}

// Point is one measurement. Bandwidths are in GB/s, 10^9 bytes.
type Point struct {
	Micros float64 `json:"time_us"` // of a call, in the mean
	P50    float64 `json:"p50_us"`
	P99    float64 `json:"p99_us"`
	AlgBW  float64 `json:"algbw_gbps"`
	BusBW  float64 `json:"busbw_gbps"`
	Wrong  int     `json:"wrong"` // elements; -1: not checked
}

// Run measures, at every rank of the group. Each row is given to show as it comes.
func Run(g *pg.Group, c Config, show func(Row)) error {
	if err := c.Validate(g.Size()); err != nil {
		return err
	}
	b := &bench{g: g, Config: c, n: g.Size(), rank: g.Rank()}
	for _, dt := range c.DTypes {
		for _, op := range c.ops(dt) {
			for _, root := range b.roots() {
				for size := c.Min; size <= c.Max; size = c.next(size) {
					row, err := b.row(size, dt, op, root)
					if err != nil {
						return err
					}
					show(row)
					if size == c.Max {
						break
					}
				}
			}
		}
	}
	return nil
}

// ops are those that a dtype has, or one that is not looked at.
func (c *Config) ops(dt pg.DType) []pg.Op {
	if !strings.HasPrefix(c.Collective, "all_reduce") && c.Collective != "reduce" && c.Collective != "reduce_scatter" {
		return []pg.Op{reduce.Sum}
	}
	return slices.DeleteFunc(slices.Clone(c.Ops), func(op pg.Op) bool { return reduce.Check(op, dt) != nil })
}

func (c *Config) next(size int) int {
	if c.Factor > 1 {
		return max(size, 1) * c.Factor
	}
	return size + c.Step
}

// bench is one rank's part.
type bench struct {
	Config

	g       *pg.Group
	n, rank int
}

func (b *bench) roots() []int {
	switch {
	case b.Collective != "broadcast" && b.Collective != "reduce" && b.Collective != "gather" && b.Collective != "scatter":
		return []int{-1}
	case b.Root >= 0:
		return []int{b.Root}
	}
	all := make([]int, b.n)
	for i := range all {
		all[i] = i
	}
	return all
}

// row measures one size, out of place and in place.
func (b *bench) row(size int, dt pg.DType, op pg.Op, root int) (Row, error) {
	each := b.n * dt.Size()
	if b.Collective == "broadcast" || b.Collective == "all_reduce" || b.Collective == "reduce" || b.Collective == "sendrecv" {
		each = dt.Size()
	}
	size = max(size/each*each, each)
	if b.Collective == "barrier" {
		size = 0
	}
	row := Row{Size: size, Count: size / dt.Size(), Type: dt.String(), Op: "none", Root: root}
	if b.Collective == "all_reduce" || b.Collective == "reduce" || b.Collective == "reduce_scatter" {
		row.Op = op.String()
	}
	for _, in := range []bool{false, true} {
		d := b.data(size, dt, op, root, in)
		p, err := b.point(d)
		if err != nil {
			return row, fmt.Errorf("%s of %d bytes: %w", b.Collective, size, err)
		}
		if in {
			row.In = p
		} else {
			row.Out = p
		}
	}
	return row, nil
}

// point measures one call again and again.
func (b *bench) point(d *data) (p Point, err error) {
	p.Wrong = -1
	for range b.Check {
		d.fill()
		if err := b.call(d, 1); err != nil {
			return p, err
		}
		p.Wrong = max(p.Wrong, 0) + d.wrong()
	}
	if err := b.call(d, b.Warmup); err != nil {
		return p, err
	}
	if _, err := b.g.Do(pg.Barrier()); err != nil {
		return p, fmt.Errorf("a barrier: %w", err)
	}
	times := make([]time.Duration, b.Iterations)
	var total time.Duration
	for i := range times {
		start := time.Now()
		if err := b.call(d, 1); err != nil {
			return p, err
		}
		times[i] = time.Since(start)
		total += times[i]
	}
	calls := float64(b.Aggregate)
	p.Micros, err = b.average(micros(total) / float64(b.Iterations) / calls)
	if err != nil {
		return p, err
	}
	slices.Sort(times)
	p.P50, p.P99 = micros(times[len(times)/2])/calls, micros(times[len(times)*99/100])/calls
	if p.Micros > 0 {
		p.AlgBW = float64(d.size) / p.Micros / 1e3
	}
	p.BusBW = p.AlgBW * b.busFactor()
	return p, nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// call makes a call several times, each Aggregate times at once.
func (b *bench) call(d *data, times int) error {
	for range times {
		if b.Aggregate == 1 && d.calls == nil {
			if _, err := b.g.Do(d.call); err != nil {
				return err //nolint:wrapcheck // the caller says what it was
			}
			continue
		}
		if err := d.together(b.g, b.Aggregate); err != nil {
			return err
		}
	}
	return nil
}

// busFactor makes of a rate of data the rate at which links carry it, which does not depend on the number of ranks: see the
// documentation of nccl-tests.
func (b *bench) busFactor() float64 {
	n := float64(b.n)
	switch b.Collective {
	case "all_reduce":
		return 2 * (n - 1) / n
	case "all_gather", "reduce_scatter", "alltoall", "gather", "scatter":
		return (n - 1) / n
	default:
		return 1
	}
}

// average is the time to show of those that the ranks have measured.
func (b *bench) average(t float64) (float64, error) {
	op := map[int]pg.Op{1: reduce.Avg, 2: reduce.Min, 3: reduce.Max}[b.Average]
	if b.Average == 0 {
		return t, nil
	}
	buf := appendFloat(nil, t)
	if _, err := b.g.Do(pg.AllReduce(buf, buf, reduce.F64, op)); err != nil {
		return 0, fmt.Errorf("the ranks' average: %w", err)
	}
	return float(buf), nil
}
