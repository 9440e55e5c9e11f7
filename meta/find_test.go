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

// Keys that share a hash are found and freed each by itself, whichever came first.
func TestKeysThatShareAHash(t *testing.T) {
	p := newPool(t)
	p.device(4 << 20)
	ids := map[string]SessionID{}
	regions := map[string]AllocResult{}
	for i, name := range []string{"one", "two", "three"} {
		code, body := p.apply(Header{}, &OpenSession{Instance: name, Tenant: name, TTLMS: 10_000, Secret: uint64(i) + 1})
		require.Zero(t, code)
		opened, err := DecodeSession(body)
		require.NoError(t, err)
		ids[name] = opened.ID
		_, regions[name] = p.alloc(opened.ID, &protocol.AllocRequest{Size: 1 << 20, PageSize: 4096})
	}
	// The salts of the tenants are such that key k of each has the same hash.
	base := p.m.table.hashOf(p.m.tenantFor(p.m.sessions[ids["one"]]).salt, []byte("kone"))
	for name, id := range ids {
		owner := p.m.tenantFor(p.m.sessions[id])
		owner.salt = 0
		owner.salt = base ^ p.m.table.hashOf(0, []byte("k"+name))
	}
	held := func(name string) bool {
		slot, ok := p.m.Find(p.m.Tenant(name), []byte("k"+name))
		at := p.m.At(0)
		require.Equal(t, []Slot{slot}, at.FindAll(p.m.Tenant(name), [][]byte{[]byte("k" + name)}, false, nil))
		return ok
	}
	names := []string{"one", "two", "three"}
	for _, first := range names {
		for _, name := range names {
			require.False(t, held(name))
			require.Zero(t, p.register(ids[name], nil, entryAt("k"+name, regions[name], 0))[0].Code)
			require.True(t, held(name))
		}
		require.Len(t, p.m.table.index, 1)
		for _, name := range append([]string{first}, names...) {
			p.do(ids[name], &Delete{Keys: [][]byte{[]byte("k" + name)}})
			require.False(t, held(name))
		}
		require.Empty(t, p.m.table.index)
	}
}
