package collective

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"larder/pg/reduce"
	"larder/pg/shm"
)

// childEnv has a process of this test binary be a member of a room, see child.
const childEnv = "LARDER_COLLECTIVE_CHILD"

// end is where a process's memory can be opened by others: descriptors under /proc.
type end struct{ PID, Outbox, Bell int }

func (e end) open(fd, flags int) *os.File {
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", e.PID, fd), flags, 0)
	must(err)
	return f
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// join is what a child is told first, and batch what it is to do then: times in nanoseconds come back.
type join struct {
	Me    int
	Ends  []end
	Table Table
}

type batch struct {
	Kind  Kind
	DType reduce.DType
	Bytes int // of all that a member has
	Times int
}

// child is a member: it speaks JSON with its parent over standard input and output.
func child() {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	n, err := strconv.Atoi(os.Getenv(childEnv))
	must(err)
	box, err := shm.NewOutbox(benchLayout(n), n)
	must(err)
	bell, err := shm.NewBell()
	must(err)
	must(out.Encode(end{os.Getpid(), int(box.File().Fd()), int(bell.File().Fd())}))
	var j join
	must(in.Decode(&j))
	files, bells := make([]*os.File, n), make([]*shm.Bell, n)
	for i, e := range j.Ends {
		files[i] = e.open(e.Outbox, os.O_RDONLY)
		bells[i], err = shm.OpenBell(e.open(e.Bell, os.O_RDWR))
		must(err)
	}
	room, err := shm.NewRoom(j.Me, box, files, bells)
	must(err)
	m := &member{c: Comm{N: n, Me: j.Me, Room: room, Local: oneHost(n)[0], Table: j.Table}, bell: bell}
	for {
		var b batch
		if err := in.Decode(&b); err == io.EOF {
			return
		}
		before := cpu()
		times := m.run(b)
		must(out.Encode(append(times, (cpu()-before)/int64(b.Times+4))))
	}
}

// cpu is the processor time that this process has used, in nanoseconds.
func cpu() int64 {
	var u unix.Rusage
	must(unix.Getrusage(unix.RUSAGE_SELF, &u))
	return u.Utime.Nano() + u.Stime.Nano()
}

type member struct {
	c    Comm
	bell *shm.Bell
	seq  uint64
}

func (m *member) do(a Args) {
	a.Seq = m.seq
	m.seq++
	op := m.c.Start(a)
	m.bell.Wait(func() bool {
		done, err := op.Poll()
		must(err)
		return done
	}, 50*time.Microsecond, time.Minute)
}

func (m *member) run(b batch) []int64 {
	a := Args{Kind: b.Kind, DType: b.DType, Op: reduce.Sum, Src: [][]byte{make([]byte, b.Bytes)}, Dst: [][]byte{make([]byte, b.Bytes)}}
	cuts := func(list [][]byte) [][]byte {
		var out [][]byte
		for i := range m.c.N {
			out = append(out, list[0][i*b.Bytes/m.c.N:(i+1)*b.Bytes/m.c.N])
		}
		return out
	}
	switch b.Kind {
	case AllGather:
		a.Dst = blank(m.c.N, b.Bytes)
	case ReduceScatter:
		a.Src = cuts(a.Src)
		a.Dst[0] = a.Dst[0][:b.Bytes/m.c.N]
	case AllToAll:
		a.Src, a.Dst = cuts(a.Src), cuts(a.Dst)
	case AllReduce, Broadcast, Reduce, Gather, Scatter, Barrier:
	}
	for _, list := range [][][]byte{a.Src, a.Dst} {
		for _, p := range list {
			for i := 0; i < len(p); i += 4096 {
				p[i] = 1
			}
		}
	}
	times := make([]int64, b.Times)
	for range 3 {
		m.do(a)
	}
	m.do(Args{Kind: Barrier})
	for i := range times {
		begin := time.Now()
		m.do(a)
		times[i] = int64(time.Since(begin))
	}
	return times
}

// crew are processes that are the members of a room.
type crew struct {
	tb  testing.TB
	in  []*json.Encoder
	out []*json.Decoder
}

func newCrew(tb testing.TB, n int, table Table) *crew {
	tb.Helper()
	c := &crew{tb: tb}
	ends := make([]end, n)
	for i := range n {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+strconv.Itoa(n))
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		require.NoError(tb, err)
		out, err := cmd.StdoutPipe()
		require.NoError(tb, err)
		require.NoError(tb, cmd.Start())
		tb.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
		c.in, c.out = append(c.in, json.NewEncoder(in)), append(c.out, json.NewDecoder(bufio.NewReader(out)))
		require.NoError(tb, c.out[i].Decode(&ends[i]))
	}
	for i := range n {
		require.NoError(tb, c.in[i].Encode(join{i, ends, table}))
	}
	return c
}

// run has all do a batch, and gives the times of all and the processor time that one operation has taken at all members.
func (c *crew) run(b batch) (times []int64, used int64) {
	for _, in := range c.in {
		require.NoError(c.tb, in.Encode(b))
	}
	for _, out := range c.out {
		var t []int64
		require.NoError(c.tb, out.Decode(&t))
		times, used = append(times, t[:b.Times]...), used+t[b.Times]
	}
	return times, used
}

// tableEnv and layoutEnv try other tables and layouts: JSON over the default ones.
const (
	tableEnv  = "LARDER_COLLECTIVE_TABLE"
	layoutEnv = "LARDER_COLLECTIVE_LAYOUT"
)

func benchTable(tb testing.TB) Table {
	tb.Helper()
	table := DefaultTable
	if s := os.Getenv(tableEnv); s != "" {
		require.NoError(tb, json.Unmarshal([]byte(s), &table))
	}
	return table
}

func benchLayout(n int) shm.Layout {
	l := Layout(n)
	if s := os.Getenv(layoutEnv); s != "" {
		must(json.Unmarshal([]byte(s), &l))
	}
	return l
}

// BenchmarkProcesses measures operations among processes of one host: the median and the least time of one, over all members.
func BenchmarkProcesses(b *testing.B) {
	for _, n := range []int{2, 4} {
		for _, dt := range []reduce.DType{reduce.F32, reduce.BF16} {
			for _, bytes := range []int{4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20} {
				measure(b, n, batch{Kind: AllReduce, DType: dt, Bytes: bytes})
			}
		}
		for k := Broadcast; k < Gather; k++ {
			for _, bytes := range []int{4 << 10, 1 << 20, 16 << 20} {
				measure(b, n, batch{Kind: k, DType: reduce.F32, Bytes: bytes})
			}
		}
		measure(b, n, batch{Kind: Barrier})
	}
}

func measure(b *testing.B, n int, x batch) {
	b.Helper()
	name := fmt.Sprintf("%d/%v/%v/%d", n, x.Kind, x.DType, x.Bytes)
	b.Run(name, func(b *testing.B) {
		c := newCrew(b, n, benchTable(b))
		x.Times = max(20, min(2000, 64<<20/max(x.Bytes, 1)))
		var times, used []int64
		for b.Loop() {
			t, u := c.run(x)
			times, used = append(times, t...), append(used, u)
		}
		slices.Sort(used)
		b.ReportMetric(float64(used[0])/1e3, "least-cpu-us")
		slices.Sort(times)
		b.ReportMetric(float64(times[len(times)/2])/1e3, "p50-us")
		b.ReportMetric(float64(times[0])/1e3, "min-us")
		b.ReportMetric(0, "ns/op")
	})
}

func TestChildIsToldWhatTheParentKnows(t *testing.T) { // the crew itself works, with real processes
	c := newCrew(t, 2, tiny.table)
	times, used := c.run(batch{Kind: AllReduce, DType: reduce.F32, Bytes: 10000, Times: 5})
	require.Len(t, times, 10)
	require.Positive(t, used)
}

// BenchmarkAlone measures what an operation costs without any other member: the overhead of all of them.
func BenchmarkAlone(b *testing.B) {
	c, buf := Comm{N: 1}, [][]byte{make([]byte, 4)}
	for seq := uint64(0); b.Loop(); seq++ {
		if done, err := c.Start(Args{Kind: AllReduce, DType: reduce.F32, Seq: seq, Src: buf, Dst: buf}).Poll(); err != nil || !done {
			b.Fatal(done, err)
		}
	}
}
