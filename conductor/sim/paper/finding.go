package paper

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"

	"larder/internal/plot"
)

// Finding is what came of an experiment.
type Finding struct {
	Experiment

	Setup      string   `json:"setup"`            // how it was run here
	Rows       []Row    `json:"rows"`             // ours beside theirs
	Checks     []Check  `json:"checks"`           // what theirs say, and whether ours do
	Figures    []Figure `json:"figures"`          // for people
	Tables     []Table  `json:"tables,omitempty"` // more of ours
	Difference string   `json:"difference"`       // why ours differ from theirs, or that they do not
}

// Row is a measurement beside the paper's.
type Row struct {
	What   string `json:"what"`
	Ours   Value  `json:"ours"`
	Theirs *Range `json:"theirs,omitempty"` // nil: they give none
	Unit   Unit   `json:"unit"`
}

// Range is a figure of a paper, or from the least to the greatest that it gives.
type Range struct {
	Low  Value `json:"low"`
	High Value `json:"high"`
}

// Check is something that a paper's results say, and whether ours say it too.
type Check struct {
	What  string `json:"what"`
	Holds bool   `json:"holds"`
}

// Figure is a drawing; SVG is not part of the JSON form, which names its file.
type Figure struct {
	Name  string `json:"name"` // of the file, without its ending
	Title string `json:"title"`
	svg   []byte
}

// Table is more figures than fit into rows.
type Table struct {
	Title    string     `json:"title"`
	Headings []string   `json:"headings"`
	Rows     [][]string `json:"rows"`
}

// Value is a number that may be none: NaN, and null in JSON.
type Value float64

// MarshalJSON writes null for what is not a number.
func (v Value) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(v)) //nolint:wrapcheck // it is a number
}

// Unit is what a row counts in.
type Unit string

// Units.
const (
	Seconds   Unit = "s"
	Share     Unit = "%" // 1 is 100%
	Ratio     Unit = ""  // of hits: four digits
	Times     Unit = "x" // one figure by another
	Requests  Unit = "requests"
	PerSecond Unit = "requests/s"
	Bandwidth Unit = "GB/s"
	Plain     Unit = "number"
)

// text writes a value for people.
func (v Value) text(u Unit) string {
	f := float64(v)
	switch {
	case math.IsNaN(f) || math.IsInf(f, 0):
		return "none"
	case u == Seconds && math.Abs(f) < 0.1:
		return digits(1000*f) + " ms"
	case u == Seconds && math.Abs(f) >= 1000:
		return grouped(int(math.Round(f))) + " s"
	case u == Seconds:
		return digits(f) + " s"
	case u == Share:
		return strconv.FormatFloat(100*f, 'f', 1, 64) + "%"
	case u == Ratio:
		return strconv.FormatFloat(f, 'f', 4, 64)
	case u == Times:
		return strconv.FormatFloat(f, 'f', 2, 64) + "x"
	case u == Requests:
		return grouped(int(math.Round(f)))
	case u == PerSecond, u == Bandwidth:
		return digits(f) + " " + string(u)
	}
	return digits(f)
}

// text writes a range for people.
func (r *Range) text(u Unit) string {
	switch {
	case r == nil:
		return "-"
	case r.Low == r.High:
		return r.Low.text(u)
	}
	return r.Low.text(u) + " to " + r.High.text(u)
}

// by says how a measurement compares with theirs.
func (r *Row) by() string {
	switch t := r.Theirs; {
	case t == nil || math.IsNaN(float64(r.Ours)):
		return "-"
	case t.Low != t.High && r.Ours < t.Low:
		return "below"
	case t.Low != t.High && r.Ours > t.High:
		return "above"
	case t.Low != t.High:
		return "within"
	case t.Low == 0:
		return "-"
	default:
		return Value(r.Ours / t.Low).text(Times)
	}
}

// row adds a measurement without one of theirs.
func (f *Finding) row(what string, u Unit, ours float64) {
	f.Rows = append(f.Rows, Row{What: what, Ours: Value(ours), Unit: u})
}

// beside adds a measurement beside theirs.
func (f *Finding) beside(what string, u Unit, ours, theirs float64) {
	f.Rows = append(f.Rows, Row{What: what, Ours: Value(ours), Theirs: &Range{Value(theirs), Value(theirs)}, Unit: u})
}

// between adds a measurement beside a range of theirs.
func (f *Finding) between(what string, u Unit, ours, low, high float64) {
	f.Rows = append(f.Rows, Row{What: what, Ours: Value(ours), Theirs: &Range{Value(low), Value(high)}, Unit: u})
}

// check adds a statement and whether it holds.
func (f *Finding) check(holds bool, format string, args ...any) bool {
	f.Checks = append(f.Checks, Check{fmt.Sprintf(format, args...), holds})
	return holds
}

// draw adds a figure. Names are unique within a report: they start with the experiment's.
func (f *Finding) draw(suffix, title string, drawing interface{ SVG() []byte }) {
	name := f.Name
	if suffix != "" {
		name += "-" + suffix
	}
	f.Figures = append(f.Figures, Figure{name, title, drawing.SVG()})
}

// say adds a sentence on the difference.
func (f *Finding) say(format string, args ...any) {
	if f.Difference != "" {
		f.Difference += " "
	}
	f.Difference += fmt.Sprintf(format, args...)
}

// digits writes three digits, or all before the point.
func digits(v float64) string {
	if math.Abs(v) >= 100 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	if v == 0 {
		return "0"
	}
	p := 2 - int(math.Floor(math.Log10(math.Abs(v))))
	return strconv.FormatFloat(v, 'f', min(p, 9), 64)
}

// grouped writes a number with commas.
func grouped(n int) string {
	s := strconv.Itoa(n)
	sign := ""
	if n < 0 {
		sign, s = "-", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// percent writes a share.
func percent(v float64) string { return Value(v).text(Share) }

// list joins words as a sentence does.
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " and " + words[len(words)-1]
}

// falling reports whether each value is below the one before it.
func falling(values ...float64) bool {
	for i := 1; i < len(values); i++ {
		if !(values[i] < values[i-1]) {
			return false
		}
	}
	return true
}

// near reports whether a value is within a share of another.
func near(v, of, share float64) bool { return math.Abs(v-of) <= share*math.Abs(of) }

// bars is one value for each of a list.
func bars(name string, values ...float64) plot.BarSeries {
	return plot.BarSeries{Name: name, Values: values}
}
