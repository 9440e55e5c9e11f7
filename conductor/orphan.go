package conductor

import (
	"slices"

	"larder/conductor/kvevent"
)

// orphans are blocks whose names cannot be told yet: what came before them is not known (its event is late, or was lost), or
// they have come without their tokens. They wait, by the engine's name of what they wait for.
type orphans struct {
	most  int
	n     int // blocks
	by    map[uint64][]orphan
	order []uint64 // what is waited for, the oldest first; some are there no more
}

// orphan is blocks of one event.
type orphan struct {
	at     place
	keys   []uint64 // what the engine calls them
	locals []uint64 // their own hashes; nil if they wait for themselves
}

func newOrphans(most int) orphans { return orphans{most: most, by: map[uint64][]orphan{}} }

// add has blocks wait. The oldest make room; it returns how many blocks those were.
func (o *orphans) add(key uint64, x orphan) (lost int) {
	if len(x.keys) > o.most {
		return len(x.keys)
	}
	for o.n+len(x.keys) > o.most && len(o.order) > 0 {
		for _, y := range o.take(o.order[0]) {
			lost += len(y.keys)
		}
		o.order = o.order[1:]
	}
	if len(o.by[key]) == 0 {
		o.order = append(o.order, key)
		o.compact()
	}
	o.by[key] = append(o.by[key], x)
	o.n += len(x.keys)
	return lost
}

// take removes what waits for a key.
func (o *orphans) take(key uint64) []orphan {
	list := o.by[key]
	delete(o.by, key)
	for i := range list {
		o.n -= len(list[i].keys)
	}
	return list
}

// compact forgets the order of what is there no more, once that is most of it.
func (o *orphans) compact() {
	if len(o.order) < 1024 || len(o.order) < 2*len(o.by) {
		return
	}
	kept := o.order[:0]
	for _, key := range o.order {
		if len(o.by[key]) > 0 {
			kept = append(kept, key)
		}
	}
	o.order = kept
}

// forget drops those of some places.
func (o *orphans) forget(which func(*place) bool) {
	for key, list := range o.by {
		kept := list[:0]
		for i := range list {
			if which(&list[i].at) {
				o.n -= len(list[i].keys)
				continue
			}
			kept = append(kept, list[i])
		}
		if o.by[key] = kept; len(kept) == 0 {
			delete(o.by, key)
		}
	}
}

// waits reports whether a block waits for itself already, at a place.
func (o *orphans) waits(key uint64, at place) bool {
	return slices.ContainsFunc(o.by[key], func(x orphan) bool { return x.locals == nil && x.at == at })
}

// remove drops a block that waits for itself, and is gone from its place.
func (o *orphans) remove(key uint64, at place) {
	list := o.by[key]
	for i, x := range list {
		if x.locals == nil && x.at == at {
			o.by[key] = append(list[:i:i], list[i+1:]...)
			if o.n--; len(o.by[key]) == 0 {
				delete(o.by, key)
			}
			return
		}
	}
}

// orphan has an event's blocks wait for their parent.
func (s *scope) orphan(x *Index, at place, e *kvevent.Event) {
	o := orphan{at: at}
	for i, engine := range e.Hashes {
		extra := uint64(0)
		if e.Extras != nil {
			extra = e.Extras[i]
		}
		o.keys = append(o.keys, engine)
		o.locals = append(o.locals, s.hash.local(e.Tokens[i*e.BlockSize:(i+1)*e.BlockSize], extra))
	}
	x.counts.orphaned.Add(uint64(len(o.keys)))
	x.counts.lost.Add(uint64(s.orphans.add(engineKey(e.Parent, at.group), o))) //nolint:gosec // not negative
}

// storeNamed notes blocks that come without their tokens: those that are known by what the engine calls them, or whose names
// are the standard's. Others wait until they are.
func (s *scope) storeNamed(x *Index, at place, bit int, e *kvevent.Event) {
	for _, engine := range e.Hashes {
		if name, known := s.nameOf(engine, at.group, e.Standard); known {
			s.add(x, name, bit, at.once)
			continue
		}
		if at.once && s.orphans.waits(engineKey(engine, at.group), at) {
			continue
		}
		x.counts.orphaned.Add(1)
		lost := s.orphans.add(engineKey(engine, at.group), orphan{at: at, keys: []uint64{engine}})
		x.counts.lost.Add(uint64(lost)) //nolint:gosec // not negative
	}
}

// adopt notes blocks that have waited for one that is known now, and those that have waited for them.
func (s *scope) adopt(x *Index, key uint64, group int, name uint64) {
	for _, o := range s.orphans.take(key) {
		bit, ok := s.bit(o.at, s.places.windows[o.at.group])
		if !ok {
			continue
		}
		x.counts.stitched.Add(uint64(len(o.keys)))
		if o.locals == nil {
			s.add(x, name, bit, o.at.once)
			continue
		}
		parent := name
		for i, engine := range o.keys {
			parent = s.hash.next(parent, o.locals[i])
			s.add(x, parent, bit, o.at.once)
			s.alias(x, engine, group, parent)
		}
	}
}
