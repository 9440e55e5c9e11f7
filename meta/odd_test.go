package meta

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// A log entry that names a victim twice evicts it once: Apply trusts no plan.
func TestVictimNamedTwice(t *testing.T) {
	p := newPool(t)
	p.device(8 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	p.register(a, nil, entryAt("x", r, 0), entryAt("y", r, 1))
	v := Victim{0, p.m.Birth(0)}
	code, body := p.do(a, &Alloc{Phase: 1, PageSize: page, Victims: []Victim{v, v}})
	require.Zero(t, code)
	got, err := DecodeAlloc(body)
	require.NoError(t, err)
	require.Len(t, got.Evicted, 1)
	require.Equal(t, uint64(1), p.m.Stats().Evictions[1])
	p.check()
	p.rebuilt()
}

// A time to live that reaches beyond the end of time never ends, rather than having ended long ago.
func TestEndlessTTL(t *testing.T) {
	p := newPool(t)
	p.device(8 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	e := entryAt("x", r, 0)
	e.TTLMS = math.MaxUint64
	require.True(t, p.register(a, nil, e)[0].New)
	_, ok := p.m.Find(TenantID{}, []byte("x"))
	require.True(t, ok, "an acknowledged entry is found")
}

// A group number that does not fit is refused, also when what is left of it is held.
func TestGroupTooLarge(t *testing.T) {
	p := newPool(t)
	p.device(8 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	e := entryAt("x", r, 0)
	e.HasPrefix, e.Hash, e.Group = true, 5, 2
	require.True(t, p.register(a, nil, e)[0].New)
	e = entryAt("y", r, 1)
	e.HasPrefix, e.Hash, e.Group = true, 5, 1<<32|2
	require.Equal(t, RegisterResult{Code: protocol.CodeBadRequest}, p.register(a, nil, e)[0])
}

// A device that has shrunk to less than its header has no room, not nearly endless room.
func TestDeviceShrunkToNothing(t *testing.T) {
	p := newPool(t)
	d := p.device(8 * page)
	code, _ := p.apply(Header{}, &Retire{Device: d, Generation: 8, Size: page})
	require.Zero(t, code)
	s := p.m.Stats()
	require.Zero(t, s.PoolBytes)
	require.Zero(t, s.FreeBytes)
}

// A CLEAR stays one while the table grows under its sweep, which has begun in the middle: every entry that it killed is
// removed before it is forgotten.
func TestClearWhileTableGrows(t *testing.T) {
	p := newPool(t)
	p.device(32 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 32 * page, PageSize: page})
	name := func(i int) string { return string(rune('a' + i)) }
	for i := range 10 {
		require.True(t, p.register(a, nil, entryAt(name(i), r, i))[0].New)
	}
	wipe := func(prefix string) {
		code, _ := p.do(a, &Clear{Prefix: []byte(prefix)})
		require.Zero(t, code)
	}
	wipe("-")
	p.apply(Header{}, &Sweep{Limit: 5}) // the next one begins here
	wipe(name(1))
	for i := range 4 {
		require.True(t, p.register(a, nil, entryAt(name(10+i), r, 10+i))[0].New)
	}
	for range 20 {
		p.apply(Header{}, &Sweep{Limit: 5})
		_, ok := p.m.Find(TenantID{}, []byte(name(1)))
		require.False(t, ok)
	}
	require.Zero(t, p.m.SweepPending())
	require.Equal(t, uint64(1), p.m.Stats().Removed[ReasonCleared])
}
