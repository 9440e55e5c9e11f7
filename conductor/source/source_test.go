package source

import (
	"encoding/binary"
	"io"
	"maps"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"larder/conductor"
	"larder/conductor/enginehash"
	"larder/conductor/kvevent"
)

// TestFollow: what engines store and remove is known, what they did before they were registered included.
func TestFollow(t *testing.T) {
	w := newWorld(t, Config{})
	a, b := newEngine(t), newEngine(t)
	b.topic = true
	a.publish(stored(nil, seq(0, 8), 1, 2))
	b.publish(stored(nil, seq(0, 4), 77))
	w.follow(a, a.service("a"))
	w.follow(b, b.service("b"))
	a.publish(stored(2, seq(8, 12), 3))
	a.publish(removed(3), stored(2, seq(8, 16), 3, 4))
	b.publish(removed(77))
	w.sync(a, "a")
	st := w.sync(b, "b")
	require.Equal(t, map[string]int{"a": 16}, w.longest(seq(0, 20)))
	require.Equal(t, Live, st.State)
	require.EqualValues(t, 1, st.Epoch)
	require.Empty(t, st.Error)
	stats := w.Stats()
	require.Equal(t, map[State]int{Live: 2}, stats.Services)
	require.EqualValues(t, 6, stats.Events)
	require.Zero(t, stats.Bad+stats.Unknown+stats.Stale)
}

// TestGaps: batches that were lost on their way are had again; if they cannot be, what was known is dropped.
func TestGaps(t *testing.T) {
	whole, fresh := map[string]int{"a": 12}, map[string]int(nil)
	for name, c := range map[string]struct {
		engine func(e *engine)
		alone  bool
		event  any // that the batch after the gap begins with
		want   map[string]int
		state  State
		drops  uint64
	}{
		"replayed":                     {want: whole, state: Live},
		"replayed with topics":         {engine: func(e *engine) { e.topic = true }, want: whole, state: Live},
		"a replay loses a batch":       {engine: func(e *engine) { e.loses[e.next+1] = 1 }, want: whole, state: Live},
		"replays lose a batch":         {engine: func(e *engine) { e.loses[e.next+1] = 100 }, want: fresh, state: Stale, drops: 1},
		"the ring is too short":        {engine: func(e *engine) { e.keeps = 1 }, want: fresh, state: Stale, drops: 3},
		"no replay":                    {alone: true, want: fresh, state: Stale, drops: 3},
		"a clear makes up for it":      {alone: true, event: cleared(), want: fresh, state: Live},
		"a clear needs no replay":      {event: cleared(), want: fresh, state: Live},
		"a clear of a medium does not": {alone: true, event: []any{"AllBlocksCleared", "GPU"}, want: fresh, state: Stale, drops: 3},
	} {
		t.Run(name, func(t *testing.T) {
			w, e := newWorld(t, Config{}), newEngine(t)
			s := e.service("a")
			if c.alone {
				s = alone(s)
			}
			w.follow(e, s)
			e.publish(stored(nil, seq(0, 4), 1))
			before := w.sync(e, "a")
			if c.engine != nil {
				e.mu.Lock()
				c.engine(e)
				e.mu.Unlock()
			}
			asked := len(e.replays())
			e.miss(stored(1, seq(4, 8), 2))
			e.miss()
			e.miss()
			if c.event != nil {
				e.publish(c.event)
			} else {
				e.publish(stored(2, seq(8, 12), 3))
			}
			st := w.sync(e, "a")
			if c.want == nil {
				require.Empty(t, w.longest(seq(0, 12)))
			} else {
				require.Equal(t, c.want, w.longest(seq(0, 12)))
			}
			require.Equal(t, c.state, st.State)
			require.Equal(t, before.Gaps+1, st.Gaps)
			require.Equal(t, c.drops, st.Dropped)
			require.Equal(t, c.state == Stale, st.Stale == 1)
			require.EqualValues(t, 1, st.Epoch)
			require.Equal(t, c.alone || c.event != nil, len(e.replays()) == asked)

			e.publish(stored(nil, seq(20, 24), 9))
			w.sync(e, "a")
			require.Equal(t, map[string]int{"a": 4}, w.longest(seq(20, 24)), "it goes on")
			e.publish(cleared(), stored(nil, seq(0, 4), 1))
			require.Equal(t, Live, w.sync(e, "a").State, "all that it has is known again")
			require.Equal(t, map[string]int{"a": 4}, w.longest(seq(0, 8)))
		})
	}
}

// TestRestart: an engine that has begun anew has nothing of what it had, however far it is by the time that it is seen.
func TestRestart(t *testing.T) {
	for name, c := range map[string]struct {
		alone   bool
		batches int // that the new process has published when it is reached; the old one had some
		epoch   uint64
	}{
		"it has published nothing":  {batches: 0, epoch: 2},
		"less than before":          {batches: 1, epoch: 2},
		"as much as before":         {batches: 10, epoch: 2},
		"more than before":          {batches: 20, epoch: 2},
		"and there is no replay":    {alone: true, batches: 1, epoch: 2},
		"and nothing can be known":  {alone: true, batches: 20, epoch: 1}, // that is a gap
		"and its ring is not whole": {batches: 30, epoch: 1},
	} {
		t.Run(name, func(t *testing.T) {
			w, e := newWorld(t, Config{}), newEngine(t)
			s := e.service("a")
			if c.alone {
				s = alone(s)
			}
			w.follow(e, s)
			e.mu.Lock()
			n := e.next
			e.mu.Unlock()
			for ; n < 10; n++ {
				e.publish(stored(nil, seq(0, 4), 1))
			}
			w.sync(e, "a")
			e.stop()
			if c.batches == 30 {
				e.keeps = 5
			}
			e.start(slices.Repeat([]any{stored(nil, seq(100, 104), 7)}, c.batches)...)
			w.hears(e, "a")
			e.publish(stored(nil, seq(40, 48), 11, 12))
			st := w.sync(e, "a")
			require.Empty(t, w.longest(seq(0, 4)), "what the old one had")
			require.Equal(t, map[string]int{"a": 8}, w.longest(seq(40, 48)))
			require.Equal(t, c.epoch, st.Epoch)
			require.Equal(t, c.epoch-1, st.Restarts)
			if !c.alone && c.batches > 0 {
				require.Equal(t, map[string]int{"a": 4}, w.longest(seq(100, 104)))
			}
		})
	}
}

// TestRestartBehindAForwarder: the connection stays, and the numbers begin anew.
func TestRestartBehindAForwarder(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	e.publish(stored(nil, seq(0, 8), 1, 2))
	w.sync(e, "a")
	e.mu.Lock()
	e.next, e.ring, e.stamp = 0, nil, 100
	e.mu.Unlock()
	e.publish(stored(nil, seq(40, 44), 3))
	eventually(t, func() bool { return w.of("a").Epoch == 2 && w.is(e, "a") })
	require.Empty(t, w.longest(seq(0, 8)))
	require.Equal(t, map[string]int{"a": 4}, w.longest(seq(40, 44)))
}

// TestEngineGoes: what is known of it stays for a while. If it comes back in time it goes on where it was; if not it begins with
// what it still has.
func TestEngineGoes(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	e.publish(stored(nil, seq(0, 8), 1, 2), stored(nil, seq(0, 8), 1, 2)) // two copies
	before := w.sync(e, "a")
	require.NoError(t, e.pub.Close())
	eventually(t, func() bool { return w.of("a").State == Disconnected })
	require.NotEmpty(t, w.of("a").Error)
	require.Equal(t, map[string]int{"a": 8}, w.longest(seq(0, 8)))
	e.miss(stored(2, seq(8, 12), 3))
	e.again()
	eventually(t, func() bool { return w.is(e, "a") && w.of("a").State == Live })
	require.Equal(t, map[string]int{"a": 12}, w.longest(seq(0, 12)), "it is had by replay, without that anything comes")
	st := w.of("a")
	require.Equal(t, before.Replayed+1, st.Replayed, "what was known has not been counted again")
	require.EqualValues(t, 1, st.Epoch)
	w.hears(e, "a")
	e.publish(removed(2))
	w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 12}, w.longest(seq(0, 12)), "there is another copy")
	e.publish(removed(2))
	w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 4}, w.longest(seq(0, 12)))
}

// TestEngineStaysAway: what is known of it is dropped after a time, and had by replay when it comes back.
func TestEngineStaysAway(t *testing.T) {
	w, e := newWorld(t, Config{DisconnectTTL: 20 * time.Millisecond}), newEngine(t)
	w.follow(e, e.service("a"))
	e.publish(stored(nil, seq(0, 8), 1, 2))
	w.sync(e, "a")
	require.NoError(t, e.pub.Close())
	eventually(t, func() bool { return w.of("a").Expired == 1 && w.of("a").Sequence == -1 })
	require.Empty(t, w.longest(seq(0, 8)))
	e.again()
	eventually(t, func() bool { return w.is(e, "a") })
	require.Equal(t, map[string]int{"a": 8}, w.longest(seq(0, 8)))
	require.EqualValues(t, 1, w.of("a").Epoch)
}

// TestHeartbeats: an engine that is there without a sign is taken for gone.
func TestHeartbeats(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			greeting := append(append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1}, "NULL"...), make([]byte, 48)...)
			_, _ = conn.Write(append(greeting, "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"...))
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()
	w := newWorld(t, Config{Heartbeat: 5 * time.Millisecond})
	s := alone(newEngine(t).service("a"))
	s.Endpoint = "tcp://" + l.Addr().String()
	_, err = w.Register(s)
	require.NoError(t, err)
	eventually(t, func() bool { return w.of("a").Connects >= 2 })
	require.Zero(t, w.of("a").Batches)
}

// TestReplayThatHangs is given up; what comes meanwhile waits, and is applied then.
func TestReplayThatHangs(t *testing.T) {
	w, e := newWorld(t, Config{ReplayTimeout: 30 * time.Millisecond, MaxBackoff: time.Minute}), newEngine(t)
	hold, begun := make(chan struct{}), make(chan struct{}, 100)
	e.hold, e.begun = hold, begun
	defer close(hold)
	_, err := w.Register(e.service("a"))
	require.NoError(t, err)
	<-begun
	require.Equal(t, Replaying, w.of("a").State)
	w.hears(e, "a")
	e.publish(stored(nil, seq(0, 4), 1))
	st := w.sync(e, "a")
	require.Equal(t, Live, st.State)
	require.Contains(t, st.Error, "deadline exceeded")
	require.EqualValues(t, replayTries, st.Replays)
	require.Equal(t, map[string]int{"a": 4}, w.longest(seq(0, 4)))
}

// TestLiveWhileReplaying: what comes while a replay goes on is applied behind it, and what both have once.
func TestLiveWhileReplaying(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	hold, begun := make(chan struct{}), make(chan struct{}, 100)
	e.mu.Lock()
	e.hold, e.begun = hold, begun
	e.mu.Unlock()
	e.miss(stored(nil, seq(0, 4), 1))
	e.publish(stored(1, seq(4, 8), 2)) // the gap is seen
	<-begun
	e.mu.Lock()
	e.hold = nil
	e.mu.Unlock()
	e.publish(removed(2))
	e.publish(stored(1, seq(4, 8), 2))
	e.miss(stored(2, seq(8, 12), 3)) // and there is another one
	e.publish(stored(3, seq(12, 16), 4))
	close(hold)
	st := w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 16}, w.longest(seq(0, 16)))
	require.Equal(t, e.next, st.Batches, "each one once")
	require.Zero(t, st.Stale)
	e.publish(removed(2))
	w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 4}, w.longest(seq(0, 16)), "there is no second copy")
}

// TestClearOfAMedium drops what lies there, and nothing else.
func TestClearOfAMedium(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	e.publish(stored(nil, seq(0, 8), 1, 2), []any{"BlockStored", []int{1}, nil, []int{}, 0, nil, "CPU"})
	e.publish(map[string]any{"type": "AllBlocksCleared", "medium": "GPU"})
	w.sync(e, "a")
	m := w.index.Query(testScope, seq(0, 8), nil)
	require.Equal(t, 4, m[0].Longest)
	require.Equal(t, 4, m[0].Media[kvevent.CPU], "it came without tokens")
	e.publish(cleared())
	w.sync(e, "a")
	require.Empty(t, w.longest(seq(0, 8)))
}

// TestOrphans: blocks whose beginning was stored before anybody listened are found once it is known.
func TestOrphans(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	e.publish(stored(nil, seq(0, 8), 1, 2))
	w.follow(e, alone(e.service("a")))
	e.publish(stored(2, seq(8, 12), 3))
	w.sync(e, "a")
	require.Empty(t, w.longest(seq(0, 12)))
	e.publish(stored(nil, seq(0, 8), 1, 2))
	w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 12}, w.longest(seq(0, 12)))
}

// TestRanks: each rank is a service; one that is restarted takes nothing of the other's with it.
func TestRanks(t *testing.T) {
	w := newWorld(t, Config{})
	e0, e1 := newEngine(t), newEngine(t)
	s0, s1 := e0.service("a"), e1.service("a")
	s1.DPRank = 1
	e0.publish(stored(nil, seq(0, 8), 1, 2))
	e1.publish(stored(nil, seq(0, 4), 1))
	for _, s := range []Service{s0, s1} {
		_, err := w.Register(s)
		require.NoError(t, err)
	}
	ranks := func() []conductor.RankMatch {
		if m := w.index.Query(testScope, seq(0, 8), nil); len(m) > 0 {
			return m[0].Ranks
		}
		return nil
	}
	eventually(t, func() bool { r := ranks(); return len(r) == 2 && r[0].Tokens == 8 && r[1].Tokens == 4 })
	removed, err := w.Unregister(Filter{InstanceID: "a", DPRank: new(int)})
	require.NoError(t, err)
	require.Equal(t, []string{"a|default|0"}, removed)
	require.Equal(t, []conductor.RankMatch{{Rank: 1, Tokens: 4}}, ranks())
}

// TestAdapters: removals name no adapter.
func TestAdapters(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	sql := testScope
	sql.LoRA = "sql"
	e.publish([]any{"BlockStored", []int{1, 2}, nil, seq(0, 8), 4, 7, "GPU", "sql"}, stored(nil, seq(0, 8), 3, 4))
	e.publish(removed(2))
	w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 4}, w.longestIn(sql, seq(0, 8)))
	require.Equal(t, map[string]int{"a": 8}, w.longest(seq(0, 8)))
}

// TestMooncake: one stream tells of several instances, tenants and models, and clears them one by one.
func TestMooncake(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	s := e.service("pool")
	s.Type = "mooncake"
	w.follow(e, s)
	event := func(kind, backend, tenant string, more map[string]any) {
		m := map[string]any{"event_type": kind, "backend_id": backend, "medium": "CPU", "block_size": 4}
		if tenant != "" {
			m["tenant_id"] = tenant
		}
		maps.Copy(m, more)
		payload, err := msgpack.Marshal(m)
		require.NoError(t, err)
		e.send(payload)
	}
	tokens := map[string]any{"seq_hashes": []int{1, 2}, "token_ids": seq(0, 8), "model_name": "m"}
	event("stored", "x", "", tokens)
	event("stored", "y", "", tokens)
	event("stored", "y", "other", tokens)
	event("stored", "y", "", map[string]any{"seq_hashes": []int{1}, "token_ids": seq(0, 4), "model_name": "n", "additional_salt": "fp8"})
	w.sync(e, "pool")
	other, salted := testScope, testScope
	other.Tenant = "other"
	salted.Model, salted.Salt = "n", "fp8"
	require.Equal(t, map[string]int{"x": 8, "y": 8}, w.longest(seq(0, 8)))
	require.Equal(t, map[string]int{"y": 8}, w.longestIn(other, seq(0, 8)))
	require.Equal(t, map[string]int{"y": 4}, w.longestIn(salted, seq(0, 8)))
	event("cleared", "y", "default", map[string]any{"medium": nil})
	w.sync(e, "pool")
	require.Equal(t, map[string]int{"x": 8}, w.longest(seq(0, 8)))
	require.Equal(t, map[string]int{"y": 8}, w.longestIn(other, seq(0, 8)))
	require.Empty(t, w.longestIn(salted, seq(0, 8)))
	_, err := w.Unregister(Filter{InstanceID: "pool"})
	require.NoError(t, err)
	require.Empty(t, w.longest(seq(0, 8)))
	require.Empty(t, w.longestIn(other, seq(0, 8)))
}

// TestPoolAndEngine: what a pool has for an engine is not what the engine has itself, on the same medium.
func TestPoolAndEngine(t *testing.T) {
	w := newWorld(t, Config{})
	engine, pool := newEngine(t), newEngine(t)
	w.follow(engine, engine.service("x"))
	s := pool.service("pool")
	s.Type = Mooncake
	w.follow(pool, s)
	engine.publish([]any{"BlockStored", []int{1}, nil, seq(0, 4), 4, nil, "CPU"})
	pool.publish(map[string]any{
		"event_type": "stored", "backend_id": "x", "medium": "CPU", "block_size": 4, "seq_hashes": []int{1, 2}, "token_ids": seq(0, 8),
	})
	w.sync(engine, "x")
	w.sync(pool, "pool")
	require.Equal(t, map[string]int{"x": 8}, w.longest(seq(0, 8)))
	pool.publish(map[string]any{"event_type": "cleared", "backend_id": "x"})
	w.sync(pool, "pool")
	require.Equal(t, map[string]int{"x": 4}, w.longest(seq(0, 8)))
}

// TestEnginesSpeakForThemselves: what an engine says of other instances and tenants is of itself.
func TestEnginesSpeakForThemselves(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	e.publish(map[string]any{
		"type": "BlockStored", "block_hashes": []int{1}, "token_ids": seq(0, 4), "block_size": 4,
		"tenant_id": "other", "model_name": "n", "backend_id": "b",
	})
	w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 4}, w.longest(seq(0, 4)))
}

// TestBad: what cannot be read is counted, and costs nothing else.
func TestBad(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	e.send([]byte("\xc1"))
	e.publish([]any{"BlockStored", []int{9}, nil, []int{1, 2, 3}, 2}, []any{"BlockMoved", 1}, stored(nil, seq(0, 4), 1))
	e.pub.Publish([]byte("kv@x"), []byte("short"), nil)
	e.pub.Publish([]byte("kv@x"))
	e.publish(stored(1, seq(4, 8), 2))
	st := w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 8}, w.longest(seq(0, 8)))
	require.EqualValues(t, 4, st.Bad)
	require.EqualValues(t, 1, st.Unknown)
	require.Zero(t, st.Gaps)
	require.NotEmpty(t, st.Error)
}

// TestSeedThatDiffers is seen, where it is known what it should be.
func TestSeedThatDiffers(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	s := e.service("a")
	s.Hash, s.HashSeed = enginehash.SHA256CBOR, "0"
	w.follow(e, s)
	publish := func(seed, salt string) {
		h, err := enginehash.New(s.Hash, seed)
		require.NoError(t, err)
		extras := enginehash.Text("", salt, 2)
		digests, err := h.Blocks(seq(0, 8), 4, extras)
		require.NoError(t, err)
		keys := make([]any, 0, 2)
		for _, k := range extras {
			keys = append(keys, []any(k))
		}
		e.publish(
			[]any{"BlockStored", digests, nil, seq(0, 8), 4, nil, "GPU", nil, keys},
			stored(digests[1], seq(8, 12), 5), // not looked at
		)
		w.sync(e, "a")
	}
	publish("0", "")
	publish("0", "pepper")
	require.EqualValues(t, 4, w.of("a").Verified)
	require.Zero(t, w.of("a").Mismatched)
	publish("1", "")
	require.EqualValues(t, 4, w.of("a").Verified)
	require.EqualValues(t, 2, w.of("a").Mismatched)
	require.Equal(t, map[string]int{"a": 12}, w.longest(seq(0, 12)), "it is found in any case")
}

// TestResync drops what is known, and asks for all of it.
func TestResync(t *testing.T) {
	w, e := newWorld(t, Config{}), newEngine(t)
	w.follow(e, e.service("a"))
	e.publish(stored(nil, seq(0, 8), 1, 2))
	w.sync(e, "a")
	w.index.Clear("a", kvevent.NoRank, kvevent.Media) // it has drifted
	require.Empty(t, w.longest(seq(0, 8)))
	require.Zero(t, w.Resync("b"))
	require.Equal(t, 1, w.Resync("a"))
	eventually(t, func() bool { return len(w.longest(seq(0, 8))) == 1 && w.is(e, "a") })
	require.EqualValues(t, 1, w.of("a").Epoch)
	require.NoError(t, e.pub.Close())
	eventually(t, func() bool { return w.of("a").State == Disconnected })
	require.Equal(t, 1, w.Resync("a"))
	eventually(t, func() bool { return len(w.longest(seq(0, 8))) == 0 }, "also if it is away")
	e.again()
	eventually(t, func() bool { return len(w.longest(seq(0, 8))) == 1 })
}

// TestFrozen: nothing is applied meanwhile, and all of it is afterwards.
func TestFrozen(t *testing.T) {
	w, e := newWorld(t, Config{QueueBatches: 2}), newEngine(t)
	w.follow(e, e.service("a"))
	before := w.of("a")
	w.Frozen(func() {
		for i := range 50 {
			e.publish(stored(nil, seq(i*4, i*4+4), uint64(i+1)))
		}
		time.Sleep(2 * time.Millisecond)
		require.Equal(t, before.Sequence, w.of("a").Sequence)
		require.Empty(t, w.longest(seq(0, 4)))
	})
	w.sync(e, "a")
	require.Equal(t, map[string]int{"a": 4}, w.longest(seq(196, 200)))
	require.Zero(t, w.of("a").Gaps)
}

// TestJudge: what a batch's number says.
func TestJudge(t *testing.T) {
	known := position{known: true, next: 10, sum: 99}
	with := func(heard, replayed uint64) position {
		p := known
		p.heard, p.replayed = heard, replayed
		return p
	}
	none := binary.BigEndian.Uint64([]byte("\xff\xff\xff\xff\xff\xff\xff\xff"))
	for name, c := range map[string]struct {
		p    position
		seq  uint64
		sum  uint64
		want verdict
	}{
		"the first one":                          {position{replayed: none}, 7, 0, due},
		"the next":                               {with(10, none), 10, 0, due},
		"one that is too far":                    {with(10, none), 12, 0, gap},
		"one that came by this connection":       {with(10, none), 9, 99, restart},
		"the first":                              {with(10, 0), 0, 0, restart},
		"one that a replay had":                  {with(5, 0), 7, 0, repeated},
		"the last that a replay had":             {with(0, 5), 9, 99, repeated},
		"another one than that":                  {with(0, 5), 9, 98, restart},
		"one from before the replay's beginning": {with(0, 5), 4, 0, restart},
		"one from an earlier connection":         {with(0, none), 9, 99, restart},
	} {
		require.Equal(t, c.want, c.p.judge(c.seq, c.sum), name)
	}
	p := known
	p.forget()
	require.EqualValues(t, -1, p.sequence())
	require.Equal(t, due, p.judge(3, 0))
}

// TestInbox: whoever puts waits while it is full of messages or bytes, but one message fits always.
func TestInbox(t *testing.T) {
	in := newInbox(3, 100)
	require.True(t, in.put(0, make([]byte, 500)))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range uint64(10) {
			in.put(i+1, []byte{byte(i)})
		}
	}()
	for i := range uint64(11) {
		<-in.ready
		for {
			m, ok, ended, _ := in.take()
			require.False(t, ended)
			if !ok {
				continue
			}
			require.Equal(t, i, m.seq)
			in.release(m)
			break
		}
		in.mu.Lock()
		require.LessOrEqual(t, in.len(), 3)
		in.wake()
		in.mu.Unlock()
	}
	<-done
	in.put(12, nil)
	in.end(io.EOF)
	in.end(nil)
	require.False(t, in.put(13, nil))
	_, ok, _, _ := in.take()
	require.True(t, ok, "what has come before the end")
	_, _, ended, why := in.take()
	require.True(t, ended)
	require.Equal(t, io.EOF, why)
}
