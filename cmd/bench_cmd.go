package cmd

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"time"

	"larder/cmd/bench"
)

// benchCmd is larder bench.
type benchCmd struct {
	Only   string        `name:"run" placeholder:"REGEXP" help:"Only groups whose names match: lookup, register, replicas, evict, full, data, restart, lost, policies, failover, lost-5M, memory-10M."`
	Time   time.Duration `default:"2s" help:"Time for each figure (default 2s)."`
	Long   bool          `help:"Also the groups that take minutes and 45 GiB of disk."`
	Dir    string        `type:"existingdir" help:"Directory on the disk to measure (default: the one for temporary files)."`
	JSON   bool          `help:"Print JSON."`
	Strict bool          `help:"Exit with 3 if an aim is missed."`
}

// Run implements the command.
func (c *benchCmd) Run(e *env) error {
	cfg := bench.Config{
		Dir: c.Dir, Time: c.Time, Long: c.Long,
		Logger:   slog.New(slog.NewTextHandler(e.stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		Progress: func(group string) { fmt.Fprintln(e.stderr, "measuring", group) },
	}
	if cfg.Dir == "" {
		cfg.Dir = os.TempDir()
	}
	if c.Time < 10*time.Millisecond {
		return usageError(fmt.Errorf("bench: --time %v is too short; at least 10ms", c.Time))
	}
	if c.Only != "" {
		r, err := regexp.Compile(c.Only)
		if err != nil {
			return usageError(fmt.Errorf("bench: --run: %w", err))
		}
		cfg.Run = r
	}
	report, err := bench.Run(e.ctx, cfg)
	if report == nil {
		return err //nolint:wrapcheck // says all
	}
	if c.JSON {
		if failed := printJSON(e.stdout, report); err == nil {
			err = failed
		}
	} else if failed := printBench(e.stdout, report); err == nil {
		err = failed
	}
	if err != nil || !c.Strict {
		return err //nolint:wrapcheck // says all
	}
	for i := range report.Rows {
		if met := report.Rows[i].Met; met != nil && !*met {
			return &exitError{exitUnwell, fmt.Errorf("bench: %s misses its aim", report.Rows[i].Name)}
		}
	}
	return nil
}

// printBench prints the report as tables.
func printBench(w io.Writer, r *bench.Report) error {
	m := &r.Machine
	fmt.Fprintf(w, "%d CPUs, %s. Servers and clients share them.\n\n", m.CPUs, m.Go)
	t := newTable("THE MACHINE'S OWN", "-")
	t.row("memory copy, one core", quantity(m.CopyOne, "B/s"))
	t.row("memory copy, all cores", quantity(m.CopyAll, "B/s"))
	t.row("4 KiB append and fdatasync, median", fmt.Sprintf("%.0f us", m.SyncMicros))
	t.row("echo over TCP, 64 in flight on 4 connections", quantity(m.EchoTCP, "messages/s"))
	t.row("echo over a Unix socket, the same", quantity(m.EchoUnix, "messages/s"))
	t.row("round trip over TCP", fmt.Sprintf("%.0f us", m.RoundTripTCP))
	t.row("round trip over a Unix socket", fmt.Sprintf("%.0f us", m.RoundTripUnix))
	if err := t.print(w); err != nil {
		return err
	}
	fmt.Fprintln(w)
	t = newTable("MEASURED", "-", "-BESIDE", "OF", "-RATIO", "AIM", "MET", "NOTE")
	for i := range r.Rows {
		row := &r.Rows[i]
		bound, ratio, met := "", "", ""
		if row.Bound != 0 {
			bound, ratio = quantity(row.Bound, row.Unit), fmt.Sprintf("%.2f", row.Ratio)
		}
		if row.Met != nil {
			met = map[bool]string{true: "yes", false: "NO"}[*row.Met]
		}
		t.row(row.Name, quantity(row.Value, row.Unit), bound, row.Of, ratio, row.Aim, met, row.Note)
	}
	return t.print(w)
}

// quantity is a value in a form that people read.
func quantity(v float64, unit string) string {
	switch {
	case unit == "B/s":
		return fmt.Sprintf("%.2f GB/s", v/1e9)
	case strings.HasSuffix(unit, "/s") && v >= 1e6:
		return fmt.Sprintf("%.2fM %s", v/1e6, unit)
	case strings.HasSuffix(unit, "/s") && v >= 1e4:
		return fmt.Sprintf("%.0fk %s", v/1e3, unit)
	case v >= 1000:
		return fmt.Sprintf("%.0f %s", v, unit)
	default:
		return fmt.Sprintf("%.2f %s", v, unit)
	}
}
