package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"larder/conductor"
	"larder/conductor/kvevent"
)

// The conductor's figures: prompts of 512 blocks of 16 tokens, which eight engines hold. Events have 64 blocks, as engines that
// prefill in chunks of 1024 tokens send them.
const (
	promptBlocks  = 512
	promptBlock   = 16
	indexBlocks   = 262_144
	indexEngines  = 8
	eventBlocks   = 64
	largeBlocks   = 1 << 20
	indexPrompts  = indexBlocks / promptBlocks
	writtenAtOnce = 250_000 // blocks a second beside lookups
)

// indexed is an index that is measured, and what it was filled with.
type indexed struct {
	x       *conductor.Index
	prompts [][]uint32
	events  [][]kvevent.Event // of each prompt
	sources []*conductor.Source
}

// fill makes an index of so many blocks, each held by so many engines.
func fill(blocks, engines int) (*indexed, error) {
	f := &indexed{x: conductor.NewIndex(conductor.IndexConfig{})}
	rng := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same each time
	for i := range blocks / promptBlocks {
		p := make([]uint32, promptBlocks*promptBlock)
		for k := range p {
			p[k] = rng.Uint32N(128_000)
		}
		f.prompts = append(f.prompts, p)
		f.events = append(f.events, eventsOf(p, i))
	}
	for e := range engines {
		f.sources = append(f.sources, engineSource("engine-"+strconv.Itoa(e)))
		if err := f.apply(f.sources[e]); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func engineSource(name string) *conductor.Source {
	return &conductor.Source{
		Instance: name, Scope: conductor.Scope{Tenant: "default", Model: "m", BlockSize: promptBlock}, Rank: kvevent.NoRank,
	}
}

// eventsOf are the events of an engine that stores a prompt.
func eventsOf(p []uint32, prompt int) (list []kvevent.Event) {
	base := uint64(prompt+1) << 20 //nolint:gosec // small
	for at := 0; at < promptBlocks; at += eventBlocks {
		e := kvevent.Event{Kind: kvevent.Stored, Rank: kvevent.NoRank, BlockSize: promptBlock, BaseBlock: -1}
		for k := range eventBlocks {
			e.Hashes = append(e.Hashes, base+uint64(at+k))
		}
		if e.HasParent = at > 0; e.HasParent {
			e.Parent = base + uint64(at) - 1
		}
		e.Tokens = p[at*promptBlock : (at+eventBlocks)*promptBlock]
		list = append(list, e)
	}
	return list
}

// apply has an engine say all of the events.
func (f *indexed) apply(src *conductor.Source) error {
	for i := range f.events {
		for k := range f.events[i] {
			if err := f.x.Apply(src, &f.events[i][k], kvevent.NoRank); err != nil {
				return fmt.Errorf("apply: %w", err)
			}
		}
	}
	return nil
}

// conductor measures the prefix index.
func (b *bench) conductor() error {
	f, err := fill(indexBlocks, indexEngines)
	if err != nil {
		return err
	}
	for _, measure := range []func(*indexed) error{b.queries, b.queriesBesideWriters, b.messages, b.removes} {
		if err := measure(f); err != nil {
			return err
		}
	}
	if err := b.stores(); err != nil {
		return err
	}
	for _, engines := range []int{1, indexEngines} {
		if err := b.large(engines); err != nil {
			return err
		}
	}
	return nil
}

// ask looks a prompt up and checks that the last engine has all of it.
func (f *indexed) ask(i int) error {
	m := f.x.Query(f.sources[0].Scope, f.prompts[i%len(f.prompts)], nil)
	if len(m) < indexEngines || m[0].Longest != promptBlocks*promptBlock {
		return fmt.Errorf("a prompt that is held was not found: %v", m)
	}
	return nil
}

// queries measures hash, lookup and score of a prompt.
func (b *bench) queries(f *indexed) error {
	o, err := repeat(b.Time, f.ask)
	if err != nil {
		return err
	}
	p50 := o.quantile(0.5)
	b.aim(Row{
		Name: "query of 512 blocks, 8 engines, 262,144 blocks: p50", Value: micros(p50), Unit: "us", Note: latencyNote(o),
	}, "<= 150 us", p50 <= 150*time.Microsecond)
	return nil
}

// repeat calls fn for a while.
func repeat(d time.Duration, fn func(i int) error) (*outcome, error) {
	o := &outcome{}
	start := time.Now()
	for i := 0; o.elapsed < d; i++ {
		from := time.Now()
		if err := fn(i); err != nil {
			return nil, err
		}
		o.latency = append(o.latency, time.Since(from))
		o.elapsed = time.Since(start)
	}
	o.requests = len(o.latency)
	slices.Sort(o.latency)
	return o, nil
}

// queriesBesideWriters measures the same while an engine stores at a given rate.
func (b *bench) queriesBesideWriters(f *indexed) error {
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	var written atomic.Int64
	failed := make(chan error, 1)
	go func() { failed <- f.write(ctx, &written) }()
	o, err := repeat(b.Time, f.ask)
	cancel()
	if err := errors.Join(err, <-failed); err != nil {
		return err
	}
	p99 := o.quantile(0.99)
	b.aim(Row{
		Name: "the same beside 250,000 stored blocks a second: p99", Value: micros(p99), Unit: "us",
		Note: fmt.Sprintf("%s; %.0fk stored a second", latencyNote(o), float64(written.Load())/o.elapsed.Seconds()/1e3),
	}, "<= 1 ms", p99 <= time.Millisecond)
	return nil
}

// write has new engines store prompts at a rate, until ctx ends.
func (f *indexed) write(ctx context.Context, written *atomic.Int64) error {
	const step = 2 * time.Millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	perStep, owed := float64(writtenAtOnce)*step.Seconds(), 0.0
	src, prompt, part := engineSource("writer"), 0, 0
	for ctx.Err() == nil {
		<-tick.C
		for owed += perStep; owed >= eventBlocks; owed -= eventBlocks {
			if err := f.x.Apply(src, &f.events[prompt][part], kvevent.NoRank); err != nil {
				return fmt.Errorf("apply: %w", err)
			}
			written.Add(eventBlocks)
			if part++; part == len(f.events[prompt]) {
				prompt, part = prompt+1, 0
			}
			if prompt == len(f.events) {
				f.x.Clear(src.Instance, kvevent.NoRank, kvevent.Media)
				f.x.Sweep()
				prompt = 0
			}
		}
	}
	f.x.Clear(src.Instance, kvevent.NoRank, kvevent.Media)
	f.x.Sweep()
	return nil
}

// messages measures stores from the messages that engines send.
func (b *bench) messages(f *indexed) error {
	var enc kvevent.Encoder
	var payloads [][]byte
	for i := range f.events {
		for k := range f.events[i] {
			enc.Begin(1)
			if err := enc.Add(&f.events[i][k]); err != nil {
				return fmt.Errorf("encode: %w", err)
			}
			payloads = append(payloads, slices.Clone(enc.End(kvevent.NoRank)))
		}
	}
	var batch kvevent.Batch
	blocks, took := 0, time.Duration(0)
	for round := 0; took < b.Time; round++ {
		src := engineSource("message-" + strconv.Itoa(round%4))
		from := processorTime(self)
		for _, p := range payloads {
			if err := batch.Decode(p); err != nil || batch.Bad > 0 {
				return errors.Join(err, batch.Reason)
			}
			for i := range batch.Events {
				if err := f.x.Apply(src, &batch.Events[i], batch.RankOf(&batch.Events[i])); err != nil {
					return fmt.Errorf("apply: %w", err)
				}
			}
		}
		took += processorTime(self) - from
		blocks += indexBlocks
		f.x.Clear(src.Instance, kvevent.NoRank, kvevent.Media)
		f.x.Sweep()
	}
	value := micros(took) / float64(blocks)
	b.aim(Row{Name: "stored block of a 64-block message, CPU with msgpack", Value: value, Unit: "us"}, "<= 1 us", value <= 1)
	return nil
}

// removes measures events that remove 64 blocks, by one engine after the other.
func (b *bench) removes(f *indexed) error {
	events, took := 0, time.Duration(0)
	for round := 0; took < b.Time/2; round++ {
		src := f.sources[round%len(f.sources)]
		from := time.Now()
		for i := range f.events {
			for k := range f.events[i] {
				e := kvevent.Event{Kind: kvevent.Removed, Hashes: f.events[i][k].Hashes, Rank: kvevent.NoRank, BaseBlock: -1}
				if err := f.x.Apply(src, &e, kvevent.NoRank); err != nil {
					return fmt.Errorf("apply: %w", err)
				}
				events++
			}
		}
		took += time.Since(from)
		if err := f.apply(src); err != nil { // for the next round
			return err
		}
	}
	value := float64(events) / took.Seconds()
	b.aim(Row{Name: "events that remove 64 blocks", Value: value, Unit: "events/s"}, ">= 100k/s", value >= 100e3)
	return nil
}

// stores measures how long a block takes that an engine stores, in the index alone.
func (b *bench) stores() error {
	blocks, took := 0, time.Duration(0)
	for took < b.Time {
		f, err := fill(indexBlocks, 0)
		if err != nil {
			return err
		}
		runtime.GC()
		for e := range indexEngines {
			from := processorTime(self)
			if err := f.apply(engineSource("engine-" + strconv.Itoa(e))); err != nil {
				return err
			}
			took += processorTime(self) - from
			blocks += indexBlocks
		}
	}
	value := micros(took) / float64(blocks)
	b.aim(Row{Name: "stored block, CPU in the index, mean of 8 engines", Value: value, Unit: "us"}, "<= 0.15 us", value <= 0.15)
	return nil
}

// large measures the memory of a million blocks, and what it takes to clear an engine of eight.
func (b *bench) large(engines int) error {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x, src, err := filled(engines)
	if err != nil {
		return err
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	value := float64(after.HeapAlloc-before.HeapAlloc) / largeBlocks
	most := map[int]float64{1: 100, indexEngines: 200}[engines]
	b.aim(Row{Name: fmt.Sprintf("heap for each of 1M blocks, engines: %d", engines), Value: value, Unit: "B"},
		fmt.Sprintf("<= %.0f B", most), value <= most)
	if engines > 1 {
		from := time.Now()
		x.Clear(src.Instance, kvevent.NoRank, kvevent.Media)
		took := time.Since(from)
		swept := time.Now()
		x.Sweep()
		b.aim(Row{
			Name: "clear of one of 8 engines with 1M blocks", Value: micros(took), Unit: "us",
			Note: "its bits are swept afterwards, in " + time.Since(swept).Round(time.Millisecond).String(),
		}, "<= 20 ms", took <= 20*time.Millisecond)
	}
	runtime.KeepAlive(x)
	return nil
}

// filled is an index of a million blocks without what it was filled with, and one of its engines.
func filled(engines int) (*conductor.Index, *conductor.Source, error) {
	f, err := fill(largeBlocks, engines)
	if err != nil {
		return nil, nil, err
	}
	return f.x, f.sources[0], nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
