package meta

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// FindAll answers for every key what Find does: keys that are held, were never, share a first byte or a hash with another.
func TestFindAllIsFind(t *testing.T) {
	p := newPool(t)
	p.device(4 << 20)
	s := p.open("a")
	_, region := p.alloc(s, &protocol.AllocRequest{Size: 1 << 20, PageSize: 4096})
	for i := range 200 {
		p.register(s, nil, entryAt(fmt.Sprintf("key-%d", i), region, i))
	}
	p.do(s, &Delete{Keys: [][]byte{[]byte("key-7")}})
	// Two keys with one hash, as if: the second stands in front of the first.
	first, _ := p.m.find(p.m.tenants[DefaultTenant], []byte("key-1"))
	second, _ := p.m.find(p.m.tenants[DefaultTenant], []byte("key-2"))
	h := p.m.table.hashOf(p.m.tenants[DefaultTenant].salt, []byte("key-1"))
	p.m.table.at(second).hnext, p.m.table.index[h] = first, second

	rng := rand.New(rand.NewPCG(1, 2))
	at := p.m.At(p.now)
	for range 300 {
		keys := make([][]byte, rng.IntN(3*findAhead))
		for i := range keys {
			keys[i] = fmt.Appendf(nil, "key-%d", rng.IntN(220))
			if rng.IntN(8) == 0 {
				keys[i][0] = 'x'
			}
		}
		want, walk := make([]Slot, 0, len(keys)), []Slot(nil)
		for _, k := range keys {
			slot, ok := at.Find(TenantID{}, k)
			require.Equal(t, ok, slot != None)
			want = append(want, slot)
			if len(walk) == 0 || walk[len(walk)-1] != None {
				walk = append(walk, slot)
			}
		}
		require.Equal(t, want, at.FindAll(TenantID{}, keys, false, []Slot{}))
		require.Equal(t, walk, at.FindAll(TenantID{}, keys, true, nil))
	}
	require.Equal(t, []Slot{9, None}, at.FindAll(p.m.Tenant("stranger"), [][]byte{[]byte("key-1")}, false, []Slot{9}))
}
