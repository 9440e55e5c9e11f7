package meta

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// Tests of promises that whole logs at random break too seldom for a short run to find out.

// TestSameLogSameState: machines that apply the same log are the same, also where one command touches many sessions,
// which are kept in a map.
func TestSameLogSameState(t *testing.T) {
	p := newPool(t)
	p.device(64 << 20)
	owner := p.open("owner")
	_, r := p.alloc(owner, &protocol.AllocRequest{Size: 32 * page, PageSize: page})
	for i := range 16 {
		key := fmt.Sprint("k", i)
		p.register(owner, nil, entryAt(key, r, i))
		code, _ := p.do(p.open(fmt.Sprint("reader", i)), &Pin{Class: ClassHard, Keys: [][]byte{[]byte(key)}})
		require.Zero(t, code)
	}
	p.apply(Header{}, &NewIncarnation{Incarnation: p.m.Incarnation() + 1})
	for range 4 {
		m, err := Open(newMemStore())
		require.NoError(t, err)
		var out Results
		for i, group := range p.log {
			require.NoError(t, m.Apply(uint64(i)+1, group, &out))
		}
		requireSame(t, p.m, m)
	}
}

// TestResponseMemoryIsTrimmed: what is acknowledged is forgotten, in memory and in the store.
func TestResponseMemoryIsTrimmed(t *testing.T) {
	p := newPool(t)
	p.device(64 << 20)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 64 * page, PageSize: page})
	answers := func() (n int) {
		p.flush()
		for k := range p.store.records {
			if k[0] == recAnswer {
				n++
			}
		}
		return n
	}
	for i := range 2 * protocol.Window {
		p.register(a, nil, entryAt(fmt.Sprint("k", i), r, i%64))
		p.do(a, &Delete{Keys: [][]byte{fmt.Append(nil, "k", i)}})
		require.LessOrEqual(t, answers(), 1)
		s := p.m.sessions[a]
		kept, state := s.remember(p.seqs[a])
		require.Equal(t, SeqAnswered, state)
		require.Equal(t, len(kept), s.remembered)
	}
}

// TestLostBytesAreNotServed: no entry of an earlier generation of its device is found, by whatever name, nor counted as
// held when it comes again, though no sweep has removed it yet.
func TestLostBytesAreNotServed(t *testing.T) {
	for name, lose := range map[string]func(p *pool, d DeviceID) Command{
		"a new generation": func(_ *pool, d DeviceID) Command { return &Retire{Device: d, Generation: 99} },
		"a new generation, and the owner is out of sight": func(p *pool, d DeviceID) Command {
			p.apply(Header{}, &CloseSession{ID: 1})
			return &Retire{Device: d, Generation: 99}
		},
		"a new incarnation": func(p *pool, _ DeviceID) Command { return &NewIncarnation{Incarnation: p.m.Incarnation() + 1} },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t)
			d := p.device(64 << 20)
			a := p.open("a")
			_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
			e := entryAt("k", r, 0)
			e.HasPrefix, e.Hash = true, 7
			ctx := &protocol.Context{Model: "m"}
			require.True(t, p.register(a, ctx, e)[0].New)
			scope := Context{Tenant: DefaultTenant, Model: "m"}
			require.Equal(t, 1, p.m.PrefixMatch(&scope, []uint64{7}, 0, nil))
			code, _ := p.apply(Header{}, lose(p, d))
			require.Zero(t, code)
			_, found := p.m.Find(TenantID{}, []byte("k"))
			require.False(t, found)
			require.Zero(t, p.m.PrefixMatch(&scope, []uint64{7}, 0, nil))
			b := p.open("b")
			for _, got := range p.register(b, ctx, e) {
				require.False(t, got.New)
				require.NotZero(t, got.Code, "it is not held either")
			}
		})
	}
}

// TestPinnedEntriesAreNoVictims: neither is one chosen, nor does a plan that was made before the pin take it.
func TestPinnedEntriesAreNoVictims(t *testing.T) {
	p := newPool(t)
	p.device(4 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	for i := range 4 {
		p.register(a, nil, entryAt(fmt.Sprint("k", i), r, i))
	}
	req := &protocol.AllocRequest{PageSize: page, NeedPages: 1, Evict: true}
	early := p.m.PlanAlloc(a, req, noGuard{}, false)
	require.Equal(t, PlanCommand, early.Kind)
	require.Len(t, early.Cmd.Victims, 1)
	for i := range 4 {
		code, _ := p.do(a, &Pin{Class: ClassHard, Keys: [][]byte{fmt.Append(nil, "k", i)}})
		require.Zero(t, code)
	}
	code, _ := p.do(a, &early.Cmd)
	require.Equal(t, protocol.CodePending, code, "it is planned again")
	plan := p.m.PlanAlloc(a, req, noGuard{}, true)
	require.NotEqual(t, PlanCommand, plan.Kind)
	for i := range 4 {
		_, found := p.m.Find(TenantID{}, fmt.Append(nil, "k", i))
		require.True(t, found)
	}
}

// TestUsesComeBeforeTheDecision: a use in the same log entry as an eviction precedes it.
func TestUsesComeBeforeTheDecision(t *testing.T) {
	p := newPool(t)
	p.device(4 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	for i := range 2 {
		p.register(a, nil, entryAt(fmt.Sprint("k", i), r, i))
	}
	slot, ok := p.m.Find(TenantID{}, []byte("k0"))
	require.True(t, ok)
	// A REGISTER of k1 again is a use of it, behind that of k0 in front of the group: k0 is the colder one.
	p.index++
	group := BeginGroup(nil, p.now, []Touch{{Slot: slot, Count: 1}})
	p.seqs[a]++
	group = AppendCommand(group, Header{Session: a, Seq: p.seqs[a], Acked: p.seqs[a]},
		&Register{Entries: []protocol.RegisterEntry{entryAt("k1", r, 1)}})
	p.res.Reset()
	require.NoError(t, p.m.Apply(p.index, group, &p.res))
	plan := p.m.PlanAlloc(a, &protocol.AllocRequest{PageSize: page, NeedPages: 1, Evict: true}, noGuard{}, false)
	require.Equal(t, PlanCommand, plan.Kind)
	require.Len(t, plan.Cmd.Victims, 1)
	require.Equal(t, slot, plan.Cmd.Victims[0].Slot)
}

// TestRegionWithEntriesIsNotFreed: its extent is not given to anybody while an entry lies in it.
func TestRegionWithEntriesIsNotFreed(t *testing.T) {
	p := newPool(t)
	p.device(4 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	p.register(a, nil, entryAt("k", r, 0))
	// The device's loss leaves the dead entries to sweeps.
	code, _ := p.apply(Header{}, &Retire{Device: r.Device, Generation: 99, Fenced: true})
	require.Zero(t, code)
	info, ok := p.m.Region(r.Region)
	require.True(t, ok)
	require.Equal(t, RegionDraining, info.State)
	require.EqualValues(t, 1, info.Live)
	code, _ = p.apply(Header{}, &FreeRegion{Region: r.Region})
	require.Equal(t, protocol.CodePending, code)
	p.apply(Header{}, &EmptyRegion{Region: r.Region})
	code, _ = p.apply(Header{}, &FreeRegion{Region: r.Region})
	require.Zero(t, code)
}
