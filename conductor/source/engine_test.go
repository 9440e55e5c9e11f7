package source

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"larder/conductor"
	"larder/zmtp"
)

// patience bounds what a test waits for.
const patience = 10 * time.Second

// eventually waits for a condition.
func eventually(t *testing.T, what func() bool, say ...any) {
	t.Helper()
	require.Eventually(t, what, patience, time.Millisecond, say...)
}

// engine is a publisher as vLLM is one, which a test has lose what it wants lost.
type engine struct {
	t                *testing.T
	endpoint, replay string
	pub              *zmtp.Publisher
	router           *zmtp.Server

	mu    sync.Mutex
	next  uint64
	ring  []message
	keeps int             // how many batches there are in the ring
	topic bool            // replies have one
	loses map[uint64]int  // batches that so many replays leave out
	asked []uint64        // where replays have begun
	hold  <-chan struct{} // replays wait for it
	begun chan<- struct{} // and say that they do
	stamp float64         // that a batch has; another one in each process
	rank  any             // that a batch names
}

// engines counts: each has endpoints of its own.
var engines atomic.Int64

func newEngine(t *testing.T) *engine {
	t.Helper()
	name := fmt.Sprintf("ipc://@larder-source-%d-%d", os.Getpid(), engines.Add(1))
	e := &engine{t: t, keeps: math.MaxInt, loses: map[uint64]int{}}
	e.endpoint, e.replay = name+"-pub", name+"-replay"
	e.start()
	t.Cleanup(func() { e.stop() })
	return e
}

// start begins a process of the engine: its numbers begin anew. It has published batches of an event each before anybody can hear of them.
func (e *engine) start(batches ...any) {
	e.t.Helper()
	e.mu.Lock()
	e.next, e.ring, e.stamp = 0, nil, e.stamp+1
	e.mu.Unlock()
	for _, event := range batches {
		e.miss(event)
	}
	var err error
	e.pub, err = zmtp.NewPublisher(e.t.Context(), e.endpoint, zmtp.Config{})
	require.NoError(e.t, err)
	e.router, err = zmtp.Listen(e.t.Context(), e.replay, zmtp.Config{Type: zmtp.ROUTER}, e.serve)
	require.NoError(e.t, err)
}

func (e *engine) stop() {
	e.t.Helper()
	require.NoError(e.t, e.pub.Close())
	require.NoError(e.t, e.router.Close())
}

// again has its publisher listen again: the process goes on.
func (e *engine) again() {
	e.t.Helper()
	var err error
	e.pub, err = zmtp.NewPublisher(e.t.Context(), e.endpoint, zmtp.Config{})
	require.NoError(e.t, err)
}

// serve replays.
func (e *engine) serve(c *zmtp.Conn) {
	for {
		m, err := c.Read()
		if err != nil || len(m) != 2 || len(m[0]) != 0 {
			return
		}
		from := binary.BigEndian.Uint64(m[1])
		e.mu.Lock()
		e.asked = append(e.asked, from)
		ring, topic, hold, begun := slices.Clone(e.ring), e.topic, e.hold, e.begun
		e.mu.Unlock()
		if hold != nil {
			begun <- struct{}{}
			<-hold
		}
		reply := func(seq uint64, payload []byte) {
			parts := [][]byte{nil, binary.BigEndian.AppendUint64(nil, seq), payload}
			if topic {
				parts = slices.Insert(parts, 1, []byte("kv@x"))
			}
			_ = c.Write(parts...)
		}
		for _, b := range ring {
			if b.seq >= from && !e.lost(b.seq) {
				reply(b.seq, b.payload)
			}
		}
		reply(lastReply, nil)
	}
}

func (e *engine) lost(seq uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.loses[seq] == 0 {
		return false
	}
	e.loses[seq]--
	return true
}

// encode makes a payload of events.
func (e *engine) encode(events ...any) []byte {
	e.t.Helper()
	if events == nil {
		events = []any{}
	}
	b, err := msgpack.Marshal([]any{e.stamp, events, e.rank})
	require.NoError(e.t, err)
	return b
}

// add gives a batch its number.
func (e *engine) add(payload []byte) uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.append(payload)
}

// append is add, for who has e.mu.
func (e *engine) append(payload []byte) uint64 {
	seq := e.next
	e.next++
	e.ring = append(e.ring, message{seq, payload})
	e.ring = e.ring[max(0, len(e.ring)-e.keeps):]
	return seq
}

// publish sends a batch of events.
func (e *engine) publish(events ...any) { e.send(e.encode(events...)) }

// miss is a batch that is lost on its way.
func (e *engine) miss(events ...any) { e.add(e.encode(events...)) }

// cut sends a batch that takes the place of all others in the ring. No replay sees that without it: who keeps a ring has its newest
// batch there, and one that has none has begun anew.
func (e *engine) cut(events ...any) {
	payload := e.encode(events...)
	e.mu.Lock()
	e.ring = nil
	seq := e.append(payload)
	e.mu.Unlock()
	e.announce(seq, payload)
}

func (e *engine) send(payload []byte) { e.announce(e.add(payload), payload) }

// announce sends a batch that has its number to those that listen.
func (e *engine) announce(seq uint64, payload []byte) {
	e.pub.Publish([]byte("kv@x"), binary.BigEndian.AppendUint64(nil, seq), payload)
}

func (e *engine) replays() []uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.asked)
}

// service is the engine as it is registered.
func (e *engine) service(instance string) Service {
	return Service{
		Endpoint: e.endpoint, ReplayEndpoint: e.replay, Type: VLLM, ModelName: "m", TenantID: DefaultTenant, InstanceID: instance, BlockSize: 4,
	}
}

// alone is a service without replay.
func alone(s Service) Service {
	s.ReplayEndpoint = ""
	return s
}

// stored is an event of blocks of 4 tokens.
func stored(parent any, tokens []uint32, hashes ...uint64) any {
	return []any{"BlockStored", hashes, parent, tokens, 4, nil, "GPU"}
}

func removed(hashes ...uint64) any { return []any{"BlockRemoved", hashes, "GPU"} }

func cleared() any { return []any{"AllBlocksCleared"} }

// seq is the tokens from a to b.
func seq(a, b int) (list []uint32) {
	for i := a; i < b; i++ {
		list = append(list, uint32(i))
	}
	return list
}

var testScope = conductor.Scope{Tenant: DefaultTenant, Model: "m", BlockSize: 4}

// world is a manager with an index.
type world struct {
	t *testing.T
	*Manager
	index *conductor.Index
}

// newWorld has short pauses, where nothing else is given, and no heartbeats.
func newWorld(t *testing.T, cfg Config) *world {
	t.Helper()
	cfg.Index = conductor.NewIndex(conductor.IndexConfig{})
	if cfg.MaxBackoff == 0 {
		cfg.MaxBackoff = 2 * time.Millisecond
	}
	if cfg.Heartbeat == 0 {
		cfg.Heartbeat = -1
	}
	w := &world{t, New(cfg), cfg.Index}
	t.Cleanup(w.Close)
	return w
}

// follow registers an engine, and waits until it gets what that publishes.
func (w *world) follow(e *engine, s Service) {
	w.t.Helper()
	fresh, err := w.Register(s)
	require.NoError(w.t, err)
	require.True(w.t, fresh)
	w.hears(e, s.InstanceID)
}

// hears waits until an instance gets what an engine publishes.
func (w *world) hears(e *engine, instance string) {
	w.t.Helper()
	eventually(w.t, func() bool { st := w.of(instance).State; return st == Live || st == Stale })
	eventually(w.t, func() bool {
		e.publish()
		for range 100 {
			if w.is(e, instance) {
				return true
			}
			time.Sleep(100 * time.Microsecond)
		}
		return false
	})
}

// is reports whether an instance is as far as an engine.
func (w *world) is(e *engine, instance string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return w.of(instance).Sequence == int64(e.next)-1
}

// sync waits until an instance is as far as an engine.
func (w *world) sync(e *engine, instance string) Status {
	w.t.Helper()
	eventually(w.t, func() bool { return w.is(e, instance) && w.of(instance).State != Replaying }, "%+v", instance)
	return w.of(instance)
}

// of is an instance's status; the zero value if there is none.
func (w *world) of(instance string) Status {
	for _, s := range w.Services() {
		if s.InstanceID == instance {
			return s
		}
	}
	return Status{}
}

// longest is what each instance has of a prompt.
func (w *world) longest(tokens []uint32) map[string]int { return w.longestIn(testScope, tokens) }

func (w *world) longestIn(scope conductor.Scope, tokens []uint32) map[string]int {
	found := map[string]int{}
	for _, m := range w.index.Query(scope, tokens, nil) {
		if m.Longest > 0 {
			found[m.Instance] = m.Longest
		}
	}
	return found
}
