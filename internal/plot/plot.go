// Package plot draws measurements as SVG files with the standard library alone: lines, steps and distributions, bars in
// groups, and boxes.
//
// The same data give the same bytes, so that a changed figure is a changed result. Text follows the reader's light or
// dark scheme, colours are those of Okabe and Ito, which colour-blind readers tell apart, and lines differ in their
// dashes besides. A figure's size is bounded however many points it is given: see Lines.
package plot

import (
	"encoding/xml"
	"math"
	"strconv"
	"strings"
)

// Sizes of a figure, in its own units, which a viewer scales.
const (
	width  = 720.0
	height = 400.0

	left, right = 74.0, 18.0 // of what is drawn in, to the edges
	top, bottom = 44.0, 54.0

	legendRow = 18.0 // height of a line of the legend
	charWidth = 6.6  // of a letter of the legend, on the wide side: SVG cannot measure text
	swatch    = 26.0 // width of the sample of a line in front of its name
)

// style has the colours of both schemes. Where figures stand inside one page the rules are repeated, and are the same.
const style = `<style>
.bg{fill:#fff}.grid{stroke:#e3e3e3}.axis{stroke:#666}.text{fill:#222}.soft{fill:#666}.rule{stroke:#666;stroke-dasharray:2 3}
.s{fill:none;stroke-width:1.8;stroke-linejoin:round}.edge{stroke-width:1.4}
.c0{stroke:#0072b2}.c1{stroke:#d55e00}.c2{stroke:#009e73}.c3{stroke:#b0578d}.c4{stroke:#b07a00}.c5{stroke:#3a97cf}.c6{stroke:#666}
.f0{fill:#0072b2}.f1{fill:#d55e00}.f2{fill:#009e73}.f3{fill:#b0578d}.f4{fill:#b07a00}.f5{fill:#3a97cf}.f6{fill:#666}
@media (prefers-color-scheme:dark){
.bg{fill:#16181c}.grid{stroke:#30343b}.axis,.rule{stroke:#9aa0a8}.text{fill:#e8e8e8}.soft{fill:#a8adb5}
.c0{stroke:#4aa8e0}.c1{stroke:#f0803c}.c2{stroke:#2cc79a}.c3{stroke:#dd94bd}.c4{stroke:#e6ac3a}.c5{stroke:#8fcdf2}.c6{stroke:#b4b4b4}
.f0{fill:#4aa8e0}.f1{fill:#f0803c}.f2{fill:#2cc79a}.f3{fill:#dd94bd}.f4{fill:#e6ac3a}.f5{fill:#8fcdf2}.f6{fill:#b4b4b4}
}</style>
`

// Styles of series, used in turn: with seven colours and four dashes none of 28 series looks like another.
const colours = 7

var dashes = [...]string{"", "7 3", "2 3", "8 3 2 3"}

// Rule is a line across a figure at a value, with its name: a limit.
type Rule struct {
	Name string
	At   float64
}

// canvas collects the text of one figure.
type canvas struct {
	b    strings.Builder
	top  float64 // of what is drawn in, below title and legend
	x, y scale
}

// begin writes a figure's frame and title, and the names of its series.
func (c *canvas) begin(title string, names []string, lines bool) {
	c.b.WriteString(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ` + num(width) + " " + num(height) +
		`" role="img" font-family="system-ui,sans-serif" font-size="12">` + "\n<title>" + escape(title) + "</title>\n" + style)
	c.b.WriteString(`<rect class="bg" width="` + num(width) + `" height="` + num(height) + `"/>` + "\n")
	c.text(left, 22, "text", "start", ` font-size="15" font-weight="600"`, title)
	c.top = top
	if len(names) > 1 || len(names) == 1 && lines {
		c.legend(names, lines)
	}
}

// legend writes the names of series in rows under the title.
func (c *canvas) legend(names []string, lines bool) {
	x, y := left, 40.0
	for i, name := range names {
		w := swatch + charWidth*float64(len([]rune(name))) + 14
		if x > left && x+w > width-right {
			x, y = left, y+legendRow
		}
		if lines {
			c.b.WriteString(`<line class="s ` + stroke(i) + `" x1="` + num(x) + `" y1="` + num(y-4) + `" x2="` + num(x+swatch-6) +
				`" y2="` + num(y-4) + `"` + dash(i) + "/>\n")
		} else {
			c.b.WriteString(`<rect class="` + fill(i) + `" x="` + num(x) + `" y="` + num(y-10) + `" width="12" height="12"/>` + "\n")
		}
		c.text(x+swatch-2, y, "text", "start", "", name)
		x += w
	}
	c.top = y + 14
}

// end closes the figure and returns it.
func (c *canvas) end() []byte {
	c.b.WriteString("</svg>\n")
	return []byte(c.b.String())
}

// yAxis draws the vertical axis with its grid.
func (c *canvas) yAxis(a Axis) {
	for _, t := range c.y.ticks() {
		y := c.y.at(t.at)
		c.line("grid", left, y, width-right, y)
		c.text(left-8, y+4, "soft", "end", "", t.text)
	}
	c.line("axis", left, c.top, left, height-bottom)
	middle := (c.top + height - bottom) / 2
	c.text(18, middle, "text", "middle", ` transform="rotate(-90 18 `+num(middle)+`)"`, c.y.label(a.Label))
}

// xAxis draws the horizontal axis with its grid.
func (c *canvas) xAxis(a Axis) {
	for _, t := range c.x.ticks() {
		x := c.x.at(t.at)
		c.line("grid", x, c.top, x, height-bottom)
		c.text(x, height-bottom+16, "soft", "middle", "", t.text)
	}
	c.line("axis", left, height-bottom, width-right, height-bottom)
	c.text((left+width-right)/2, height-14, "text", "middle", "", c.x.label(a.Label))
}

// categories writes names below the horizontal axis, evenly spread; where they are too wide for one line, every second
// one stands lower.
func (c *canvas) categories(a Axis, names []string) {
	c.line("axis", left, height-bottom, width-right, height-bottom)
	step := (width - left - right) / float64(max(1, len(names)))
	wide := false
	for _, name := range names {
		wide = wide || charWidth*float64(len([]rune(name))) > step
	}
	for i, name := range names {
		y := height - bottom + 15
		if wide && i%2 == 1 {
			y += 13
		}
		c.text(left+(float64(i)+0.5)*step, y, "soft", "middle", "", name)
	}
	c.text((left+width-right)/2, height-10, "text", "middle", "", a.Label)
}

// rules draws lines across at values of the vertical axis.
func (c *canvas) rules(list []Rule) {
	for _, r := range list {
		if !c.y.shows(r.At) {
			continue
		}
		y := c.y.at(r.At)
		c.line("rule", left, y, width-right, y)
		c.text(width-right-2, y-4, "soft", "end", ` font-size="11"`, r.Name)
	}
}

// nothing says that there is nothing to draw.
func (c *canvas) nothing() {
	c.text((left+width-right)/2, (c.top+height-bottom)/2, "soft", "middle", "", "no data")
}

func (c *canvas) line(class string, x1, y1, x2, y2 float64) {
	c.b.WriteString(`<line class="` + class + `" x1="` + num(x1) + `" y1="` + num(y1) + `" x2="` + num(x2) + `" y2="` + num(y2) + `"/>` + "\n")
}

// text writes text; more is further attributes, which are ours and need no escaping.
func (c *canvas) text(x, y float64, class, anchor, more, text string) {
	if text == "" {
		return
	}
	c.b.WriteString(`<text class="` + class + `" x="` + num(x) + `" y="` + num(y) + `" text-anchor="` + anchor + `"` + more + ">" +
		escape(text) + "</text>\n")
}

func stroke(i int) string { return "c" + strconv.Itoa(i%colours) }

func fill(i int) string { return "f" + strconv.Itoa(i%colours) }

// dash changes with the colour, so that series differ in print too.
func dash(i int) string {
	if d := dashes[i%len(dashes)]; d != "" {
		return ` stroke-dasharray="` + d + `"`
	}
	return ""
}

// num writes a coordinate: a tenth of a unit is finer than a screen shows.
func num(v float64) string {
	const tenth = 10
	return strconv.FormatFloat(math.Round(v*tenth)/tenth, 'f', -1, 64)
}

// escape makes text safe inside an element. What XML cannot say becomes U+FFFD.
func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder does not fail
	return b.String()
}

// huge bounds the values that are drawn, and its inverse those on logarithmic axes, so that no arithmetic on them overflows.
const huge = 1e100

// finite tells values that can be drawn from those that cannot.
func finite(v float64) bool { return v >= -huge && v <= huge }

// onAxis tells values that have a place on an axis from those that do not.
func onAxis(v float64, a Axis) bool { return finite(v) && (!a.Log || v >= 1/huge) }

// highest is the greatest value of rules that have a place on an axis, or least.
func highest(list []Rule, a Axis, least float64) float64 {
	for _, r := range list {
		if onAxis(r.At, a) {
			least = max(least, r.At)
		}
	}
	return least
}
