package poolfeed

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/conductor"
	"larder/conductor/kvevent"
	"larder/conductor/kvpub"
	"larder/internal/freeport"
	"larder/server"
)

const mib = 1 << 20

// pool is a pool of one master or more, all in this process.
type pool struct {
	t       *testing.T
	cfgs    []server.Config
	servers []*server.Server // nil where one is stopped
}

// newPool starts masters with a pool of 2 MiB.
func newPool(t *testing.T, members int) *pool {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-feed-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	p := &pool{t: t}
	var peers []server.PeerConfig
	for i := range members {
		peers = append(peers, server.PeerConfig{ID: uint64(i) + 1, Addr: freeport.For(t), Client: freeport.For(t), Admin: "127.0.0.1:1"})
	}
	for i := range members {
		cfg := server.Default()
		cfg.DataDir = filepath.Join(dir, "data"+strconv.Itoa(i))
		cfg.Listen, cfg.PeerListen, cfg.AdminListen = peers[i].Client, peers[i].Addr, server.Off
		cfg.Socket = filepath.Join(dir, "s"+strconv.Itoa(i))
		cfg.ElectionTimeout, cfg.DefaultLease = 300*time.Millisecond, 200*time.Millisecond
		cfg.MinFreeDisk, cfg.MinRegionAge = mib, 0
		cfg.Pool = []server.DeviceConfig{{Path: filepath.Join(dir, "pool"), Size: 4 * mib}} // its header takes 2 MiB
		cfg.KVEventsListen = "tcp://" + freeport.For(t)
		if members > 1 {
			cfg.NodeID, cfg.Peers = peers[i].ID, peers
		}
		p.cfgs, p.servers = append(p.cfgs, cfg), append(p.servers, nil)
		p.start(i)
	}
	t.Cleanup(func() {
		for i := range p.servers {
			p.stop(i)
		}
	})
	return p
}

func (p *pool) start(i int) {
	p.t.Helper()
	s, err := server.Start(p.cfgs[i], nil)
	require.NoError(p.t, err)
	p.servers[i] = s
}

func (p *pool) stop(i int) {
	p.t.Helper()
	if s := p.servers[i]; s != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(p.t, s.Stop(ctx))
		p.servers[i] = nil
	}
}

// endpoints are where members publish.
func (p *pool) endpoints() (list []string) {
	for _, cfg := range p.cfgs {
		list = append(list, cfg.KVEventsListen)
	}
	return list
}

// open connects a client of a tenant.
func (p *pool) open(tenant string) *client.Client {
	p.t.Helper()
	var addrs []string
	for _, cfg := range p.cfgs {
		addrs = append(addrs, cfg.Listen)
	}
	cfg := client.Config{Addrs: addrs, Tenant: tenant, Instance: "c-" + tenant + strconv.FormatUint(rand.Uint64(), 36), PageSize: 4096, RegionSize: mib}
	var c *client.Client
	require.Eventually(p.t, func() bool {
		var err error
		c, err = client.Open(p.t.Context(), cfg)
		return err == nil
	}, 20*time.Second, 20*time.Millisecond)
	p.t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// load stores and removes blocks of two models, and remembers all that it ever stored.
type load struct {
	t      *testing.T
	c      *client.Client
	tenant string
	r      *rand.Rand
	models []client.PrefixContext
	ever   map[uint64]client.PrefixContext
	n      uint64
}

func (p *pool) load(tenant string) *load {
	return &load{
		t: p.t, c: p.open(tenant), tenant: tenant, r: rand.New(rand.NewPCG(1, uint64(len(tenant)))), ever: map[uint64]client.PrefixContext{},
		models: []client.PrefixContext{{Model: "m", BlockSize: 16}, {Model: "m", LoRA: "sql", Salt: "s", BlockSize: 32}},
	}
}

func key(n uint64) []byte { return fmt.Appendf(nil, "block-%d", n) }

// step stores some blocks, and removes some; what is stored when the pool is full evicts.
func (l *load) step(n int) {
	l.t.Helper()
	for range n {
		l.n++
		model := l.models[l.n/8%2]
		hash := 1_000_000 + l.n
		_, err := l.c.Put(l.t.Context(), key(l.n), make([]byte, 4096), client.WithPrefix(&model, hash, hash-1, l.n%8))
		require.NoError(l.t, err)
		l.ever[hash] = model
		if l.r.IntN(4) == 0 {
			_, err := l.c.Delete(l.t.Context(), key(1+l.r.Uint64N(l.n)))
			require.NoError(l.t, err)
		}
	}
}

// held is what the pool holds of it.
func (l *load) held() (list []uint64) {
	l.t.Helper()
	for cursor, more := uint64(0), true; more; more = cursor != 0 {
		blocks, _, next, err := l.c.ListBlocks(l.t.Context(), cursor, 100)
		require.NoError(l.t, err)
		for _, b := range blocks {
			list = append(list, b.Hash)
		}
		cursor = next
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// known is what an index says that the pool holds of it.
func (l *load) known(x *conductor.Index) (list []uint64) {
	for hash, c := range l.ever {
		scope := conductor.Scope{Tenant: l.tenant, Model: c.Model, LoRA: c.LoRA, Salt: c.Salt, BlockSize: int(c.BlockSize)}
		for _, m := range x.QueryNames(scope, []uint64{hash}) {
			if m.Instance == "pool" && m.Longest > 0 && m.Media[kvevent.CPU] == m.Longest {
				list = append(list, hash)
			}
		}
	}
	slices.Sort(list)
	return list
}

// requireFollows waits until the index knows what the pool holds, no more and no less.
func requireFollows(t *testing.T, f *Feed, x *conductor.Index, loads ...*load) {
	t.Helper()
	for _, l := range loads {
		held := l.held()
		require.NotEmpty(t, held)
		last := []uint64(nil)
		for deadline := time.Now().Add(20 * time.Second); !slices.Equal(held, last) && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
			last = l.known(x)
		}
		require.Equal(t, held, last, "%+v", f.Stats())
	}
}

func feed(t *testing.T, x *conductor.Index, members []string, loads ...*load) *Feed {
	t.Helper()
	cfg := Config{
		Index: x, Members: members, Tenants: map[string]*client.Client{}, Silence: 2 * time.Second,
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	for _, l := range loads {
		cfg.Tenants[l.tenant] = l.c
	}
	f, err := Start(cfg)
	require.NoError(t, err)
	t.Cleanup(f.Close)
	return f
}

// TestFollow: the index knows what is stored, deleted, evicted and cleared, of the tenants that it follows, what was there
// before it came as well as what came later, and after the master was restarted.
func TestFollow(t *testing.T) {
	p := newPool(t, 1)
	l, other := p.load("default"), p.load("other")
	l.step(100)
	other.step(20)
	x := conductor.NewIndex(conductor.IndexConfig{})
	f := feed(t, x, p.endpoints(), l)
	requireFollows(t, f, x, l)
	require.Empty(t, other.known(x), "it is not followed")
	l.step(1000) // evicts
	requireFollows(t, f, x, l)
	require.Less(t, len(l.held()), 512)
	require.Zero(t, f.Stats().Bad+f.Stats().Gaps)
	require.EqualValues(t, 1, f.Stats().Listings)

	require.NoError(t, l.c.Clear(t.Context(), client.Scope{Context: &l.models[0]}))
	requireFollows(t, f, x, l)
	l.step(50)
	requireFollows(t, f, x, l)
	other.step(20)
	require.Eventually(t, func() bool { return f.Stats().Foreign > 0 }, 10*time.Second, time.Millisecond)

	p.stop(0)
	p.start(0)
	l.step(50)
	requireFollows(t, f, x, l)
	require.Greater(t, f.Stats().Listings, uint64(1))
	require.Empty(t, other.known(x))
}

// TestFollowACluster: while members come and go, the leader among them, the index follows one or another, all tenants.
func TestFollowACluster(t *testing.T) {
	p := newPool(t, 3)
	l, other := p.load("default"), p.load("other")
	x := conductor.NewIndex(conductor.IndexConfig{})
	f := feed(t, x, p.endpoints(), l, other)
	for i := range p.servers {
		l.step(60)
		other.step(20)
		requireFollows(t, f, x, l, other)
		was := f.Stats().Members
		p.stop(i) // the first one is followed now, and each led at some time
		l.step(60)
		other.step(20)
		requireFollows(t, f, x, l, other)
		p.start(i)
		if i == 0 {
			require.Greater(t, f.Stats().Members, was)
		}
	}
	l.step(60)
	requireFollows(t, f, x, l, other)
	require.Zero(t, f.Stats().Bad)
}

// TestGap: events that are lost on their way are noticed, and all is listed anew; until then what is known stays.
func TestGap(t *testing.T) {
	p := newPool(t, 1)
	l := p.load("default")
	l.step(50)
	pub, err := kvpub.New(t.Context(), kvpub.Config{
		Listen: "tcp://127.0.0.1:*", Format: kvevent.RFC1527, Rank: kvevent.NoRank, Beat: 10 * time.Millisecond, Interval: time.Millisecond,
	})
	require.NoError(t, err)
	defer func() { require.NoError(t, pub.Close()) }()
	x := conductor.NewIndex(conductor.IndexConfig{})
	f := feed(t, x, []string{pub.Endpoint()}, l)
	requireFollows(t, f, x, l)
	listings := f.Stats().Listings
	l.step(50) // nobody is told
	require.NotEqual(t, l.held(), l.known(x))
	pub.Skip()
	requireFollows(t, f, x, l)
	require.Equal(t, listings+1, f.Stats().Listings)
	require.EqualValues(t, 1, f.Stats().Gaps)

	require.NoError(t, pub.Publish(kvevent.Event{Kind: kvevent.Cleared, Medium: kvevent.Media, Rank: kvevent.NoRank, BaseBlock: -1}))
	require.Eventually(t, func() bool { return len(l.known(x)) == 0 }, 10*time.Second, time.Millisecond)
	pub.Skip()
	requireFollows(t, f, x, l)
	// An event that names no tenant could be anybody's.
	require.NoError(t, pub.Publish(kvevent.Event{
		Kind: kvevent.Stored, Rank: kvevent.NoRank, Hashes: []uint64{1}, BlockSize: 16, BaseBlock: -1,
	}))
	require.Eventually(t, func() bool { return f.Stats().Members == 2 }, 10*time.Second, time.Millisecond)
}

// TestListUnderLoad: what is stored and removed while an index lists the pool is not lost, nor comes back.
func TestListUnderLoad(t *testing.T) {
	p := newPool(t, 1)
	l := p.load("default")
	l.step(300)
	for range 4 {
		var wg sync.WaitGroup
		wg.Go(func() { l.step(150) })
		x := conductor.NewIndex(conductor.IndexConfig{})
		f := feed(t, x, p.endpoints(), l)
		wg.Wait()
		requireFollows(t, f, x, l)
		f.Close()
	}
}

// TestStale: what is known is forgotten once no member has been heard for long.
func TestStale(t *testing.T) {
	p := newPool(t, 1)
	l := p.load("default")
	l.step(20)
	x := conductor.NewIndex(conductor.IndexConfig{})
	f, err := Start(Config{
		Index: x, Members: p.endpoints(), Tenants: map[string]*client.Client{"default": l.c}, Silence: 2 * time.Second, Stale: 300 * time.Millisecond,
	})
	require.NoError(t, err)
	defer f.Close()
	requireFollows(t, f, x, l)
	p.stop(0)
	require.NotEmpty(t, l.known(x))
	require.Eventually(t, func() bool { return len(l.known(x)) == 0 }, 10*time.Second, 10*time.Millisecond)
	require.False(t, f.Stats().Synced)
	p.start(0)
	requireFollows(t, f, x, l)
	require.True(t, f.Stats().Synced)
}

func TestWrongConfig(t *testing.T) {
	x := conductor.NewIndex(conductor.IndexConfig{})
	tenants := map[string]*client.Client{"default": nil}
	for _, cfg := range []Config{
		{},
		{Index: x, Members: []string{"tcp://127.0.0.1:1"}},
		{Members: []string{"tcp://127.0.0.1:1"}, Tenants: tenants},
		{Index: x, Tenants: tenants},
		{Index: x, Members: []string{"http://x"}, Tenants: tenants},
	} {
		_, err := Start(cfg)
		require.ErrorContains(t, err, "poolfeed")
	}
}
