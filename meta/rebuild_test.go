package meta

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/protocol"
)

// twin rebuilds a second machine from the store and applies to it what the pool applies to its own from here on.
type twin struct {
	*pool
	m2   *Machine
	from int
}

func (p *pool) twin() *twin {
	return &twin{pool: p, m2: p.rebuilt(), from: len(p.log)}
}

// same applies to the rebuilt machine what the first one has applied since, and compares.
func (w *twin) same() {
	w.tb.Helper()
	base := w.index - uint64(len(w.log))
	for ; w.from < len(w.log); w.from++ {
		var out Results
		require.NoError(w.tb, w.m2.Apply(base+uint64(w.from)+1, w.log[w.from], &out))
	}
	requireSame(w.tb, w.m, w.m2)
}

func (p *pool) usePolicy(name string) {
	set := p.m.Settings()
	set.Policy = name
	code, _ := p.apply(Header{}, &SetSettings{Settings: set})
	require.Zero(p.tb, code)
}

// A context whose only entry is dead must survive that entry's replacement.
func TestRegisterReplacesTheOnlyEntryOfItsContext(t *testing.T) {
	p := newPool(t)
	p.device(64 << 20)
	id := p.open("a")
	_, r := p.alloc(id, &protocol.AllocRequest{Size: 1 << 20, PageSize: 64 << 10})
	ctx := &protocol.Context{Model: "m"}
	e := entryAt("k", r, 0)
	e.TTLMS = 10
	require.True(t, p.register(id, ctx, e)[0].New)
	p.now += 20
	require.True(t, p.register(id, ctx, entryAt("k", r, 1))[0].New)
	p.rebuilt()
}

// Pinning again moves a pin's end, whichever end it had.
func TestPinAgainMovesItsEnd(t *testing.T) {
	for _, c := range []struct{ first, second uint64 }{{0, 5000}, {5000, 0}, {5000, 9000}} {
		t.Run(fmt.Sprintf("%d then %d", c.first, c.second), func(t *testing.T) {
			p := newPool(t)
			p.device(64 << 20)
			id := p.open("a")
			_, r := p.alloc(id, &protocol.AllocRequest{Size: 1 << 20, PageSize: 64 << 10})
			p.register(id, nil, entryAt("k", r, 0))
			for _, until := range []uint64{c.first, c.second} {
				code, _ := p.do(id, &Pin{Class: ClassHard, Owner: "o", Until: until, Keys: [][]byte{[]byte("k")}})
				require.Zero(t, code)
			}
			at, timed := p.m.NextPinExpiry()
			require.Equal(t, c.second != 0, timed)
			require.Equal(t, c.second, at)
			w := p.twin()
			p.now = 6000
			p.apply(Header{}, &ExpirePins{})
			w.same()
			p.do(id, &Pin{Undo: true, Class: ClassHard, Owner: "o", Keys: [][]byte{[]byte("k")}})
			_, timed = p.m.NextPinExpiry()
			require.False(t, timed)
			p.now = 10_000
			p.apply(Header{}, &ExpirePins{})
			w.same()
		})
	}
}

// What is dropped of a region, and in which order, must not depend on whether the machine was rebuilt.
func TestEmptyingARegionAfterARebuild(t *testing.T) {
	p := newPool(t)
	p.device(256 << 20)
	a := p.open("a")
	pages := MaxDropPerCommand + 100
	_, r := p.alloc(a, &protocol.AllocRequest{Size: uint64(pages) * 4096, PageSize: 4096})
	for i := range pages {
		p.register(a, nil, entryAt(fmt.Sprint("k", i), r, i))
	}
	// Slots freed in the middle are taken again: order of slots and order of registration differ.
	for i := range 50 {
		p.do(a, &Delete{Keys: [][]byte{fmt.Append(nil, "k", i)}})
	}
	for i := range 50 {
		p.register(a, nil, entryAt(fmt.Sprint("n", i), r, i))
	}
	w := p.twin()
	b := p.open("b")
	code, _ := p.apply(Header{}, &Mark{Region: r.Region, For: b})
	require.Zero(t, code)
	w.same()
}

// Partitions go over to another policy in an order that does not depend on the history of the process.
func TestMigrationAfterARebuild(t *testing.T) {
	p := newPool(t)
	p.device(256 << 20)
	a := p.open("a")
	_, small := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 4096})
	_, large := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 64 << 10})
	for i := range 8 {
		p.register(a, nil, entryAt(fmt.Sprint("s", i), small, i))
	}
	for i := range 8 {
		p.register(a, nil, entryAt(fmt.Sprint("l", i), large, i))
	}
	for i := range 8 { // now the small ones are the hottest
		p.register(a, nil, entryAt(fmt.Sprint("s", i), small, i))
	}
	w := p.twin()
	p.usePolicy("lfu")
	p.apply(Header{}, &Sweep{Limit: 4})
	w.same()
}

// State of a policy that is being replaced must leave the store with it, also across a restart in between.
func TestGhostsOfAReplacedPolicyAcrossRestarts(t *testing.T) {
	p := newPool(t)
	p.device(64 << 20)
	p.usePolicy("s3fifo")
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 64 << 10})
	p.register(a, nil, entryAt("k0", r, 0), entryAt("k1", r, 1))
	slot, ok := p.m.find(p.m.tenants[DefaultTenant], []byte("k0"))
	require.True(t, ok)
	code, _ := p.do(a, &Alloc{Phase: 1, PageSize: 64 << 10, Victims: []Victim{{slot, p.m.Birth(slot)}}})
	require.Zero(t, code)
	p.usePolicy("lru")
	p.do(a, &Delete{Keys: [][]byte{[]byte("k1")}})
	w := p.twin()
	require.NotZero(t, p.m.SweepPending(), "the change must come to an end")
	p.apply(Header{}, &Sweep{Limit: 100})
	w.same()
	require.Zero(t, p.m.SweepPending())
	p.store, p.m = w.store, w.m2 // the rebuilt one goes on
	p.rebuilt()
}

// Policy state must leave the store with its session, also what became empty since the last flush.
func TestPolicyStateLeavesWithItsSession(t *testing.T) {
	p := newPool(t)
	p.device(64 << 20)
	p.usePolicy("sieve")
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 64 << 10})
	p.register(a, nil, entryAt("k0", r, 0), entryAt("k1", r, 1))
	slot, ok := p.m.find(p.m.tenants[DefaultTenant], []byte("k0"))
	require.True(t, ok)
	p.do(a, &Alloc{Phase: 1, PageSize: 64 << 10, Victims: []Victim{{slot, p.m.Birth(slot)}}})
	p.flush() // with the hand at k1
	p.do(a, &Delete{Keys: [][]byte{[]byte("k1")}})
	p.do(a, &ReturnRegion{Region: r.Region})
	p.apply(Header{}, &FreeRegion{Region: r.Region})
	p.apply(Header{}, &CloseSession{ID: a, Fenced: true})
	p.rebuilt()
}

// The end of a session ends a migration on all replicas or on none.
func TestSessionEndDuringMigration(t *testing.T) {
	p := newPool(t)
	p.device(64 << 20)
	a, b := p.open("a"), p.open("b")
	_, ra := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 64 << 10})
	_, rb := p.alloc(b, &protocol.AllocRequest{Size: 1 << 20, PageSize: 64 << 10})
	p.register(a, nil, entryAt("a", ra, 0))
	p.do(a, &Delete{Keys: [][]byte{[]byte("a")}})
	p.register(b, nil, entryAt("b", rb, 0))
	p.usePolicy("lfu")
	p.do(b, &Delete{Keys: [][]byte{[]byte("b")}})
	w := p.twin()
	p.do(a, &ReturnRegion{Region: ra.Region})
	p.apply(Header{}, &FreeRegion{Region: ra.Region})
	p.apply(Header{}, &CloseSession{ID: a, Fenced: true})
	w.same()
}

// A parent whose child went over to the new policy goes over as well.
func TestMigrationOfPrefixesEnds(t *testing.T) {
	p := newPool(t)
	p.device(64 << 20)
	p.usePolicy("prefix-lru")
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 4096})
	for i := range 10 {
		e := entryAt(fmt.Sprint("k", i), r, i)
		e.HasPrefix, e.Hash, e.Parent, e.Index = true, uint64(i+1), uint64(i), uint64(i)
		require.True(t, p.register(a, &protocol.Context{Model: "m"}, e)[0].New)
	}
	p.usePolicy("lru")
	w := p.twin()
	for n := 0; p.m.SweepPending() > 0; n++ {
		require.Less(t, n, 100, "%d slots left", p.m.SweepPending())
		p.apply(Header{}, &Sweep{Limit: 3})
		w.same()
	}
}

// An entry that was pinned while the policy changed starts afresh under the new one.
func TestPinnedThroughAPolicyChange(t *testing.T) {
	for _, changes := range [][]string{{"s3fifo"}, {"lru", "s3fifo"}, {"lru", "lfu"}} {
		t.Run(fmt.Sprint(changes), func(t *testing.T) {
			p := newPool(t)
			p.device(64 << 20)
			p.usePolicy("prefix-lru")
			a := p.open("a")
			_, r := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 4096})
			for i := range 10 {
				p.register(a, nil, entryAt(fmt.Sprint("k", i), r, i))
			}
			p.do(a, &Pin{Class: ClassHard, Keys: [][]byte{[]byte("k9")}})
			for _, name := range changes {
				p.usePolicy(name)
				p.apply(Header{}, &Sweep{Limit: 100})
				require.Zero(t, p.m.SweepPending())
			}
			w := p.twin()
			p.do(a, &Pin{Undo: true, Class: ClassHard, Keys: [][]byte{[]byte("k9")}})
			w.same()
			slot, _ := p.m.find(p.m.tenants[DefaultTenant], []byte("k9"))
			require.LessOrEqual(t, p.m.table.at(slot).aux, uint32(1))
			n := 0
			p.m.policyOf(p.m.table.at(slot)).Victims(p.now, func(Slot) policy.Verdict { n++; return policy.Take })
			require.Equal(t, 10, n)
		})
	}
}

// A device that shrinks and grows again does not give out what a region still holds.
func TestDeviceShrinksAndGrows(t *testing.T) {
	p := newPool(t)
	d := p.device(16 << 20)
	a, b := p.open("a"), p.open("b")
	for range 2 {
		p.alloc(a, &protocol.AllocRequest{Size: 8 << 20, PageSize: 64 << 10})
	}
	full := p.m.devices[d].Size
	p.apply(Header{}, &Retire{Device: d, Generation: 8, Size: full - 8<<20})
	p.apply(Header{}, &Retire{Device: d, Generation: 9, Size: full})
	plan, r := p.alloc(b, &protocol.AllocRequest{Size: 8 << 20, PageSize: 64 << 10})
	require.NotEqual(t, PlanCommand, plan.Kind, "%+v", r)
	p.check()
	p.rebuilt()
}

// What lies beyond the end of a device that shrank is not given again.
func TestNothingBeyondTheEndOfADevice(t *testing.T) {
	p := newPool(t)
	d := p.device(16 << 20)
	a, b := p.open("a"), p.open("b")
	for range 2 {
		p.alloc(a, &protocol.AllocRequest{Size: 8 << 20, PageSize: 64 << 10})
	}
	p.apply(Header{}, &Retire{Device: d, Generation: 8, Size: p.m.devices[d].Size - 8<<20, Fenced: true})
	for range 2 {
		plan, r := p.alloc(b, &protocol.AllocRequest{Size: 8 << 20, PageSize: 64 << 10})
		if plan.Kind == PlanCommand {
			require.LessOrEqual(t, r.RegionOffset+r.RegionLength, p.m.devices[d].dataEnd())
		}
	}
	p.rebuilt()
}

// A session that is replaced and has nothing left is forgotten.
func TestReplacedSessionIsForgotten(t *testing.T) {
	p := newPool(t)
	a := p.open("a")
	code, _ := p.apply(Header{}, &OpenSession{Instance: "a", TTLMS: 1, Secret: 1, Replaces: a, Proof: p.m.sessions[a].secret})
	require.Zero(t, code)
	require.Len(t, p.m.sessions, 1)
	p.apply(Header{}, &NewIncarnation{Incarnation: 3})
	require.Empty(t, p.m.sessions)
	p.rebuilt()
}

// Clearing an empty pool leaves nothing behind.
func TestClearOfAnEmptyPool(t *testing.T) {
	p := newPool(t)
	for range 2 * MaxClearMarks {
		code, _ := p.apply(Header{}, &Clear{Prefix: []byte("x")})
		require.Zero(t, code)
		for p.m.SweepPending() > 0 {
			p.apply(Header{}, &Sweep{Limit: 100})
		}
	}
}

// Retiring a device costs the same however much lies there.
func TestRetireDropsNothingItself(t *testing.T) {
	p := newPool(t)
	d := p.device(64 << 20)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 1 << 20, PageSize: 4096})
	for i := range 100 {
		p.register(a, nil, entryAt(fmt.Sprint("k", i), r, i))
	}
	w := p.twin()
	p.apply(Header{}, &Retire{Device: d, Generation: 8, Fenced: true})
	require.Equal(t, uint64(100), p.m.table.count)
	for p.m.SweepPending() > 0 {
		p.apply(Header{}, &Sweep{Limit: 30})
	}
	require.Zero(t, p.m.table.count)
	p.check()
	w.same()
}
