package pgbench

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Table prints rows.
type Table struct {
	CPUTime     bool // times are called so
	Percentiles bool // with a column for the 99th percentile
	Timestamps  bool // with the time of day
}

// Heading stands above the rows.
func (t Table) Heading() string {
	name, p99, micros, when := "time", "", "", ""
	if t.CPUTime {
		name = "cputime"
	}
	if t.Percentiles {
		p99, micros = fmt.Sprintf(" %7s", "p99"), fmt.Sprintf(" %7s", "(us)")
	}
	if t.Timestamps {
		when = fmt.Sprintf("  %19s", "timestamp")
	}
	names := fmt.Sprintf("  %9s %7s%s  %6s  %6s  %6s", name, "p50", p99, "algbw", "busbw", "#wrong")
	units := fmt.Sprintf("  %9s %7s%s  %6s  %6s  %6s", "(us)", "(us)", micros, "(GB/s)", "(GB/s)", "")
	left := strings.Repeat(" ", 54)
	return fmt.Sprintf("#%s%*s%*s\n#%11s  %12s  %8s  %6s  %6s%s%s%s\n#%11s  %12s  %22s  %s%s\n",
		left[1:], len(names), "out-of-place", len(names), "in-place",
		"size", "count", "type", "redop", "root", names, names, when, "(B)", "(elements)", "", units, units)
}

// Line is a row of it.
func (t Table) Line(r Row) string {
	when := ""
	if t.Timestamps {
		when = "  " + time.Now().Format(time.DateTime)
	}
	return fmt.Sprintf("%12d  %12d  %8s  %6s  %6d%s%s%s\n", r.Size, r.Count, r.Type, r.Op, r.Root, t.half(r.Out), t.half(r.In), when)
}

// half is the part of a line that is one measurement.
func (t Table) half(p Point) string {
	wrong, p99 := "N/A", ""
	if p.Wrong >= 0 {
		wrong = strconv.Itoa(p.Wrong)
	}
	if t.Percentiles {
		p99 = fmt.Sprintf(" %7.1f", p.P99)
	}
	return fmt.Sprintf("  %9.2f %7.1f%s  %6.2f  %6.2f  %6s", p.Micros, p.P50, p99, p.AlgBW, p.BusBW, wrong)
}
