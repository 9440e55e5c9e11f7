package member

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// TestScenarios plays scripts of testdata: each line of a script is something that happens to one group, in the simulation's
// virtual time and without faults of the store; what is printed is which views were committed since, when, and what calls answered.
func TestScenarios(t *testing.T) {
	t.Parallel()
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		t.Helper()
		var sc *scenario
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			t.Helper()
			if d.Cmd == "group" {
				sc = newScenario(t, d)
			}
			return sc.play(t, d)
		})
	})
}

type scenario struct {
	s     *sim
	told  uint64 // epoch
	out   strings.Builder
	calls []*call
}

// newScenario reads "group founders=3 cap=4 [manual|deferred] [retry]".
func newScenario(t *testing.T, d *datadriven.TestData) *scenario {
	t.Helper()
	sp := spec{AutoDeactivate: !d.HasArg("manual"), AutoSync: !d.HasArg("manual") && !d.HasArg("deferred"), Retry: d.HasArg("retry")}
	d.ScanArgs(t, "founders", &sp.Founders)
	sp.Cap = sp.Founders
	d.MaybeScanArgs(t, "cap", &sp.Cap)
	sp.FirstCap = sp.Cap
	for i := range sp.Cap {
		sp.Ranks = append(sp.Ranks, i)
	}
	sc := &scenario{s: newSim(1, sp)}
	for i := range sp.Founders {
		sc.s.spawn(i)
	}
	return sc
}

// play runs the lines of a command, lets the time pass that the command's argument "for" says, and tells what became of it.
func (sc *scenario) play(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	sc.out.Reset()
	for line := range strings.Lines(d.Input) {
		sc.line(t, strings.Fields(line))
	}
	rest := "1s"
	d.MaybeScanArgs(t, "for", &rest)
	sc.pass(sc.duration(t, rest))
	require.NoError(t, sc.s.fault)
	sc.s.checkWins()
	for _, c := range sc.calls {
		sc.tellCall(c)
	}
	sc.calls = nil
	if sc.out.Len() == 0 {
		return "nothing"
	}
	return sc.out.String()
}

// pass lets time pass, and tells of the views that are committed then, and how long after the last line that is.
func (sc *scenario) pass(d time.Duration) {
	began := sc.s.now
	for sc.s.now < began+d {
		sc.s.run(time.Millisecond)
		v, ok := sc.s.views[sc.s.latest]
		if !ok || v.Epoch == sc.told {
			continue
		}
		sc.told = v.Epoch
		fmt.Fprintf(&sc.out, "%s: view %d %s: members %s active %s", about(sc.s.now-began), v.Epoch, v.Reason, ranksOf(v), v.Active)
		if v.Absent.Len() > 0 {
			fmt.Fprintf(&sc.out, " absent %s", v.Absent)
		}
		sc.out.WriteString("\n")
	}
}

func (sc *scenario) tellCall(c *call) {
	if !c.over {
		fmt.Fprintf(&sc.out, "%s: waits\n", c.name())
		return
	}
	fmt.Fprintf(&sc.out, "%s: %s", c.name(), c.resp.Status)
	if len(c.resp.Dropped) > 0 {
		fmt.Fprintf(&sc.out, " %s", rankList(c.resp.Dropped))
	}
	if c.resp.Reason != "" {
		fmt.Fprintf(&sc.out, " (%s)", c.resp.Reason)
	}
	if c.err != nil {
		fmt.Fprintf(&sc.out, "%v", c.err)
	}
	fmt.Fprintf(&sc.out, " after %s\n", about(c.took))
}

func (c *call) name() string {
	return map[callKind]string{callActivate: "activate", callDeactivate: "deactivate", callJoin: "join", callSync: "sync"}[c.kind]
}

// about is a time as coarse as it is stable: the scripts are to say what matters.
func about(d time.Duration) string {
	for _, x := range []time.Duration{
		100 * time.Millisecond, 300 * time.Millisecond, 600 * time.Millisecond, time.Second, 4 * time.Second, 5 * time.Second, 20 * time.Second,
	} {
		if d <= x {
			return "<=" + x.String()
		}
	}
	return ">20s"
}

func ranksOf(v View) string {
	var ranks []int
	for _, m := range v.Members {
		ranks = append(ranks, m.Rank)
	}
	return rankList(ranks)
}

func (sc *scenario) duration(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return d
}

// line is one thing that happens: "kill 2", "silent 2" (nobody notices but by the lease), "leave 2", "cut 0 1", "mend 0 1",
// "shut 2" (channels to it are lost, and none can be made), "open 2", "stop 2 500ms", "spawn 2", "join 2", "activate by 0: 2 3", "deactivate by 0: 1", "sync by 0", "wait 5ms".
func (sc *scenario) line(t *testing.T, f []string) {
	t.Helper()
	var ranks []int
	for _, x := range f[1:] {
		if r, err := strconv.Atoi(strings.TrimSuffix(x, ":")); err == nil {
			ranks = append(ranks, r)
		}
	}
	s := sc.s
	begin := func(kind callKind, by int, ranks ...int) {
		sc.calls = append(sc.calls, s.slots[by].start(kind, ranks...))
	}
	switch f[0] {
	case "kill":
		s.slots[ranks[0]].kill(true)
	case "silent":
		s.slots[ranks[0]].kill(false)
	case "leave":
		s.slots[ranks[0]].leave()
	case "cut":
		s.cutLink(ranks[0], ranks[1], true, 2*time.Millisecond)
	case "mend":
		s.cutLink(ranks[0], ranks[1], false, 0)
	case "shut":
		p := s.slots[ranks[0]]
		p.shut = true
		p.input(func() { p.core.askResync(p.core.view.Epoch, true, "channels were lost") })
	case "open":
		s.slots[ranks[0]].shut = false
	case "stop":
		s.slots[ranks[0]].pause(sc.duration(t, f[2]))
	case "spawn":
		s.spawn(ranks[0])
	case "wait":
		sc.pass(sc.duration(t, f[1]))
	case "join":
		begin(callJoin, ranks[0])
	case "activate":
		begin(callActivate, ranks[0], ranks[1:]...)
	case "deactivate":
		begin(callDeactivate, ranks[0], ranks[1:]...)
	case "sync":
		begin(callSync, ranks[0])
	default:
		t.Fatalf("no such thing: %v", f)
	}
}
