package meta

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// A page of pins ends with an entry, never within one; the pages together hold every pin that has not ended, once.
func TestPinsArePagedByEntry(t *testing.T) {
	p := newPool(t)
	p.device(1 << 20)
	id := p.open("one")
	_, region := p.alloc(id, &protocol.AllocRequest{Size: 4 * 4096, PageSize: 4096})
	for i := range 4 {
		p.register(id, nil, entryAt(strconv.Itoa(i), region, i))
	}
	pin := func(session SessionID, c *Pin) {
		code, _ := p.apply(Header{Session: session}, c)
		require.Zero(t, code)
	}
	pin(0, &Pin{Class: ClassHard, Owner: "ann", Keys: [][]byte{[]byte("0"), []byte("1"), []byte("3")}})
	pin(0, &Pin{Class: ClassHard, Owner: "bob", Keys: [][]byte{[]byte("0")}})
	pin(0, &Pin{Class: ClassSoft, Owner: "bob", Until: p.now + 10, Keys: [][]byte{[]byte("2")}})
	pin(id, &Pin{Class: ClassHard, Keys: [][]byte{[]byte("3")}})
	list := func(nowMS uint64, tenant, owner string, limit int) (pages []int, all []PinInfo) {
		for cursor := uint64(0); ; {
			at, n := p.m.At(nowMS), 0
			cursor = at.ListPins(tenant, owner, cursor, limit, func(x PinInfo) { all = append(all, x); n++ })
			if pages = append(pages, n); cursor == 0 {
				return pages, all
			}
		}
	}
	pages, all := list(p.now, "", "", 1)
	require.Equal(t, []int{2, 1, 1, 2}, pages)
	require.Equal(t, PinInfo{Key: []byte("3"), Tenant: DefaultTenant, Session: id, Class: ClassHard}, all[5])
	require.Equal(t, PinInfo{Key: []byte("2"), Tenant: DefaultTenant, Owner: "bob", Class: ClassSoft, UntilMS: p.now + 10}, all[3])
	pages, _ = list(p.now, DefaultTenant, "bob", 100)
	require.Equal(t, []int{2}, pages)
	pages, _ = list(p.now+10, "", "bob", 100)
	require.Equal(t, []int{1}, pages, "what has ended is not listed, though nothing was logged since")
	pages, _ = list(p.now, "another", "", 100)
	require.Equal(t, []int{0}, pages)
}
