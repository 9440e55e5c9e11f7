package simtest

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The default run: at least 100,000 ticks and 10 seeds. With -short it is a tenth of that.
const (
	defaultSeeds = 40
	defaultTicks = 2500
	shortSeeds   = 4
)

// Bounds of a swarm.
const (
	seedsPerWorker = 10       // then a process is followed by another: what stuck stores leave behind, some 100 MiB each, is freed
	minimised      = 5        // failures that are made smaller; more would take longer than the run
	outputTail     = 16 << 10 // of what a process says, that is kept for its failure
)

// TestSwarm runs many seeds, each with a mixture of faults of its own, in one process per core: what raft draws is a
// process's. A seed that fails, gets stuck or takes its process with it does not keep the others from running.
func TestSwarm(t *testing.T) {
	if *flagWorker {
		work(t)
		return
	}
	w := &swarm{t: t, total: newCoverage(), next: *flagFirst, seeds: *flagSeeds, ticks: ticksOr(10_000), begun: time.Now()}
	if w.seeds == 0 && *flagMinutes == 0 {
		w.seeds, w.ticks = defaultSeeds, ticksOr(defaultTicks)
		if testing.Short() || raced {
			w.seeds = shortSeeds
		}
	}
	if deadline, ok := t.Deadline(); ok {
		w.until = deadline.Add(-min(w.options(0).limit(), time.Until(deadline)/2)) // a stuck run is to be told of before that
	}
	_, bad := parseClasses(*flagFaults)
	require.Empty(t, bad, "no such class of faults")
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(w.run)
	}
	wg.Wait()
	t.Logf("%v\n%v", time.Since(w.begun).Round(time.Millisecond), w.total)
	w.write()
	if w.total.Seeds >= 200 && *flagFaults == "all" {
		require.Empty(t, w.total.never(), "this never happened")
	}
}

// swarm is what the processes of a swarm have in common.
type swarm struct {
	t     *testing.T
	seeds int
	ticks int
	begun time.Time
	until time.Time // when the test would be ended; zero = it would not

	mu       sync.Mutex
	total    *coverage
	next     uint64
	given    int
	failures int
	written  time.Time
}

// order is what a worker is asked to do, and report what it says then. Smallest comes in a report of its own.
type (
	order struct {
		Seed     uint64
		Ticks    int
		Minimise bool
	}
	report struct {
		Cover    *coverage
		Failure  string
		Smallest string
	}
)

func (w *swarm) options(seed uint64) options { return runOptions(w.t, seed, w.ticks) }

// take draws the next seed. It returns false when there is none.
func (w *swarm) take() (seed uint64, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.given >= w.seeds && time.Since(w.begun).Minutes() >= *flagMinutes:
		return 0, false
	case w.failures > 0 && flag.Lookup("test.failfast").Value.String() == "true":
		return 0, false
	case !w.until.IsZero() && time.Now().After(w.until):
		if w.given < w.seeds {
			w.t.Errorf("the time that -timeout allows is over after %d of %d seeds", w.given, w.seeds)
			w.given = w.seeds
		}
		return 0, false
	}
	seed = w.next
	w.next++
	w.given++
	return seed, true
}

// run has one process after the other run seeds.
func (w *swarm) run() {
	for {
		x := &worker{w: w}
		for range seedsPerWorker {
			seed, ok := w.take()
			if !ok {
				x.stop()
				return
			}
			if err := x.seed(seed); err != nil {
				w.crashed(seed, err, x.kill())
				break
			}
		}
		x.stop()
	}
}

// smaller says whether one more failure is to be made smaller.
func (w *swarm) smaller() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return *flagMinim && w.failures < minimised
}

// finished counts a seed. The counts are written as the swarm goes on.
func (w *swarm) finished(r *report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.total.add(r.Cover)
	if r.Failure != "" {
		w.failures++
		w.t.Error(r.Failure)
	}
	if time.Since(w.written) > time.Second {
		w.written = time.Now()
		w.write()
	}
}

// crashed counts a seed that took its process with it.
func (w *swarm) crashed(seed uint64, err error, said []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures++
	w.total.Seeds++
	w.total.Violations++
	w.t.Errorf("seed %d ends its process: %v\n%s\n%s", seed, err, said, w.options(seed).line(commit()))
}

func (w *swarm) write() {
	if *flagJSON != "" {
		require.NoError(w.t, w.total.write(*flagJSON))
	}
}

// worker is a process that runs seeds. It is started for its first.
type worker struct {
	w       *swarm
	cmd     *exec.Cmd
	orders  io.WriteCloser
	from    *os.File
	reports *bufio.Reader
	said    tail
}

func (x *worker) start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	from, to, err := os.Pipe()
	if err != nil {
		return err
	}
	x.cmd = exec.CommandContext(x.w.t.Context(), self, "-test.run=^TestSwarm$", "-test.timeout=0", "-worker",
		"-faults="+*flagFaults, "-skip="+*flagSkip)
	x.cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	x.cmd.Stdout, x.cmd.Stderr, x.cmd.ExtraFiles = &x.said, &x.said, []*os.File{to}
	if x.orders, err = x.cmd.StdinPipe(); err != nil {
		return errors.Join(err, from.Close(), to.Close())
	}
	x.reports = bufio.NewReader(from)
	x.from = from
	return errors.Join(x.cmd.Start(), to.Close())
}

// seed has the process run one seed, and waits for it.
func (x *worker) seed(seed uint64) error {
	if x.cmd == nil {
		if err := x.start(); err != nil {
			return err
		}
	}
	o := order{Seed: seed, Ticks: x.w.ticks, Minimise: x.w.smaller()}
	if err := json.NewEncoder(x.orders).Encode(o); err != nil {
		return err
	}
	r, err := x.report()
	if err != nil {
		return err
	}
	x.w.finished(r)
	if r.Failure == "" || !o.Minimise {
		return nil
	}
	if r, err = x.report(); err != nil {
		return fmt.Errorf("while its failure was made smaller: %w", err)
	}
	x.w.t.Log(r.Smallest)
	return nil
}

func (x *worker) report() (*report, error) {
	line, err := x.reports.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	r := new(report)
	return r, json.Unmarshal(line, r)
}

// stop lets the process end.
func (x *worker) stop() {
	if x.cmd == nil {
		return
	}
	if err := errors.Join(x.orders.Close(), x.cmd.Wait(), x.from.Close()); err != nil {
		x.w.t.Errorf("a process of the swarm: %v\n%s", err, x.said.b)
	}
	x.cmd = nil
}

// kill ends the process, if it has not ended itself, and returns the last that it said.
func (x *worker) kill() []byte {
	if x.cmd == nil || x.cmd.Process == nil {
		return nil
	}
	timer := time.AfterFunc(time.Second, func() { _ = x.cmd.Process.Kill() }) // it has closed its reports
	_ = x.cmd.Wait()                                                          // what ended it, it has said
	timer.Stop()
	_ = x.from.Close() // nothing was written to it
	x.cmd = nil
	return x.said.b
}

// tail keeps the beginning and the end of what is written to it: the reason of a crash comes first.
type tail struct{ b []byte }

// Write implements io.Writer.
func (k *tail) Write(b []byte) (int, error) {
	k.b = append(k.b, b...)
	if over := len(k.b) - outputTail; over > 0 {
		k.b = append(k.b[:outputTail/2], k.b[outputTail/2+over:]...)
	}
	return len(b), nil
}

// work is a worker: it runs the seeds that it is asked for until there are no more.
func work(t *testing.T) {
	t.Helper()
	orders := json.NewDecoder(os.Stdin)
	out := json.NewEncoder(os.NewFile(3, "reports"))
	for {
		var x order
		err := orders.Decode(&x)
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err)
		o := runOptions(t, x.Seed, x.Ticks)
		r := simulate(t, o)
		said := report{Cover: r.cover}
		if r.violation != nil {
			said.Failure = fmt.Sprintf("%v\n%s", r.violation, o.line(commit()))
		}
		require.NoError(t, out.Encode(said))
		if r.violation != nil && x.Minimise {
			require.NoError(t, out.Encode(report{Smallest: minimise(t, o, r)}))
		}
	}
}
