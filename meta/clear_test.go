package meta

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// twoTenants is a pool in which two tenants hold the keys p/1 and q/1 each.
func twoTenants(t *testing.T) (p *pool, holds func(tenant, key string) bool) {
	t.Helper()
	p = newPool(t)
	p.device(8 * page)
	for i, tenant := range []string{"one", "two"} {
		code, body := p.apply(Header{}, &OpenSession{Instance: tenant, Tenant: tenant, TTLMS: 1000, Secret: uint64(i + 1)})
		require.Zero(t, code)
		s, err := DecodeSession(body)
		require.NoError(t, err)
		_, r := p.alloc(s.ID, &protocol.AllocRequest{Size: 2 * page, PageSize: page})
		for j, key := range []string{"p/1", "q/1"} {
			require.True(t, p.register(s.ID, nil, entryAt(key, r, j))[0].New)
		}
	}
	return p, func(tenant, key string) bool {
		_, ok := p.m.Find(p.m.Tenant(tenant), []byte(key))
		return ok
	}
}

// TestClearByPrefixReachesTheTenantsThatItNames: an operator's CLEAR by prefix covers all tenants unless it names one, a
// client's covers its own whatever it names, and a restart forgets neither.
func TestClearByPrefixReachesTheTenantsThatItNames(t *testing.T) {
	for name, tc := range map[string]struct {
		session SessionID
		context *Context
		one     bool // whether the key of tenant one is left
		two     bool
	}{
		"an operator":                        {0, nil, false, false},
		"an operator, of the empty name":     {0, &Context{}, false, false},
		"an operator, of a tenant":           {0, &Context{Tenant: "two"}, true, false},
		"an operator, of an unknown tenant":  {0, &Context{Tenant: "three"}, true, true},
		"a client":                           {1, nil, false, true},
		"a client that names another tenant": {1, &Context{Tenant: "two"}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			p, holds := twoTenants(t)
			c := &Clear{Prefix: []byte("p/"), Context: tc.context}
			if tc.session == 0 {
				code, _ := p.apply(Header{}, c)
				require.Zero(t, code)
			} else {
				code, _ := p.do(tc.session, c)
				require.Zero(t, code)
			}
			look := func() {
				t.Helper()
				require.Equal(t, tc.one, holds("one", "p/1"))
				require.Equal(t, tc.two, holds("two", "p/1"))
				require.True(t, holds("one", "q/1"))
				require.True(t, holds("two", "q/1"))
			}
			look()
			p.flush()
			p.m = p.rebuilt()
			look()
			for p.m.SweepPending() > 0 {
				p.apply(Header{}, &Sweep{Limit: 3})
				look()
			}
		})
	}
}

// TestClearByPrefixTakesNoMoreThanATenant: a mark that could not be honoured in full is refused, not honoured in part.
func TestClearByPrefixTakesNoMoreThanATenant(t *testing.T) {
	for _, x := range []*Context{
		{Model: "m"},
		{Tenant: "one", LoRA: "l"},
		{Salt: "s"},
		{BlockSize: 16},
		{Seed: 1},
		{Tenant: strings.Repeat("n", protocol.MaxNameBytes+1)},
	} {
		p, holds := twoTenants(t)
		code, _ := p.apply(Header{}, &Clear{Prefix: []byte("p/"), Context: x})
		require.Equal(t, protocol.CodeBadRequest, code)
		require.True(t, holds("one", "p/1"))
	}
}

// TestClearsOfOneThingAreOneMark: there is room for so many CLEARs of different things until a sweep has carried them
// out, and for any number of the same, each of which reaches what came before it.
func TestClearsOfOneThingAreOneMark(t *testing.T) {
	p, holds := twoTenants(t)
	for range 2 * MaxClearMarks {
		code, _ := p.do(1, &Clear{All: true})
		require.Zero(t, code)
	}
	require.False(t, holds("one", "p/1"))
	require.True(t, holds("two", "p/1"))
	require.Len(t, p.m.head.marks, 1)
	for i := range MaxClearMarks - 1 {
		code, _ := p.apply(Header{}, &Clear{Context: &Context{Model: fmt.Sprint("m", i)}})
		require.Zero(t, code)
	}
	code, _ := p.apply(Header{}, &Clear{Context: &Context{Model: "one more"}})
	require.Equal(t, protocol.CodeBusy, code)
	code, _ = p.apply(Header{}, &Clear{Context: &Context{Model: "m0"}})
	require.Zero(t, code)
	p.m = p.rebuilt()
	require.Len(t, p.m.head.marks, MaxClearMarks)
	for p.m.SweepPending() > 0 {
		p.apply(Header{}, &Sweep{Limit: 100})
	}
	require.Empty(t, p.m.head.marks)
	require.True(t, holds("two", "p/1"))
	code, _ = p.apply(Header{}, &Clear{Context: &Context{Model: "one more"}})
	require.Zero(t, code)
}

// One tenant repeats a CLEAR more often than a sweep takes: others' CLEARs must be carried out all the same.
func TestOneWhoClearsOftenDoesNotKeepOthersFromIt(t *testing.T) {
	p, _ := twoTenants(t)
	end := uint64(p.m.table.end)
	for i := range MaxClearMarks {
		p.do(1, &Clear{Context: &Context{Salt: fmt.Sprint("s", i)}})
	}
	busy := 0
	for i := range 1000 {
		// the sweep gets through all but one slot between two CLEARs of tenant one
		p.apply(Header{}, &Sweep{Limit: uint32(end - 1)})
		code, _ := p.do(1, &Clear{Context: &Context{Salt: "s0"}})
		require.Zero(t, code)
		if code, _ := p.do(2, &Clear{Context: &Context{Model: fmt.Sprint("m", i%12)}}); code == protocol.CodeBusy {
			busy++
		}
	}
	require.Zero(t, busy)
}
