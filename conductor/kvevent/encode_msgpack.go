package kvevent

import (
	"encoding/binary"
	"math"
)

// writer writes msgpack, numbers and lengths in their shortest form.
type writer struct{ b []byte }

// dict is a map that is being written. Its length, of two bytes, is filled in at the end.
type dict struct{ at, n int }

func (w *writer) dict() dict {
	w.b = append(w.b, 0xde, 0, 0)
	return dict{at: len(w.b) - 2}
}

// name writes the name of the next value of a map.
func (w *writer) name(m *dict, name string) *writer {
	m.n++
	w.text(name)
	return w
}

func (w *writer) end(m dict) { binary.BigEndian.PutUint16(w.b[m.at:], uint16(m.n)) } //nolint:gosec // an event has some twenty

// patch32 overwrites four bytes with a number.
func (w *writer) patch32(at, v int) { binary.BigEndian.PutUint32(w.b[at:], uint32(v)) } //nolint:gosec // a batch has less events

func (w *writer) null() { w.b = append(w.b, 0xc0) }

func (w *writer) uint(v uint64) {
	switch {
	case v < 1<<7:
		w.b = append(w.b, byte(v))
	case v < 1<<8:
		w.b = append(w.b, 0xcc, byte(v))
	case v < 1<<16:
		w.b = binary.BigEndian.AppendUint16(append(w.b, 0xcd), uint16(v))
	case v < 1<<32:
		w.b = binary.BigEndian.AppendUint32(append(w.b, 0xce), uint32(v))
	default:
		w.b = binary.BigEndian.AppendUint64(append(w.b, 0xcf), v)
	}
}

// integer writes a number that is not negative.
func (w *writer) integer(v int) { w.uint(uint64(v)) } //nolint:gosec // see above

func (w *writer) float(v float64) {
	w.b = binary.BigEndian.AppendUint64(append(w.b, 0xcb), math.Float64bits(v))
}

func (w *writer) array(n int) { w.head(n, 16, 0x90, 0xdc) }

// head writes a length: in one byte below short, else behind long in two, or behind the byte after that in four.
func (w *writer) head(n, short int, first, long byte) {
	switch {
	case n < short:
		w.b = append(w.b, first|byte(n)) //nolint:gosec // below short
	case n < 1<<16:
		w.b = binary.BigEndian.AppendUint16(append(w.b, long), uint16(n)) //nolint:gosec // checked
	default:
		w.b = binary.BigEndian.AppendUint32(append(w.b, long+1), uint32(n)) //nolint:gosec // memory has not so many
	}
}

func (w *writer) text(s string) {
	w.textHead(len(s))
	w.b = append(w.b, s...)
}

func (w *writer) bytes(s []byte) {
	w.textHead(len(s))
	w.b = append(w.b, s...)
}

func (w *writer) textHead(n int) {
	if n >= 32 && n < 1<<8 {
		w.b = append(w.b, 0xd9, byte(n))
		return
	}
	w.head(n, 32, 0xa0, 0xda)
}

func (w *writer) numbers(list []uint64) {
	w.array(len(list))
	for _, v := range list {
		w.uint(v)
	}
}

func (w *writer) tokens(list []uint32) {
	w.array(len(list))
	for _, v := range list {
		w.uint(uint64(v))
	}
}
