package pg

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
	"larder/pg/store"
)

// Ranks here are processes of their own: this test's program, started again. Each calls all-reduces without end, to which it gives
// 2^rank: the sum tells who took part. It prints when that changes, and whom it has lost; and how it is, when it is asked.

var (
	kills = flag.Int("kills", 6, "how many ranks TestKills kills")
	seed  = flag.Uint64("kill-seed", 1, "of whom it kills, and when")
)

const (
	rankEnv   = "LARDER_PG_TEST_RANK"
	testRanks = 4
	// recoverTime is how long survivors may take to the next result, and pauseTime how long a joiner may have them pause. Both
	// are the project's own aims on idle machines, with what this one may be busy with besides.
	recoverTime = 20 * time.Second
)

// rankSpec tells a process which rank it is.
type rankSpec struct {
	Dir       string
	Rank      int
	Extension bool
	Retry     bool
	Count     int // elements
}

// said is a line that a rank prints.
type said struct {
	Rank  int     `json:"-"`
	Sum   float32 `json:"sum,omitempty"` // of a collective, as it has become
	Lost  []int   `json:"lost,omitempty"`
	Error string  `json:"error,omitempty"`
	// PauseMS is the longest time between two results since the last line.
	PauseMS float64 `json:"pause_ms"`

	FDs, Goroutines, HeapKiB, MapKiB int       // when asked
	ended                            *exec.Cmd // whose output this ends
}

// beRank is a rank's process.
func beRank() int {
	var spec rankSpec
	out := json.NewEncoder(os.Stdout)
	err := json.Unmarshal([]byte(os.Getenv(rankEnv)), &spec)
	if err == nil {
		err = spec.run(out)
	}
	if err != nil {
		_ = out.Encode(said{Error: err.Error()}) // the parent is gone
		return 1
	}
	return 0
}

func (spec rankSpec) run(out *json.Encoder) error {
	ctx := context.Background()
	s, err := store.Directory(ctx, spec.Dir, 3*time.Second)
	if err != nil {
		return err
	}
	w, err := New(ctx, Config{Job: "test", Rank: spec.Rank, Store: s})
	if err != nil {
		return err
	}
	g, err := w.Group(ctx, GroupConfig{ID: "world", Ranks: upTo(testRanks), Extension: spec.Extension, Retry: spec.Retry})
	if err != nil {
		return err
	}
	if spec.Extension {
		if err := g.Join(ctx); err != nil {
			return err
		}
	}
	r := &reducer{g: g, out: out, count: spec.Count}
	go r.hear()
	go r.activate(ctx)
	return r.run()
}

// reducer calls all-reduces.
type reducer struct {
	g     *Group
	count int
	mu    sync.Mutex
	out   *json.Encoder
}

func (r *reducer) say(s said) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.out.Encode(s) // the parent is gone, and ends this process
}

// hear ends the process with its parent, and tells how it is.
func (r *reducer) hear() {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		fds, _ := os.ReadDir("/proc/self/fd")
		maps, _ := os.ReadFile("/proc/self/maps")
		r.say(said{
			FDs: len(fds), Goroutines: runtime.NumGoroutine(), HeapKiB: int(m.HeapAlloc >> 10), MapKiB: strings.Count(string(maps), "memfd:larder"),
		})
	}
	os.Exit(0)
}

// activate lets in whoever has come.
func (r *reducer) activate(ctx context.Context) {
	for {
		pause(5*time.Millisecond, nil)
		active := r.g.Active()
		ranks := slices.DeleteFunc(upTo(testRanks), active.Has)
		if len(ranks) == 0 || !active.Has(r.g.Rank()) {
			continue
		}
		states, err := r.g.PeerState(ranks...)
		if err != nil {
			r.say(said{Error: err.Error()})
			return
		}
		ready := ranks[:0]
		for i, ok := range states {
			if ok {
				ready = append(ready, ranks[i])
			}
		}
		if len(ready) > 0 {
			_, _ = r.g.Activate(ctx, ready...) // others do it, too; what matters is seen by the sums
		}
	}
}

func (r *reducer) run() error {
	var last float32
	var longest time.Duration
	at := moment()
	for {
		buf := fill(float32(int(1)<<r.g.Rank()), r.count)
		_, err := r.g.Do(AllReduce(buf, buf, reduce.F32, reduce.Sum))
		if lost, ok := errors.AsType[*PeerError](err); ok {
			r.say(said{Lost: lost.Ranks})
			continue
		}
		if err != nil {
			return err
		}
		sum := float32At(buf, 0)
		for i := range r.count {
			if float32At(buf, i) != sum {
				return fmt.Errorf("element %d is %v, and the first one %v", i, float32At(buf, i), sum)
			}
		}
		longest = max(longest, since(at))
		at = moment()
		if sum != last {
			r.say(said{Sum: sum, PauseMS: float64(longest) / 1e6})
			last, longest = sum, 0
		}
	}
}

// processes are the ranks' processes, for their parent.
type processes struct {
	t    *testing.T
	spec rankSpec
	says chan said
	all  [testRanks]*exec.Cmd
	in   [testRanks]io.WriteCloser
}

func startRanks(t *testing.T, spec rankSpec) *processes {
	t.Helper()
	spec.Dir = t.TempDir()
	p := &processes{t: t, spec: spec, says: make(chan said, 1024)}
	for rank := range testRanks {
		p.start(rank, false)
	}
	t.Cleanup(func() {
		for rank := range p.all {
			p.kill(rank)
		}
	})
	return p
}

func (p *processes) start(rank int, extension bool) {
	spec := p.spec
	spec.Rank, spec.Extension = rank, extension
	text, err := json.Marshal(spec)
	require.NoError(p.t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), rankEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(p.t, err)
	p.in[rank], err = cmd.StdinPipe()
	require.NoError(p.t, err)
	require.NoError(p.t, cmd.Start())
	p.all[rank] = cmd
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			var s said
			if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
				s = said{Error: lines.Text()}
			}
			s.Rank = rank
			p.says <- s
		}
		p.says <- said{Rank: rank, ended: cmd}
	}()
}

func (p *processes) kill(rank int) {
	if cmd := p.all[rank]; cmd != nil {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // killed
		p.all[rank] = nil
	}
}

// untilSum waits until all these ranks have that sum, and returns the longest pause of each.
func (p *processes) untilSum(want float32, ranks ...int) map[int]float64 {
	p.t.Helper()
	left, pauses := slices.Clone(ranks), map[int]float64{}
	deadline := time.After(recoverTime)
	for len(left) > 0 {
		select {
		case s := <-p.says:
			require.Empty(p.t, s.Error, "rank %d", s.Rank)
			if s.ended != nil {
				require.NotSame(p.t, p.all[s.Rank], s.ended, "rank %d ended", s.Rank) // one that was killed may be heard of late
				continue
			}
			if s.Sum == 0 || !slices.Contains(ranks, s.Rank) {
				continue
			}
			pauses[s.Rank] = max(pauses[s.Rank], s.PauseMS)
			left = slices.DeleteFunc(left, func(r int) bool { return r == s.Rank })
			if s.Sum != want {
				left = append(left, s.Rank)
			}
		case <-deadline:
			p.t.Fatalf("ranks %v have not come to %v in %v", left, want, recoverTime)
		}
	}
	return pauses
}

// stats asks a rank how it is.
func (p *processes) stats(rank int) said {
	p.t.Helper()
	_, err := fmt.Fprintln(p.in[rank])
	require.NoError(p.t, err)
	for {
		if s := <-p.says; s.Rank == rank && s.FDs > 0 {
			return s
		}
	}
}

// Ranks are killed in the middle of what they do, any of them but one, and others take their places, while the rest goes on.
func TestKills(t *testing.T) {
	for _, retry := range []bool{false, true} {
		t.Run(fmt.Sprint("retry=", retry), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(*seed, 0))
			p := startRanks(t, rankSpec{Count: 1000, Retry: retry})
			const everybody = 1<<testRanks - 1
			p.untilSum(everybody, upTo(testRanks)...)
			var began said
			var recovered, joined []float64
			for i := range *kills {
				if i == *kills/10+1 {
					began = p.stats(testRanks - 1)
				}
				pause(time.Duration(rnd.Int64N(int64(20*time.Millisecond))), nil)
				victim := rnd.IntN(testRanks - 1)
				p.kill(victim)
				survivors := slices.DeleteFunc(upTo(testRanks), func(r int) bool { return r == victim })
				for _, ms := range p.untilSum(everybody-float32(int(1)<<victim), survivors...) {
					recovered = append(recovered, ms)
				}
				p.start(victim, true)
				pauses := p.untilSum(everybody, upTo(testRanks)...)
				for _, r := range survivors {
					joined = append(joined, pauses[r])
				}
			}
			end := p.stats(testRanks - 1)
			slices.Sort(recovered)
			slices.Sort(joined)
			at := func(x []float64, q int) float64 { return x[(len(x)-1)*q/100] }
			t.Logf("%d kills; to the next result p50 %.1f ms, p99 %.1f, max %.1f; pause for a joiner p50 %.1f ms, p99 %.1f, max %.1f",
				*kills, at(recovered, 50), at(recovered, 99), at(recovered, 100), at(joined, 50), at(joined, 99), at(joined, 100))
			t.Logf("a survivor of all, after the first kills and the last: %d, %d files; %d, %d goroutines; %d, %d KiB; %d, %d mappings",
				began.FDs, end.FDs, began.Goroutines, end.Goroutines, began.HeapKiB, end.HeapKiB, began.MapKiB, end.MapKiB)
			require.LessOrEqual(t, end.FDs, began.FDs+4, "files")
			require.LessOrEqual(t, end.Goroutines, began.Goroutines+8, "goroutines")
			require.LessOrEqual(t, end.MapKiB, began.MapKiB+16, "mappings")
			require.LessOrEqual(t, end.HeapKiB, began.HeapKiB+2048, "heap")
		})
	}
}
