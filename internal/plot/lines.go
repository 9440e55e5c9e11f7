package plot

import (
	"math"
	"slices"
	"strings"
)

// maxPoints bounds the points of a series that are drawn: more than there are places for on a screen. Of each stretch
// the first, the least, the greatest and the last are kept, so that no peak is lost.
const maxPoints = 1000

// Series is points joined by lines. A point that is not finite leaves a gap.
type Series struct {
	Name string
	X, Y []float64 // of the same length
	Step bool      // the value holds until the next point
	Dots bool      // points are marked, as measurements are that are few
}

// Lines is a figure of series.
type Lines struct {
	Title  string
	X, Y   Axis
	Series []Series
	Rules  []Rule
}

// CDF is the distribution of values as a series: for each, the share that is not above it.
func CDF(name string, values []float64) Series {
	sorted := slices.DeleteFunc(slices.Clone(values), func(v float64) bool { return !finite(v) })
	slices.Sort(sorted)
	s := Series{Name: name, Step: true}
	n := len(sorted)
	if n > 0 {
		s.X, s.Y = append(s.X, sorted[0]), append(s.Y, 0)
	}
	every := max(1, n/maxPoints)
	for i := 0; i < n; i += every {
		s.X = append(s.X, sorted[i])
		s.Y = append(s.Y, float64(i+1)/float64(n))
	}
	if n > 0 && s.X[len(s.X)-1] != sorted[n-1] {
		s.X, s.Y = append(s.X, sorted[n-1]), append(s.Y, 1)
	}
	return s
}

// SVG draws the figure.
func (l *Lines) SVG() []byte {
	var c canvas
	names := make([]string, len(l.Series))
	for i := range l.Series {
		names[i] = l.Series[i].Name
	}
	c.begin(l.Title, names, true)
	xLow, xHigh, yLow, yHigh := l.bounds()
	c.x = newScale(l.X, xLow, xHigh, left, width-right)
	c.y = newScale(l.Y, yLow, yHigh, height-bottom, c.top)
	c.xAxis(l.X)
	c.yAxis(l.Y)
	c.rules(l.Rules)
	drawn := false
	for i := range l.Series {
		drawn = c.series(i, l) || drawn
	}
	if !drawn {
		c.nothing()
	}
	return c.end()
}

// bounds are the least and the greatest values of both axes. A linear axis begins at zero or below.
func (l *Lines) bounds() (xLow, xHigh, yLow, yHigh float64) {
	xLow, yLow = math.Inf(1), math.Inf(1)
	xHigh, yHigh = math.Inf(-1), math.Inf(-1)
	for i := range l.Series {
		s := &l.Series[i]
		for j := range min(len(s.X), len(s.Y)) {
			x, y := s.X[j], s.Y[j]
			if onAxis(x, l.X) && onAxis(y, l.Y) {
				xLow, xHigh, yLow, yHigh = min(xLow, x), max(xHigh, x), min(yLow, y), max(yHigh, y)
			}
		}
	}
	if xHigh < xLow {
		xLow, xHigh, yLow, yHigh = 0, 1, 0, 1
	}
	for _, r := range l.Rules {
		if onAxis(r.At, l.Y) {
			yLow, yHigh = min(yLow, r.At), max(yHigh, r.At)
		}
	}
	if !l.X.Log && xLow > 0 && xLow < 0.5*xHigh {
		xLow = 0
	}
	if !l.Y.Log {
		yLow = min(yLow, 0)
	}
	return xLow, xHigh, yLow, yHigh
}

// series draws one of them, and reports whether there was anything to draw.
func (c *canvas) series(i int, l *Lines) bool {
	s := &l.Series[i]
	xs, ys := thin(s.X, s.Y, l.X.Log)
	var path, dots strings.Builder
	open, last := false, ""
	for j := range xs {
		if !onAxis(xs[j], l.X) || !onAxis(ys[j], l.Y) {
			open = false
			continue
		}
		if xs[j] > c.x.high && open { // the axis is cut off here
			if s.Step {
				path.WriteString("H" + num(c.x.to))
			}
			break
		}
		x, y := num(c.x.at(xs[j])), num(c.y.at(ys[j]))
		switch {
		case !open:
			path.WriteString("M" + x + " " + y)
		case s.Step && y != last:
			path.WriteString("H" + x + "V" + y)
		case s.Step:
			path.WriteString("H" + x)
		default:
			path.WriteString("L" + x + " " + y)
		}
		open, last = true, y
		if s.Dots {
			dots.WriteString(`<circle class="` + fill(i) + `" cx="` + x + `" cy="` + y + `" r="3"/>`)
		}
	}
	if path.Len() == 0 {
		return false
	}
	c.b.WriteString(`<path class="s ` + stroke(i) + `"` + dash(i) + ` d="` + path.String() + `"><title>` + escape(s.Name) + "</title></path>\n")
	if s.Dots {
		c.b.WriteString(dots.String() + "\n")
	}
	return true
}

// thin leaves at most maxPoints of a series, in order. The stretches are as wide as they are drawn, if points are evenly
// spread: on a logarithmic axis the first are the shortest.
func thin(x, y []float64, logarithmic bool) (xs, ys []float64) {
	n := min(len(x), len(y))
	if n <= maxPoints {
		return x[:n], y[:n]
	}
	const kept = 4 // of each stretch
	stretches := maxPoints / kept
	for k, from := 0, 0; k < stretches && from < n; k++ {
		to := (k + 1) * n / stretches
		if logarithmic {
			to = max(from+1, int(math.Pow(float64(n), float64(k+1)/float64(stretches))))
		}
		if to = min(to, n); k == stretches-1 {
			to = n
		}
		least, most := from, from
		for j := from; j < to; j++ {
			if y[j] < y[least] {
				least = j
			}
			if y[j] > y[most] {
				most = j
			}
		}
		last := -1
		for _, j := range [kept]int{from, min(least, most), max(least, most), to - 1} {
			if j != last {
				xs, ys = append(xs, x[j]), append(ys, y[j])
			}
			last = j
		}
		from = to
	}
	return xs, ys
}
