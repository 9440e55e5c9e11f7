package cmd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"larder/cmd/bench"
)

// maruCmd is larder maru.
type maruCmd struct {
	Bench maruBench `cmd:"" help:"Compare with Maru's own server: the same requests from the same clients, one server after the other."`
}

// maruBench is larder maru bench.
type maruBench struct {
	Maru    string        `required:"" type:"existingdir" placeholder:"PATH" help:"A checkout of Maru, whose server is started."`
	Python  string        `default:"python3" help:"Interpreter that runs it: 3.12 or later, with pyzmq, msgpack, dacite and numpy (default python3)."`
	Clients []int         `default:"1,8" help:"Clients at once, each figure anew (default 1,8)."`
	Time    time.Duration `default:"1s" help:"Time for each turn (default 1s)."`
	Rounds  int           `default:"3" help:"Turns that each server has for each figure, one server after the other; the median counts (default 3)."`
	Only    string        `name:"run" placeholder:"REGEXP" help:"Only figures that match, as sync/lookup, async/mixed."`
	Dir     string        `type:"existingdir" help:"Directory for Larder's data (default: the one for temporary files). Its disk is what changes wait for; Maru's server keeps nothing."`
	JSON    bool          `help:"Print JSON."`
}

// maxMaruClients is how many clients a comparison may have: threads of this process.
const maxMaruClients = 256

// Run implements the command.
func (c *maruBench) Run(e *env) error {
	cfg := bench.MaruConfig{
		Python: c.Python, Dir: c.Dir, Clients: c.Clients, Time: c.Time, Rounds: c.Rounds,
		Progress: func(row string) { fmt.Fprintln(e.stderr, "measuring", row) },
	}
	for _, n := range c.Clients {
		if n < 1 || n > maxMaruClients {
			return usageError(fmt.Errorf("maru bench: --clients %d: from 1 to %d", n, maxMaruClients))
		}
	}
	if c.Time < 10*time.Millisecond {
		return usageError(fmt.Errorf("maru bench: --time %v is too short; at least 10ms", c.Time))
	}
	if c.Rounds < 1 {
		return usageError(fmt.Errorf("maru bench: --rounds %d: at least 1", c.Rounds))
	}
	if c.Only != "" {
		r, err := regexp.Compile(c.Only)
		if err != nil {
			return usageError(fmt.Errorf("maru bench: --run: %w", err))
		}
		cfg.Run = r
	}
	if err := cfg.Check(); err != nil {
		return usageError(fmt.Errorf("maru bench: --run: %w", err))
	}
	var err error
	if cfg.Maru, err = filepath.Abs(c.Maru); err == nil {
		cfg.Program, err = os.Executable()
	}
	if err != nil {
		return fmt.Errorf("maru bench: %w", err)
	}
	if err := bench.CheckMaru(e.ctx, c.Python, cfg.Maru); err != nil {
		return usageError(fmt.Errorf("maru bench: %w", err))
	}
	report, err := bench.Maru(e.ctx, cfg)
	if c.JSON {
		return errors.Join(printJSON(e.stdout, report), err)
	}
	return errors.Join(printMaru(e.stdout, report), err)
}

// printMaru prints the comparison as a table.
func printMaru(w io.Writer, report *bench.MaruReport) error {
	fmt.Fprintf(w, "%d CPUs, which servers and clients share. Larder's changes are on its disk when they are answered, where a\n"+
		"synced append takes %.0f us; Maru's are in memory. CPU us is the processor time that a server takes for a request:\n"+
		"Larder's from all processors, Maru's (Python) from one at a time.\n\n", report.CPUs, report.SyncMicros)
	t := newTable("MODE", "OPERATION", "-CLIENTS", "-LARDER/s", "-p50 us", "-p99 us", "-CPU us", "-MARU/s", "-p50 us",
		"-p99 us", "-CPU us", "-RATIO",
		"MARU'S SERVER")
	short := func(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }
	whole := func(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }
	for i := range report.Rows {
		r := &report.Rows[i]
		t.row(r.Mode, r.Op, r.Clients, whole(r.Larder.Requests), whole(r.Larder.P50), whole(r.Larder.P99), short(r.Larder.CPU),
			whole(r.Maru.Requests), whole(r.Maru.P50), whole(r.Maru.P99), short(r.Maru.CPU), fmt.Sprintf("%.2f", r.Ratio), r.Maru.Server)
	}
	return t.print(w)
}
