package policy

// places is the index of a history: it tells at which number the last use of a
// key is. It holds no keys, so that whoever finds a place has to look whether the
// key is the one in the history.
//
// It is a hash table that grows a bucket at a time (extendible hashing; Fagin et
// al., TODS 1979): no call moves more than the places of one bucket and the
// pointers to all.
type places struct {
	buckets []*bucket // by the lowest bits of a tag's upper part; 1<<depth of them
}

// bucket is a table with open addressing. A cell is a tag above the lowest
// numberBits of a number, or 0. At most three quarters are taken.
type bucket struct {
	cells []uint64
	n     int
	depth uint // all its tags have so many lowest bits of the upper part in common
}

const (
	placesLeast = 8   // cells of a bucket at first
	placesMost  = 256 // and before it is split
	homeBits    = 8   // of a tag, for the place within a bucket: 256 cells
	tagBits     = 31
	depthMost   = tagBits - homeBits
	numberBits  = 32 // of a number: a history is far shorter than 1<<32 uses
	numberMask  = 1<<numberBits - 1
)

func newPlaces() places { return places{buckets: []*bucket{{cells: make([]uint64, placesLeast)}}} }

// tagOf is 32 bits of a hash of a key, never 0. Which keys share a place differs
// between processes, and changes no outcome.
func tagOf(key uint64) uint64 { return mix64(key^scatterSeed)>>(64-tagBits) | 1<<tagBits }

func (p *places) bucket(tag uint64) *bucket {
	return p.buckets[tag>>homeBits&(uint64(len(p.buckets))-1)]
}

// add enters the number of a key that has no place.
func (p *places) add(tag, number uint64) {
	b := p.bucket(tag)
	for 4*(b.n+1) > 3*len(b.cells) {
		if len(b.cells) < placesMost || b.depth == depthMost {
			b.fill(b.cells, make([]uint64, 2*len(b.cells)))
		} else {
			p.split(b, tag)
			b = p.bucket(tag)
		}
	}
	b.put(tag<<numberBits | number&numberMask)
}

// drop takes out the place of a number, which is there, and moves back those
// behind it that would not be found past an empty cell.
func (p *places) drop(tag, number uint64) {
	b := p.bucket(tag)
	mask := uint64(len(b.cells)) - 1
	hole := tag & mask
	for b.cells[hole] != tag<<numberBits|number&numberMask {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; b.cells[i] != 0; i = (i + 1) & mask {
		// Its home may not lie behind the hole, seen from where it is.
		if (i-b.cells[i]>>numberBits)&mask >= (i-hole)&mask {
			b.cells[hole] = b.cells[i]
			hole = i
		}
	}
	b.cells[hole] = 0
	b.n--
}

func (b *bucket) put(cell uint64) {
	mask := uint64(len(b.cells)) - 1
	i := cell >> numberBits & mask
	for b.cells[i] != 0 {
		i = (i + 1) & mask
	}
	b.cells[i] = cell
	b.n++
}

// fill puts what is in some cells into empty ones.
func (b *bucket) fill(from, into []uint64) {
	b.cells, b.n = into, 0
	for _, c := range from {
		if c != 0 {
			b.put(c)
		}
	}
}

// split gives half of a bucket to another, by one more bit of the tags.
func (p *places) split(b *bucket, tag uint64) {
	if 1<<b.depth == len(p.buckets) {
		p.buckets = append(p.buckets, p.buckets...)
	}
	bit := uint64(1) << b.depth
	b.depth++
	other := &bucket{cells: make([]uint64, placesMost), depth: b.depth}
	for i := tag>>homeBits&(bit-1) | bit; i < uint64(len(p.buckets)); i += 2 * bit {
		p.buckets[i] = other
	}
	old := b.cells
	b.cells, b.n = make([]uint64, placesMost), 0
	for _, c := range old {
		switch {
		case c == 0:
		case c>>(numberBits+homeBits)&bit == 0:
			b.put(c)
		default:
			other.put(c)
		}
	}
}
