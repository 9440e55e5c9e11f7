package cmd

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// table collects rows and prints them in aligned columns.
type table struct {
	rows  [][]string
	right map[int]bool // columns of numbers
}

// newTable begins a table. A heading that starts with a dash is that of a column of numbers, set flush right.
func newTable(headings ...string) *table {
	t := &table{right: make(map[int]bool)}
	for i, h := range headings {
		if rest, ok := strings.CutPrefix(h, "-"); ok {
			headings[i] = rest
			t.right[i] = true
		}
	}
	t.rows = append(t.rows, headings)
	return t
}

// row adds a row of values in their usual form.
func (t *table) row(values ...any) {
	cells := make([]string, len(values))
	for i, v := range values {
		switch v := v.(type) {
		case string:
			cells[i] = v
		case uint64:
			cells[i] = strconv.FormatUint(v, 10)
		case bool:
			cells[i] = "no"
			if v {
				cells[i] = "yes"
			}
		default:
			cells[i] = fmt.Sprint(v)
		}
	}
	t.rows = append(t.rows, cells)
}

// print writes the table.
func (t *table) print(w io.Writer) error {
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range t.rows {
		line := make([]string, len(row))
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			line[i] = cell + pad
			if t.right[i] {
				line[i] = pad + cell
			}
		}
		b.WriteString(strings.TrimRight(strings.Join(line, "  "), " ") + "\n")
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	return nil
}

// pairs prints names and values in two columns.
func pairs(w io.Writer, list ...[2]string) error {
	width := 0
	for _, p := range list {
		width = max(width, len(p[0]))
	}
	for _, p := range list {
		if _, err := fmt.Fprintf(w, "%-*s  %s\n", width, p[0], p[1]); err != nil {
			return fmt.Errorf("write: %w", err)
		}
	}
	return nil
}

// bytesText is a number of bytes in the largest unit that leaves at least one before the point.
func bytesText(n uint64) string {
	const step = 1024
	if n < step {
		return strconv.FormatUint(n, 10) + " B"
	}
	v, unit := float64(n), 0
	for v >= step && unit < 4 {
		v /= step
		unit++
	}
	return fmt.Sprintf("%.1f %s", v, [...]string{"B", "KiB", "MiB", "GiB", "TiB"}[unit])
}

// millis is a duration given in milliseconds.
func millis(ms int64) string {
	d := time.Duration(ms) * time.Millisecond
	if d > time.Minute {
		d = d.Round(time.Second)
	}
	return d.String()
}

// percent is a share of a whole.
func percent(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(whole))
}
