package server

import (
	"errors"
	"fmt"
	"math"
	"net"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Size is a number of bytes. Its text form has a unit: "64KiB", "1.5GiB", "4096B".
type Size uint64

// units of Size, the largest first.
var units = []struct {
	name  string
	bytes uint64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"KB", 1e3},
	{"kB", 1e3},
	{"B", 1},
}

// ParseSize reads a size with a unit. "0" needs none.
func ParseSize(text string) (Size, error) {
	t := strings.TrimSpace(text)
	if t == "0" {
		return 0, nil
	}
	for _, u := range units {
		digits, ok := strings.CutSuffix(t, u.name)
		if !ok {
			continue
		}
		digits = strings.TrimSpace(digits)
		if n, err := strconv.ParseUint(digits, 10, 64); err == nil {
			if n > math.MaxInt64/u.bytes {
				return 0, fmt.Errorf("size %q is too large: the most is 8191PiB", text)
			}
			return Size(n * u.bytes), nil
		}
		f, err := strconv.ParseFloat(digits, 64)
		if err != nil || math.IsNaN(f) || f < 0 || f*float64(u.bytes) >= math.MaxInt64 {
			break
		}
		return Size(f * float64(u.bytes)), nil
	}
	return 0, fmt.Errorf("size %q: write a number and a unit, as in 64KiB, 640MiB or 2GiB", text)
}

// String gives the exact text form with the largest binary unit that divides s.
func (s Size) String() string {
	if s == 0 {
		return "0"
	}
	for _, u := range units[:4] {
		if uint64(s)%u.bytes == 0 {
			return strconv.FormatUint(uint64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatUint(uint64(s), 10) + "B"
}

// MarshalText gives the text form.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads the text form.
func (s *Size) UnmarshalText(b []byte) error {
	v, err := ParseSize(string(b))
	if err == nil {
		*s = v
	}
	return err
}

// ParsePeer reads ID=PEER[/CLIENT[/ADMIN]]. A CLIENT or ADMIN without a host has PEER's.
func ParsePeer(text string) (PeerConfig, error) {
	id, rest, ok := strings.Cut(text, "=")
	n, err := strconv.ParseUint(strings.TrimSpace(id), 0, 64)
	if !ok || err != nil || n == 0 {
		return PeerConfig{}, fmt.Errorf("peer %q: write ID=PEER[/CLIENT[/ADMIN]], as in 1=10.0.0.1:7401/:7400/:7402", text)
	}
	parts := strings.Split(strings.TrimSpace(rest), "/")
	if len(parts) > 3 {
		return PeerConfig{}, fmt.Errorf("peer %q: at most three addresses: for members, for clients, of the admin", text)
	}
	p := PeerConfig{ID: n, Addr: parts[0]}
	if len(parts) > 1 {
		p.Client = parts[1]
	}
	if len(parts) > 2 {
		p.Admin = parts[2]
	}
	return p, p.complete()
}

// complete gives the addresses that are left out the host of Addr and the default ports.
func (p *PeerConfig) complete() error {
	host, port, err := net.SplitHostPort(p.Addr)
	if err != nil || host == "" || port == "" {
		return fmt.Errorf("peer %d: address %q: write host:port", p.ID, p.Addr)
	}
	for _, a := range []struct {
		addr *string
		port string
	}{{&p.Client, DefaultClientPort}, {&p.Admin, DefaultAdminPort}} {
		switch {
		case *a.addr == "":
			*a.addr = net.JoinHostPort(host, a.port)
		case strings.HasPrefix(*a.addr, ":"):
			*a.addr = net.JoinHostPort(host, strings.TrimPrefix(*a.addr, ":"))
		}
	}
	return nil
}

// String gives the form that ParsePeer reads.
func (p PeerConfig) String() string {
	return fmt.Sprintf("%d=%s/%s/%s", p.ID, p.Addr, p.Client, p.Admin)
}

// ParseDevice reads PATH[,size=S][,tier=T][,coherence=C][,force], or a size alone for the default path.
func ParseDevice(text string) (DeviceConfig, error) {
	parts := strings.Split(text, ",")
	var d DeviceConfig
	if size, err := ParseSize(parts[0]); err == nil {
		d.Size = size
	} else {
		d.Path = strings.TrimSpace(parts[0])
	}
	for _, part := range parts[1:] {
		key, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		var err error
		switch key {
		case "size":
			d.Size, err = ParseSize(value)
		case "tier":
			d.Tier = value
		case "coherence":
			d.Coherence = value
		case "force":
			d.Force = true
			if value != "" {
				d.Force, err = parseBool(value)
			}
		default:
			err = unknownName(key, tagNames(reflect.TypeFor[DeviceConfig]()))
		}
		if err != nil {
			return DeviceConfig{}, fmt.Errorf("pool device %q: %w", text, err)
		}
	}
	return d, nil
}

// String gives the form that ParseDevice reads.
func (d DeviceConfig) String() string {
	s := d.Path
	if d.Size != 0 {
		s += ",size=" + d.Size.String()
	}
	if d.Tier != "" {
		s += ",tier=" + d.Tier
	}
	if d.Coherence != "" {
		s += ",coherence=" + d.Coherence
	}
	if d.Force {
		s += ",force"
	}
	return s
}

// setValues sets a field from text. A list takes all of values, and each may hold several, separated by semicolons;
// anything else takes the last one.
func setValues(field reflect.Value, values []string) error {
	if field.Kind() == reflect.Slice {
		list := reflect.MakeSlice(field.Type(), 0, len(values))
		for _, value := range values {
			for _, item := range strings.FieldsFunc(value, func(r rune) bool { return r == ';' }) {
				elem := reflect.New(field.Type().Elem()).Elem()
				if err := setScalar(elem, item); err != nil {
					return err
				}
				list = reflect.Append(list, elem)
			}
		}
		field.Set(list)
		return nil
	}
	if len(values) == 0 {
		return errors.New("a value is missing")
	}
	return setScalar(field, values[len(values)-1])
}

// setScalar sets a field that is not a list from text.
func setScalar(field reflect.Value, text string) error {
	if !utf8.ValidString(text) {
		return fmt.Errorf("%q is not UTF-8 text, which is all that a configuration file can hold", clip(text))
	}
	var err error
	switch p := field.Addr().Interface().(type) {
	case *string:
		*p = text
	case *Secret:
		*p = Secret(text)
	case *bool:
		*p, err = parseBool(text)
	case *uint64:
		*p, err = parseUint(text)
	case *int:
		var n uint64
		if n, err = parseUint(text); err == nil && n > math.MaxInt32 {
			err = fmt.Errorf("%d is too large: the most is %d", n, math.MaxInt32)
		}
		*p = int(n) //nolint:gosec // checked above
	case *Size:
		*p, err = ParseSize(text)
	case *Watermarks:
		err = p.UnmarshalText([]byte(text))
	case *time.Duration:
		*p, err = parseDuration(text)
	case *PeerConfig:
		*p, err = ParsePeer(text)
	case *DeviceConfig:
		*p, err = ParseDevice(text)
	default:
		err = fmt.Errorf("no text form for %T", p)
	}
	return err
}

func parseBool(text string) (bool, error) {
	switch text {
	case "true", "yes", "on", "1":
		return true, nil
	case "false", "no", "off", "0":
		return false, nil
	}
	return false, fmt.Errorf("%q: write true or false", text)
}

func parseUint(text string) (uint64, error) {
	n, err := strconv.ParseUint(strings.ReplaceAll(text, "_", ""), 0, 64)
	if err != nil {
		return 0, fmt.Errorf("%q: write a whole number that is not negative", text)
	}
	return n, nil
}

func parseDuration(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("duration %q: write a number and a unit, as in 500ms, 2s or 10m", text)
	}
	return d, nil
}

// formatValue gives a field's text form, secrets hidden.
func formatValue(field reflect.Value) string {
	switch v := field.Interface().(type) {
	case time.Duration:
		return formatDuration(v)
	case fmt.Stringer:
		return v.String()
	}
	if field.Kind() == reflect.Slice {
		items := make([]string, field.Len())
		for i := range items {
			items[i] = formatValue(field.Index(i))
		}
		return strings.Join(items, ";")
	}
	return fmt.Sprint(field.Interface())
}

// formatDuration is Duration.String without zero units at the end: 1m, not 1m0s.
func formatDuration(d time.Duration) string {
	if d == 0 {
		return "0s"
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// nearDistance is how many letters a misspelt name may differ by for a suggestion to be of use.
const nearDistance = 3

// unknownName says that a name is none of known, and which of them is nearest.
func unknownName(name string, known []string) error {
	best, distance := "", nearDistance+1
	for _, k := range known {
		if d := editDistance(name, k); d < distance {
			best, distance = k, d
		}
	}
	if best == "" {
		return fmt.Errorf("unknown key %q: the keys are %s", clip(name), strings.Join(known, ", "))
	}
	return fmt.Errorf("unknown key %q: did you mean %q?", clip(name), best)
}

// clipBytes bounds what an error message repeats of a wrong input.
const clipBytes = 64

// clip shortens a text that an error message repeats.
func clip(s string) string {
	if len(s) > clipBytes {
		return s[:clipBytes] + "..."
	}
	return s
}

// editDistance is the Levenshtein distance of a to b, or more than nearDistance when their lengths say so at once.
func editDistance(a, b string) int {
	if len(a)-len(b) > nearDistance || len(b)-len(a) > nearDistance {
		return nearDistance + 1
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			next := min(diagonal+cost, row[j]+1, row[j+1]+1)
			diagonal, row[j+1] = row[j+1], next
		}
	}
	return row[len(b)]
}
