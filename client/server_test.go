package client_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/meta"
	"larder/server"
)

const mib = 1 << 20

// startServer starts a real cluster of one, whose pool has a device per tier of so many MiB of data.
func startServer(t *testing.T, tiers map[string]int) *server.Server {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-client-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	cfg := server.Default()
	cfg.DataDir = t.TempDir()
	cfg.Listen, cfg.PeerListen, cfg.AdminListen = "127.0.0.1:0", "127.0.0.1:0", server.Off
	cfg.Socket = filepath.Join(dir, "s")
	cfg.ElectionTimeout, cfg.DefaultLease = 300*time.Millisecond, 200*time.Millisecond
	cfg.MinFreeDisk = mib
	cfg.Pool = nil
	for tier, size := range tiers {
		cfg.Pool = append(cfg.Pool, server.DeviceConfig{
			Path: filepath.Join(dir, tier), Tier: tier, Size: server.Size((size + 2) * mib), // its header takes 2 MiB
		})
	}
	s, err := server.Start(cfg, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, s.Stop(ctx))
	})
	return s
}

// open connects a client that the end of the test closes.
func open(t *testing.T, s *server.Server, cfg client.Config) *client.Client {
	t.Helper()
	cfg.Addrs = []string{s.Addr()}
	cfg.PageSize, cfg.RegionSize = 64<<10, mib
	c, err := client.Open(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// store stores a page under each key.
func store(t *testing.T, c *client.Client, keys ...[]byte) {
	t.Helper()
	for _, k := range keys {
		_, err := c.Put(t.Context(), k, []byte("value of "+string(k)))
		require.NoError(t, err, "%s", k)
	}
}

// names makes n keys.
func names(prefix string, n int) (keys [][]byte) {
	for i := range n {
		keys = append(keys, fmt.Appendf(nil, "%s-%d", prefix, i))
	}
	return keys
}

func held(t *testing.T, c *client.Client, key string) bool {
	t.Helper()
	ok, err := c.Exists(t.Context(), []byte(key))
	require.NoError(t, err)
	return ok
}

func remove(t *testing.T, c *client.Client, key string) bool {
	t.Helper()
	was, err := c.Delete(t.Context(), []byte(key))
	require.NoError(t, err)
	return was[0]
}

func TestASessionsPinHoldsUntilItIsUndoneOrTheSessionEnds(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c, other := open(t, s, client.Config{}), open(t, s, client.Config{})
	store(t, c, names("cold", 4)...)
	done, err := c.Pin(t.Context(), client.PinSpec{}, []byte("cold-0"), []byte("cold-1"), []byte("none"))
	require.NoError(t, err)
	require.Equal(t, []bool{true, true, false}, done)
	store(t, c, names("flood", 2*4*16)...) // twice what the pool holds
	require.True(t, held(t, c, "cold-0") && held(t, c, "cold-1"))
	require.False(t, held(t, c, "cold-2") || held(t, c, "cold-3"), "what is as cold, and not pinned, is gone")
	require.False(t, remove(t, other, "cold-0"))
	require.True(t, held(t, c, "cold-0"))

	done, err = other.Unpin(t.Context(), client.PinSpec{}, []byte("cold-0"))
	require.NoError(t, err)
	require.Equal(t, []bool{false}, done, "the pin is another session's")
	for _, want := range []bool{true, false} {
		done, err = c.Unpin(t.Context(), client.PinSpec{}, []byte("cold-0"))
		require.NoError(t, err)
		require.Equal(t, []bool{want}, done)
	}
	require.True(t, remove(t, other, "cold-0"))

	require.NoError(t, c.Close(t.Context()))
	require.True(t, remove(t, other, "cold-1"), "the session has ended, and its pin with it")
}

func TestADurablePinOutlivesItsSessionAndIsUndoneByItsOwnersName(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c, other := open(t, s, client.Config{}), open(t, s, client.Config{})
	spec := client.PinSpec{Kind: string(client.PinDurable), Owner: "job-7"}
	store(t, c, []byte("k"), []byte("brief"))
	done, err := c.Pin(t.Context(), spec, []byte("k"))
	require.NoError(t, err)
	require.Equal(t, []bool{true}, done)
	brief := spec
	brief.TTLMS = 300
	_, err = c.Pin(t.Context(), brief, []byte("brief"))
	require.NoError(t, err)
	require.NoError(t, c.Close(t.Context()))
	store(t, other, names("flood", 2*4*16)...)
	require.True(t, held(t, other, "k"))
	require.False(t, remove(t, other, "k"))
	require.Eventually(t, func() bool { return !held(t, other, "brief") || remove(t, other, "brief") }, 10*time.Second,
		10*time.Millisecond, "a pin with a time to live ends by itself")

	somebody := spec
	somebody.Owner = "job-8"
	done, err = other.Unpin(t.Context(), somebody, []byte("k"))
	require.NoError(t, err)
	require.Equal(t, []bool{false}, done)
	done, err = other.Unpin(t.Context(), spec, []byte("k"))
	require.NoError(t, err)
	require.Equal(t, []bool{true}, done)
	require.True(t, remove(t, other, "k"))
}

func TestASoftPinIsEvictedLastAndBeforeAStoreFails(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c := open(t, s, client.Config{})
	spec := client.PinSpec{Kind: string(client.PinSoft), TTLMS: 3600_000}
	store(t, c, []byte("soft"))
	done, err := c.Pin(t.Context(), spec, []byte("soft"))
	require.NoError(t, err)
	require.Equal(t, []bool{true}, done)
	flood := names("flood", 2*4*16)
	store(t, c, flood...)
	require.True(t, held(t, c, "soft"))

	_, err = c.Pin(t.Context(), spec, flood...) // those that are held: all of the pool is pinned softly now
	require.NoError(t, err)
	store(t, c, names("more", 4)...)
	done, err = c.Unpin(t.Context(), spec, []byte("more-0"))
	require.NoError(t, err)
	require.Equal(t, []bool{false}, done)
}

func TestAPinThatSaysTooLittleIsRefused(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c := open(t, s, client.Config{})
	store(t, c, []byte("k"))
	for name, spec := range map[string]client.PinSpec{
		"durable without an owner": {Kind: string(client.PinDurable)},
		"soft without an end":      {Kind: string(client.PinSoft)},
		"a session's with an end":  {Kind: string(client.PinSession), TTLMS: 5},
		"of no kind":               {Kind: "velcro"},
	} {
		_, err := c.Pin(t.Context(), spec, []byte("k"))
		require.ErrorIs(t, err, client.ErrConfig, name)
	}
}

func TestPrefixMatchDemandsAllShardsOfABlock(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c := open(t, s, client.Config{})
	model := client.PrefixContext{Model: "m", BlockSize: 4}
	hashes := client.PrefixHashes([]uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 0, model)
	require.Len(t, hashes, 3)
	put := func(block int, member uint16) {
		parent := uint64(0)
		if block > 0 {
			parent = hashes[block-1]
		}
		_, err := c.Put(t.Context(), fmt.Appendf(nil, "block-%d/%d", block, member), []byte("kv"),
			client.WithPrefix(&model, hashes[block], parent, uint64(block)), client.WithShard(member, 2))
		require.NoError(t, err)
	}
	for block := range hashes {
		put(block, 0)
	}
	put(0, 1)
	put(1, 1)
	other := open(t, s, client.Config{Tenant: "other"})
	for _, tc := range []struct {
		name    string
		c       *client.Client
		context client.PrefixContext
		members int
		want    int
	}{
		{"any shard", c, model, 0, 3},
		{"both shards", c, model, 2, 2},
		{"groups of another size", c, model, 3, 0},
		{"the largest group", c, model, client.MaxShards, 0},
		{"another model", c, client.PrefixContext{Model: "n", BlockSize: 4}, 0, 0},
		{"another tenant", other, model, 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, keys, err := tc.c.PrefixMatch(t.Context(), tc.context, hashes, tc.members, true)
			require.NoError(t, err)
			require.Equal(t, tc.want, n)
			require.Len(t, keys, tc.want)
			for i, k := range keys {
				require.Equal(t, fmt.Sprintf("block-%d/0", i), string(k))
			}
		})
	}
	put(2, 1)
	n, keys, err := c.PrefixMatch(t.Context(), model, hashes, 2, false)
	require.NoError(t, err)
	require.Equal(t, 3, n)
	require.Empty(t, keys, "they were not asked for")
	require.True(t, remove(t, c, "block-0/1"))
	n, _, err = c.PrefixMatch(t.Context(), model, hashes, 2, false)
	require.NoError(t, err)
	require.Zero(t, n, "a prefix has no gap at its start")
}

func TestShardsAreLimitedToWhatServersMatch(t *testing.T) {
	require.Equal(t, meta.MaxGroupMembers, client.MaxShards)
}

func TestRegionsComeFromTheTierThatIsAskedForWhileItHasRoom(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8, "dram": 2, "ssd": 4})
	tiers := map[uint64]string{}
	for _, d := range s.Status().Devices {
		tiers[d.ID] = d.Tier
	}
	require.Len(t, tiers, 3)
	lies := func(c *client.Client, key string) string {
		l, err := c.Lookup(t.Context(), []byte(key))
		require.NoError(t, err)
		return tiers[l.Device]
	}
	dram, ssd := open(t, s, client.Config{Tier: "dram"}), open(t, s, client.Config{Tier: "ssd"})
	store(t, ssd, []byte("ssd"))
	require.Equal(t, "ssd", lies(ssd, "ssd"))
	const pages = 2 * mib / (64 << 10)
	store(t, dram, names("dram", pages+1)...)
	for i := range pages {
		require.Equal(t, "dram", lies(dram, fmt.Sprint("dram-", i)))
	}
	require.NotEqual(t, "dram", lies(dram, fmt.Sprint("dram-", pages)), "rather another tier than evictions")
	require.True(t, held(t, dram, "dram-0"))
}
