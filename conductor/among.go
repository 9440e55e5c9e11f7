package conductor

import "larder/conductor/kvevent"

// Engines tell the adapter and the size of blocks when they store them, and not when these are gone, nor when they copy them to
// another medium: they name them by hash alone. So an event without either is for those scopes of its source that know the
// hashes.

// elsewhere reports whether an event may be for another scope than it says.
func (src *Source) elsewhere(e *kvevent.Event) bool {
	return len(src.Also) > 0 && len(e.LoRA) == 0 && e.BlockSize == 0 && len(e.Tokens) == 0
}

// applyAmong applies an event to each scope of its source that knows some of its blocks. What none of them knows is left for
// the source's own scope.
func (x *Index) applyAmong(src *Source, at place, e *kvevent.Event) (rest []uint64) {
	rest = e.Hashes
	for i := range src.Also {
		s := x.find(src.Also[i])
		if s == nil || len(rest) == 0 {
			continue
		}
		known := *e
		s.mu.Lock()
		if known.Hashes, rest = s.known(rest, at.group, e.Standard); len(known.Hashes) > 0 && !s.gone {
			s.applyNamed(x, at, &known)
		}
		s.mu.Unlock()
	}
	return rest
}

// known splits engines' names of blocks into those that a scope knows, and the others.
func (s *scope) known(hashes []uint64, group int, standard bool) (known, others []uint64) {
	for _, engine := range hashes {
		key := engineKey(engine, group)
		_, there := s.names.shard(key).get(key)
		if !there && standard {
			name := named(engine)
			_, there = s.blocks.shard(name).get(name)
		}
		if there {
			known = append(known, engine)
		} else {
			others = append(others, engine)
		}
	}
	return known, others
}

// applyNamed applies an event whose blocks are all known by their names.
func (s *scope) applyNamed(x *Index, at place, e *kvevent.Event) {
	if e.Kind == kvevent.Removed {
		s.remove(x, at, e)
		return
	}
	if bit, ok := s.bit(at, e.Window); ok {
		x.counts.stored.Add(uint64(len(e.Hashes)))
		s.storeNamed(x, at, bit, e)
	}
}
