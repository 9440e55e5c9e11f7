package plot

import (
	"math"
	"slices"
	"strconv"
)

// BarSeries is one value for each group of a figure of bars. A value that is not finite leaves its place empty.
type BarSeries struct {
	Name   string
	Values []float64
}

// Bars is a figure of bars in groups: what is compared stands side by side.
type Bars struct {
	Title  string
	X      Axis // its label alone is used
	Y      Axis
	Groups []string
	Series []BarSeries
	Rules  []Rule
}

// SVG draws the figure.
func (f *Bars) SVG() []byte {
	var c canvas
	names := make([]string, len(f.Series))
	low, high := 0.0, math.Inf(-1)
	if f.Y.Log {
		low = math.Inf(1)
	}
	for i := range f.Series {
		names[i] = f.Series[i].Name
		for _, v := range f.Series[i].Values[:min(len(f.Groups), len(f.Series[i].Values))] {
			if onAxis(v, f.Y) {
				low, high = min(low, v), max(high, v)
			}
		}
	}
	c.begin(f.Title, names, false)
	empty := math.IsInf(high, -1)
	if empty {
		low, high = 0, 1
	}
	high = highest(f.Rules, f.Y, high)
	if f.Y.Log {
		low /= 2 // so that the least bar has a height
	}
	c.y = newScale(f.Y, low, max(high, 0), height-bottom, c.top)
	c.yAxis(f.Y)
	c.categories(f.X, f.Groups)
	if empty {
		c.nothing()
		return c.end()
	}
	for i := range f.Series {
		c.bars(i, f)
	}
	c.rules(f.Rules)
	return c.end()
}

// bars draws those of one series.
func (c *canvas) bars(i int, f *Bars) {
	step := (width - left - right) / float64(max(1, len(f.Groups)))
	wide := step * 0.8 / float64(len(f.Series))
	wide = min(wide, 70)
	base := c.y.at(max(c.y.low, 0))
	for g, v := range f.Series[i].Values {
		if g >= len(f.Groups) || !onAxis(v, f.Y) {
			continue
		}
		x := left + (float64(g)+0.5)*step + (float64(i)-float64(len(f.Series))/2)*wide
		y := c.y.at(v)
		c.b.WriteString(`<rect class="` + fill(i) + `" x="` + num(x+0.5) + `" y="` + num(min(y, base)) + `" width="` + num(max(wide-1, 0.5)) +
			`" height="` + num(math.Abs(base-y)) + `"><title>` + escape(f.Series[i].Name+", "+f.Groups[g]+": "+c.y.value(v)) + "</title></rect>\n")
		if text := c.y.value(v); charWidth*float64(len(text)) < wide+8 {
			c.text(x+wide/2, min(y, base)-4, "text", "middle", ` font-size="10"`, text)
		}
	}
}

// value is a value as it is written above a bar.
func (s *scale) value(v float64) string {
	switch {
	case s.unit == Share:
		return strconv.FormatFloat(100*v, 'f', 1, 64) + "%"
	case s.unit == Seconds && s.log:
		return s.text(v)
	case s.unit == Seconds:
		return short(v / s.by)
	case math.Abs(v) >= 1e4:
		return thousands(v)
	}
	return short(v)
}

// Box is a distribution as a box.
type Box struct {
	Name   string
	Values []float64
}

// Boxes is a figure of distributions side by side. A box reaches from the lower to the upper quartile, its line is the
// median, its dot the mean, and the whiskers reach from the fifth to the ninety-fifth percentile.
type Boxes struct {
	Title string
	X, Y  Axis // of X the label alone is used
	Boxes []Box
	Rules []Rule
}

// SVG draws the figure.
func (f *Boxes) SVG() []byte {
	var c canvas
	names := make([]string, len(f.Boxes))
	sorted := make([][]float64, len(f.Boxes))
	low, high := math.Inf(1), math.Inf(-1)
	for i := range f.Boxes {
		names[i] = f.Boxes[i].Name
		sorted[i] = slices.DeleteFunc(slices.Clone(f.Boxes[i].Values), func(v float64) bool {
			return !onAxis(v, f.Y)
		})
		slices.Sort(sorted[i])
		if len(sorted[i]) > 0 {
			low, high = min(low, quantile(sorted[i], 0.05)), max(high, quantile(sorted[i], 0.95), mean(sorted[i]))
		}
	}
	c.begin(f.Title, nil, false)
	empty := math.IsInf(high, -1)
	if empty {
		low, high = 0, 1
	}
	high = highest(f.Rules, f.Y, high)
	if !f.Y.Log {
		low = min(low, 0)
	}
	c.y = newScale(f.Y, low, high, height-bottom, c.top)
	c.yAxis(f.Y)
	c.categories(f.X, names)
	if empty {
		c.nothing()
	}
	c.rules(f.Rules)
	for i, values := range sorted {
		if len(values) > 0 {
			c.box(i, len(sorted), values)
		}
	}
	return c.end()
}

// box draws the i-th of n.
func (c *canvas) box(i, n int, sorted []float64) {
	step := (width - left - right) / float64(n)
	x, wide := left+(float64(i)+0.5)*step, min(step*0.5, 70)
	at := func(q float64) float64 { return c.y.at(quantile(sorted, q)) }
	edge := "edge " + stroke(i)
	for _, w := range [][2]float64{{0.05, 0.25}, {0.75, 0.95}} {
		c.line(edge, x, at(w[0]), x, at(w[1]))
	}
	for _, q := range [...]float64{0.05, 0.95} {
		c.line(edge, x-wide/4, at(q), x+wide/4, at(q))
	}
	c.b.WriteString(`<rect class="edge ` + stroke(i) + " " + fill(i) + `" fill-opacity="0.25" x="` + num(x-wide/2) + `" y="` + num(at(0.75)) +
		`" width="` + num(wide) + `" height="` + num(at(0.25)-at(0.75)) + `"/>` + "\n")
	c.line(edge, x-wide/2, at(0.5), x+wide/2, at(0.5))
	m := mean(sorted)
	c.b.WriteString(`<circle class="` + fill(i) + `" cx="` + num(x) + `" cy="` + num(c.y.at(m)) + `" r="3.5"/>` + "\n")
	c.text(x, at(0.95)-6, "text", "middle", ` font-size="10"`, "mean "+c.y.value(m))
}

// quantile of sorted values, of which there is at least one: the least that a share of q is not above.
func quantile(sorted []float64, q float64) float64 {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}
