package meta

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// TestADeviceIsGivenAgainOnlyFenced: after a restore the index does not know who else was given what. Whatever is free
// in it may be written to by somebody, until that is impossible.
func TestADeviceIsGivenAgainOnlyFenced(t *testing.T) {
	p := newPool(t)
	d := p.device(64 << 20)
	a := p.open("a")
	_, before := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	stale := p.m.PlanAlloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page}, noGuard{}, false)
	p.apply(Header{}, &NewIncarnation{Incarnation: 2})
	b := p.open("b")
	req := &protocol.AllocRequest{Size: 4 * page, PageSize: page}
	out := func() {
		t.Helper()
		plan := p.m.PlanAlloc(b, req, noGuard{}, true)
		require.NotEqual(t, PlanCommand, plan.Kind)
		code, _ := p.do(b, &stale.Cmd)
		require.Equal(t, protocol.CodePending, code, "nor by a plan that was made before")
	}
	out()
	code, _ := p.apply(Header{}, &Retire{Device: d, Generation: 9})
	require.Equal(t, protocol.CodeForbidden, code, "somebody may be in the middle of a copy")
	out()
	p.rebuilt()
	out()
	code, _ = p.apply(Header{}, &Retire{Device: d, Generation: 9, Fenced: true})
	require.Zero(t, code)
	plan, after := p.alloc(b, req)
	require.Equal(t, PlanCommand, plan.Kind)
	require.EqualValues(t, 9, after.Generation)
	require.NotEqual(t, before.Region, after.Region)
	_, known := p.m.Session(a)
	require.False(t, known, "its region is nobody's, and it is forgotten with that")
}

// TestNoIDIsUsedTwice: of a snapshot and the two histories that were made of it, each gives ids that no other gave.
func TestNoIDIsUsedTwice(t *testing.T) {
	type ids struct {
		session           SessionID
		region            RegionID
		epoch, birth, pin uint64
	}
	incarnations := []uint64{0, 1_800_000_000_000, 1_800_000_000_001}
	lines := make([]ids, 0, len(incarnations))
	for _, incarnation := range incarnations {
		p := newPool(t)
		d := p.device(64 << 20)
		p.apply(Header{}, &NewIncarnation{Incarnation: 1_700_000_000_000})
		p.apply(Header{}, &Retire{Device: d, Generation: 5, Fenced: true})
		p.open("before the snapshot")
		if incarnation != 0 {
			code, _ := p.apply(Header{}, &NewIncarnation{Incarnation: incarnation})
			require.Zero(t, code)
			p.apply(Header{}, &Retire{Device: d, Generation: 6, Fenced: true})
		}
		a := p.open("a")
		_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
		require.True(t, p.register(a, nil, entryAt("k", r, 0))[0].New)
		p.do(a, &Pin{Class: ClassHard, Keys: [][]byte{[]byte("k")}})
		slot, ok := p.m.Find(TenantID{}, []byte("k"))
		require.True(t, ok)
		require.Len(t, p.m.pinsOf[slot], 1)
		lines = append(lines, ids{
			session: a, region: r.Region, epoch: r.Epoch, birth: p.m.Birth(slot), pin: p.m.pinsOf[slot][0].id,
		})
		p.rebuilt()
	}
	for i, x := range lines {
		for _, y := range lines[i+1:] {
			require.NotEqual(t, x.session, y.session)
			require.NotEqual(t, x.region, y.region)
			require.NotEqual(t, x.epoch, y.epoch)
			require.NotEqual(t, x.birth, y.birth)
			require.NotEqual(t, x.pin, y.pin)
		}
	}
}

// TestTheLastIncarnation: ids begin with the incarnation, and there is room for it.
func TestTheLastIncarnation(t *testing.T) {
	p := newPool(t)
	p.apply(Header{}, &NewIncarnation{Incarnation: 1})
	code, _ := p.apply(Header{}, &NewIncarnation{Incarnation: MaxIncarnation + 1})
	require.Equal(t, protocol.CodeBadRequest, code)
	code, _ = p.apply(Header{}, &NewIncarnation{Incarnation: MaxIncarnation})
	require.Zero(t, code)
	require.Greater(t, p.open("a"), SessionID(MaxIncarnation)<<idBits)
	p.rebuilt()
}
