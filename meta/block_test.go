package meta

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// blockKey names a block.
type blockKey struct {
	ctx   Context
	hash  uint64
	group uint32
}

// blockFollower knows blocks as one knows them who hears of changes alone, from the beginning or from a listing on.
type blockFollower struct {
	tb     testing.TB
	m      *Machine
	blocks map[blockKey]Media
	strict bool // it has heard of everything: what is told as stored was not there
}

func (f *blockFollower) apply(changes []BlockChange) {
	for _, c := range changes {
		if c.Kind == BlocksCleared {
			clear(f.blocks)
			continue
		}
		require.NotZero(f.tb, c.Media)
		key := blockKey{*c.Context, c.Hash, c.Group}
		if c.Kind == BlockStored {
			require.False(f.tb, f.strict && f.blocks[key]&c.Media != 0, "it was told before")
			f.blocks[key] |= c.Media
			continue
		}
		if f.blocks[key] &^= c.Media; f.blocks[key] == 0 {
			delete(f.blocks, key)
		}
	}
}

// listBlocks lists the blocks of all tenants.
func listBlocks(m *Machine) map[blockKey]Media {
	blocks, at := map[blockKey]Media{}, m.At(m.head.now)
	for cursor, first := uint64(0), true; first || cursor != 0; first = false {
		cursor = at.ListBlocks("", cursor, 3, func(b *Block) { blocks[blockKey{*b.Context, b.Hash, b.Group}] |= b.Media })
	}
	return blocks
}

// check: what is held is known, and what is known is held, or an entry of it waits for a sweep.
func (f *blockFollower) check() {
	for key, media := range listBlocks(f.m) {
		require.Equal(f.tb, media, f.blocks[key]&media, "%+v", key)
	}
	there := map[blockKey]Media{}
	for s := range f.m.table.end {
		if x := f.m.table.at(s); x.birth != 0 && x.flags&flagPrefix != 0 {
			there[blockKey{f.m.contextOf(x).Context, x.hash, x.group}] |= f.m.told(x)
		}
	}
	for key, media := range f.blocks {
		require.Zero(f.tb, media&^there[key], "%+v", key)
	}
}

// blockFollowers are one that follows from the beginning and one that lists again and again.
type blockFollowers struct{ all, now *blockFollower }

func newBlockFollowers(tb testing.TB, m *Machine) blockFollowers {
	tb.Helper()
	return blockFollowers{
		&blockFollower{tb, m, map[blockKey]Media{}, true},
		&blockFollower{tb, m, map[blockKey]Media{}, false},
	}
}

func (f blockFollowers) step(r *rand.Rand, out *Results) {
	for _, x := range []*blockFollower{f.all, f.now} {
		x.apply(out.Blocks)
		x.check()
	}
	if r.IntN(10) == 0 {
		f.now.blocks = listBlocks(f.now.m)
	}
}

// swept: once sweeps are through, both know what is held, no more and no less.
func (f blockFollowers) swept(index uint64) {
	m := f.all.m
	out := Results{WantBlocks: true}
	for m.startSweep(); m.SweepPending() > 0; index++ {
		out.Reset()
		require.NoError(f.all.tb, m.Apply(index, AppendCommand(BeginGroup(nil, 0, nil), Header{}, &Sweep{Limit: 100}), &out))
		f.all.apply(out.Blocks)
		f.now.apply(out.Blocks)
	}
	require.Equal(f.all.tb, listBlocks(m), f.all.blocks)
	require.Equal(f.all.tb, listBlocks(m), f.now.blocks)
}

// TestRandomBlocks stores few blocks under many keys, on two devices, and takes them away in all ways, with sweeps that come
// late: what is told is right after every command.
func TestRandomBlocks(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 3))
		p := newPool(t)
		s := DefaultSettings()
		s.Version = ClusterVersion
		p.apply(Header{}, &SetSettings{s})
		p.device(64 * page)
		g := generator{r: r, p: p}
		g.nodes()
		a := p.open("a")
		_, space := p.alloc(a, &protocol.AllocRequest{Size: 64 * page, PageSize: page})
		for n := range 400 {
			switch p.now++; r.IntN(12) {
			case 0:
				p.do(a, &Clear{Context: &Context{Model: "m"}})
			case 1:
				p.do(a, &Clear{Prefix: keysOf("k1", "k2", "k3")[r.IntN(3)]})
			case 2, 3:
				p.apply(Header{}, &Sweep{Limit: 1 + uint32(r.IntN(16))})
			case 4, 5:
				p.do(a, &Delete{Keys: [][]byte{g.key(), g.key()}})
			case 6:
				g.tiers()
			case 7:
				g.copy()
			case 8:
				if n%10 == 0 {
					p.apply(Header{}, &Clear{All: true})
				}
			default:
				e := entryAt(string(g.key()), space, r.IntN(64))
				e.HasPrefix, e.Hash, e.TTLMS = true, r.Uint64N(4), r.Uint64N(2)*30
				p.register(a, &protocol.Context{Model: []string{"m", "n"}[r.IntN(2)]}, e)
			}
		}
		replica, err := Open(newMemStore())
		require.NoError(t, err)
		f := newBlockFollowers(t, replica)
		out := Results{WantBlocks: true}
		for i, group := range p.log {
			out.Reset()
			require.NoError(t, replica.Apply(uint64(i)+1, group, &out))
			f.step(r, &out)
		}
		f.swept(p.index + 1)
	}
}

// changes are what the last command told, as kinds and hashes.
func (p *pool) changes() (told []any) {
	for _, c := range p.res.Blocks {
		told = append(told, c.Kind, c.Hash, c.Media)
	}
	return told
}

// TestWhatBlocksTell goes through the life of a block.
func TestWhatBlocksTell(t *testing.T) {
	p := newPool(t)
	p.res.WantBlocks = true
	s := DefaultSettings()
	s.Version = ClusterVersion
	p.apply(Header{}, &SetSettings{s})
	p.device(32 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 8 * page, PageSize: page})
	block := func(key string, at int, hash uint64) protocol.RegisterEntry {
		e := entryAt(key, r, at)
		e.HasPrefix, e.Hash, e.Parent, e.Index, e.Group = true, hash, hash-1, hash-1, 1<<16|2
		return e
	}
	ctx := &protocol.Context{Model: "m", BlockSize: 16}
	p.register(a, ctx, block("k1", 0, 1), block("k2", 1, 2), block("k5", 2, 5), entryAt("plain", r, 3))
	require.Equal(t, []any{BlockStored, uint64(1), InMemory, BlockStored, uint64(2), InMemory, BlockStored, uint64(5), InMemory}, p.changes())
	first, last := p.res.Blocks[0], p.res.Blocks[2]
	require.Equal(t, Context{Tenant: DefaultTenant, Model: "m", BlockSize: 16}, *first.Context)
	require.False(t, first.HasParent)
	require.Equal(t, Block{first.Context, 5, 4, true, 4, 1<<16 | 2, InMemory}, last.Block, "its parent is told though it is not held")

	p.register(a, ctx, block("other", 4, 2))
	require.Empty(t, p.changes(), "it is held already")
	p.do(a, &Delete{Keys: keysOf("k5", "plain")})
	require.Equal(t, []any{BlockRemoved, uint64(5), InMemory}, p.changes())

	// What was cleared is gone when a sweep comes by; what takes its place before that is told at once.
	p.do(a, &Clear{Prefix: []byte("k")})
	require.Empty(t, p.changes())
	p.register(a, ctx, block("new", 5, 2))
	require.Equal(t, []any{BlockRemoved, uint64(2), InMemory, BlockStored, uint64(2), InMemory}, p.changes())
	p.apply(Header{}, &Sweep{Limit: 100})
	require.Equal(t, []any{BlockRemoved, uint64(1), InMemory}, p.changes())

	p.apply(Header{}, &Clear{All: true})
	require.Equal(t, []any{BlocksCleared, uint64(0), Media(0)}, p.changes())
	p.apply(Header{}, &Sweep{Limit: 100})
	require.Empty(t, p.changes(), "all of it was told")
	require.Empty(t, listBlocks(p.m))
	p.apply(Header{}, &Clear{All: true})
	require.Empty(t, p.changes(), "there was nothing")

	p.res.WantBlocks = false
	p.register(a, ctx, block("quiet", 6, 9))
	require.Empty(t, p.changes(), "nobody wants to hear")
	require.Len(t, listBlocks(p.m), 1)
}

func keysOf(keys ...string) (list [][]byte) {
	for _, k := range keys {
		list = append(list, []byte(k))
	}
	return list
}

// TestListBlocksByTenant: nobody is told of another tenant's blocks.
func TestListBlocksByTenant(t *testing.T) {
	p := newPool(t)
	p.device(32 * page)
	for i, tenant := range []string{"a", "b"} {
		id := p.openOf(tenant, tenant)
		_, r := p.alloc(id, &protocol.AllocRequest{Size: 8 * page, PageSize: page})
		for k := range 3 {
			e := entryAt(string(rune('k'+k)), r, k)
			e.HasPrefix, e.Hash = true, uint64(10*i+k)
			p.register(id, nil, e)
		}
	}
	at := p.m.At(0)
	var hashes []uint64
	for cursor, n := uint64(0), 0; n == 0 || cursor != 0; n++ {
		cursor = at.ListBlocks("b", cursor, 2, func(b *Block) {
			require.Equal(t, "b", b.Context.Tenant)
			hashes = append(hashes, b.Hash)
		})
	}
	slices.Sort(hashes)
	require.Equal(t, []uint64{10, 11, 12}, hashes)
}
