package conductor

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math/bits"
	"slices"

	"larder/conductor/kvevent"
)

// An exported index is a mark, and frames: kind u8, length u32, body, CRC-32C u32 of all that. All numbers are little-endian,
// lengths of texts and lists within a body are uvarints. The frames are, in this order,
//
//	head    seed u64
//	scope   tenant, model, LoRA, salt; block size; windows (group, tokens); places (instance, rank+1, medium, group)
//	blocks  name u64 and one bit for each place, in words of 64, of the scope before
//	names   engine's key u64, name u64
//	copies  name u64, place u32, how many more u32
//	end     how many scopes, blocks, names and copies there were, u64 each
//
// with blocks, names and copies after their scope as often as it takes. Scopes come in the order of their last use. Orphans are
// left out: what they wait for may have come and gone by the time of the import.
const (
	exportMark    = "larder index 1\n"
	frameHead     = 1
	frameScope    = 2
	frameBlocks   = 3
	frameNames    = 4
	frameCopies   = 5
	frameEnd      = 6
	frameHeader   = 5
	frameSum      = 4
	frameMost     = 32 << 20 // bytes of a body: a scope with 4096 places of long names
	frameEnough   = 64 << 10 // when a frame of blocks is written
	maxTextInside = 4 << 10  // bytes of a name of a scope or an instance
)

// ErrImport says that what was read is no exported index, that it is damaged, or that it does not fit the configuration.
var ErrImport = errors.New("conductor: this cannot be imported")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Export writes what the index knows. It is for a time at which no event is applied; queries and sweeps go on meanwhile.
func (x *Index) Export(w io.Writer) error {
	e := &exporter{w: w}
	e.write([]byte(exportMark))
	e.begin(frameHead)
	e.b = binary.LittleEndian.AppendUint64(e.b, x.cfg.Seed)
	e.end()
	x.mu.RLock()
	all := slices.Collect(maps.Values(x.scopes))
	x.mu.RUnlock()
	slices.SortFunc(all, func(a, b *scope) int { return cmp.Compare(a.used.Load(), b.used.Load()) })
	for _, s := range all {
		e.scope(s)
	}
	e.begin(frameEnd)
	for _, n := range []uint64{uint64(len(all)), e.blocks, e.names, e.copies} {
		e.b = binary.LittleEndian.AppendUint64(e.b, n)
	}
	e.end()
	if e.err != nil {
		return fmt.Errorf("conductor: export: %w", e.err)
	}
	return nil
}

// exporter writes frames. After an error it writes nothing more.
type exporter struct {
	w   io.Writer
	b   []byte // the frame
	err error

	blocks, names, copies uint64
	scratch               slab // of one shard
}

func (e *exporter) write(b []byte) {
	if e.err == nil {
		_, e.err = e.w.Write(b)
	}
}

func (e *exporter) begin(kind byte) { e.b = append(e.b[:0], kind, 0, 0, 0, 0) }

func (e *exporter) end() {
	if n := len(e.b) - frameHeader; n > frameMost && e.err == nil {
		e.err = fmt.Errorf("a scope's places take %d bytes, at most %d", n, frameMost)
	}
	binary.LittleEndian.PutUint32(e.b[1:], uint32(len(e.b)-frameHeader)) //nolint:gosec // a frame is no longer than frameMost
	e.write(binary.LittleEndian.AppendUint32(e.b, crc32.Checksum(e.b, castagnoli)))
}

// split ends a frame that is long enough, and begins another one of the same kind.
func (e *exporter) split() {
	if len(e.b) >= frameEnough {
		e.end()
		e.begin(e.b[0])
	}
}

func (e *exporter) text(s string) {
	e.b = append(binary.AppendUvarint(e.b, uint64(len(s))), s...)
}

func (e *exporter) number(n int) { e.b = binary.AppendUvarint(e.b, uint64(n)) } //nolint:gosec // none of them is negative

// scope writes all of a scope.
func (e *exporter) scope(s *scope) {
	s.mu.Lock()
	byBit := map[int]place{}
	for at, bit := range s.places.bits {
		if !at.once { // who says what is there says so again
			byBit[bit] = at
		}
	}
	windows, copies := maps.Clone(s.places.windows), maps.Clone(s.copies)
	s.mu.Unlock()
	order := slices.Sorted(maps.Keys(byBit))
	e.begin(frameScope)
	for _, text := range []string{s.key.Tenant, s.key.Model, s.key.LoRA, s.key.Salt} {
		e.text(text)
	}
	e.number(s.key.BlockSize)
	e.number(len(windows))
	for _, group := range slices.Sorted(maps.Keys(windows)) {
		e.number(group)
		e.number(windows[group])
	}
	e.number(len(order))
	index := map[int]int{} // of a bit among the places
	for i, bit := range order {
		at := byBit[bit]
		index[bit] = i
		e.text(at.instance)
		e.number(at.rank + 1)
		e.number(int(at.medium))
		e.number(at.group)
	}
	e.end()
	e.blocksOf(s, index)
	e.namesOf(s)
	e.copiesOf(copies, index)
}

// take copies a shard, while nobody changes it.
func (e *exporter) take(s *scope, sh *shard) *slab {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := sh.slab.Load()
	if b == nil {
		return nil
	}
	c := &e.scratch
	c.width, c.keys, c.words = b.width, append(c.keys[:0], b.keys...), append(c.words[:0], b.words...)
	return c
}

// scattered is the n-th place of a shard, in an order that has nothing of its own. Keys in their own order, put into a table
// that grows as they come, would fill a part of it while the rest is empty.
func (b *slab) scattered(n int) int { return n * 0x9e3779b1 & (len(b.keys) - 1) }

// blocksOf writes where blocks are.
func (e *exporter) blocksOf(s *scope, index map[int]int) {
	to := make(mask, words(len(index)))
	e.begin(frameBlocks)
	for i := range s.blocks.shards {
		b := e.take(s, &s.blocks.shards[i])
		if b == nil {
			continue
		}
		for n := range b.keys {
			k := b.scattered(n)
			name := b.keys[k]
			if name == 0 || !to.renumber(b.words[k*b.width:][:b.width], index) {
				continue
			}
			e.b = binary.LittleEndian.AppendUint64(e.b, name)
			for _, w := range to {
				e.b = binary.LittleEndian.AppendUint64(e.b, w)
			}
			e.blocks++
			e.split()
		}
	}
	e.end()
}

// words is how many words so many places need.
func words(places int) int { return max(1, (places+63)/64) }

// renumber sets m to the bits of a block, as index has them. It reports false if none is left: they were cleared.
func (m mask) renumber(block []uint64, index map[int]int) (left bool) {
	clear(m)
	for i, w := range block {
		for ; w != 0; w &= w - 1 {
			if to, there := index[64*i+bits.TrailingZeros64(w)]; there {
				m.set(to)
				left = true
			}
		}
	}
	return left
}

// namesOf writes what engines call blocks.
func (e *exporter) namesOf(s *scope) {
	e.begin(frameNames)
	for i := range s.names.shards {
		b := e.take(s, &s.names.shards[i])
		if b == nil {
			continue
		}
		for n := range b.keys {
			k := b.scattered(n)
			key := b.keys[k]
			if key == 0 {
				continue
			}
			e.b = binary.LittleEndian.AppendUint64(e.b, key)
			e.b = binary.LittleEndian.AppendUint64(e.b, b.words[k])
			e.names++
			e.split()
		}
	}
	e.end()
}

// copiesOf writes which blocks are somewhere more than once.
func (e *exporter) copiesOf(copies map[copyKey]uint32, index map[int]int) {
	keys := slices.SortedFunc(maps.Keys(copies), func(a, b copyKey) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.bit, b.bit))
	})
	e.begin(frameCopies)
	for _, key := range keys {
		at, there := index[key.bit]
		if !there {
			continue
		}
		e.b = binary.LittleEndian.AppendUint64(e.b, key.name)
		e.b = binary.LittleEndian.AppendUint32(e.b, uint32(at)) //nolint:gosec // a place
		e.b = binary.LittleEndian.AppendUint32(e.b, copies[key])
		e.copies++
		e.split()
	}
	e.end()
}

// Import replaces what the index knows by what was exported, if that is whole and fits the configuration; else the error is
// ErrImport, or the reader's, and nothing has changed. It reads no further than to the end of it. Queries go on meanwhile, and
// see either. The seed has to be the same: blocks have their names from it.
func (x *Index) Import(r io.Reader) error {
	i := &importer{r: r, cfg: &x.cfg, scopes: map[Scope]*scope{}}
	if err := i.all(); err != nil {
		return fmt.Errorf("conductor: import: %w", err)
	}
	x.mu.Lock()
	old := x.scopes
	x.scopes = i.scopes
	for _, s := range i.order {
		s.used.Store(x.clock.Add(1))
	}
	for _, s := range old {
		s.mu.Lock() // events that are being applied to it are through then
		s.gone = true
		x.blocks.Add(-int64(s.blocks.len()))
		s.mu.Unlock()
	}
	x.blocks.Add(int64(i.blocks)) //nolint:gosec // as many as fit
	x.mu.Unlock()
	return nil
}

// importer reads frames.
type importer struct {
	r   io.Reader
	cfg *IndexConfig
	b   []byte // what is left of the frame
	buf []byte

	scopes                map[Scope]*scope
	order                 []*scope // as they came
	last                  *scope
	places                int // of last
	blocks, names, copies uint64
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrImport}, args...)...)
}

// all reads everything.
func (i *importer) all() error {
	mark := make([]byte, len(exportMark))
	if _, err := io.ReadFull(i.r, mark); err != nil || string(mark) != exportMark {
		return cmp.Or(notEOF(err), damaged("it does not begin with %q", exportMark))
	}
	for n := 0; ; n++ {
		kind, err := i.frame()
		if err == nil && (kind == frameHead) != (n == 0) {
			err = damaged("frame %d is of kind %d", n, kind)
		}
		if err == nil {
			err = i.read(kind)
		}
		if err != nil || kind == frameEnd {
			return err
		}
	}
}

// notEOF is an error of a reader; nil if there is just nothing more to read.
func notEOF(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}

// frame reads the next frame.
func (i *importer) frame() (kind byte, err error) {
	i.buf = slices.Grow(i.buf[:0], frameHeader)[:frameHeader]
	if _, err := io.ReadFull(i.r, i.buf); err != nil {
		return 0, cmp.Or(notEOF(err), damaged("it is cut short"))
	}
	n := binary.LittleEndian.Uint32(i.buf[1:])
	if n > frameMost {
		return 0, damaged("a frame of %d bytes", n)
	}
	end := frameHeader + int(n)
	i.buf = slices.Grow(i.buf, int(n)+frameSum)[:end+frameSum]
	if _, err := io.ReadFull(i.r, i.buf[frameHeader:]); err != nil {
		return 0, cmp.Or(notEOF(err), damaged("it is cut short"))
	}
	if binary.LittleEndian.Uint32(i.buf[end:]) != crc32.Checksum(i.buf[:end], castagnoli) {
		return 0, damaged("a frame's checksum is wrong")
	}
	i.b = i.buf[frameHeader:end]
	return i.buf[0], nil
}

// read reads the body of a frame.
func (i *importer) read(kind byte) error {
	switch kind {
	case frameHead:
		if len(i.b) != 8 || binary.LittleEndian.Uint64(i.b) != i.cfg.Seed {
			return damaged("its seed is another one than %d", i.cfg.Seed)
		}
		return nil
	case frameScope:
		return i.scope()
	case frameEnd:
		want := make([]byte, 0, 32)
		for _, n := range []uint64{uint64(len(i.order)), i.blocks, i.names, i.copies} {
			want = binary.LittleEndian.AppendUint64(want, n)
		}
		if !bytes.Equal(want, i.b) {
			return damaged("a part of it is missing")
		}
		return nil
	}
	size := map[byte]int{frameBlocks: 8 + 8*words(i.places), frameNames: 16, frameCopies: 16}[kind]
	if size == 0 || i.last == nil || len(i.b)%size != 0 {
		return damaged("a frame of kind %d with %d bytes", kind, len(i.b))
	}
	for ; len(i.b) > 0; i.b = i.b[size:] {
		if err := i.entry(kind, i.b[:size]); err != nil {
			return err
		}
	}
	return nil
}

// entry reads one block, name or copy.
func (i *importer) entry(kind byte, b []byte) error {
	s, name := i.last, binary.LittleEndian.Uint64(b)
	if name == 0 {
		return damaged("a block is named 0")
	}
	switch kind {
	case frameBlocks:
		return i.block(name, b[8:])
	case frameNames:
		i.names++
		s.names.shard(name).put(name, binary.LittleEndian.Uint64(b[8:]))
	default:
		at, more := binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])
		if int(at) >= i.places || more == 0 {
			return damaged("%d copies at place %d of %d", more, at, i.places)
		}
		i.copies++
		s.copies[copyKey{name, int(at)}] = more
	}
	return nil
}

// block adds a block to the last scope.
func (i *importer) block(name uint64, b []byte) error {
	if i.blocks++; i.blocks > uint64(i.cfg.MaxBlocks) { //nolint:gosec // positive
		return damaged("it has more than %d blocks: let the index have more of them", i.cfg.MaxBlocks)
	}
	var all uint64
	last := words(i.places) - 1
	for word := range last + 1 {
		w := binary.LittleEndian.Uint64(b[8*word:])
		if word == last && i.places < 64*last+64 && w>>(i.places-64*last) != 0 {
			return damaged("a block is at a place that is none")
		}
		if all |= w; w == 0 {
			continue
		}
		was, _ := i.last.blocks.shard(name).set(name, word, w)
		for fresh := w &^ was; fresh != 0; fresh &= fresh - 1 {
			i.last.places.held[64*word+bits.TrailingZeros64(fresh)]++
		}
	}
	if all == 0 {
		return damaged("a block is nowhere")
	}
	return nil
}

// scope reads a scope, without its blocks.
func (i *importer) scope() error {
	var key Scope
	for _, to := range []*string{&key.Tenant, &key.Model, &key.LoRA, &key.Salt} {
		text, err := i.text()
		if err != nil {
			return err
		}
		*to = text
	}
	var err error
	if key.BlockSize, err = i.number(1 << 30); err != nil {
		return err
	}
	if i.scopes[key] != nil || key.BlockSize < 1 || len(i.scopes) >= i.cfg.MaxScopes {
		return damaged("a scope is there twice, has blocks of no tokens, or is one of more than %d", i.cfg.MaxScopes)
	}
	s := newScope(key, i.cfg)
	if err := i.windows(&s.places); err != nil {
		return err
	}
	if err := i.placesOf(&s.places); err != nil {
		return err
	}
	s.view.Store(s.places.view(key.BlockSize))
	i.scopes[key], i.order, i.last = s, append(i.order, s), s
	return nil
}

func (i *importer) windows(p *places) error {
	n, err := i.number(kvevent.MaxGroups)
	for ; n > 0 && err == nil; n-- {
		var group, tokens int
		if group, err = i.number(kvevent.MaxGroups - 1); err == nil {
			tokens, err = i.number(1 << 30)
		}
		p.windows[group] = tokens
	}
	return err
}

func (i *importer) placesOf(p *places) error {
	n, err := i.number(i.cfg.MaxPlaces)
	if err != nil {
		return err
	}
	for range n {
		var at place
		var rank, medium int
		if at.instance, err = i.text(); err == nil {
			rank, err = i.number(1 << 30)
		}
		if err == nil {
			medium, err = i.number(int(kvevent.Media) - 1)
		}
		if err == nil {
			at.group, err = i.number(kvevent.MaxGroups - 1)
		}
		if err != nil {
			return err
		}
		at.rank, at.medium = rank-1, kvevent.Medium(medium)
		if _, fresh, _ := p.bit(at); !fresh {
			return damaged("a place is there twice")
		}
	}
	i.places = n
	return nil
}

// number reads a number that is at most most.
func (i *importer) number(most int) (int, error) {
	v, n := binary.Uvarint(i.b)
	if n <= 0 || v > uint64(most) { //nolint:gosec // not negative
		return 0, damaged("a number in a scope is %d, at most %d", v, most)
	}
	i.b = i.b[n:]
	return int(v), nil //nolint:gosec // checked
}

func (i *importer) text() (string, error) {
	n, err := i.number(maxTextInside)
	if err != nil || n > len(i.b) {
		return "", cmp.Or(err, damaged("a text in a scope is cut short"))
	}
	s := string(i.b[:n])
	i.b = i.b[n:]
	return s, nil
}
