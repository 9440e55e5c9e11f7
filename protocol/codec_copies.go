package protocol

import "encoding/binary"

// more reports whether r says more than where the bytes lie first.
func (r *LookupResult) more() bool { return r.Promote || len(r.Copies) > 0 }

// appendMore appends what r says beyond the first location, as fields of its map, and returns how many they are.
func appendMore(b []byte, r *LookupResult) ([]byte, byte) {
	e := enc{b: b}
	e.uint("version", r.Version)
	e.optBool("promote", r.Promote)
	e.optLocations("copies", r.Copies)
	return e.b, byte(e.n) //nolint:gosec // three at most
}

// moreField reads a field of what appendMore writes, and reports whether it was one.
func (d *dec) moreField(name []byte, r *LookupResult) bool {
	switch string(name) {
	case "version":
		r.Version = d.uint()
	case "promote":
		r.Promote = d.bool()
	case "copies":
		r.Copies = d.locations("copies", r.Copies)
	default:
		return false
	}
	return true
}

func (e *enc) optLocations(name string, locations []Location) {
	if len(locations) == 0 {
		return
	}
	e.array(name, len(locations))
	for i := range locations {
		s := e.open()
		e.location(&locations[i])
		e.close(s)
	}
}

// locations reads at most MaxCopies locations.
func (d *dec) locations(name string, s []Location) []Location {
	for l := range elements(d, &s, MaxCopies, name) {
		*l = Location{}
		have := uint(0)
		for k := d.element(); d.next(&k); {
			have |= d.wholeLocation(d.name(), l)
		}
		d.need(have, "handle", "kv_offset", "kv_length")
	}
	return s
}

// wholeLocation reads a field of a Location, or skips another one, and returns its bit if it is required.
func (d *dec) wholeLocation(name []byte, l *Location) uint {
	if !d.locationField(name, l) {
		d.skip()
		return 0
	}
	switch string(name) {
	case "handle":
		return 1
	case "kv_offset":
		return 2
	case "kv_length":
		return 4
	}
	return 0
}

// packedHead is what the first word of r's packed form says of promote and copies.
func (r *LookupResult) packedHead() uint64 {
	head := uint64(min(len(r.Copies), MaxCopies)) << packedCopies
	if r.Promote {
		head |= packedPromote
	}
	return head
}

// packedMoreSize returns the size of the second bin of a packed reply; 0 = there is none.
func packedMoreSize(results []LookupResult) int {
	size := 0
	for i := range results {
		if r := &results[i]; r.Found && r.more() {
			size += 8 + min(len(r.Copies), MaxCopies)*PackedCopySize
		}
	}
	return size
}

// appendPackedMore appends the second bin of a packed reply, which has size bytes.
func appendPackedMore(b []byte, results []LookupResult, size int) []byte {
	b = appendBinHead(b, size)
	for i := range results {
		r := &results[i]
		if !r.Found || !r.more() {
			continue
		}
		b = binary.LittleEndian.AppendUint64(b, r.Version)
		for k := range min(len(r.Copies), MaxCopies) {
			b = appendPackedCopy(b, &r.Copies[k])
		}
	}
	return b
}

func appendPackedCopy(b []byte, l *Location) []byte {
	for _, v := range [...]uint64{
		l.Device, l.RegionID, l.Offset, l.Length, l.Generation, l.Epoch, l.KVOffset, l.Checksum,
	} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func readPackedCopy(p []byte, length uint64) Location {
	u := func(i int) uint64 { return binary.LittleEndian.Uint64(p[8*i:]) }
	return Location{
		Region: Region{
			Handle: Handle{RegionID: u(1), Offset: u(2), Length: u(3)},
			Device: u(0), Generation: u(4), Epoch: u(5),
		},
		KVOffset: u(6), KVLength: length, Checksum: u(7),
	}
}

// packedMore reads the second bin of a packed reply, whose first has the records heads, into the results.
func (d *dec) packedMore(results []LookupResult, heads, more []byte) {
	total := 0
	for i := range results {
		total += packedCopiesOf(heads, i)
	}
	all := make([]Location, 0, min(total, len(more)/PackedCopySize))
	for i := range results {
		r, n := &results[i], packedCopiesOf(heads, i)
		if !r.Found || !r.Promote && n == 0 {
			continue
		}
		if n > MaxCopies || len(more) < 8+n*PackedCopySize {
			d.badCopies("%d copies of result %d are over the limit of %d, or end too early", n, i, MaxCopies)
			return
		}
		r.Version = binary.LittleEndian.Uint64(more)
		more = more[8:]
		for range n {
			all = append(all, readPackedCopy(more, r.KVLength))
			more = more[PackedCopySize:]
		}
		if n > 0 {
			r.Copies = all[len(all)-n : len(all) : len(all)]
		}
	}
	if len(more) > 0 {
		d.badCopies("%d bytes are left over", len(more))
	}
}

// packedCopiesOf returns how many copies the i-th of the packed records announces.
func packedCopiesOf(heads []byte, i int) int { return int(heads[i*PackedSize+1]) }

func (d *dec) badCopies(format string, args ...any) {
	d.failAt("copies", format, args...)
}
