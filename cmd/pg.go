package cmd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"larder/cmd/pgbench"
	"larder/pg"
	"larder/pg/reduce"
	"larder/pg/store"
)

// pgCmd is larder pg.
type pgCmd struct {
	Bench pgBench `cmd:"" help:"Measure collectives between processes of this host, with the flags and columns of pgbench and nccl-tests."`
}

// pgBench is larder pg bench. The letters are pgbench's.
type pgBench struct {
	Collective string       `default:"all_reduce" help:"all_reduce (the default), all_gather, broadcast, reduce_scatter, alltoall, sendrecv, reduce, gather, scatter, barrier."`
	Backend    string       `default:"larder-cpu" enum:"larder-cpu" help:"larder-cpu, the only one here; python -m larder.pg.bench has others beside it (default larder-cpu)."`
	Ranks      int          `name:"ngpus" short:"g" default:"2" help:"Ranks, a process each (default 2)."`
	MinBytes   pgbench.Size `name:"minbytes" short:"b" default:"32M" help:"Smallest size (default 32M)."`
	MaxBytes   pgbench.Size `name:"maxbytes" short:"e" default:"32M" help:"Largest size (default 32M)."`
	StepBytes  pgbench.Size `name:"stepbytes" short:"i" default:"1M" help:"From one size to the next (default 1M)."`
	StepFactor int          `name:"stepfactor" short:"f" default:"1" help:"Factor from one size to the next, instead of --stepbytes (default 1: that)."`
	Iters      int          `short:"n" default:"20" help:"Calls that are measured, of each size (default 20)."`
	Warmup     int          `name:"warmup-iters" short:"w" default:"1" help:"Calls before those (default 1)."`
	Aggregate  int          `name:"agg-iters" short:"m" default:"1" help:"Calls that are started together (default 1)."`
	Check      int          `short:"c" default:"1" help:"How often each result is checked; 0: not (default 1)."`
	Average    int          `short:"a" default:"1" help:"Time that is shown: 0 rank 0's, 1 the ranks' mean, 2 the least, 3 the most (default 1)."`
	DType      string       `name:"datatype" short:"d" default:"float32" help:"float32 (the default), bfloat16, int8 and so on, or all."`
	Op         string       `short:"o" default:"sum" help:"sum (the default), prod, min, max, avg, band, bor, bxor, or all."`
	Root       int          `short:"r" default:"0" help:"Root of broadcasts and the like; -1: each in turn (default 0)."`
	Device     string       `default:"cpu" enum:"cpu" help:"cpu, the only one here; python -m larder.pg.bench has cuda, too (default cpu)."`
	CPUTime    bool         `name:"report_cputime" short:"C" help:"Time until operations are queued on a GPU: without one the same as without it."`
	Timestamps bool         `name:"report_timestamps" short:"S" help:"End rows with the time of day."`
	Threads    int          `name:"nthreads" short:"t" default:"1" help:"Threads of a rank: 1, for which the others are ranks (default 1)."`
	OutputFile string       `name:"output_file" short:"J" placeholder:"FILE" help:"Refused, as by pgbench: --json prints JSON."`
	Percentile bool         `name:"percentiles" short:"p" help:"A column for the 99th percentile beside that for the median."`
	Hosts      int          `default:"1" help:"Have the ranks behave as if they were on so many hosts: between those they use TCP (default 1)."`
	Transports []string     `help:"Transports, in order of preference: shm, unix, tcp (default: all)."`
	JSON       bool         `help:"Print JSON."`

	RankOf string `hidden:"" env:"LARDER_PG_BENCH_RANK" json:"-" help:"Be a rank: a benchRank."`
}

// benchRank tells a process that it is a rank of a benchmark.
type benchRank struct {
	Rank  int
	Dir   string // where ranks meet
	Bench pgBench
}

// Run implements the command.
func (c *pgBench) Run(e *env) error {
	if c.RankOf != "" {
		var r benchRank
		if err := json.Unmarshal([]byte(c.RankOf), &r); err != nil {
			return usageError(errors.New("pg bench: LARDER_PG_BENCH_RANK is for the processes that it starts: unset it"))
		}
		return r.run(e)
	}
	if _, err := c.config(); err != nil {
		return usageError(fmt.Errorf("pg bench: %w", err))
	}
	return c.launch(e)
}

// benchNames are other names for collectives: pgbench's all_gather_base differs from all_gather in Python alone.
var benchNames = strings.NewReplacer("all_to_all", "alltoall", "all_gather_base", "all_gather")

// config is what the flags ask for.
func (c *pgBench) config() (cfg pgbench.Config, err error) {
	cfg = pgbench.Config{
		Collective: benchNames.Replace(c.Collective), Min: int(c.MinBytes), Max: int(c.MaxBytes),
		Step: int(c.StepBytes), Factor: c.StepFactor, Iterations: c.Iters, Warmup: c.Warmup, Aggregate: c.Aggregate,
		Check: c.Check, Average: c.Average, Root: c.Root,
	}
	if c.Ranks < 1 || c.Ranks > maxBenchRanks || c.Hosts < 1 || c.Hosts > c.Ranks {
		return cfg, fmt.Errorf("%d ranks on %d hosts: 1 to %d ranks, one on each host at least", c.Ranks, c.Hosts, maxBenchRanks)
	}
	if c.OutputFile != "" {
		return cfg, errors.New("-J: pgbench has it and refuses it; --json prints JSON, to be redirected to a file")
	}
	if c.Threads != 1 {
		return cfg, fmt.Errorf("%d threads: a rank is a process with one, -g says how many there are", c.Threads)
	}
	if cfg.DTypes, err = pgbench.ParseDTypes(c.DType); err != nil {
		return cfg, err //nolint:wrapcheck // says all
	}
	for op := reduce.Sum; op.Valid(); op++ {
		if c.Op == "all" || c.Op == op.String() {
			cfg.Ops = append(cfg.Ops, op)
		}
	}
	return cfg, cfg.Validate(c.Ranks)
}

// maxBenchRanks bounds the processes that are started.
const maxBenchRanks = 64

// launch starts a process for each rank, and prints what rank 0 says.
func (c *pgBench) launch(e *env) (err error) {
	dir, err := os.MkdirTemp("", "larder-pg-")
	if err != nil {
		return fmt.Errorf("pg bench: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("pg bench: %w", err)
	}
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	out, in := io.Pipe()
	errs := make([]error, c.Ranks+1) // one more, of what rank 0 said
	var wg sync.WaitGroup
	for rank := range c.Ranks {
		spec, err := json.Marshal(benchRank{rank, dir, *c})
		if err != nil {
			return fmt.Errorf("pg bench: %w", err)
		}
		cmd := exec.CommandContext(ctx, self, "pg", "bench") //nolint:gosec // this program
		cmd.Env = append(os.Environ(), "LARDER_PG_BENCH_RANK="+string(spec))
		cmd.Stderr = e.stderr
		if rank == 0 {
			cmd.Stdout = in
		}
		wg.Go(func() {
			if err := cmd.Run(); err != nil {
				errs[rank] = fmt.Errorf("pg bench: rank %d: %w", rank, err)
				cancel()
			}
			if rank == 0 {
				_ = in.Close() // it never fails
			}
		})
	}
	errs[c.Ranks] = c.print(e, out)
	_, _ = io.Copy(io.Discard, out) // of a rank that goes on after what could not be read
	wg.Wait()
	return errors.Join(errs...)
}

// print shows rank 0's rows as they come.
func (c *pgBench) print(e *env, from io.Reader) error {
	lines := bufio.NewScanner(from)
	var rows []pgbench.Row
	table := pgbench.Table{CPUTime: c.CPUTime, Percentiles: c.Percentile, Timestamps: c.Timestamps}
	for lines.Scan() {
		var row pgbench.Row
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			return fmt.Errorf("pg bench: rank 0 said %.60q: %w", lines.Text(), err)
		}
		if !c.JSON && len(rows) == 0 {
			fmt.Fprintf(e.stdout, "# %s, larder-cpu, %d ranks on %d hosts\n%s", c.Collective, c.Ranks, c.Hosts, table.Heading())
		}
		if !c.JSON {
			fmt.Fprint(e.stdout, table.Line(row))
		}
		rows = append(rows, row)
	}
	if c.JSON && len(rows) > 0 {
		return printJSON(e.stdout, rows)
	}
	return nil
}

// meetTime is how long ranks wait for each other: they are started together.
const meetTime = 30 * time.Second

// run is one of the processes.
func (r *benchRank) run(e *env) (err error) {
	c := &r.Bench
	cfg, err := c.config()
	if err != nil {
		return usageError(fmt.Errorf("pg bench: %w", err))
	}
	ctx, cancel := context.WithTimeout(e.ctx, meetTime)
	defer cancel()
	s, err := store.Directory(ctx, r.Dir, 0)
	if err != nil {
		return fmt.Errorf("pg bench: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	wc := pg.Config{Job: "bench", Rank: r.Rank, Store: s, Transports: c.Transports}
	if c.Hosts > 1 {
		wc.Host, wc.Listen = "host"+strconv.Itoa(r.Rank*c.Hosts/c.Ranks), []string{"127.0.0.1:0"}
	}
	w, err := pg.New(ctx, wc)
	if err != nil {
		return fmt.Errorf("pg bench: %w", err)
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	ranks := make([]int, c.Ranks)
	for i := range ranks {
		ranks[i] = i
	}
	g, err := w.Group(ctx, pg.GroupConfig{ID: "world", Ranks: ranks})
	if err != nil {
		return fmt.Errorf("pg bench: %w", err)
	}
	enc := json.NewEncoder(e.stdout)
	return pgbench.Run(g, cfg, func(row pgbench.Row) { //nolint:wrapcheck // says all
		if r.Rank == 0 {
			_ = enc.Encode(row) // a parent that has gone shows nothing
		}
	})
}
