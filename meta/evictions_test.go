package meta

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// TestEvictionsAreCountedInEntries: whatever gives space to a client, what it cost others or itself is told in entries.
func TestEvictionsAreCountedInEntries(t *testing.T) {
	const pages = 8
	p := newPool(t)
	p.device(2 * pages * page)
	fill := func(instance string, n int) (SessionID, AllocResult) {
		id := p.open(instance)
		_, r := p.alloc(id, &protocol.AllocRequest{Size: pages * page, PageSize: page})
		for i := range n {
			require.True(t, p.register(id, nil, entryAt(fmt.Sprintf("%s/%d", instance, i), r, i))[0].New)
		}
		return id, r
	}
	count := func(own, departed, other uint64) {
		t.Helper()
		require.Equal(t, [4]uint64{0, own, departed, other}, p.m.Stats().Evictions)
	}
	a, ra := fill("a", pages)
	b, rb := fill("b", 5)
	count(0, 0, 0)

	plan, _ := p.alloc(a, &protocol.AllocRequest{Size: pages * page, PageSize: page, NeedPages: 3, Evict: true})
	require.Len(t, plan.Cmd.Victims, 3)
	count(3, 0, 0)

	code, _ := p.apply(Header{}, &Mark{Region: rb.Region, For: a})
	require.Zero(t, code)
	count(3, 0, 5)
	code, _ = p.apply(Header{}, &Mark{Region: rb.Region, For: a})
	require.Equal(t, protocol.CodePending, code, "it is being taken already")
	code, _ = p.do(b, &RevokeDone{Region: rb.Region, Epoch: rb.Epoch})
	require.Zero(t, code)
	code, _ = p.do(a, &Alloc{Phase: 3, Region: rb.Region, PageSize: page})
	require.Zero(t, code)
	count(3, 0, 5)

	c := p.open("c")
	code, _ = p.do(a, &ReturnRegion{Region: ra.Region})
	require.Zero(t, code)
	code, _ = p.do(c, &Alloc{Phase: 2, Region: ra.Region, PageSize: page})
	require.Zero(t, code)
	count(3, pages-3, 5)

	require.Equal(t, p.m.Stats().Evictions, p.rebuilt().Stats().Evictions, "a member that starts again goes on from there")
}

// TestARegionMarkedWithMoreThanOneCommandRemovesIsCountedOnce: what is left of it is removed later, by whoever comes.
func TestARegionMarkedWithMoreThanOneCommandRemovesIsCountedOnce(t *testing.T) {
	const entries = MaxDropPerCommand + 100
	p := newPool(t)
	p.device(2 * entries * page)
	a, b := p.open("a"), p.open("b")
	r := p.fill(a, entries)
	code, _ := p.apply(Header{}, &Mark{Region: r.Region, For: b})
	require.Zero(t, code)
	require.EqualValues(t, 100, p.m.Stats().Entries)
	require.EqualValues(t, entries, p.m.Stats().Evictions[3])
	code, _ = p.do(a, &ReturnRegion{Region: r.Region})
	require.Zero(t, code)
	code, _ = p.do(b, &Alloc{Phase: 3, Region: r.Region, PageSize: page})
	require.Zero(t, code)
	require.Equal(t, [4]uint64{3: entries}, p.m.Stats().Evictions)
}

// fill gives a session a region of so many pages with an entry in each.
func (p *pool) fill(id SessionID, entries int) AllocResult {
	p.tb.Helper()
	_, r := p.alloc(id, &protocol.AllocRequest{Size: uint64(entries) * page, PageSize: page})
	for from := 0; from < entries; from += 1000 {
		var batch []protocol.RegisterEntry
		for i := from; i < min(from+1000, entries); i++ {
			batch = append(batch, entryAt(strconv.Itoa(i), r, i))
		}
		p.register(id, nil, batch...)
	}
	return r
}

// TestADepartedRegionWithMoreThanOneCommandRemovesIsCountedWhole: it is emptied step by step before it is given.
func TestADepartedRegionWithMoreThanOneCommandRemovesIsCountedWhole(t *testing.T) {
	const entries = MaxDropPerCommand + 100
	p := newPool(t)
	p.device(entries * page)
	a, b := p.open("a"), p.open("b")
	r := p.fill(a, entries)
	code, _ := p.do(a, &ReturnRegion{Region: r.Region})
	require.Zero(t, code)
	req := &protocol.AllocRequest{Size: entries * page, PageSize: page, NeedPages: 1, Evict: true}
	plan, _ := p.alloc(b, req)
	require.Equal(t, PlanEmpty, plan.Kind)
	code, _ = p.apply(Header{}, &EmptyRegion{Region: plan.Region})
	require.Zero(t, code)
	require.Equal(t, [4]uint64{2: MaxChorePerCommand}, p.m.Stats().Evictions)
	plan, given := p.alloc(b, req)
	require.Equal(t, PlanCommand, plan.Kind)
	require.Equal(t, r.Region, given.Region)
	require.Equal(t, [4]uint64{2: entries}, p.m.Stats().Evictions)

	p.register(b, nil, entryAt("x", given, 0), entryAt("y", given, 1), entryAt("z", given, 2))
	code, _ = p.do(b, &ReturnRegion{Region: r.Region})
	require.Zero(t, code)
	code, _ = p.apply(Header{}, &EmptyRegion{Region: r.Region})
	require.Zero(t, code)
	code, _ = p.do(a, &Alloc{Phase: 2, Region: r.Region, PageSize: page})
	require.Zero(t, code)
	require.Equal(t, [4]uint64{2: entries + 3}, p.m.Stats().Evictions, "emptied whole, and counted once")
}

// TestOlderStateIsNotRead: its head has another layout, and the error says what can be done.
func TestOlderStateIsNotRead(t *testing.T) {
	for format, want := range map[byte]string{stateFormat - 1: "empty data directory", stateFormat + 1: "run a newer one"} {
		p := newPool(t)
		p.flush()
		p.store.records[string([]byte{recHead})][0] = format
		_, err := Open(p.store)
		require.ErrorContains(t, err, want)
	}
}
