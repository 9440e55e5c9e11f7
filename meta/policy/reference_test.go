package policy_test

import (
	"cmp"
	"maps"
	"slices"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

type (
	slot  = policy.Slot
	known = policytest.Entry
)

// reference is a policy written for being obviously right: slices and maps,
// time linear in the entries. victims returns the entries that would be taken,
// in order, if those in stays were kept and every other was taken.
type reference interface {
	add(s slot, info known)
	unpin(s slot)
	touch(s slot, n uint32)
	pin(s slot)
	drop(s slot)  // deleted, wherever it is
	evict(s slot) // by decision
	victims(stays map[slot]bool) []slot
}

func newReference(name string) reference {
	base := refBase{info: map[slot]known{}, uses: map[slot]uint32{}, last: map[slot]int{}, held: map[slot]bool{}}
	switch name {
	case "lru", "fifo":
		return &refSorted{base, name == "lru", func(r *refBase, a, b slot) int { return cmp.Compare(r.last[a], r.last[b]) }}
	case "lfu":
		return &refSorted{base, true, func(r *refBase, a, b slot) int {
			return cmp.Or(cmp.Compare(r.uses[a], r.uses[b]), cmp.Compare(r.last[a], r.last[b]))
		}}
	case "length-aware":
		return &refSorted{base, true, func(r *refBase, a, b slot) int {
			return cmp.Or(cmp.Compare(r.uses[a], r.uses[b]), cmp.Compare(r.info[b].Index, r.info[a].Index),
				cmp.Compare(r.last[a], r.last[b]))
		}}
	case "ttl":
		return &refSorted{base, false, func(r *refBase, a, b slot) int {
			return cmp.Or(cmp.Compare(expirySecond(r.info[a]), expirySecond(r.info[b])), cmp.Compare(r.last[a], r.last[b]))
		}}
	case "none":
		return &refSorted{base, false, func(_ *refBase, a, b slot) int { return cmp.Compare(a, b) }}
	case "sieve":
		return &refSieve{refBase: base, visited: map[slot]bool{}}
	case "s3fifo":
		return &refS3{refBase: base, count: map[slot]int{}, wasMain: map[slot]bool{}}
	case "prefix-lru":
		return &refPrefix{refBase: base, parent: map[slot]slot{}}
	}
	return nil
}

// referenceTTLMS is the life without an own one; lives below 512 s are exact to
// a second.
const referenceTTLMS = 100_000

func expirySecond(i known) uint64 {
	at := i.ExpiresMS
	if at == 0 {
		at = i.AddedMS + referenceTTLMS
	}
	return (at + 999) / 1000
}

type refBase struct {
	info  map[slot]known
	uses  map[slot]uint32
	last  map[slot]int
	held  map[slot]bool
	clock int
}

func (r *refBase) note(s slot) { r.clock++; r.last[s] = r.clock }

func (r *refBase) copyBase() refBase {
	return refBase{maps.Clone(r.info), maps.Clone(r.uses), maps.Clone(r.last), maps.Clone(r.held), r.clock}
}

func without(list []slot, s slot) []slot {
	return slices.DeleteFunc(slices.Clone(list), func(x slot) bool { return x == s })
}

// refSorted sorts all entries for every question.
type refSorted struct {
	refBase

	moves bool // a use changes the place
	order func(r *refBase, a, b slot) int
}

func (r *refSorted) add(s slot, info known) {
	r.info[s], r.uses[s], r.held[s] = info, 1, true
	r.note(s)
}
func (r *refSorted) unpin(s slot) { r.held[s] = true; r.note(s) }
func (r *refSorted) pin(s slot)   { delete(r.held, s) }
func (r *refSorted) touch(s slot, n uint32) {
	if r.moves {
		r.uses[s] = min(r.uses[s]+n, 4095)
		r.note(s)
	}
}
func (r *refSorted) drop(s slot)  { delete(r.held, s) }
func (r *refSorted) evict(s slot) { delete(r.held, s) }
func (r *refSorted) victims(stays map[slot]bool) []slot {
	all := slices.DeleteFunc(slices.Collect(maps.Keys(r.held)), func(s slot) bool { return stays[s] })
	slices.SortFunc(all, func(a, b slot) int { return r.order(&r.refBase, a, b) })
	return all
}

// refSieve is the paper's pseudo-code on a slice from oldest to newest; hand is
// an index, len(queue) or more being the start.
type refSieve struct {
	refBase

	queue   []slot
	visited map[slot]bool
	hand    int
	rounds  int // how often the hand came to the newest end
}

func (r *refSieve) add(s slot, info known) { r.info[s] = info; r.visited[s] = false; r.unpin(s) }

func (r *refSieve) unpin(s slot) {
	if r.hand >= len(r.queue) {
		r.hand = 0 // it stood past the end, that is at the start
	}
	r.queue = append(r.queue, s)
	r.visited[s] = false
}
func (r *refSieve) touch(s slot, _ uint32) { r.visited[s] = true }

func (r *refSieve) cut(s slot) {
	i := slices.Index(r.queue, s)
	if i < 0 {
		return
	}
	r.queue = slices.Delete(slices.Clone(r.queue), i, i+1)
	if r.hand > i {
		r.hand--
	}
	if r.hand >= len(r.queue) {
		r.hand = 0
	}
}
func (r *refSieve) pin(s slot)  { r.cut(s) }
func (r *refSieve) drop(s slot) { r.cut(s) }

func (r *refSieve) step() {
	if r.hand++; r.hand >= len(r.queue) {
		r.hand, r.rounds = 0, r.rounds+1
	}
}

func (r *refSieve) evict(s slot) {
	for r.queue[r.hand] != s {
		r.visited[r.queue[r.hand]] = false
		r.step()
	}
	r.cut(s)
}

func (r *refSieve) victims(stays map[slot]bool) []slot {
	c := &refSieve{queue: slices.Clone(r.queue), visited: maps.Clone(r.visited), hand: r.hand}
	var out []slot
	for {
		left := slices.ContainsFunc(c.queue, func(s slot) bool { return !stays[s] })
		if !left {
			return out
		}
		for c.visited[c.queue[c.hand]] || stays[c.queue[c.hand]] {
			c.visited[c.queue[c.hand]] = false
			c.step()
		}
		s := c.queue[c.hand]
		out = append(out, s)
		c.cut(s)
	}
}

// refS3 is the paper's pseudo-code on slices from oldest to newest.
type refS3 struct {
	refBase

	small, main []slot
	count       map[slot]int
	ghosts      []uint64 // oldest first; 0 where one was taken
	wasMain     map[slot]bool
}

func (r *refS3) add(s slot, info known) {
	r.info[s], r.count[s], r.wasMain[s] = info, 0, false
	r.unpin(s)
}

func (r *refS3) unpin(s slot) {
	if i := slices.Index(r.ghosts, r.info[s].KeyHash); i >= 0 {
		r.ghosts[i] = 0
		r.wasMain[s] = true
	}
	if r.wasMain[s] {
		r.main = append(slices.Clone(r.main), s)
	} else {
		r.small = append(slices.Clone(r.small), s)
	}
}

func (r *refS3) touch(s slot, n uint32) { r.count[s] = min(3, r.count[s]+int(n)) }

func (r *refS3) pin(s slot) {
	r.wasMain[s] = slices.Contains(r.main, s)
	r.drop(s)
}

func (r *refS3) drop(s slot) { r.small, r.main = without(r.small, s), without(r.main, s) }

func (r *refS3) promote(x slot) {
	r.small = without(r.small, x)
	r.main = append(r.main, x)
	r.count[x] = 0
}

func (r *refS3) evict(s slot) {
	n := len(r.small) + len(r.main)
	if i := slices.Index(r.small, s); i >= 0 {
		for _, x := range slices.Clone(r.small[:i]) {
			if r.count[x] > 1 {
				r.promote(x)
			}
		}
		r.small = without(r.small, s)
		limit := max(1, n-n/10)
		if over := len(r.ghosts) - limit + 1; over > 0 {
			r.ghosts = r.ghosts[over:]
		}
		if i := slices.Index(r.ghosts, r.info[s].KeyHash); i >= 0 {
			r.ghosts[i] = 0
		}
		r.ghosts = append(slices.Clone(r.ghosts), r.info[s].KeyHash)
		return
	}
	if len(r.small)*10 >= n {
		for len(r.small) > 0 && r.count[r.small[0]] > 1 {
			r.promote(r.small[0])
		}
	}
	spent := slices.ContainsFunc(r.main, func(x slot) bool { return r.count[x] == 0 })
	for i := 0; ; {
		x := r.main[i]
		switch {
		case x == s && (spent || r.count[x] == 0):
			r.main = without(r.main, s)
			return
		case r.count[x] == 0:
			i++
		default:
			r.count[x]--
			r.main = append(without(r.main, x), x)
		}
	}
}

// victims plays the paper's eviction on copies; an entry that stays is offered
// once, where it would have left, and keeps its place.
func (r *refS3) victims(stays map[slot]bool) []slot {
	small, main, count := slices.Clone(r.small), slices.Clone(r.main), maps.Clone(r.count)
	inSmall, inMain := len(small), len(main)
	var out []slot
	pass := func(s slot, in *int) {
		if !stays[s] {
			out = append(out, s)
			*in--
		}
	}
	fromSmall := func() bool {
		for len(small) > 0 {
			s := small[0]
			small = small[1:]
			if count[s] <= 1 {
				pass(s, &inSmall)
				return true
			}
			inSmall, inMain = inSmall-1, inMain+1
			main, count[s] = append(main, s), 0
		}
		return false
	}
	for len(small)+len(main) > 0 {
		if inSmall*10 >= inSmall+inMain && fromSmall() {
			continue
		}
		if len(main) == 0 {
			fromSmall()
			continue
		}
		for count[main[0]] > 0 {
			count[main[0]]--
			main = append(main[1:], main[0])
		}
		s := main[0]
		main = main[1:]
		pass(s, &inMain)
	}
	return out
}

// refPrefix keeps the whole tree, and the leaves in a slice from cold to hot.
type refPrefix struct {
	refBase

	parent map[slot]slot // of live entries, pinned or not
	leaves []slot
}

func (r *refPrefix) childless(s slot) bool {
	for _, p := range r.parent {
		if p == s {
			return false
		}
	}
	return true
}

func (r *refPrefix) add(s slot, info known) {
	r.parent[s] = info.Parent
	r.leaves = without(r.leaves, info.Parent)
	r.unpin(s)
}

func (r *refPrefix) unpin(s slot) {
	r.held[s] = true
	r.note(s)
	if r.childless(s) {
		r.leaves = append(r.leaves, s)
	}
}

func (r *refPrefix) touch(s slot, _ uint32) {
	r.note(s)
	if r.childless(s) {
		r.leaves = append(without(r.leaves, s), s)
	}
}

func (r *refPrefix) pin(s slot) { delete(r.held, s); r.leaves = without(r.leaves, s) }

func (r *refPrefix) drop(s slot) {
	parent := r.parent[s]
	r.pin(s)
	delete(r.parent, s)
	for c, p := range r.parent {
		if p == s {
			r.parent[c] = policy.None
		}
	}
	if !r.held[parent] || !r.childless(parent) {
		return
	}
	if r.last[parent] > r.last[s] {
		r.leaves = append(r.leaves, parent)
	} else {
		r.leaves = slices.Insert(slices.Clone(r.leaves), 0, parent)
	}
}

func (r *refPrefix) evict(s slot) { r.drop(s) }

func (r *refPrefix) victims(stays map[slot]bool) []slot {
	c := &refPrefix{refBase: r.copyBase(), parent: maps.Clone(r.parent), leaves: slices.Clone(r.leaves)}
	var out []slot
	for {
		i := slices.IndexFunc(c.leaves, func(s slot) bool { return !stays[s] })
		if i < 0 {
			return out
		}
		out = append(out, c.leaves[i])
		c.drop(c.leaves[i])
	}
}
