package plot

import (
	"math"
	"strconv"
)

// Unit is what an axis counts in. It decides how ticks read.
type Unit uint8

// Units.
const (
	Number  Unit = iota // with k, M and G for thousands
	Seconds             // shown in µs, ms, s or min
	Share               // 1 is 100%
	Tokens              // with k for 1024, as lengths of prompts are named
)

// Axis says what an axis shows. Values that do not fit it are left out: those that are not finite, and on a logarithmic
// axis those that are not positive.
type Axis struct {
	Label string
	Unit  Unit
	Log   bool    // logarithmic
	Max   float64 // the least that the axis reaches to; 0: as far as the values do
	Limit float64 // the most that it reaches to: what is above is cut off; 0: none
}

// maxTicks bounds the ticks of an axis: more would run into each other.
const maxTicks = 8

// scale places values of an axis on the figure.
type scale struct {
	unit     Unit
	log      bool
	low      float64 // in the axis's values
	high     float64
	from, to float64 // in the figure's units
	by       float64 // what values are divided by to be shown
	suffix   string  // of the label
	step     float64 // between ticks of a linear axis, in the axis's values
}

// newScale makes the scale that shows values from low to high, a little rounded, between two places of the figure.
func newScale(a Axis, low, high, from, to float64) scale {
	high = max(high, a.Max)
	if a.Limit > low {
		high = min(high, a.Limit)
	}
	s := scale{unit: a.Unit, log: a.Log, from: from, to: to, by: 1}
	if a.Log {
		if low <= 0 {
			low, high = 1, max(high, 10)
		}
		if high/low < 10 { // at least a decade
			high = low * 10
		}
		s.low, s.high = low, high
		return s
	}
	if size := max(math.Abs(low), math.Abs(high)); high-low < 1e-9*max(size, 1e-9) { // all values are one
		high = low + max(1, size)
	}
	s.by, s.suffix = shownIn(a.Unit, max(math.Abs(low), math.Abs(high)))
	s.step = nice((high-low)/s.by/(maxTicks-2), a.Unit) * s.by
	s.low = math.Floor(low/s.step+1e-9) * s.step
	s.high = math.Ceil(high/s.step-1e-9) * s.step
	return s
}

// shownIn is the unit of time in which the greatest value of an axis reads well.
func shownIn(u Unit, high float64) (by float64, suffix string) {
	const minute = 60
	switch {
	case u == Share:
		return 0.01, ""
	case u != Seconds:
		return 1, ""
	case high >= 10*minute:
		return minute, "min"
	case high >= 1:
		return 1, "s"
	case high >= 1e-3:
		return 1e-3, "ms"
	default:
		return 1e-6, "µs"
	}
}

// nice is the least round number that is not below v: 1, 2 or 5 times a power of ten, or a power of two where tokens are
// counted.
func nice(v float64, u Unit) float64 {
	if u == Tokens && v > 1 {
		return math.Exp2(math.Ceil(math.Log2(v)))
	}
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range [...]float64{1, 2, 5} {
		if m*power >= v*(1-1e-9) {
			return m * power
		}
	}
	return 10 * power
}

// shows reports whether a value has a place on the axis.
func (s *scale) shows(v float64) bool { return finite(v) && v >= s.low && v <= s.high }

// at is the place of a value, no further out than the axis.
func (s *scale) at(v float64) float64 {
	v = min(max(v, s.low), s.high)
	f := (v - s.low) / (s.high - s.low)
	if s.log {
		f = math.Log(v/s.low) / math.Log(s.high/s.low)
	}
	return s.from + f*(s.to-s.from)
}

// label adds the unit to what an axis is called.
func (s *scale) label(name string) string {
	if s.suffix != "" && !s.log {
		return name + " (" + s.suffix + ")"
	}
	return name
}

// tick is a value with its text.
type tick struct {
	at   float64
	text string
}

// ticks of the axis, at most about maxTicks.
func (s *scale) ticks() []tick {
	if s.log {
		return s.logTicks()
	}
	var list []tick
	for i := 0; i <= 2*maxTicks; i++ {
		v := s.low + float64(i)*s.step
		if v > s.high+s.step*1e-6 {
			break
		}
		list = append(list, tick{v, s.text(v / s.by)})
	}
	return list
}

// logTicks are powers of ten, and what lies between them where there is room. Tokens have powers of two.
func (s *scale) logTicks() []tick {
	var list []tick
	if s.unit == Tokens {
		low, high := math.Ceil(math.Log2(s.low)-1e-9), math.Floor(math.Log2(s.high)+1e-9)
		by := math.Ceil((high - low + 1) / maxTicks)
		for e := low; e <= high; e += max(1, by) {
			list = append(list, tick{math.Exp2(e), s.text(math.Exp2(e))})
		}
		return list
	}
	low, high := math.Floor(math.Log10(s.low)), math.Ceil(math.Log10(s.high))
	between := []float64{1}
	switch decades := high - low; {
	case decades <= 2:
		between = []float64{1, 2, 5}
	case decades <= 4:
		between = []float64{1, 3}
	}
	by := max(1, math.Ceil((high-low)/maxTicks))
	for e := low; e <= high; e += by {
		for _, m := range between {
			v := m * math.Pow(10, e)
			if v >= s.low*(1-1e-9) && v <= s.high*(1+1e-9) {
				list = append(list, tick{v, s.text(v)})
			}
		}
	}
	return list
}

// text is a value as a tick shows it.
func (s *scale) text(v float64) string {
	switch {
	case s.unit == Share && s.log:
		return short(100*v) + "%"
	case s.unit == Share:
		return short(v) + "%"
	case s.unit == Seconds && s.log:
		by, suffix := shownIn(Seconds, v*(1+1e-9))
		return short(v/by) + " " + suffix
	case s.unit == Seconds:
		return short(v)
	case s.unit == Tokens && v >= 1024:
		return short(v/1024) + "k"
	case s.unit == Tokens:
		return short(v)
	}
	return thousands(v)
}

// thousands writes a number with a suffix for its size.
func thousands(v float64) string {
	switch a := math.Abs(v); {
	case a >= 1e9*(1-1e-9):
		return short(v/1e9) + "G"
	case a >= 1e6*(1-1e-9):
		return short(v/1e6) + "M"
	case a >= 1e3*(1-1e-9):
		return short(v/1e3) + "k"
	}
	return short(v)
}

// short writes a number with four digits at most, and no zeros that say nothing.
func short(v float64) string {
	if v == 0 || math.Abs(v) < 1e-12 {
		return "0"
	}
	digits := 3 - int(math.Floor(math.Log10(math.Abs(v))))
	p := math.Pow(10, float64(min(max(digits, 0), 12)))
	return strconv.FormatFloat(math.Round(v*p)/p, 'f', -1, 64)
}
