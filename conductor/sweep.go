package conductor

import "slices"

// Sweep gives back what clears have left: the bits of places that nobody has any more, the blocks that lie nowhere else, and
// engines' names of blocks that are gone. It goes through everything, a shard at a time, so that events wait for it no longer
// than for one, and queries not at all. Whoever owns the index calls it now and then.
func (x *Index) Sweep() {
	x.each(func(s *scope) {
		s.sweepPlaces(x)
		if s.names.len() > 2*s.blocks.len()+tableShards*shardLeast {
			s.sweepNames()
		}
	})
}

func (s *scope) sweepPlaces(x *Index) {
	s.mu.Lock()
	retired := slices.Clone(s.places.retired)
	gone := make(mask, s.places.width())
	s.mu.Unlock()
	if len(retired) == 0 {
		return
	}
	for _, bit := range retired {
		gone.set(bit)
	}
	for i := range s.blocks.shards {
		s.mu.Lock()
		if n := s.blocks.shards[i].sweep(gone); !s.gone {
			x.blocks.Add(-int64(n))
		}
		s.mu.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.copies {
		if gone[key.bit/64]&(1<<(key.bit%64)) != 0 {
			delete(s.copies, key)
		}
	}
	s.places.retired = slices.DeleteFunc(s.places.retired, func(bit int) bool { return slices.Contains(retired, bit) })
	s.places.free = append(s.places.free, retired...)
}

// sweepNames forgets what engines call blocks that are gone.
func (s *scope) sweepNames() {
	for i := range s.names.shards {
		s.mu.Lock()
		s.sweepNamesOf(&s.names.shards[i])
		s.mu.Unlock()
	}
}

func (s *scope) sweepNamesOf(sh *shard) {
	b := sh.slab.Load()
	if b == nil {
		return
	}
	var dead []uint64
	for i, key := range b.keys {
		if key == 0 {
			continue
		}
		if _, there := s.blocks.shard(b.words[i]).get(b.words[i]); !there {
			dead = append(dead, key)
		}
	}
	for _, key := range dead {
		sh.drop(key)
	}
}
