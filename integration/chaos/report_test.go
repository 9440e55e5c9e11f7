package chaos

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"larder/integration/cluster"
)

// Flags of the package.
var (
	casesFlag   = flag.String("cases", "3", "how many cases to run, \"all\", or their names with commas between")
	minutesFlag = flag.Float64("minutes", 0, "draw faults at random for so many minutes")
	seedFlag    = flag.Uint64("seed", 0, "seed of the random faults; 0 draws one")
	jsonFlag    = flag.String("report", "", "file for the report")
)

// report is what a run counted and measured.
type report struct {
	Began      time.Time         `json:"began"`
	Seconds    float64           `json:"seconds"`
	Processors int               `json:"processors"`
	Seeds      []uint64          `json:"seeds,omitempty"`
	Cases      []caseReport      `json:"cases"`
	Faults     map[string]uint64 `json:"faults"`     // by kind
	Operations map[string]uint64 `json:"operations"` // of clients, by kind
	Figures    []figure          `json:"figures"`
	Stalls     []string          `json:"stalls,omitempty"` // when this process itself was given no processor

	mu sync.Mutex
}

// caseReport is the outcome of one case.
type caseReport struct {
	Name    string  `json:"name"`
	Outcome string  `json:"outcome"` // passed, failed, or skipped and why
	Seconds float64 `json:"seconds"`
}

// figure is one thing that was measured.
type figure struct {
	Case  string  `json:"case"`
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	Goal  string  `json:"goal,omitempty"`
	Met   bool    `json:"met"` // true where there is no goal
}

// total is the report of this process.
var total = report{Began: time.Now(), Processors: runtime.NumCPU(), Faults: map[string]uint64{}, Operations: map[string]uint64{}}

// TestMain runs the tests and reports.
func TestMain(m *testing.M) {
	cluster.Main(reporting{m})
}

// reporting is a run of tests with a report at its end.
type reporting struct{ m *testing.M }

// Run implements what goleak wants of testing.M.
func (r reporting) Run() int {
	code := r.m.Run()
	for _, s := range cluster.Stalls(total.Began) {
		total.Stalls = append(total.Stalls, fmt.Sprintf("%s: %v", s.From.Format(time.TimeOnly), s.Took.Round(time.Millisecond)))
	}
	total.Seconds = time.Since(total.Began).Seconds()
	if len(total.Cases) > 0 {
		total.print()
	}
	if *jsonFlag != "" {
		b, err := json.MarshalIndent(&total, "", "  ")
		if err == nil {
			err = os.WriteFile(*jsonFlag, append(b, '\n'), 0o600)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "report:", err)
			return 1
		}
	}
	return code
}

// print writes the report as tables.
func (r *report) print() {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	line := func(cells ...string) { fmt.Fprintln(w, strings.Join(cells, "\t")) }
	line("\ncase", "outcome", "seconds")
	for _, c := range r.Cases {
		line(c.Name, c.Outcome, fmt.Sprintf("%.1f", c.Seconds))
	}
	line("\nfigure", "measured", "goal", "met")
	for _, f := range r.Figures {
		met := ""
		if f.Goal != "" {
			met = map[bool]string{true: "yes", false: "NO"}[f.Met]
		}
		line(f.Case+": "+f.Name, fmt.Sprintf("%.4g %s", f.Value, f.Unit), f.Goal, met)
	}
	for _, counts := range []struct {
		head string
		of   map[string]uint64
	}{{"fault", r.Faults}, {"operation", r.Operations}} {
		line("\n"+counts.head, "count")
		kinds := make([]string, 0, len(counts.of))
		for kind := range counts.of {
			kinds = append(kinds, kind)
		}
		slices.Sort(kinds)
		for _, kind := range kinds {
			line(kind, strconv.FormatUint(counts.of[kind], 10))
		}
	}
	for _, s := range r.Stalls {
		line("\nthis process stood still", s)
	}
	w.Flush() //nolint:errcheck // standard output
}
