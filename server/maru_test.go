package server

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"larder/maru"
	"larder/meta"
	"larder/protocol"
	"larder/zmtp"
)

// withMaru makes a member a metadata server for Maru's clients.
func withMaru(cfg *Config) { cfg.Maru, cfg.MaruRM = "127.0.0.1:0", "127.0.0.1:0" }

// maruClient is a client of Maru's, as far as its wire goes.
type maruClient struct {
	tb  testing.TB
	c   *zmtp.Conn
	seq uint32
}

type dict = map[string]any

func dialMaru(tb testing.TB, s *Server, identity string) *maruClient {
	tb.Helper()
	kind := zmtp.DEALER
	if identity == "" {
		kind = zmtp.REQ
	}
	c, err := zmtp.Dial(tb.Context(), "tcp://"+s.maru.Addr(), zmtp.Config{Type: kind, Identity: identity, MaxMessage: 64 << 20})
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = c.Close() })
	return &maruClient{tb: tb, c: c}
}

// send sends a request without waiting for its reply.
func (c *maruClient) send(t maru.Type, fields any) {
	c.tb.Helper()
	payload, err := msgpack.Marshal(fields)
	require.NoError(c.tb, err)
	c.seq++
	b := []byte{0xcf, 0, 1, byte(t), 0, 0, 0, 0}
	b = binary.BigEndian.AppendUint32(b, c.seq)
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	require.NoError(c.tb, c.c.Write(nil, append(b, payload...)))
}

// receive reads the next reply, which must be to the request of a sequence.
func (c *maruClient) receive(seq uint32) dict {
	c.tb.Helper()
	stop := time.AfterFunc(20*time.Second, func() { _ = c.c.Close() })
	defer stop.Stop()
	parts, err := c.c.Read()
	require.NoError(c.tb, err)
	require.Len(c.tb, parts, 2)
	require.Empty(c.tb, parts[0])
	require.Equal(c.tb, seq, binary.BigEndian.Uint32(parts[1][8:]))
	var out dict
	require.NoError(c.tb, msgpack.Unmarshal(parts[1][16:], &out))
	return out
}

func (c *maruClient) call(t maru.Type, fields any) dict {
	c.tb.Helper()
	c.send(t, fields)
	return c.receive(c.seq)
}

// is calls, and returns the one word of the reply that says whether.
func (c *maruClient) is(t maru.Type, fields dict, word string) bool {
	c.tb.Helper()
	r := c.call(t, fields)
	require.Contains(c.tb, r, word, "%v", r)
	v, _ := r[word].(bool)
	return v
}

func (c *maruClient) alloc(instance string, size uint64) dict {
	c.tb.Helper()
	r := c.call(maru.RequestAlloc, dict{"instance_id": instance, "size": size})
	require.Equal(c.tb, true, r["success"], "%v", r)
	h, _ := r["handle"].(dict)
	return h
}

func at(key, region any, offset, length int) dict {
	return dict{"key": key, "region_id": region, "kv_offset": offset, "kv_length": length}
}

func number(tb testing.TB, v any) uint64 {
	tb.Helper()
	var n uint64
	_, err := fmt.Sscan(fmt.Sprint(v), &n)
	require.NoError(tb, err)
	return n
}

func maruServer(t *testing.T, changes ...func(*Config)) *Server {
	t.Helper()
	cfg := testConfig(t)
	withMaru(&cfg)
	for _, change := range changes {
		change(&cfg)
	}
	return startServer(t, cfg)
}

func TestMaruKeys(t *testing.T) {
	s := maruServer(t)
	c := dialMaru(t, s, "12345678")
	require.Equal(t, dict{"success": true, "rm_address": s.cfg.MaruRMAdvertise}, c.call(maru.Handshake, dict{}))
	h := c.alloc("inst-A", 3_000_000)
	region := h["region_id"]
	require.EqualValues(t, 4<<20, number(t, h["length"]))
	require.NotZero(t, number(t, h["auth_token"]))

	require.True(t, c.is(maru.Register, at("k1", region, 0, 100), "is_new"))
	require.False(t, c.is(maru.Register, at("k1", region, 0, 100), "is_new"), "the first writer wins")
	require.Equal(t, dict{"found": true, "handle": h, "kv_offset": int8(0), "kv_length": int8(100)}, c.call(maru.Lookup, dict{"key": "k1"}))
	require.Equal(t, dict{"found": false}, c.call(maru.Lookup, dict{"key": "none"}))

	require.True(t, c.is(maru.Pin, dict{"key": "k1"}, "exists"))
	require.False(t, c.is(maru.Delete, dict{"key": "k1"}, "success"), "it is pinned")
	require.True(t, c.is(maru.Unpin, dict{"key": "k1"}, "success"))
	require.False(t, c.is(maru.Unpin, dict{"key": "k1"}, "success"))
	require.True(t, c.is(maru.Delete, dict{"key": "k1"}, "success"))
	require.False(t, c.is(maru.Exists, dict{"key": "k1"}, "exists"))

	// Keys are equal as Python sees them.
	require.True(t, c.is(maru.Register, at(42, region, 0, 1), "is_new"))
	require.False(t, c.is(maru.Register, at(42.0, region, 0, 1), "is_new"))
	require.True(t, c.is(maru.Register, at("42", region, 0, 1), "is_new"))
	require.True(t, c.is(maru.Register, at(nil, region, 0, 1), "is_new"))
	require.True(t, c.is(maru.Register, at(true, region, 0, 1), "is_new"))
	require.True(t, c.is(maru.Exists, dict{"key": 1.0}, "exists"))

	// A location is not looked at.
	require.True(t, c.is(maru.Register, at("lost", 1<<40, -5, -7), "is_new"))
	require.True(t, c.is(maru.Exists, dict{"key": "lost"}, "exists"))
	require.False(t, c.is(maru.Lookup, dict{"key": "lost"}, "found"))
	require.True(t, c.is(maru.Register, at("far", region, 1<<40, 3), "is_new"))

	require.Equal(t, dict{"success": true, "results": []any{true, false, false}},
		c.call(maru.BatchRegister, dict{"entries": []any{at("b1", region, 0, 10), at("b1", region, 0, 10), at(42, region, 0, 9)}}))
	require.Equal(t, dict{"results": []any{true, false, true}}, c.call(maru.BatchExists, dict{"keys": []any{"b1", "nope", 42}}))
	require.Equal(t, dict{"results": []any{true, false, false}}, c.call(maru.BatchPin, dict{"keys": []any{"b1", "nope", 42}}))
	require.Equal(t, dict{"results": []any{true, false, false}}, c.call(maru.BatchUnpin, dict{"keys": []any{"b1", "nope", 42}}))
	require.Equal(t, dict{"results": []any{}}, c.call(maru.BatchUnpin, dict{}))
	require.Equal(t, dict{"results": []any{true, true}}, c.call(maru.BatchPin, dict{"keys": []any{"b1", "b1"}}), "pinned twice")
	require.False(t, c.is(maru.Delete, dict{"key": "b1"}, "success"))

	stats := c.call(maru.GetStats, dict{})
	require.Equal(t, dict{"total_entries": int8(7), "total_size": int8(1 + 1 + 1 + 1 - 7 + 3 + 10)}, stats["kv_manager"])
	require.Equal(t, dict{"num_allocations": int8(1), "total_allocated": uint32(4 << 20), "active_clients": int8(1)}, stats["allocation_manager"])
	usage := c.call(maru.GetUsage, dict{})
	require.Equal(t, []any{dict{"instance_id": "inst-A", "regions": int8(1), "allocated": uint32(4 << 20), "used": int8(17)}}, usage["instances"])
	require.Equal(t, number(t, usage["pool_total"]), number(t, usage["pool_free"])+4<<20)
}

func TestMaruErrors(t *testing.T) {
	s := maruServer(t)
	c := dialMaru(t, s, "12345678")
	raw := func(parts ...string) string {
		bodies := [][]byte{nil}
		for _, p := range parts {
			b, err := hex.DecodeString(strings.ReplaceAll(p, " ", ""))
			require.NoError(t, err)
			bodies = append(bodies, b)
		}
		require.NoError(t, c.c.Write(bodies...))
		got, err := c.c.Read()
		require.NoError(t, err)
		return hex.EncodeToString(got[len(got)-1])
	}
	const undecoded = "cf000180000000000000000000" + "00001d81a56572726f72b5696e7465726e616c20736572766572206572726f72"
	require.Equal(t, undecoded, raw("cf00017e 00000000 0000004d 00000001 80"), "an unknown type")
	require.Equal(t, undecoded, raw("cf000112 00000000 00000001 00000001 80"), "a field is missing")
	require.Equal(t, undecoded, raw(""), "nothing")
	require.Equal(t, undecoded, raw("cf0001f1 00000000 00000001 00000001", "80"), "a body in two parts")
	require.Equal(t, "cf000192000000000000000700"+"00001d81a56572726f72b5696e7465726e616c20736572766572206572726f72",
		raw("cf000112 00000000 00000007 00000007 81a36b65799101"), "a list is no key")
	require.Equal(t, "cf0001ff000000000000000100000021"+"81a56572726f72b9556e6b6e6f776e206d65737361676520747970653a20323535",
		raw("cf0001ff 00000000 00000001 00000001 80"))
	require.Equal(t, "cf0001f1040000000000000200000001"+"80", raw("cf0001f1 04010203 00000002 00000001 80"), "flags come back, nothing else")

	require.Equal(t, dict{"error": "internal server error"}, c.call(maru.RequestAlloc, dict{"instance_id": "i", "size": -1}))
	require.Equal(t, dict{"success": false, "error": "Allocation failed"}, c.call(maru.RequestAlloc, dict{"instance_id": "i", "size": 0}))
	require.Equal(t, dict{"success": false, "error": "Allocation failed"}, c.call(maru.RequestAlloc, dict{"instance_id": "i", "size": 1 << 49}))
	require.Equal(t, dict{"success": false, "error": "Allocation failed"}, c.call(maru.RequestAlloc, dict{"instance_id": "i", "size": 1 << 40}))
}

// TestMaruRegionsEndWithTheirKeys: RETURN_ALLOC of a region with keys frees it when the last one is deleted.
func TestMaruRegionsEndWithTheirKeys(t *testing.T) {
	s := maruServer(t)
	c := dialMaru(t, s, "12345678")
	h, other := c.alloc("a", 1), c.alloc("b", 1)
	id := h["region_id"]
	list := func(but any) any {
		return c.call(maru.ListAllocations, dict{"exclude_instance_id": but})["allocations"]
	}
	require.Equal(t, []any{h, other}, list(nil))
	require.Equal(t, []any{h, other}, list(""))
	require.Equal(t, []any{other}, list("a"))
	require.True(t, c.is(maru.Register, at("k", id, 0, 5), "is_new"))
	require.False(t, c.is(maru.ReturnAlloc, dict{"instance_id": "b", "region_id": id}, "success"), "it is another's")
	require.True(t, c.is(maru.ReturnAlloc, dict{"instance_id": "a", "region_id": id}, "success"))
	require.True(t, c.is(maru.ReturnAlloc, dict{"instance_id": "a", "region_id": id}, "success"), "again, while it is there")
	require.Equal(t, []any{other}, list(nil))
	require.True(t, c.is(maru.Lookup, dict{"key": "k"}, "found"))
	require.True(t, c.is(maru.Register, at("k2", id, 0, 5), "is_new"))
	require.True(t, c.is(maru.Delete, dict{"key": "k"}, "success"))
	require.True(t, c.is(maru.Lookup, dict{"key": "k2"}, "found"))
	require.True(t, c.is(maru.Delete, dict{"key": "k2"}, "success"))
	require.False(t, c.is(maru.ReturnAlloc, dict{"instance_id": "a", "region_id": id}, "success"), "it is gone")
	stats := c.call(maru.GetStats, dict{})["allocation_manager"]
	require.Equal(t, dict{"num_allocations": int8(1), "total_allocated": uint32(2 << 20), "active_clients": int8(1)}, stats)
	require.False(t, c.is(maru.ReturnAlloc, dict{"instance_id": "a", "region_id": 1 << 40}, "success"))
}

// TestMaruPipelines: what a DEALER has sent is carried out and answered in its order.
func TestMaruPipelines(t *testing.T) {
	s := maruServer(t)
	c := dialMaru(t, s, "12345678")
	id := c.alloc("a", 1)["region_id"]
	first := c.seq
	const rounds = 200
	go func() { // the socket takes only so much
		for i := range rounds {
			key := fmt.Sprint(i % 7)
			c.send(maru.Exists, dict{"key": key})
			c.send(maru.Register, at(key, id, 0, 1))
			c.send(maru.Lookup, dict{"key": key})
			c.send(maru.Delete, dict{"key": key})
			c.send(maru.Heartbeat, dict{})
			c.send(maru.BatchExists, dict{"keys": []any{key}})
		}
	}()
	for i := range rounds {
		seq := first + uint32(i*6)
		require.Equal(t, dict{"exists": false}, c.receive(seq+1))
		require.Equal(t, dict{"success": true, "is_new": true}, c.receive(seq+2))
		require.Equal(t, true, c.receive(seq + 3)["found"])
		require.Equal(t, dict{"success": true}, c.receive(seq+4))
		require.Empty(t, c.receive(seq+5))
		require.Equal(t, dict{"results": []any{false}}, c.receive(seq+6))
	}
}

func TestMaruSurvivesARestart(t *testing.T) {
	cfg := testConfig(t)
	withMaru(&cfg)
	s, err := Start(cfg, testLogger(t))
	require.NoError(t, err)
	c := dialMaru(t, s, "12345678")
	h := c.alloc("a", 1)
	id := h["region_id"]
	for i := range 10 {
		require.True(t, c.is(maru.Register, at(i, id, i, 1), "is_new"))
	}
	require.True(t, c.is(maru.Pin, dict{"key": 3}, "exists"))
	require.NoError(t, s.Stop(t.Context()))

	s = startServer(t, cfg)
	c = dialMaru(t, s, "12345678")
	for i := range 10 {
		require.Equal(t, h, c.call(maru.Lookup, dict{"key": i})["handle"], "with the same token")
	}
	require.False(t, c.is(maru.Delete, dict{"key": 3}, "success"), "it is still pinned")
	require.True(t, c.is(maru.ReturnAlloc, dict{"instance_id": "a", "region_id": id}, "success"))
}

// TestMaruEvictsTheGone: regions of owners that have returned them, or have gone, are had when the pool is full and not
// before; those of the living never.
func TestMaruEvictsTheGone(t *testing.T) {
	s := maruServer(t, func(cfg *Config) {
		cfg.MaruLease, cfg.MaruOwnerGrace = 300*time.Millisecond, 100*time.Millisecond
		cfg.Pool[0].Size = 8 << 20 // three regions of 2 MiB beside the header
	})
	alive, gone, sync := dialMaru(t, s, "alive..."), dialMaru(t, s, "gone...."), dialMaru(t, s, "")
	mine := alive.alloc("alive", 1)
	theirs := gone.alloc("gone", 1)
	require.True(t, alive.is(maru.Register, at("mine", mine["region_id"], 0, 1), "is_new"))
	require.True(t, gone.is(maru.Register, at("theirs", theirs["region_id"], 0, 1), "is_new"))
	third := sync.alloc("sync", 1)
	require.True(t, sync.is(maru.Register, at("third", third["region_id"], 0, 1), "is_new"))
	require.NoError(t, gone.c.Close())
	time.Sleep(1500 * time.Millisecond)
	require.True(t, alive.is(maru.Lookup, dict{"key": "theirs"}, "found"), "there was room")

	began := time.Now()
	got := alive.alloc("alive", 1)
	require.Equal(t, theirs["offset"], got["offset"])
	require.NotEqual(t, theirs["region_id"], got["region_id"], "a late request of whoever had it is not about this one")
	require.NotEqual(t, theirs["auth_token"], got["auth_token"])
	require.GreaterOrEqual(t, time.Since(began), 200*time.Millisecond, "somebody may have been reading there")
	require.False(t, alive.is(maru.Exists, dict{"key": "theirs"}, "exists"))
	require.True(t, alive.is(maru.Exists, dict{"key": "third"}, "exists"))

	full := dict{"success": false, "error": "Allocation failed"}
	require.Equal(t, full, alive.call(maru.RequestAlloc, dict{"instance_id": "alive", "size": 1}), "all others are alive")
	require.True(t, sync.is(maru.Pin, dict{"key": "third"}, "exists"))
	require.True(t, sync.is(maru.ReturnAlloc, dict{"instance_id": "sync", "region_id": third["region_id"]}, "success"))
	require.Equal(t, full, alive.call(maru.RequestAlloc, dict{"instance_id": "alive", "size": 1}), "pins hold a region")
	require.True(t, sync.is(maru.Unpin, dict{"key": "third"}, "success"))
	require.Equal(t, third["offset"], alive.alloc("alive", 1)["offset"])
	require.False(t, sync.is(maru.Exists, dict{"key": "third"}, "exists"))
}

// TestMaruRefusesWhatIsLate: a REGISTER_KV that a DEALER queued while it had no connection is not carried out.
func TestMaruRefusesWhatIsLate(t *testing.T) {
	s := maruServer(t)
	c := dialMaru(t, s, "12345678")
	id := c.alloc("a", 1)["region_id"]
	again := dialMaru(t, s, "12345678")
	again.seq = 17
	require.Equal(t, dict{"error": "internal server error"}, again.call(maru.Register, at("late", id, 0, 1)))
	require.Equal(t, dict{"exists": false}, again.call(maru.Exists, dict{"key": "late"}))
	time.Sleep(2 * 50 * time.Millisecond)
	require.True(t, again.is(maru.Register, at("in time", id, 0, 1), "is_new"))

	// One whose time is over when it comes into the log is not carried out either.
	m := s.master
	m.state.RLock()
	over := m.logTime(m.now()) - 1
	m.state.RUnlock()
	_, err := s.do(t.Context(), &meta.Maru{
		Op: meta.MaruRegister, DeadlineMS: over, Entries: []meta.MaruEntry{{Key: []byte("later")}},
	})
	require.Equal(t, protocol.CodePending, protocol.CodeOf(err))
	require.Equal(t, dict{"exists": false}, again.call(maru.Exists, dict{"key": "later"}))
}

// TestMaruUndoesWhatTheLogTookTooLongFor: a REGISTER_KV that is in the log in time, and committed when its client has given
// up, is seen by nobody.
func TestMaruUndoesWhatTheLogTookTooLongFor(t *testing.T) {
	s := maruServer(t)
	c := dialMaru(t, s, "12345678")
	id := c.alloc("a", 1)["region_id"]
	require.True(t, c.is(maru.Register, at("old", id, 0, 1), "is_new"))
	entry := func(key string) meta.MaruEntry {
		return meta.MaruEntry{Key: []byte(key), Region: meta.MaruInt{Abs: number(t, id)}, Length: meta.MaruInt{Abs: 1}}
	}
	q := maru.Request{Header: maru.Header{Type: maru.BatchRegister}, Entries: []meta.MaruEntry{entry("old"), entry("late")}}
	outcome := make(chan maru.Outcome, 1)
	s.maruDoor.Log(&q, false, time.Nanosecond, func(o maru.Outcome, _ func(b []byte) []byte) { outcome <- o })
	require.Equal(t, maru.Failed, <-outcome)
	for range 20 {
		require.Equal(t, dict{"results": []any{true, false}}, c.call(maru.BatchExists, dict{"keys": []any{"old", "late"}}))
		require.Equal(t, dict{"found": false}, c.call(maru.Lookup, dict{"key": "late"}))
		time.Sleep(2 * time.Millisecond)
	}
	require.Equal(t, int8(1), c.call(maru.GetStats, dict{})["kv_manager"].(dict)["total_entries"])
	require.True(t, c.is(maru.Register, at("late", id, 0, 1), "is_new"))
	require.Equal(t, true, c.call(maru.Lookup, dict{"key": "late"})["found"])
}

// TestMaruThroughAnyMember: followers pass requests on, and outlive the leader.
func TestMaruThroughAnyMember(t *testing.T) {
	servers := startCluster(t, withMaru)
	leader := leaderOf(t, servers)
	rest := followers(t, servers, leader)
	a, b := dialMaru(t, rest[0], "aaaaaaaa"), dialMaru(t, rest[1], "")
	h := a.alloc("a", 1)
	id := h["region_id"]
	for i := range 50 {
		a.send(maru.Register, at(i, id, i, 1))
		a.send(maru.Lookup, dict{"key": i})
	}
	for i := range uint32(50) {
		require.Equal(t, dict{"success": true, "is_new": true}, a.receive(2+2*i))
		require.Equal(t, h, a.receive(3 + 2*i)["handle"])
	}
	require.Equal(t, h, b.call(maru.Lookup, dict{"key": 7})["handle"])
	direct := dialMaru(t, leader, "")
	require.Equal(t, h, direct.call(maru.Lookup, dict{"key": 7})["handle"])
	require.Equal(t, a.call(maru.GetUsage, dict{}), direct.call(maru.GetUsage, dict{}))

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, leader.Stop(ctx))
	require.Eventually(t, func() bool { return b.call(maru.Lookup, dict{"key": 7})["found"] == true }, 10*time.Second, 10*time.Millisecond)
	for i := range 50 {
		require.Equal(t, h, b.call(maru.Lookup, dict{"key": i})["handle"], "acknowledged, and so kept")
	}
	require.True(t, a.is(maru.Register, at("after", id, 0, 1), "is_new"))
	require.True(t, b.is(maru.Exists, dict{"key": "after"}, "exists"))
}
