package meta

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"testing"
	"time"

	"larder/protocol"
)

// fill registers n entries with 32-byte keys, a batch of 64 at a time.
func fill(tb testing.TB, p *pool, a SessionID, n int) {
	tb.Helper()
	fillWith(tb, p, a, n, func(int, *protocol.RegisterEntry) {})
}

// fillWith is fill, of entries to which more adds what it likes.
func fillWith(tb testing.TB, p *pool, a SessionID, n int, more func(i int, e *protocol.RegisterEntry)) {
	tb.Helper()
	const perRegion = 1 << 20
	var r AllocResult
	key := make([]byte, 32)
	entries := make([]protocol.RegisterEntry, 0, 64)
	keys := make([]byte, 0, 64*32)
	for i := range n {
		if i%perRegion == 0 {
			_, r = p.alloc(a, &protocol.AllocRequest{Size: perRegion * 4096, PageSize: 4096})
		}
		binary.BigEndian.PutUint64(key[12:], uint64(i)*0x9e3779b97f4a7c15)
		keys = append(keys, key...)
		e := entryAt("", r, i%perRegion)
		e.Key = keys[len(keys)-32:]
		more(i, &e)
		entries = append(entries, e)
		if len(entries) == cap(entries) || i == n-1 {
			p.seqs[a]++
			p.index++
			g := AppendCommand(BeginGroup(nil, p.now, nil), Header{Session: a, Seq: p.seqs[a], Acked: p.seqs[a]}, &Register{Entries: entries})
			p.res.Reset()
			if err := p.m.Apply(p.index, g, &p.res); err != nil {
				tb.Fatal(err)
			}
			entries, keys = entries[:0], keys[:0]
		}
	}
	if p.m.table.count != uint64(n) {
		tb.Fatalf("%d entries instead of %d", p.m.table.count, n)
	}
}

// BenchmarkMemory reports heap bytes per entry, of the native clients or of Maru's, the longest pause of the garbage collector and
// how long it takes, with LARDER_ENTRIES entries (default 1 M; 10 M is the figure that the layout was made for).
func BenchmarkMemory(b *testing.B) {
	n := 1_000_000
	if v, err := strconv.Atoi(os.Getenv("LARDER_ENTRIES")); err == nil {
		n = v
	}
	for _, c := range []struct {
		name string
		fill func(tb testing.TB, p *pool, n int)
	}{
		{"native", fillNative},
		{"maru", fillMaru},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				runtime.GC()
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				p := newPool(b)
				p.device(1 << 50)
				c.fill(b, p, n)
				p.m.Flush(discard{})
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(n), "B/entry")
				const times = 5
				begun := time.Now()
				for range times {
					runtime.GC()
				}
				b.ReportMetric(float64(time.Since(begun).Milliseconds())/times, "gc-ms")
				var gc debug.GCStats
				debug.ReadGCStats(&gc)
				b.ReportMetric(float64(slices.Max(gc.Pause[:times]).Microseconds()), "gc-pause-us")
				runtime.KeepAlive(p)
			}
		})
	}
}

func fillNative(tb testing.TB, p *pool, n int) {
	tb.Helper()
	fill(tb, p, p.open("a"), n)
}

// fillMaru registers n of Maru's keys, of 40 bytes, in a region.
func fillMaru(tb testing.TB, p *pool, n int) {
	tb.Helper()
	settings := p.m.Settings()
	settings.Version = VersionMaru
	p.apply(Header{}, &SetSettings{settings})
	code, body := p.apply(Header{}, &OpenSession{Instance: "a", Secret: 1, Features: FeatureMaru})
	if code != 0 {
		tb.Fatal(code)
	}
	session, err := DecodeSession(body)
	if err != nil {
		tb.Fatal(err)
	}
	_, r := p.alloc(session.ID, &protocol.AllocRequest{InstanceID: "a", Size: 1 << 40, PageSize: 1 << 20})
	entries := make([]MaruEntry, 64)
	for i := 0; i < n; i += len(entries) {
		for j := range entries {
			entries[j] = MaruEntry{
				Key: fmt.Appendf(nil, "a model@1@0@%029x", uint64(i+j)*0x9e3779b97f4a7c15), Region: MaruInt{Abs: uint64(r.Region)},
				Offset: MaruInt{Abs: uint64(i+j) << 10}, Length: MaruInt{Abs: 1 << 10},
			}
		}
		p.index++
		p.res.Reset()
		if err := p.m.Apply(p.index, AppendCommand(BeginGroup(nil, p.now, nil), Header{}, &Maru{Op: MaruRegister, Entries: entries}), &p.res); err != nil {
			tb.Fatal(err)
		}
	}
	if keys, _ := p.m.MaruTotal(); keys < n {
		tb.Fatalf("%d keys instead of %d", keys, n)
	}
}

type discard struct{}

func (discard) Set([]byte, []byte) {}
func (discard) Delete([]byte)      {}

func BenchmarkRegister(b *testing.B) {
	for _, c := range []struct {
		name   string
		batch  int
		blocks bool // the entries are blocks of prefixes
		want   bool // and are told
	}{{"batch-1", 1, false, false}, {"batch-64", 64, false, false}, {"blocks-64", 64, true, false}, {"told-64", 64, true, true}} {
		b.Run(c.name, func(b *testing.B) {
			batch := c.batch
			p := newPool(b)
			p.res.WantBlocks = c.want
			p.device(1 << 50)
			a := p.open("a")
			var r AllocResult
			key := make([]byte, 32*batch)
			entries := make([]protocol.RegisterEntry, batch)
			i := 0
			var g []byte
			b.ReportAllocs()
			for b.Loop() {
				for j := range entries {
					if i%(1<<20) == 0 {
						_, r = p.alloc(a, &protocol.AllocRequest{Size: 4096 << 20, PageSize: 4096})
					}
					k := key[j*32 : j*32+32]
					binary.BigEndian.PutUint64(k[12:], uint64(i)*0x9e3779b97f4a7c15)
					entries[j] = protocol.RegisterEntry{
						Key: k, RegionID: uint64(r.Region), Epoch: r.Epoch, KVOffset: uint64(i%(1<<20)) * 4096, KVLength: 4096,
						HasPrefix: c.blocks, Hash: uint64(i) * 0x9e3779b97f4a7c15,
					}
					i++
				}
				p.seqs[a]++
				p.index++
				g = AppendCommand(BeginGroup(g[:0], p.now, nil), Header{Session: a, Seq: p.seqs[a], Acked: p.seqs[a]}, &Register{Entries: entries})
				p.res.Reset()
				if err := p.m.Apply(p.index, g, &p.res); err != nil {
					b.Fatal(err)
				}
				if p.m.DirtyLen() > 4096 {
					p.m.Flush(discard{})
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(i), "ns/entry")
		})
	}
}

func BenchmarkFind(b *testing.B) {
	for _, n := range []int{10_000, 1_000_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			p := newPool(b)
			p.device(1 << 50)
			fill(b, p, p.open("a"), n)
			key := make([]byte, 32)
			i := 0
			var l Location
			b.ReportAllocs()
			for b.Loop() {
				i = (i + 7919) % n
				binary.BigEndian.PutUint64(key[12:], uint64(i)*0x9e3779b97f4a7c15)
				s, ok := p.m.Find(TenantID{}, key)
				if !ok {
					b.Fatal("lost")
				}
				p.m.Location(s, &l)
			}
		})
	}
}

// BenchmarkPlanEvict64 plans and applies a REQUEST_ALLOC that evicts 64 pages, beside one that finds free space.
func BenchmarkPlanEvict64(b *testing.B) {
	p := newPool(b)
	p.device(1 << 50)
	a := p.open("a")
	fill(b, p, a, 1_000_000)
	req := &protocol.AllocRequest{Size: 64 * 4096, PageSize: 4096, NeedPages: 64, Evict: true}
	for b.Loop() {
		plan := p.m.PlanAlloc(a, req, noGuard{}, false)
		if plan.Kind != PlanCommand {
			b.Fatal(plan)
		}
	}
}
