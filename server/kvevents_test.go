package server

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
	"larder/meta"
	"larder/protocol"
	"larder/zmtp"
)

// eventsOf are events that a server publishes, as they come in.
type eventsOf struct {
	tb    testing.TB
	c     *zmtp.Conn
	b     kvevent.Batch
	at    int // in the batch
	next  uint64
	holes int
	topic string
}

// follow subscribes to a server's events, and returns when it is heard.
func follow(tb testing.TB, endpoint string) *eventsOf {
	tb.Helper()
	c, err := zmtp.Dial(tb.Context(), endpoint, zmtp.Config{Type: zmtp.SUB})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	require.NoError(tb, c.Subscribe("kv@"))
	e := &eventsOf{tb: tb, c: c}
	e.read() // there is one every second
	e.holes, e.at = 0, len(e.b.Events)
	return e
}

func (e *eventsOf) read() {
	e.tb.Helper()
	m, err := e.c.Read()
	require.NoError(e.tb, err)
	sequence := binary.BigEndian.Uint64(m[1])
	require.GreaterOrEqual(e.tb, sequence, e.next)
	if sequence != e.next {
		e.holes++
	}
	e.next, e.topic, e.at = sequence+1, string(m[0]), 0
	require.NoError(e.tb, e.b.Decode(m[2]))
	require.NoError(e.tb, e.b.Reason)
}

// event is the next event.
func (e *eventsOf) event() *kvevent.Event {
	e.tb.Helper()
	for e.at == len(e.b.Events) {
		e.read()
	}
	e.at++
	return &e.b.Events[e.at-1]
}

func withKVEvents(cfg Config) Config {
	cfg.KVEventsListen, cfg.KVEventsReplayListen = "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"
	return cfg
}

// TestKVEventsOfAServer: what clients store and delete is published, with all that it was stored with, and is counted.
func TestKVEventsOfAServer(t *testing.T) {
	s := startServer(t, withKVEvents(testConfig(t)))
	endpoint, replay := s.KVEvents()
	require.NotEmpty(t, replay)
	e := follow(t, endpoint)
	require.Equal(t, "kv@"+s.Config().Advertise+"@"+s.Config().ClusterName, e.topic)
	w := dial(t, "tcp", s.Addr())
	w.open("w")
	a := w.alloc(protocol.AllocRequest{InstanceID: "w", Size: 16 * 4096, PageSize: 4096})
	req := protocol.RegisterRequest{Mutation: w.next(), Context: &protocol.Context{Model: "m", LoRA: "sql", Salt: "s", BlockSize: 16}}
	for i := range uint64(4) {
		req.Entries = append(req.Entries, protocol.RegisterEntry{
			Key: fmt.Appendf(nil, "k%d", i), RegionID: a.Region.RegionID, Epoch: a.Region.Epoch, KVOffset: i * 4096, KVLength: 4096,
			HasPrefix: true, Hash: 101 + i, Parent: 100 + i, Index: 7 + i, Group: 1<<16 | 2,
		})
	}
	req.Entries[3].Parent = 9 // of another prompt
	var reply protocol.RegisterReply
	require.NoError(t, reply.DecodeAs(w.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister)), protocol.TypeBatchRegister))
	require.NoError(t, reply.Err())
	w.register(a.Region, 10, "plain")
	stored := *e.event()
	require.Equal(t, kvevent.Event{
		Kind: kvevent.Stored, Medium: kvevent.CPU, Rank: kvevent.NoRank, Hashes: []uint64{101, 102, 103}, Parent: 100, HasParent: true,
		Standard: true, BlockSize: 16, Group: 1, LoRA: []byte("sql"), Salt: []byte("s"), Model: []byte("m"),
		Tenant: []byte("default"), Backend: []byte(s.Config().ClusterName), ID: stored.ID, BaseBlock: 7,
	}, stored, "blocks that follow each other share an event")
	other := *e.event()
	require.Equal(t, []uint64{104}, other.Hashes)
	require.EqualValues(t, 9, other.Parent)
	del := protocol.KeysRequest{Mutation: w.next(), Keys: [][]byte{[]byte("k3"), []byte("plain"), []byte("k0")}}
	w.call(protocol.TypeBatchDelete, del.AppendAs(nil, protocol.TypeBatchDelete))
	gone := *e.event()
	require.Equal(t, kvevent.Removed, gone.Kind)
	require.Equal(t, []uint64{104, 101}, gone.Hashes)
	require.Equal(t, "m", string(gone.Model))
	require.Zero(t, e.holes)
	stats := s.kvEvents.pub.Stats()
	require.EqualValues(t, 3, stats.Events)
	require.Zero(t, stats.Refused)
}

// testEvents publishes what a test tells, until it ends.
func testEvents(tb testing.TB, format string) (*kvEvents, *eventsOf) {
	tb.Helper()
	cfg := withKVEvents(Default())
	cfg.KVEventsFormat = format
	k, err := newKVEvents(tb.Context(), &cfg, nil, &Counters{}, testLogger(tb))
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, k.pub.Close()) })
	return k, follow(tb, k.pub.Endpoint())
}

// changesOf are changes of so many blocks of a context, one after the other in a prompt.
func changesOf(c *meta.Context, first, n uint64) (list []meta.BlockChange) {
	for i := range n {
		list = append(list, meta.BlockChange{Block: meta.Block{
			Context: c, Hash: first + i, Parent: first + i - 1, HasParent: i > 0, Index: uint32(i), Media: meta.InMemory,
		}})
	}
	return list
}

// TestChangesShareEvents as long as subscribers can tell them apart.
func TestChangesShareEvents(t *testing.T) {
	k, e := testEvents(t, "rfc1527")
	a, b := &meta.Context{Model: "a"}, &meta.Context{Model: "b", BlockSize: 1 << 40}
	list := changesOf(a, 1, maxEventBlocks+2)
	list = append(list, changesOf(b, 5000, 1)...)
	list[len(list)-1].Context = &meta.Context{Model: "c"}
	both := changesOf(a, 6000, 1)[0]
	both.Media = meta.InMemory | meta.OnDisk
	gone := both
	gone.Kind, gone.Media = meta.BlockRemoved, meta.OnDisk
	cleared := meta.BlockChange{Kind: meta.BlocksCleared}
	list = append(list, both, gone, gone, cleared)
	list = append(list, changesOf(b, 1, 1)...) // blocks of no engine: refused
	k.publish(list)
	for _, want := range []struct {
		kind   kvevent.Kind
		medium kvevent.Medium
		blocks int
	}{
		{kvevent.Stored, kvevent.CPU, maxEventBlocks},
		{kvevent.Stored, kvevent.CPU, 2},
		{kvevent.Stored, kvevent.CPU, 1},
		{kvevent.Stored, kvevent.CPU, 1},
		{kvevent.Stored, kvevent.Disk, 1},
		{kvevent.Removed, kvevent.Disk, 2},
		{kvevent.Cleared, kvevent.Media, 0},
	} {
		got := e.event()
		require.Equal(t, want.kind, got.Kind)
		require.Equal(t, want.medium, got.Medium)
		require.Len(t, got.Hashes, want.blocks)
	}
	require.EqualValues(t, 1, k.pub.Stats().Refused)
}

// TestTooManyChanges: what waits is bounded; what is left out is a hole in the sequence, behind what was published and before
// what comes later.
func TestTooManyChanges(t *testing.T) {
	k, e := testEvents(t, "vllm")
	c := &meta.Context{}
	k.tell(changesOf(c, 1, maxBlockChanges-1))
	k.tell(changesOf(c, 1, 2))
	k.tell(changesOf(c, 1, 1))
	require.EqualValues(t, 3, k.n.KVEventsLost.Load())
	done := make(chan struct{})
	go func() {
		k.run(t.Context())
		close(done)
	}()
	blocks := 0
	for e.holes == 0 {
		if e.read(); e.holes == 0 {
			for i := range e.b.Events {
				blocks += len(e.b.Events[i].Hashes)
			}
		}
	}
	require.Equal(t, maxBlockChanges-1, blocks)
	k.tell(changesOf(c, 77, 1))
	require.Equal(t, []uint64{77}, e.event().Hashes)
	k.tell(nil) // the state was replaced
	for e.holes == 1 {
		e.read()
	}
	require.EqualValues(t, 2, k.n.KVEventsGaps.Load())
}

func TestKVEventsConfig(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"kv_events_listen: zmtp":                func(c *Config) { c.KVEventsListen = "5557" },
		"kv_events_replay_listen: nothing":      func(c *Config) { c.KVEventsListen = "" },
		"kv_events_format: the format":          func(c *Config) { c.KVEventsFormat = "json" },
		"kv_events_topic: 300 bytes, at most 2": func(c *Config) { c.KVEventsTopic = string(make([]byte, 300)) },
	} {
		cfg := withKVEvents(testConfig(t))
		require.NoError(t, cfg.Complete())
		require.NoError(t, cfg.Validate())
		change(&cfg)
		require.ErrorContains(t, cfg.Validate(), want)
	}
}

// BenchmarkKVEvents registers blocks, with nobody to publish them to, and with a subscriber.
func BenchmarkKVEvents(b *testing.B) {
	for _, on := range []bool{false, true} {
		b.Run(fmt.Sprintf("on=%t", on), func(b *testing.B) {
			cfg := testConfig(b)
			cfg.Pool[0].Size = 1 << 30
			if on {
				cfg = withKVEvents(cfg)
			}
			s := startServer(b, cfg)
			if endpoint, _ := s.KVEvents(); on {
				c, err := zmtp.Dial(b.Context(), endpoint, zmtp.Config{Type: zmtp.SUB})
				require.NoError(b, err)
				require.NoError(b, c.Subscribe(""))
				defer func() { _ = c.Close() }()
				go func() {
					for {
						if _, err := c.Read(); err != nil {
							return
						}
					}
				}()
			}
			benchRegister(b, s, 64, 64, true)
			if on {
				require.Zero(b, s.Counters().KVEventsLost.Load())
				b.ReportMetric(float64(s.kvEvents.pub.Stats().Events), "events")
			}
		})
	}
}

// BenchmarkTell is what Apply pays for a change, and publish what its goroutine does.
func BenchmarkTell(b *testing.B) {
	k, _ := testEvents(b, "rfc1527")
	c := &meta.Context{Tenant: "default", Model: "m", BlockSize: 16}
	list := changesOf(c, 1, 64)
	b.Run("tell", func(b *testing.B) {
		for b.Loop() {
			if k.tell(list); len(k.queue) > maxBlockChanges/2 {
				k.queue = k.queue[:0]
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
	})
	b.Run("publish", func(b *testing.B) {
		for b.Loop() {
			k.publish(list)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
	})
}

// TestASnapshotIsTold: a member whose index a snapshot has replaced does not know what has changed, and says so, after all
// that it has told before.
func TestASnapshotIsTold(t *testing.T) {
	r := newRig(t)
	var told [][]meta.BlockChange
	r.m.cfg.Blocks = func(changes []meta.BlockChange) { told = append(told, slices.Clone(changes)) }
	r.device(8)
	c := r.client("a")
	a := c.alloc(protocol.AllocRequest{Size: 4 * testPage, PageSize: testPage})
	require.NoError(t, a.Err())
	req := c.registration(a.Region, 0, "k")
	req.Entries[0].HasPrefix, req.Entries[0].Hash = true, 5
	c.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister))
	require.Len(t, told, 1)
	require.EqualValues(t, 5, told[0][0].Hash)
	require.NoError(t, r.m.Restored(r.index))
	require.Len(t, told, 2)
	require.Nil(t, told[1])
}
