package server

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"larder/conductor/kvevent"
	"larder/conductor/kvpub"
	"larder/meta"
)

// Limits of publishing.
const (
	// maxBlockChanges wait to be published, 3 MiB: more is applied in a second on the fastest machines, and published in a
	// tenth of one. What comes when so many wait is left out, and a number of the sequence with it.
	maxBlockChanges = 64 << 10
	// maxEventBlocks are told by one event: a prompt has as many.
	maxEventBlocks = 512
	// maxEventContexts have their texts kept as events have them.
	maxEventContexts = 1024
	// kvEventsBeat is how often subscribers hear from a member that has nothing to tell. It bounds for how long one does not
	// know that it has missed the last events, or that the member is gone, or cut off from the others.
	kvEventsBeat = time.Second
)

// kvEvents publishes what this member applies, for whoever follows the pool: the blocks of prefixes that are stored and
// removed. Every member does so, leader or not, so that one who follows a member goes on through changes of leadership.
//
// Apply never waits for it: it leaves what has changed in a queue that is bounded. One that runs over, or a snapshot that
// takes the place of the state, leaves a hole in the sequence that subscribers see, and list anew what there is.
type kvEvents struct {
	pub    *kvpub.Publisher
	n      *Counters
	logger *slog.Logger
	wake   chan struct{} // 1: there is something in the queue

	mu    sync.Mutex
	queue []meta.BlockChange
	lost  bool // something behind the queue was left out

	// Of the goroutine that publishes.
	event    kvevent.Event
	of       meta.Block // the last block of the event
	hashes   []uint64
	ids      uint64
	contexts map[*meta.Context]*eventContext
	backend  []byte
	refused  bool // an event was, and logged
}

// eventContext is what events have of a context.
type eventContext struct {
	model, tenant, lora, salt []byte
	blockSize                 int
}

// newKVEvents begins to publish as the configuration says.
// led says whether the member knows a leader: one that does not may have missed anything, and does not speak.
func newKVEvents(ctx context.Context, cfg *Config, led func() bool, n *Counters, logger *slog.Logger) (*kvEvents, error) {
	format, err := kvevent.ParseFormat(cfg.KVEventsFormat)
	if err != nil {
		return nil, fmt.Errorf("server: kv_events_format: %w", err)
	}
	topic := cfg.KVEventsTopic
	if topic == "" {
		topic = "kv@" + cfg.Advertise + "@" + cfg.ClusterName
	}
	pub, err := kvpub.New(ctx, kvpub.Config{
		Listen: cfg.KVEventsListen, Replay: cfg.KVEventsReplayListen, Topic: topic, Format: format, Rank: kvevent.NoRank,
		Beat: kvEventsBeat, Beating: led,
	})
	if err != nil {
		return nil, fmt.Errorf("server: publish KV events: %w", err)
	}
	return &kvEvents{
		pub: pub, n: n, logger: logger, wake: make(chan struct{}, 1), contexts: map[*meta.Context]*eventContext{},
		backend: []byte(cfg.ClusterName),
	}, nil
}

// tell queues what a log entry has changed. nil says that the state was replaced, and nobody knows by what.
func (k *kvEvents) tell(changes []meta.BlockChange) {
	k.mu.Lock()
	switch room := maxBlockChanges - len(k.queue); {
	case changes == nil:
		k.lost = true
	case k.lost || len(changes) > room:
		k.lost = true // all that follows until the queue is empty, so that the hole is in one place
		k.n.KVEventsLost.Add(uint64(len(changes)))
	default:
		k.queue = append(k.queue, changes...)
	}
	k.mu.Unlock()
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// run publishes what is queued until ctx ends.
func (k *kvEvents) run(ctx context.Context) {
	var changes []meta.BlockChange
	for {
		select {
		case <-ctx.Done():
			return
		case <-k.wake:
		}
		var lost bool
		k.mu.Lock()
		changes, k.queue = k.queue, changes[:0]
		lost, k.lost = k.lost, false
		k.mu.Unlock()
		k.publish(changes)
		clear(changes) // contexts may go
		if lost {
			k.n.KVEventsGaps.Add(1)
			k.pub.Skip()
		}
	}
}

// publish tells changes in their order. Blocks that follow each other in a prompt, and blocks of one context that go together,
// share an event.
func (k *kvEvents) publish(changes []meta.BlockChange) {
	for i := range changes {
		c := &changes[i]
		if c.Kind == meta.BlocksCleared {
			k.flush()
			k.event = kvevent.Event{Kind: kvevent.Cleared, Medium: kvevent.Media, Rank: kvevent.NoRank, BaseBlock: -1, Backend: k.backend}
			k.send()
			continue
		}
		for _, m := range [...]struct {
			media  meta.Media
			medium kvevent.Medium
		}{{meta.InMemory, kvevent.CPU}, {meta.OnDisk, kvevent.Disk}} {
			if c.Media&m.media == 0 {
				continue
			}
			if !k.joins(c, m.medium) {
				k.flush()
				k.begin(c, m.medium)
			}
			k.hashes = append(k.hashes, c.Hash)
			k.of = c.Block
		}
	}
	k.flush()
}

// eventKinds are the kinds of events that tell of changes.
var eventKinds = [...]kvevent.Kind{meta.BlockStored: kvevent.Stored, meta.BlockRemoved: kvevent.Removed}

// joins reports whether a block can be told by the present event, too.
func (k *kvEvents) joins(c *meta.BlockChange, medium kvevent.Medium) bool {
	switch {
	case len(k.hashes) == 0 || len(k.hashes) == maxEventBlocks, k.event.Kind != eventKinds[c.Kind], k.event.Medium != medium,
		k.of.Context != c.Context, k.of.Group != c.Group:
		return false
	}
	return c.Kind == meta.BlockRemoved || c.HasParent && c.Parent == k.of.Hash && c.Index == k.of.Index+1
}

// begin begins an event with a block.
func (k *kvEvents) begin(c *meta.BlockChange, medium kvevent.Medium) {
	x := k.context(c.Context)
	k.event = kvevent.Event{
		Kind: eventKinds[c.Kind], Medium: medium, Rank: kvevent.NoRank, Standard: true,
		Parent: c.Parent, HasParent: c.HasParent, BaseBlock: -1, BlockSize: x.blockSize,
		Group: int(c.Group >> 16), // which of the members of a block this is
		LoRA:  x.lora, Salt: x.salt, Model: x.model, Tenant: x.tenant, Backend: k.backend,
	}
	if c.Index <= math.MaxInt32 {
		k.event.BaseBlock = int(c.Index)
	}
}

// context is what events have of a context.
func (k *kvEvents) context(c *meta.Context) *eventContext {
	x := k.contexts[c]
	if x == nil {
		if len(k.contexts) >= maxEventContexts {
			clear(k.contexts)
		}
		x = &eventContext{
			model: []byte(c.Model), tenant: []byte(c.Tenant), lora: []byte(c.LoRA), salt: []byte(c.Salt),
			blockSize: int(min(c.BlockSize, math.MaxInt32)),
		}
		k.contexts[c] = x
	}
	return x
}

// flush publishes the present event, if it has blocks.
func (k *kvEvents) flush() {
	if len(k.hashes) == 0 {
		return
	}
	k.event.Hashes = k.hashes
	k.send()
	k.hashes = k.hashes[:0]
}

func (k *kvEvents) send() {
	k.ids++
	k.event.ID = k.ids
	if err := k.pub.Publish(k.event); err != nil && !k.refused {
		k.refused = true
		k.logger.Warn("a KV event could not be published; others like it are counted, and not logged", slog.Any("error", err))
	}
}

// KVEvents is where this member publishes events, and where it sends past ones again; empty if nowhere.
func (s *Server) KVEvents() (events, replay string) {
	if s.kvEvents == nil {
		return "", ""
	}
	return s.kvEvents.pub.Endpoint(), s.kvEvents.pub.ReplayEndpoint()
}

// collectKVEvents emits what publishing has done, if it is on.
func (m *metrics) collectKVEvents(e emitter) {
	k := m.server.kvEvents
	if k == nil {
		return
	}
	s := k.pub.Stats()
	e.counter("kv_events_total", "KV events published.", s.Events)
	e.counter("kv_events_batches_total", "Batches of KV events, those without events included; also the next one's sequence.", s.Sequence)
	e.counter("kv_events_refused_total", "KV events that no format could hold.", s.Refused)
	e.counter("kv_events_lost_total", "Changes of blocks that were left out since too many waited.", k.n.KVEventsLost.Load())
	e.counter("kv_events_gaps_total", "Numbers left out of the sequence, since changes were, or a snapshot replaced the index.",
		k.n.KVEventsGaps.Load())
	e.counter("kv_events_batches_dropped_total", "Batches that subscribers lost since they read too slowly.", s.Dropped)
	e.counter("kv_events_replays_total", "Requests for past batches.", s.Replays)
	e.gauge("kv_events_subscribers", "Connections of subscribers.", float64(s.Subscribers))
	e.gauge("kv_events_kept_bytes", "Bytes of past batches that can be sent again.", float64(s.KeptBytes))
}
