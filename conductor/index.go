package conductor

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"larder/conductor/kvevent"
)

// Scope is what blocks can be shared within: prompts of different scopes have nothing in common, and who asks in one never
// learns of another. A user's own salt sets prompts apart within a scope.
type Scope struct {
	Tenant, Model, LoRA string
	BlockSize           int    // tokens
	Salt                string // of whole engines
}

// Source is one publisher of events: an engine, or one of its ranks.
type Source struct {
	Instance string
	Scope    Scope // BlockSize and LoRA are those of events that name none
	Rank     int   // of events that name none; kvevent.NoRank if the engine has none
	// Also are other scopes that the source has stored blocks in: of adapters, or of groups with larger blocks. Events that name
	// neither are for the scope that knows their blocks.
	Also []Scope
	// Once says that events tell what is there, however often they do: a block that is stored twice and removed once is gone.
	// Others' copies are counted.
	Once bool
	// Epoch tells what the source says apart from what it said before it began to list anew all that it has: see Supersede.
	Epoch uint32
}

// IndexConfig bounds an index. The zero value of each field stands for its default.
type IndexConfig struct {
	Seed      uint64 // of names
	MaxBlocks int    // of all scopes; 64Mi, some 3 GiB. Beyond that the scope that was used least lately goes.
	MaxScopes int    // 4096
	// MaxOrphans bounds the blocks that wait for what came before them, in each scope; 64Ki.
	MaxOrphans int
	// MaxPlaces bounds the places of a scope, each an instance's rank, medium and group; 4096: half a KiB a block.
	MaxPlaces int
}

// Index tells where blocks are. Its methods may be called concurrently; events of one source are to be applied in order.
type Index struct {
	cfg    IndexConfig
	blocks atomic.Int64 // of all scopes
	clock  atomic.Int64 // counts uses of scopes

	mu     sync.RWMutex
	scopes map[Scope]*scope

	counts counts
}

// counts are what metrics tell; see [Counts].
type counts struct {
	stored, removed, cleared, unknown, orphaned, stitched, lost, refused, evictedScopes atomic.Uint64
}

// scope is the index of one scope.
type scope struct {
	key    Scope
	used   atomic.Int64 // of the index's clock
	blocks table        // by name: places
	names  table        // by engine's name: name
	view   atomic.Pointer[view]

	mu      sync.Mutex // of what follows; held while a source's event is applied
	places  places
	copies  map[copyKey]uint32 // of blocks that lie more than once at a place: how many more
	orphans orphans
	hash    hasher
	list    []uint64 // scratch
	near    uint64
	gone    bool // it has been evicted
}

// copyKey is a block at a place.
type copyKey struct {
	name uint64
	bit  int
}

// NewIndex makes an empty index.
func NewIndex(cfg IndexConfig) *Index {
	if cfg.MaxBlocks <= 0 {
		cfg.MaxBlocks = 64 << 20
	}
	if cfg.MaxScopes <= 0 {
		cfg.MaxScopes = 4096
	}
	if cfg.MaxOrphans <= 0 {
		cfg.MaxOrphans = 64 << 10
	}
	if cfg.MaxPlaces <= 0 {
		cfg.MaxPlaces = 4096
	}
	return &Index{cfg: cfg, scopes: map[Scope]*scope{}}
}

// ErrScope says that a scope cannot be, or that there are too many.
var ErrScope = errors.New("conductor: a scope has a block size of 1 token or more")

// find is a scope, nil if nothing is known of it.
func (x *Index) find(key Scope) *scope {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := x.scopes[key]
	if s != nil {
		s.used.Store(x.clock.Add(1))
	}
	return s
}

// make is a scope, which is added if it is new; the one that was used least lately makes room for it.
func (x *Index) make(key Scope) (*scope, error) {
	if s := x.find(key); s != nil {
		return s, nil
	}
	if key.BlockSize < 1 {
		return nil, fmt.Errorf("%w, not %d", ErrScope, key.BlockSize)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if s := x.scopes[key]; s != nil {
		return s, nil
	}
	if len(x.scopes) >= x.cfg.MaxScopes {
		x.evict(nil)
	}
	s := newScope(key, &x.cfg)
	s.used.Store(x.clock.Add(1))
	x.scopes[key] = s
	return s, nil
}

func newScope(key Scope, cfg *IndexConfig) *scope {
	s := &scope{key: key, places: newPlaces(cfg.MaxPlaces), copies: map[copyKey]uint32{}, orphans: newOrphans(cfg.MaxOrphans)}
	s.hash = hasher{seed: cfg.Seed}
	s.view.Store(s.places.view(key.BlockSize))
	return s
}

// evict forgets the scope that was used least lately, but not keep. It reports false if there is none. mu is held.
func (x *Index) evict(keep *scope) bool {
	var coldest *scope
	for _, s := range x.scopes {
		if s != keep && (coldest == nil || s.used.Load() < coldest.used.Load()) {
			coldest = s
		}
	}
	if coldest == nil {
		return false
	}
	delete(x.scopes, coldest.key)
	coldest.mu.Lock() // events that are being applied to it are through then
	defer coldest.mu.Unlock()
	coldest.gone = true
	x.blocks.Add(-int64(coldest.blocks.len()))
	x.counts.evictedScopes.Add(1)
	return true
}

// room has cold scopes make room for n more blocks. It reports false if the scope has all of it by itself.
func (x *Index) room(s *scope, n int) bool {
	if x.blocks.Load()+int64(n) <= int64(x.cfg.MaxBlocks) {
		return true
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for x.blocks.Load()+int64(n) > int64(x.cfg.MaxBlocks) {
		if !x.evict(s) {
			return false
		}
	}
	return true
}

// Apply takes note of an event. rank is its batch's, see [kvevent.Batch.RankOf]; if none is named it is the source's.
func (x *Index) Apply(src *Source, e *kvevent.Event, rank int) error {
	if rank == kvevent.NoRank {
		rank = src.Rank
	}
	if e.Kind == kvevent.Cleared {
		x.ClearTenant(src.Scope.Tenant, src.Instance, rank, e.Medium)
		x.counts.cleared.Add(1)
		return nil
	}
	at := place{instance: src.Instance, rank: rank, medium: e.Medium, group: e.Group, once: src.Once, epoch: src.Epoch}
	if src.elsewhere(e) {
		rest := *e
		if rest.Hashes = x.applyAmong(src, at, e); len(rest.Hashes) == 0 {
			return nil
		}
		e = &rest
	}
	s, err := x.make(src.scopeOf(e))
	if err != nil {
		return err
	}
	if e.Kind == kvevent.Stored && !x.room(s, len(e.Hashes)) {
		x.counts.refused.Add(uint64(len(e.Hashes)))
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return nil // it was evicted just now, and what it had with it
	}
	if e.Kind == kvevent.Removed {
		s.remove(x, at, e)
		return nil
	}
	return s.store(x, at, e)
}

// scopeOf is the scope of an event: what it says itself counts.
func (src *Source) scopeOf(e *kvevent.Event) Scope {
	key := src.Scope
	if e.BlockSize > 0 {
		key.BlockSize = e.BlockSize
	}
	if len(e.LoRA) > 0 {
		key.LoRA = string(e.LoRA)
	}
	return key
}

// Clear forgets what lies at the places of an instance: of a rank, if that is not kvevent.NoRank, and of a medium, if that
// is not kvevent.Media. It takes no longer if there is much of it; Sweep gives the memory back.
func (x *Index) Clear(instance string, rank int, medium kvevent.Medium) {
	x.retire("", func(p *place) bool { return p.within(instance, rank, medium) })
}

// ClearTenant is Clear for what one tenant has there: others may have engines of the same name.
func (x *Index) ClearTenant(tenant, instance string, rank int, medium kvevent.Medium) {
	x.retire(tenant, func(p *place) bool { return p.within(instance, rank, medium) })
}

// ClearRank is ClearTenant for a rank alone: kvevent.NoRank stands for what lies there of no rank.
func (x *Index) ClearRank(tenant, instance string, rank int, medium kvevent.Medium) {
	x.retire(tenant, func(p *place) bool { return p.rank == rank && p.within(instance, rank, medium) })
}

// Supersede forgets what a source that says what is there has said in other epochs than its present one: until then both
// count. It takes no longer than Clear does.
func (x *Index) Supersede(src *Source) {
	x.retire("", func(p *place) bool { return p.once && p.instance == src.Instance && p.epoch != src.Epoch })
}

// retire forgets what lies at some places of a tenant, or of all if that is "".
func (x *Index) retire(tenant string, which func(*place) bool) {
	x.each(func(s *scope) {
		if tenant != "" && s.key.Tenant != tenant {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.places.retire(which) > 0 {
			s.view.Store(s.places.view(s.key.BlockSize))
		}
		s.orphans.forget(which)
	})
}

// each calls fn for every scope.
func (x *Index) each(fn func(*scope)) {
	x.mu.RLock()
	all := make([]*scope, 0, len(x.scopes))
	for _, s := range x.scopes {
		all = append(all, s)
	}
	x.mu.RUnlock()
	for _, s := range all {
		fn(s)
	}
}

// bit is a place's. What is seen of places changes with the first block there.
func (s *scope) bit(at place, window int) (int, bool) {
	bit, fresh, ok := s.places.bit(at)
	if ok && (fresh || s.places.windows[at.group] != window) {
		s.places.windows[at.group] = window
		s.view.Store(s.places.view(s.key.BlockSize))
	}
	return bit, ok
}

// store takes note of blocks. Those without tokens are followed by their engines' names.
func (s *scope) store(x *Index, at place, e *kvevent.Event) error {
	bit, ok := s.bit(at, e.Window)
	if !ok {
		return fmt.Errorf("%w: more than %d places of one scope: instances, ranks, media and groups", ErrScope, x.cfg.MaxPlaces)
	}
	x.counts.stored.Add(uint64(len(e.Hashes)))
	switch {
	case len(e.Tokens) == 0:
		s.storeNamed(x, at, bit, e)
		return nil
	case e.HasParent:
		parent, known := s.nameOf(e.Parent, at.group, e.Standard)
		if !known {
			s.orphan(x, at, e)
			return nil
		}
		s.chain(x, at, bit, e, parent)
	default:
		s.chain(x, at, bit, e, 0)
	}
	return nil
}

// chain notes the blocks of an event, which follow parent, or begin a prompt if that is 0.
func (s *scope) chain(x *Index, at place, bit int, e *kvevent.Event, parent uint64) {
	n, near := e.BlockSize, uint64(0)
	s.list = s.list[:0]
	for i, engine := range e.Hashes {
		extra := uint64(0)
		if e.Extras != nil {
			extra = e.Extras[i]
		}
		local := s.hash.local(e.Tokens[i*n:(i+1)*n], extra)
		if parent == 0 {
			parent = s.hash.first(local, e.Salt)
		} else {
			parent = s.hash.next(parent, local)
		}
		s.list = append(s.list, parent)
		key := engineKey(engine, at.group)
		near += s.blocks.shard(parent).touch(parent) + s.names.shard(key).touch(key)
	}
	s.near = near // or the compiler would leave it out
	for i, engine := range e.Hashes {
		s.add(x, s.list[i], bit, at.once)
		s.alias(x, engine, at.group, s.list[i])
	}
}

// add notes that a block lies at a place; once says that it is no copy if it is known to be there.
func (s *scope) add(x *Index, name uint64, bit int, once bool) {
	was, fresh := s.blocks.shard(name).set(name, bit/64, 1<<(bit%64))
	if fresh {
		x.blocks.Add(1)
	}
	switch there := was&(1<<(bit%64)) != 0; {
	case !there:
		s.places.held[bit]++
	case !once:
		s.copies[copyKey{name, bit}]++
	}
}

// engineKey is an engine's name of a block as a key: groups name their blocks by themselves. Tables go by a key's lowest and highest
// bits, and engines' names may be numbers that differ in the middle alone: so all bits are mixed, as MurmurHash3 ends.
func engineKey(engine uint64, group int) uint64 {
	k := engine ^ uint64(group)*0x9e3779b97f4a7c15 //nolint:gosec // not negative
	k = (k ^ k>>33) * 0xff51afd7ed558ccd
	k = (k ^ k>>33) * 0xc4ceb9fe1a85ec53
	return named(k ^ k>>33)
}

// alias notes what an engine calls a block, and has orphans follow that waited for it.
func (s *scope) alias(x *Index, engine uint64, group int, name uint64) {
	key := engineKey(engine, group)
	s.names.shard(key).put(key, name)
	if s.orphans.n > 0 {
		s.adopt(x, key, group, name)
	}
}

// nameOf is the name of a block that an engine calls so.
func (s *scope) nameOf(engine uint64, group int, standard bool) (name uint64, known bool) {
	key := engineKey(engine, group)
	name, known = s.names.shard(key).get(key)
	if !known && standard {
		return named(engine), true
	}
	return name, known
}

// remove takes note that blocks are gone from a place.
func (s *scope) remove(x *Index, at place, e *kvevent.Event) {
	x.counts.removed.Add(uint64(len(e.Hashes)))
	bit, there := s.places.bits[at]
	if there {
		s.places.uses[at.instance].removed.Add(uint64(len(e.Hashes)))
	}
	near := uint64(0)
	for _, engine := range e.Hashes {
		key := engineKey(engine, at.group)
		near += s.names.shard(key).touch(key)
	}
	s.near = near
	for _, engine := range e.Hashes {
		name, known := s.nameOf(engine, at.group, e.Standard)
		switch {
		case !known || !there:
			x.counts.unknown.Add(1)
			s.orphans.remove(engineKey(engine, at.group), at)
		case s.take(x, name, bit):
			key := engineKey(engine, at.group)
			s.names.shard(key).drop(key)
		}
	}
}

// take notes that one copy of a block is gone from a place. It reports whether the block lies nowhere any more.
func (s *scope) take(x *Index, name uint64, bit int) (dead bool) {
	if len(s.copies) > 0 && s.takeCopy(copyKey{name, bit}) {
		return false
	}
	was, dead := s.blocks.shard(name).clear(name, bit)
	if was {
		s.places.held[bit]--
	}
	if dead {
		x.blocks.Add(-1)
	}
	return dead
}

// takeCopy notes that one of several copies of a block is gone. It reports false if there was only one.
func (s *scope) takeCopy(key copyKey) bool {
	switch more := s.copies[key]; more {
	case 0:
		return false
	case 1:
		delete(s.copies, key)
	default:
		s.copies[key] = more - 1
	}
	return true
}

// Query tells how much of a prompt each engine of a scope holds. What is left of the prompt after its whole blocks does not
// count. salt is what the user gave, if anything.
func (x *Index) Query(key Scope, tokens []uint32, salt []byte) []Match {
	s := x.find(key)
	if s == nil {
		return nil
	}
	m := newMatcher(s.view.Load())
	h := hasher{seed: x.cfg.Seed, buf: make([]byte, 0, 4*key.BlockSize)}
	name := uint64(0)
	for m.alive > 0 && len(tokens) >= key.BlockSize {
		local := h.local(tokens[:key.BlockSize], 0)
		if name == 0 {
			name = h.first(local, salt)
		} else {
			name = h.next(name, local)
		}
		tokens = tokens[key.BlockSize:]
		if !s.look(m, name) {
			break
		}
	}
	return m.matches(key.BlockSize)
}

// QueryNames is Query for a prompt whose blocks' names are known: RFC 1527's rolling hashes with the index's seed.
func (x *Index) QueryNames(key Scope, names []uint64) []Match {
	s := x.find(key)
	if s == nil {
		return nil
	}
	m := newMatcher(s.view.Load())
	for _, name := range names {
		if m.alive == 0 || !s.look(m, named(name)) {
			break
		}
	}
	return m.matches(key.BlockSize)
}

// QueryHashes is Query for a prompt whose blocks are known by what engines of the scope call them, or, those that no engine calls
// so, by RFC 1527's rolling hashes with the index's seed.
func (x *Index) QueryHashes(key Scope, hashes []uint64) []Match {
	s := x.find(key)
	if s == nil {
		return nil
	}
	m := newMatcher(s.view.Load())
	var name [1]uint64
	for _, engine := range hashes {
		at := engineKey(engine, 0)
		if s.names.shard(at).read(at, name[:]) == 0 {
			name[0] = named(engine)
		}
		if m.alive == 0 || !s.look(m, name[0]) {
			break
		}
	}
	return m.matches(key.BlockSize)
}

// look has a matcher see where a block lies.
func (s *scope) look(m *matcher, name uint64) bool {
	k := s.blocks.shard(name).read(name, m.words)
	return m.block(m.words[:k])
}
