package policy

import "hash/maphash"

// scatterSeed makes it unforeseeable which numbers share a place in a numbers table, since clients choose some of them
// (lives, indices of blocks). It differs between processes, and changes no outcome.
var scatterSeed = maphash.String(maphash.MakeSeed(), "numbers")

// numbers maps numbers below 2^64-1 to values, in one array without pointers: a look-up touches one cache line. A cell
// that is taken is found by going on from its home, the place of its hash, without passing an empty one. The zero value
// is an empty map. It is never ranged over.
type numbers[V any] struct {
	cells []numberCell[V] // none, or a power of two of them, at most three quarters taken
	n     int
}

type numberCell[V any] struct {
	id uint64 // the number and 1; 0: the cell is empty
	v  V
}

const numbersMin = 8 // cells

func (m *numbers[V]) mask() uint64 { return uint64(len(m.cells)) - 1 }

func (m *numbers[V]) home(id uint64) uint64 { return mix64(id^scatterSeed) & m.mask() }

// find returns the value of key in place, good until the next add or drop; nil when there is none.
func (m *numbers[V]) find(key uint64) *V {
	if m.n == 0 {
		return nil
	}
	for i := m.home(key + 1); ; i = (i + 1) & m.mask() {
		switch c := &m.cells[i]; c.id {
		case key + 1:
			return &c.v
		case 0:
			return nil
		}
	}
}

// add makes room for a key that is not there, and returns its value, zero, to be set in place.
func (m *numbers[V]) add(key uint64) *V {
	if m.n++; 4*m.n > 3*len(m.cells) {
		m.grow()
	}
	c := m.vacant(key + 1)
	c.id = key + 1
	return &c.v
}

// vacant is the empty cell in which id has to go.
func (m *numbers[V]) vacant(id uint64) *numberCell[V] {
	i := m.home(id)
	for m.cells[i].id != 0 {
		i = (i + 1) & m.mask()
	}
	return &m.cells[i]
}

func (m *numbers[V]) grow() {
	old := m.cells
	m.cells = make([]numberCell[V], max(numbersMin, 2*len(old)))
	for i := range old {
		if id := old[i].id; id != 0 {
			*m.vacant(id) = old[i]
		}
	}
}

// drop takes out a key that is there, and moves back those behind it that would not be found past an empty cell.
func (m *numbers[V]) drop(key uint64) {
	m.n--
	hole := m.home(key + 1)
	for m.cells[hole].id != key+1 {
		hole = (hole + 1) & m.mask()
	}
	for i := (hole + 1) & m.mask(); m.cells[i].id != 0; i = (i + 1) & m.mask() {
		// Its home may not lie behind the hole, seen from where it is.
		if (i-m.home(m.cells[i].id))&m.mask() >= (i-hole)&m.mask() {
			m.cells[hole] = m.cells[i]
			hole = i
		}
	}
	m.cells[hole] = numberCell[V]{}
}
