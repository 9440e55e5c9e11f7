package conductor

import (
	"cmp"
	"slices"
	"sync/atomic"

	"larder/conductor/kvevent"
)

// use counts the queries that found something at an instance, and the blocks that it let go.
type use struct {
	queries, tokens, removed atomic.Uint64
	last                     atomic.Int64 // nanoseconds since 1970
}

// note takes note of a query that found so many tokens.
func (u *use) note(tokens int, now int64) {
	if tokens == 0 {
		return
	}
	u.queries.Add(1)
	u.tokens.Add(uint64(tokens)) //nolint:gosec // positive
	u.last.Store(now)
}

// ScopeView is what an index knows of one scope.
type ScopeView struct {
	Scope

	Blocks    int                // different ones
	Replicas  int                // copies of them: each place counts
	Media     [kvevent.Media]int // the copies by medium
	Orphans   int                // blocks that wait for what came before them
	Instances []InstanceView     // in the order of their names
}

// InstanceView is what an index knows of one engine within a scope.
type InstanceView struct {
	Instance   string
	Blocks     int // copies at all of its places
	Media      [kvevent.Media]int
	Ranks      []int  // of data parallelism
	Removed    uint64 // copies that it said are gone, without clears
	Queries    uint64 // that found something there
	HitTokens  uint64 // that those found
	LastAccess int64  // nanoseconds since 1970 of the last one; 0 for never
}

// View tells what an index knows, scope by scope, in the order of their names: of a tenant, or of all if that is "".
// It takes no longer if there are more blocks.
func (x *Index) View(tenant string) []ScopeView {
	var list []ScopeView
	x.each(func(s *scope) {
		if tenant == "" || s.key.Tenant == tenant {
			list = append(list, s.viewOf())
		}
	})
	slices.SortFunc(list, func(a, b ScopeView) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Model, b.Model), cmp.Compare(a.LoRA, b.LoRA),
			cmp.Compare(a.BlockSize, b.BlockSize), cmp.Compare(a.Salt, b.Salt))
	})
	return list
}

func (s *scope) viewOf() ScopeView {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := ScopeView{Scope: s.key, Blocks: s.blocks.len(), Orphans: s.orphans.n}
	at := map[string]int{}
	for p, bit := range s.places.bits {
		i, there := at[p.instance]
		if !there {
			i = len(v.Instances)
			at[p.instance] = i
			u := s.places.uses[p.instance]
			v.Instances = append(v.Instances, InstanceView{
				Instance: p.instance, Removed: u.removed.Load(),
				Queries: u.queries.Load(), HitTokens: u.tokens.Load(), LastAccess: u.last.Load(),
			})
		}
		n, inst := s.places.held[bit], &v.Instances[i]
		inst.Blocks += n
		inst.Media[p.medium] += n
		v.Replicas += n
		v.Media[p.medium] += n
		if p.rank != kvevent.NoRank && !slices.Contains(inst.Ranks, p.rank) {
			inst.Ranks = append(inst.Ranks, p.rank)
		}
	}
	for i := range v.Instances {
		slices.Sort(v.Instances[i].Ranks)
	}
	slices.SortFunc(v.Instances, func(a, b InstanceView) int { return cmp.Compare(a.Instance, b.Instance) })
	return v
}

// Counts are what has happened to an index since it was made, in blocks unless said otherwise.
type Counts struct {
	Stored   uint64 // told of, on all places
	Removed  uint64
	Unknown  uint64 // removed that were not known
	Orphaned uint64 // waited for what comes before them
	Stitched uint64 // of those, the ones that have found it
	Lost     uint64 // of those, the ones that had to make room
	Refused  uint64 // had no room
	Cleared  uint64 // clears, of instances or some of their places
	Evicted  uint64 // scopes that made room for others
	Blocks   int    // held now
	Scopes   int    // held now
}

// Counts tells what has happened to the index.
func (x *Index) Counts() Counts {
	c := &x.counts
	x.mu.RLock()
	scopes := len(x.scopes)
	x.mu.RUnlock()
	return Counts{
		Stored: c.stored.Load(), Removed: c.removed.Load(), Unknown: c.unknown.Load(), Orphaned: c.orphaned.Load(),
		Stitched: c.stitched.Load(), Lost: c.lost.Load(), Refused: c.refused.Load(), Cleared: c.cleared.Load(),
		Evicted: c.evictedScopes.Load(), Blocks: int(x.blocks.Load()), Scopes: scopes,
	}
}

// Seed is what names are made with; see [Names].
func (x *Index) Seed() uint64 { return x.cfg.Seed }
