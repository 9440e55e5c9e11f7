package p2p

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/shm"
)

// peerEnv makes the test binary the other process of a benchmark.
const peerEnv = "P2P_TEST_PEER"

// address tells the other process where this one's files are.
type address struct{ Pid, Bell, Ring int }

func (a address) open(fd int) (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", a.Pid, fd), os.O_RDWR, 0)
}

const (
	benchRing = 1 << 20
	benchSpin = 50 * time.Microsecond
)

// process is one of two with a port each.
type process struct {
	*Port
	bell *shm.Bell
}

// meet connects to the other process: tell passes this one's address on, or returns the other's, each once.
func meet(me int, tell func(*address) (address, error)) (*process, error) {
	bell, err := shm.NewBell()
	if err != nil {
		return nil, err
	}
	a := address{Pid: os.Getpid(), Bell: int(bell.File().Fd()), Ring: -1}
	other, err := tell(&a)
	if err != nil {
		return nil, err
	}
	f, err := other.open(other.Bell)
	if err != nil {
		return nil, err
	}
	theirs, err := shm.OpenBell(f)
	_ = f.Close()
	if err != nil {
		return nil, err
	}
	p, there, err := shm.CreateRing(benchRing, theirs)
	if err != nil {
		return nil, err
	}
	a.Ring = int(there.Fd())
	if other, err = tell(&a); err != nil {
		return nil, err
	}
	if f, err = other.open(other.Ring); err != nil {
		return nil, err
	}
	c, err := shm.OpenRing(f, theirs)
	_ = f.Close()
	return &process{NewPort(Config{
		Me: me, Ranks: func() []int { return []int{1 - me} }, Bell: bell,
		Lane: func(int) (*shm.Producer, *shm.Consumer, error) { return p, c, nil },
	}), bell}, err
}

// wait polls until an operation has ended.
func (p *process) wait(o *Op) error {
	p.bell.Wait(func() bool {
		for !o.Done() && p.Poll() {
			continue
		}
		return o.Done()
	}, benchSpin, time.Minute)
	return o.Err()
}

// runPeer sends back what it gets with tag 1, and says so of what it gets with tag 2, until its input ends.
func runPeer() error {
	in := bufio.NewReader(os.Stdin)
	p, err := meet(1, func(a *address) (other address, err error) {
		if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
			return other, err
		}
		line, err := in.ReadBytes('\n')
		if err != nil {
			return other, err
		}
		return other, json.Unmarshal(line, &other)
	})
	if err != nil {
		return err
	}
	go func() {
		_, _ = in.ReadByte() // the parent has closed it
		os.Exit(0)
	}()
	buf := make([]byte, 64<<20)
	for {
		r := p.Recv(0, AnyTag, buf)
		if err := p.wait(r); err != nil {
			return err
		}
		answer := buf[:r.Len()]
		if r.Tag() == 2 {
			answer = nil
		}
		if err := p.wait(p.Send(0, r.Tag(), answer)); err != nil {
			return err
		}
	}
}

// peer starts the other process.
func peer(tb testing.TB) *process {
	tb.Helper()
	exe, err := os.Executable()
	require.NoError(tb, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), peerEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	d := json.NewDecoder(out)
	p, err := meet(0, func(a *address) (other address, err error) {
		if err := json.NewEncoder(in).Encode(a); err != nil {
			return other, err
		}
		return other, d.Decode(&other)
	})
	require.NoError(tb, err)
	tb.Cleanup(func() {
		require.NoError(tb, in.Close())
		require.NoError(tb, cmd.Wait())
		p.Close()
		require.NoError(tb, p.bell.Close())
	})
	return p
}

func TestMessagesBetweenProcesses(t *testing.T) {
	p := peer(t)
	for _, n := range []int{0, 8, eagerBytes, 1 << 20, 16 << 20} {
		want, got := random(n, 1), make([]byte, n)
		s, r := p.Send(1, 1, want), p.Recv(1, 1, got)
		require.NoError(t, p.wait(s))
		require.NoError(t, p.wait(r))
		require.Equal(t, want, got)
	}
}

// BenchmarkRoundTrip is a message to another process and back.
func BenchmarkRoundTrip(b *testing.B) {
	for _, size := range []int{8, 4 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) { bench(b, 1, size, size) })
	}
}

// BenchmarkOneWay is a message to another process, which confirms it.
func BenchmarkOneWay(b *testing.B) {
	for _, size := range []int{64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) { bench(b, 2, size, 0) })
	}
}

func bench(b *testing.B, tag uint64, size, back int) {
	b.Helper()
	p := peer(b)
	out, in := make([]byte, size), make([]byte, back)
	var times []time.Duration
	b.SetBytes(int64(size))
	for b.Loop() {
		start := time.Now()
		p.Send(1, tag, out)
		require.NoError(b, p.wait(p.Recv(1, tag, in)))
		times = append(times, time.Since(start))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(times[0].Nanoseconds()), "min-ns")
}
