package paper

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"larder/conductor/sim"
	"larder/internal/workload"
)

// Report is what was found, of all experiments.
type Report struct {
	Trace       *TraceFacts `json:"trace,omitempty"`
	Quick       bool        `json:"quick,omitempty"`
	Calibration facts       `json:"calibration"`
	Findings    []Finding   `json:"findings"`
	Left        []Left      `json:"left_out,omitempty"`
}

// TraceFacts is what a report says of the trace that it was given.
type TraceFacts struct {
	Name       string  `json:"name"`
	Published  bool    `json:"published"` // it is the conversation trace of FAST'25
	Requests   int     `json:"requests"`
	Accesses   int     `json:"accesses"` // of blocks
	Distinct   int     `json:"distinct"`
	MeanInput  float64 `json:"mean_input"`
	MeanOutput float64 `json:"mean_output"`
}

// Left is an experiment that was left out.
type Left struct {
	Name  string `json:"name"`
	Title string `json:"title"`
	Why   string `json:"why"`
}

// facts are the calibration that all experiments share.
type facts struct {
	Models   []sim.Model    `json:"models"`
	Hardware []sim.Hardware `json:"hardware"`
}

func newReport(cfg *Config) *Report {
	r := &Report{Quick: cfg.Quick}
	for _, name := range sim.ModelNames() {
		m, _ := sim.FindModel(name) // it is one of them
		r.Calibration.Models = append(r.Calibration.Models, m)
	}
	for _, name := range sim.HardwareNames() {
		h, _ := sim.FindHardware(name) // it is one of them
		r.Calibration.Hardware = append(r.Calibration.Hardware, h)
	}
	if cfg.Trace != nil {
		r.Trace = traceFacts(cfg.Trace, cfg.TraceName)
	}
	return r
}

func traceFacts(t workload.Trace, name string) *TraceFacts {
	f := &TraceFacts{Name: name, Published: isPublished(t), Requests: len(t), Accesses: t.Accesses(), Distinct: t.Distinct()}
	for i := range t {
		f.MeanInput += float64(t[i].Input) / float64(len(t))
		f.MeanOutput += float64(t[i].Output) / float64(len(t))
	}
	return f
}

// Names of what Write writes.
const (
	markdownName = "report.md"
	jsonName     = "report.json"
	plotsDir     = "plots"
)

// Write puts report.md, report.json and the figures into a directory, which is made if it is not there.
func (r *Report) Write(dir string) error {
	if err := os.MkdirAll(filepath.Join(dir, plotsDir), 0o750); err != nil {
		return fmt.Errorf("paper: write the report: %w", err)
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("paper: write the report: %w", err)
	}
	files := map[string][]byte{markdownName: []byte(r.Markdown()), jsonName: append(data, '\n')}
	for i := range r.Findings {
		for _, f := range r.Findings[i].Figures {
			files[filepath.Join(plotsDir, f.Name+".svg")] = f.svg
		}
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil { //nolint:gosec // it is for everybody to read
			return fmt.Errorf("paper: write the report: %w", err)
		}
	}
	return nil
}

// Markdown is the report for people. Figures are named, not contained: see Write.
func (r *Report) Markdown() string {
	var b strings.Builder
	b.WriteString("# The papers' experiments on Larder's simulator\n\n")
	b.WriteString("Ours beside what the arXiv report (2407.00079) and FAST'25 measured. The scheduler, the prefix index and the " +
		"eviction\npolicies are the real ones; engines and networks are worked out from the cost model of FAST'25.\n\n")
	if r.Quick {
		b.WriteString("**Quick: a fraction of the requests and of the points. The code is the same; the figures are not to be used.**\n\n")
	}
	r.writeCalibration(&b)
	r.writeSummary(&b)
	for i := range r.Findings {
		r.Findings[i].write(&b)
	}
	if len(r.Left) > 0 {
		b.WriteString("## Left out\n\n")
		for _, l := range r.Left {
			b.WriteString("- " + l.Title + ": " + l.Why + "\n")
		}
	}
	return b.String()
}

// writeCalibration tells what the figures depend on.
func (r *Report) writeCalibration(b *strings.Builder) {
	b.WriteString("## Calibration\n\nOne for all experiments.\n\n")
	var t Table
	t.Headings = []string{"node", "FLOPS", "memory bandwidth", "host to device", "network", "MFU", "of bandwidth: " +
		"weights", "KV", "links", "step"}
	for _, h := range r.Calibration.Hardware {
		t.Rows = append(t.Rows, []string{
			h.Name, digits(h.FLOPS/1e12) + " T", digits(h.HBMBandwidth/1e12) + " TB/s", digits(h.HostToDevice/1e9) + " GB/s",
			digits(8*h.NIC/1e9) + " Gbps", percent(h.MFU), percent(h.WeightReads), percent(h.KVReads), percent(h.LinkShare),
			h.StepOverhead.String(),
		})
	}
	t.write(b)
	t = Table{Headings: []string{"model", "layers", "dimension", "grouped-query ratio", "a", "b", "KV a token"}}
	for i := range r.Calibration.Models {
		m := &r.Calibration.Models[i]
		t.Rows = append(t.Rows, []string{
			m.Name, strconv.Itoa(m.Layers), strconv.Itoa(m.Dim), strconv.Itoa(m.GQA), digits(m.Quadratic), digits(m.Linear),
			grouped(m.Layers*2*m.Dim/m.GQA*m.ElementBytes) + " B",
		})
	}
	t.write(b)
	if f := r.Trace; f != nil {
		what := "not the published conversation trace, whose figures theirs are"
		if f.Published {
			what = "the published conversation trace"
		}
		fmt.Fprintf(b, "Trace: %s, %s: %s requests, %s tokens in and %s out in the mean, %s blocks, %s of them distinct.\n\n",
			f.Name, what, grouped(f.Requests), grouped(int(f.MeanInput)), grouped(int(f.MeanOutput)), grouped(f.Accesses),
			grouped(f.Distinct))
	}
}

// writeSummary lists what theirs say and whether ours do.
func (r *Report) writeSummary(b *strings.Builder) {
	t := Table{Headings: []string{"experiment", "what theirs say", "ours too"}}
	held := 0
	for i := range r.Findings {
		f := &r.Findings[i]
		for _, c := range f.Checks {
			t.Rows = append(t.Rows, []string{"[" + f.Title + "](#" + f.Name + ")", c.What, yes(c.Holds)})
			if c.Holds {
				held++
			}
		}
	}
	fmt.Fprintf(b, "## Summary\n\nOf %d statements that theirs make, ours make %d.\n\n", len(t.Rows), held)
	t.write(b)
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "**no**"
}

// write writes the section of an experiment.
func (f *Finding) write(b *strings.Builder) {
	fmt.Fprintf(b, "<a id=\"%s\"></a>\n\n## %s\n\n%s. Theirs: %s\n\n%s\n\n", f.Name, f.Title, f.Source, f.Theirs, f.Setup)
	if len(f.Rows) > 0 {
		t := Table{Headings: []string{"", "ours", "theirs", "ours by theirs"}}
		for i := range f.Rows {
			r := &f.Rows[i]
			t.Rows = append(t.Rows, []string{r.What, r.Ours.text(r.Unit), r.Theirs.text(r.Unit), r.by()})
		}
		t.write(b)
	}
	for i := range f.Tables {
		f.Tables[i].write(b)
	}
	for _, g := range f.Figures {
		fmt.Fprintf(b, "![%s](%s/%s.svg)\n\n", g.Title, plotsDir, g.Name)
	}
	for _, c := range f.Checks {
		b.WriteString("- " + c.What + ": " + yes(c.Holds) + "\n")
	}
	b.WriteString("\n" + f.Difference + "\n\n")
}

// write writes a table in Markdown.
func (t *Table) write(b *strings.Builder) {
	if t.Title != "" {
		b.WriteString(t.Title + "\n\n")
	}
	line := func(cells []string) {
		b.WriteString("|")
		for _, c := range cells {
			b.WriteString(" " + strings.ReplaceAll(c, "|", `\|`) + " |")
		}
		b.WriteString("\n")
	}
	line(t.Headings)
	b.WriteString("|" + strings.Repeat("---|", len(t.Headings)) + "\n")
	for _, r := range t.Rows {
		line(r)
	}
	b.WriteString("\n")
}
