// Package bench measures what this program promises, each figure beside the bound of the machine that it can be
// compared with: memory copies, synced writes, round trips over loopback. Servers and clients share the process and
// its cores, so ratios mean more than absolute figures.
package bench

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"time"
)

// Config says what to measure and how long.
type Config struct {
	Dir      string         // existing directory on the disk that is to be measured; data directories are made inside
	Time     time.Duration  // per figure
	Run      *regexp.Regexp // only groups whose names match; nil: all
	Long     bool           // also the groups that take minutes and tens of GiB of disk
	Logger   *slog.Logger   // of the servers
	Progress func(group string)
}

// Row is one figure.
type Row struct {
	Group string  `json:"group"`
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	Bound float64 `json:"bound,omitempty"`    // what the machine, or the thing compared with, does; 0 = none
	Of    string  `json:"bound_of,omitempty"` // what Bound is
	Ratio float64 `json:"ratio,omitempty"`    // Value / Bound
	Aim   string  `json:"aim,omitempty"`      // what it should be
	Met   *bool   `json:"met,omitempty"`      // whether it is; nil = there is no aim
	Note  string  `json:"note,omitempty"`
}

// Report is the outcome of Run.
type Report struct {
	Machine Machine `json:"machine"`
	Rows    []Row   `json:"rows"`
}

// Machine holds the bounds, measured in the same run.
type Machine struct {
	CPUs          int     `json:"cpus"`
	Go            string  `json:"go"`
	CopyOne       float64 `json:"copy_one_core_bytes_per_s"`  // of 1 MiB blocks, one core
	CopyAll       float64 `json:"copy_all_cores_bytes_per_s"` // all cores
	SyncMicros    float64 `json:"sync_us"`                    // median of a 4 KiB append and fdatasync
	EchoTCP       float64 `json:"echo_tcp_per_s"`             // small messages, 64 in flight on 4 connections
	EchoUnix      float64 `json:"echo_unix_per_s"`            // the same over a Unix socket
	RoundTripTCP  float64 `json:"round_trip_tcp_us"`          // one message in flight
	RoundTripUnix float64 `json:"round_trip_unix_us"`
}

// bench is one run.
type bench struct {
	Config

	ctx    context.Context //nolint:containedctx // of the whole run
	report *Report
}

// group is a set of figures that share a setting.
type group struct {
	name string
	long bool
	run  func(b *bench) error
}

// groups in the order of the report.
var groups = []group{
	{"lookup", false, (*bench).lookups},
	{"register", false, (*bench).registers},
	{"replicas", false, (*bench).replicas},
	{"evict", false, (*bench).evictions},
	{"full", false, (*bench).fullPool},
	{"data", false, (*bench).data},
	{"restart", false, (*bench).restart},
	{"lost", false, (*bench).lost},
	{"conductor", false, (*bench).conductor},
	{"simulator", false, (*bench).simulator},
	{"policies", true, (*bench).policies},
	{"failover", true, (*bench).failover},
	{"lost-5M", true, (*bench).lostLong},
	{"memory-10M", true, (*bench).tenMillion},
}

// Groups lists the names of the groups.
func Groups() []string {
	names := make([]string, len(groups))
	for i, g := range groups {
		names[i] = g.name
	}
	return names
}

// Run measures. A group that fails ends the run: its error says which.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	dir, err := os.MkdirTemp(cfg.Dir, "larder-bench-")
	if err != nil {
		return nil, fmt.Errorf("bench: %w; name a directory that can be written with --dir", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // left behind at worst; its name says what it is
	cfg.Dir = dir
	b := &bench{Config: cfg, ctx: ctx, report: &Report{}}
	if cfg.Progress == nil {
		b.Progress = func(string) {}
	}
	b.Progress("machine")
	if b.report.Machine, err = measureMachine(ctx, filepath.Join(dir, "sync"), cfg.Time/4); err != nil {
		return nil, fmt.Errorf("bench: the machine's bounds: %w", err)
	}
	for _, g := range groups {
		if cfg.Run != nil && !cfg.Run.MatchString(g.name) || g.long && !cfg.Long {
			continue
		}
		if err := ctx.Err(); err != nil {
			return b.report, fmt.Errorf("bench: %w", err)
		}
		b.Progress(g.name)
		from := len(b.report.Rows)
		if err := g.run(b); err != nil {
			return b.report, fmt.Errorf("bench: %s: %w", g.name, err)
		}
		for i := from; i < len(b.report.Rows); i++ {
			b.report.Rows[i].Group = g.name
		}
		runtime.GC() // so that the next group does not pay for this one
	}
	return b.report, nil
}

// add adds a row without an aim.
func (b *bench) add(r Row) {
	if r.Bound != 0 {
		r.Ratio = r.Value / r.Bound
	}
	b.report.Rows = append(b.report.Rows, r)
}

// aim adds a row that should reach something.
func (b *bench) aim(r Row, aim string, met bool) {
	r.Aim, r.Met = aim, &met
	b.add(r)
}

// atLeast adds a row whose ratio should be at least least.
func (b *bench) atLeast(r Row, least float64) {
	b.aim(r, fmt.Sprintf("ratio >= %.2f", least), r.Value >= least*r.Bound)
}

// atMost adds a row whose ratio should be at most most.
func (b *bench) atMost(r Row, most float64) {
	b.aim(r, fmt.Sprintf("ratio <= %.2f", most), r.Value <= most*r.Bound)
}
