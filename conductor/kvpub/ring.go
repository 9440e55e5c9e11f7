package kvpub

import "sort"

// batch is one that was sent.
type batch struct {
	sequence uint64
	payload  []byte
}

// ring keeps the last batches. Its memory grows with them, up to its bounds.
type ring struct {
	most, mostBytes int

	list  []batch // those in it begin at from, and go on at the list's beginning
	from  int
	n     int
	bytes int
}

// push adds a batch; the oldest make room. One that is larger than all of the ring has it for itself.
func (r *ring) push(b batch) {
	for r.n > 0 && (r.n == r.most || r.bytes+len(b.payload) > r.mostBytes) {
		r.bytes -= len(r.list[r.from].payload)
		r.list[r.from] = batch{}
		r.from = (r.from + 1) % len(r.list)
		r.n--
	}
	if r.n == len(r.list) {
		r.grow()
	}
	r.list[(r.from+r.n)%len(r.list)] = b
	r.n++
	r.bytes += len(b.payload)
}

func (r *ring) grow() {
	list := make([]batch, min(max(2*r.n, 64), r.most))
	for i := range r.n {
		list[i] = *r.at(i)
	}
	r.list, r.from = list, 0
}

// at is the i-th of the oldest.
func (r *ring) at(i int) *batch { return &r.list[(r.from+i)%len(r.list)] }

// since appends the batches from a sequence on and before another, at most n.
func (r *ring) since(list []batch, from, before uint64, n int) []batch {
	i := sort.Search(r.n, func(i int) bool { return r.at(i).sequence >= from })
	for ; i < r.n && n > 0 && r.at(i).sequence < before; i++ {
		list = append(list, *r.at(i))
		n--
	}
	return list
}
