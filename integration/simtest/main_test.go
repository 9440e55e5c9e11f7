package simtest

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

var (
	flagSeed    = flag.Uint64("seed", 1, "the seed of TestSeed")
	flagSeeds   = flag.Int("seeds", 0, "how many seeds TestSwarm runs; 0 is the short run")
	flagFirst   = flag.Uint64("first", 1, "the first seed of TestSwarm")
	flagTicks   = flag.Int("ticks", 0, "ticks of a run; 0 is 10,000")
	flagMinutes = flag.Float64("minutes", 0, "TestSwarm goes on for so long, whatever -seeds says")
	flagJSON    = flag.String("report", "", "write the counts to this file")
	flagFaults  = flag.String("faults", "all", "classes of faults that are allowed, with commas; all, none")
	flagSkip    = flag.String("skip", "", "numbers of faults to leave out, with commas")
	flagWorker  = flag.Bool("worker", false, "run the seeds that standard input names; for TestSwarm's own processes")
	flagLog     = flag.Bool("simlog", false, "print what happens")
	flagMinim   = flag.Bool("minimise", true, "make a failing run smaller")
	_           = flag.String("version", "", "the commit that printed the line: another may not fail")
)

func runOptions(t *testing.T, seed uint64, ticks int) options {
	t.Helper()
	o := options{seed: seed, ticks: ticks, skip: map[int]bool{}}
	set, bad := parseClasses(*flagFaults)
	require.Empty(t, bad, "no such class of faults")
	o.faults = set
	for n := range strings.SplitSeq(*flagSkip, ",") {
		if n == "" {
			continue
		}
		i, err := strconv.Atoi(n)
		require.NoError(t, err)
		o.skip[i] = true
	}
	if *flagLog {
		o.log = func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	}
	return o
}

func ticksOr(n int) int {
	if *flagTicks > 0 {
		return *flagTicks
	}
	return n
}

// commit names the sources, for the line that repeats a failure.
func commit() string {
	b, err := exec.Command("git", "rev-parse", "--short", "HEAD").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// TestSeed repeats one run.
func TestSeed(t *testing.T) {
	o := runOptions(t, *flagSeed, ticksOr(2000))
	begun := time.Now()
	r := simulate(t, o)
	t.Logf("seed %d: %d ticks in %v, trace %x, %d faults of %v\n%v", o.seed, r.ticks, time.Since(begun), r.trace, r.fired, r.faults, r.cover)
	if r.violation != nil {
		t.Errorf("%v\n%s", r.violation, o.line(commit()))
	}
}

// TestMain lets garbage pile up a little: a simulation makes much of it, and keeps little.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

// TestRunsRepeat runs seeds twice: all that happens is the same, bit for bit, on any number of processors. -seeds, -first and
// -ticks ask for more.
func TestRunsRepeat(t *testing.T) {
	seeds, first := 4, uint64(2) // of which the last has nodes
	if *flagSeeds > 0 {
		seeds, first = *flagSeeds, *flagFirst
	}
	for seed := first; seed < first+uint64(seeds); seed++ {
		o := runOptions(t, seed, ticksOr(1200))
		o.faults = allClasses
		a, b := simulate(t, o), simulate(t, o)
		require.Equal(t, a.trace, b.trace, "seed %d", o.seed)
		a.cover.Syncs, b.cover.Syncs = 0, 0 // those of tables are as many as Pebble finds time for
		require.Equal(t, a.cover, b.cover, "seed %d", o.seed)
		require.Nil(t, a.violation)
	}
}

// TestClassesAreWrittenAndRead checks the names that -faults takes.
func TestClassesAreWrittenAndRead(t *testing.T) {
	for c := range classes {
		require.NotEmpty(t, c.String())
		set, bad := parseClasses(classSet(0).with(c).String())
		require.Empty(t, bad)
		require.Equal(t, classSet(0).with(c), set)
	}
	_, bad := parseClasses("net-delay,nonsense")
	require.Equal(t, "nonsense", bad)
	none, _ := parseClasses(classSet(0).String())
	require.Zero(t, none)
}

// TestReadsWithoutConfirmationAreFound has members answer reads without asking whether they still lead.
func TestReadsWithoutConfirmationAreFound(t *testing.T) {
	faults, _ := parseClasses("part-clients,member-pause,member-pause-step")
	for seed := uint64(1); seed <= 20; seed++ {
		o := options{seed: seed, ticks: 1500, faults: faults, all: true, careless: true}
		if r := simulate(t, o); r.violation != nil {
			t.Logf("seed %d: %v", seed, r.violation)
			require.Contains(t, []string{"linear", "lease", "bytes", "names", "maru"}, r.violation.oracle)
			o.careless = false
			require.Nil(t, simulate(t, o).violation, "a careful one is not")
			return
		}
	}
	t.Error("no stale read was found")
}

// TestAProcessThatHasEndedItselfMakesNoTables checks what keeps Pebble from trying to flush for ever.
func TestAProcessThatHasEndedItselfMakesNoTables(t *testing.T) {
	bubble(t, func() {
		fs := newDisk(1, 1).mount()
		log, err := fs.Create("/1.log", vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		fs.fail(errIO)
		require.ErrorIs(t, fs.failed(), errIO)
		back := false
		go func() {
			_, _ = fs.Create("/2.sst", vfs.WriteCategoryUnspecified)
			back = true
		}()
		synctest.Wait()
		require.False(t, back)
		_, err = log.Write([]byte("x"))
		require.NoError(t, err)
	})
}

// TestOutputIsKeptInPart keeps the beginning and the end of what a process says: why it crashed, and the seed's line.
func TestOutputIsKeptInPart(t *testing.T) {
	var k tail
	for i := range 3 * outputTail {
		n, err := fmt.Fprintf(&k, "%d\n", i)
		require.NoError(t, err)
		require.Positive(t, n)
	}
	require.Len(t, k.b, outputTail)
	require.True(t, strings.HasPrefix(string(k.b), "0\n1\n2\n"))
	require.True(t, strings.HasSuffix(string(k.b), fmt.Sprintf("\n%d\n", 3*outputTail-1)))
}
