package service

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
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

// soon is within how long what is told has come through.
const soon = 10 * time.Second

// publisher is an engine that publishes as vLLM does.
func publisher(t *testing.T) *kvpub.Publisher {
	t.Helper()
	p, err := kvpub.New(context.Background(), kvpub.Config{
		Listen: "tcp://127.0.0.1:0", Replay: "tcp://127.0.0.1:0", Rank: kvevent.NoRank, Interval: time.Millisecond,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// stored has an engine say that it has stored the blocks of tokens from 0 to n, of 4 each, which it calls base and up.
func stored(t *testing.T, p *kvpub.Publisher, base uint64, n int) {
	t.Helper()
	e := kvevent.Event{Kind: kvevent.Stored, Rank: kvevent.NoRank, BlockSize: 4, BaseBlock: -1}
	for i := range n {
		e.Tokens = append(e.Tokens, uint32(i))
		if i%4 == 0 {
			e.Hashes = append(e.Hashes, base+uint64(i))
		}
	}
	require.NoError(t, p.Publish(e))
}

// follow registers an engine that publishes.
func follow(t *testing.T, s *Service, p *kvpub.Publisher, instance string) {
	t.Helper()
	code, answer := post(t, s, "/register", fmt.Sprintf(`{"endpoint":%q,"replay_endpoint":%q,"type":"vLLM","modelname":"m","instance_id":%q,`+
		`"block_size":4,"dp_rank":0}`, p.Endpoint(), p.ReplayEndpoint(), instance))
	require.Equal(t, 200, code, "%v", answer)
}

// longest is how much of the prompt of n tokens an instance has.
func longest(t *testing.T, s *Service, instance string, n int) int {
	t.Helper()
	code, answer := post(t, s, "/query", `{"model":"m","block_size":4,"token_ids":`+prompt(n)+`}`)
	require.Equal(t, 200, code)
	hits, there := object(t, answer["default"])[instance]
	if !there {
		return 0
	}
	found, ok := object(t, hits)["longest_matched"].(float64)
	require.True(t, ok)
	return int(found)
}

func comes(t *testing.T, s *Service, instance string, n, want int) {
	t.Helper()
	require.Eventually(t, func() bool { return longest(t, s, instance, n) == want }, soon, 5*time.Millisecond, "%s has %d of %d", instance, want, n)
}

// TestEngines: what engines publish is answered, whatever they call their blocks, and still after a restart: before they are
// reached, and with what they have said meanwhile.
func TestEngines(t *testing.T) {
	dir := t.TempDir()
	again := func() *Service {
		s, err := Start(Config{Listen: "127.0.0.1:0", StateDir: dir, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		return s
	}
	s := again()
	a, b := publisher(t), publisher(t)
	stored(t, a, 1000, 8) // before anybody listens
	follow(t, s, a, "a")
	follow(t, s, b, "b")
	comes(t, s, "a", 16, 8)
	stored(t, b, 77_000, 16)
	comes(t, s, "b", 16, 16)
	require.NoError(t, s.Close())

	stored(t, a, 1000, 16)
	s = again()
	defer func() { require.NoError(t, s.Close()) }()
	require.GreaterOrEqual(t, longest(t, s, "a", 16), 8, "it is known from the start")
	require.Equal(t, 16, longest(t, s, "b", 16))
	comes(t, s, "a", 16, 16)
	require.NoError(t, b.Publish(kvevent.Event{Kind: kvevent.Cleared, Medium: kvevent.Media, Rank: kvevent.NoRank, BaseBlock: -1}))
	comes(t, s, "b", 16, 0)
}

// newPool starts a master of a pool that publishes events.
func newPool(t *testing.T) *server.Server {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-service-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	cfg := server.Default()
	cfg.DataDir, cfg.Socket = filepath.Join(dir, "data"), server.Off
	cfg.Listen, cfg.PeerListen, cfg.AdminListen = "127.0.0.1:0", server.Off, server.Off
	cfg.MinFreeDisk = 1 << 20
	cfg.Pool = []server.DeviceConfig{{Path: filepath.Join(dir, "pool"), Size: 18 << 20}} // its header takes 2 MiB
	cfg.KVEventsListen = "tcp://" + freeport.For(t)
	s, err := server.Start(cfg, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		require.NoError(t, s.Stop(ctx))
	})
	return s
}

func openPool(t *testing.T, m *server.Server) *client.Client {
	t.Helper()
	c, err := client.Open(context.Background(), client.Config{Addrs: []string{m.Addr()}, PageSize: 4096, RegionSize: 4 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })
	return c
}

// TestPool: pooled blocks are known, can be loaded by any engine, and a second conductor begins with what the first one has known.
func TestPool(t *testing.T) {
	m := newPool(t)
	c := openPool(t, m)
	scope := client.PrefixContext{Model: "m", BlockSize: 4}
	tokens := make([]uint32, 8000)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	parent := uint64(0)
	for i, name := range conductor.Names(nil, 0, tokens, 4, nil)[:1000] {
		_, err := c.Put(context.Background(), fmt.Appendf(nil, "block-%d", i), []byte("kv"), client.WithPrefix(&scope, name, parent, uint64(i)))
		require.NoError(t, err)
		parent = name
	}
	beside := func() *Service {
		s, err := Start(Config{
			Listen: "127.0.0.1:0", Pool: map[string]*client.Client{DefaultTenant: c}, PoolEvents: []string{m.Config().KVEventsListen},
			Logger: slog.New(slog.DiscardHandler),
		})
		require.NoError(t, err)
		return s
	}
	first := beside()
	comes(t, first, PoolInstance, 8000, 4000)
	e := publisher(t)
	follow(t, first, e, "a")
	stored(t, e, 1000, 8)
	comes(t, first, "a", 8, 8)
	code, answer := post(t, first, "/schedule", `{"model":"m","token_ids":`+prompt(8000)+`}`)
	require.Equal(t, 200, code)
	require.Equal(t, PoolInstance, answer["transfer_from"], "%v", answer)
	require.EqualValues(t, 4000, answer["prefix_len"])
	first.save(context.Background())

	require.NoError(t, e.Close())
	second := beside() // while the first one runs, and the engine cannot be reached
	require.Equal(t, 8, longest(t, second, "a", 8))
	require.NoError(t, second.Close())
	require.NoError(t, first.Close())
}
