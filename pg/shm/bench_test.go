package shm

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A child is the test binary once more, with another job: see children.
const childEnv = "SHM_TEST_CHILD"

// children are what a child process can do. Its files are those that the parent has passed, from number 3 on.
var children = map[string]func(args []string, file func(i int) *os.File) error{
	"echo": echoChild,
}

// runChild does a child's job.
func runChild(job string) int {
	args := strings.Fields(job)
	err := children[args[0]](args[1:], func(i int) *os.File { return os.NewFile(uintptr(3+i), "passed") })
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, job, err)
		return 1
	}
	return 0
}

// startChild starts a child that is killed with the test at the latest.
func startChild(tb testing.TB, job string, files ...*os.File) *exec.Cmd {
	tb.Helper()
	exe, err := os.Executable()
	require.NoError(tb, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+job)
	cmd.Stderr, cmd.ExtraFiles = os.Stderr, files
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	return cmd
}

// echoChild sends back what it gets, until the ring ends: files are its bell, the parent's, the ring to it; and the ring back comes
// from the parent, too, which has created both: the child is the consumer of one and takes over the producer of the other.
func echoChild(args []string, file func(i int) *os.File) error {
	spin, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	own, err := mapBell(file(0))
	if err != nil {
		return err
	}
	parent, err := OpenBell(file(1))
	if err != nil {
		return err
	}
	in, err := OpenRing(file(2), parent)
	if err != nil {
		return err
	}
	r, err := mapRing(file(3), in.Size())
	if err != nil {
		return err
	}
	out := &Producer{end: end{r: r, peer: parent}}
	for {
		own.Wait(func() bool { return len(in.Ready()) > 0 || in.Err() != nil }, time.Duration(spin)*time.Microsecond, time.Second)
		if in.Err() != nil {
			return nil
		}
		for p := in.Ready(); len(p) > 0; p = in.Ready() {
			n := copy(out.Free(), p)
			out.Commit(n)
			in.Consume(n)
		}
	}
}

// echo starts a process that sends back what it gets.
func echo(tb testing.TB, ringBytes int, spin time.Duration) (own *Bell, p *Producer, c *Consumer) {
	tb.Helper()
	own, err := NewBell()
	require.NoError(tb, err)
	theirs, err := NewBell()
	require.NoError(tb, err)
	p, there, err := CreateRing(ringBytes, theirs)
	require.NoError(tb, err)
	back, bf, err := CreateRing(ringBytes, own)
	require.NoError(tb, err)
	c, err = OpenRing(bf, theirs)
	require.NoError(tb, err)
	cmd := startChild(tb, "echo "+strconv.Itoa(int(spin.Microseconds())), theirs.File(), own.File(), there, bf)
	tb.Cleanup(func() {
		require.NoError(tb, p.Close())
		require.NoError(tb, cmd.Wait())
		require.NoError(tb, c.Close())
		require.NoError(tb, back.r.release())
		for _, x := range []interface{ Close() error }{own, theirs, there, bf} {
			require.NoError(tb, x.Close())
		}
	})
	return own, p, c
}

// p50 reports the median of the times of b's rounds, which a busy machine's mean tells little of.
func p50(b *testing.B, times []time.Duration) {
	b.Helper()
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(times[len(times)*9/10].Nanoseconds()), "p90-ns")
}

// BenchmarkRoundTrip is 8 bytes to another process and back.
func BenchmarkRoundTrip(b *testing.B) {
	for _, spin := range []time.Duration{0, 50 * time.Microsecond} {
		b.Run(fmt.Sprintf("spin=%v", spin), func(b *testing.B) {
			bell, p, c := echo(b, 1<<16, spin)
			var times []time.Duration
			ready := func() bool { return len(c.Ready()) >= 8 }
			for b.Loop() {
				start := time.Now()
				p.Free()[0] = 1
				p.Commit(8)
				for !bell.Wait(ready, spin, time.Second) {
					continue
				}
				c.Consume(8)
				times = append(times, time.Since(start))
			}
			p50(b, times)
		})
	}
}
