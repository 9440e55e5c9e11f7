package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"larder/meta/policy"
	"larder/protocol"
	"larder/server"
)

// Sizes of the index's figures.
const (
	lookupEntries = 100_000
	page          = 4096
	lookupBatch   = 128
	registerBatch = 64
)

// lookups measures LOOKUP.
func (b *bench) lookups() (err error) {
	n, err := b.single("lookup", 1<<30, false, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	writers, err := b.sessions(n, lookupEntries/connections*page)
	if err != nil {
		return err
	}
	defer hangUp(writers)
	if _, _, err := b.load(writers, 8, registerBatch, 0, lookupEntries, 0); err != nil {
		return err
	}
	for _, at := range []struct {
		network, address, name, of string
		echo                       float64
	}{
		{"tcp", n.Addr(), "TCP", "echo over TCP", b.report.Machine.EchoTCP},
		{"unix", n.cfg.Socket, "Unix socket", "echo over the socket", b.report.Machine.EchoUnix},
	} {
		if at.address == server.Off {
			continue
		}
		one, err := b.lookupRate(at.network, at.address, 1)
		if err != nil {
			return err
		}
		row := Row{
			Name: "LOOKUP, " + at.name + ", 64 in flight on 4 connections", Value: one.rate(), Unit: "lookups/s",
			Bound: at.echo, Of: at.of, Note: latencyNote(one),
		}
		b.aim(row, ">= 250k/s", row.Value >= 250e3)
		many, err := b.lookupRate(at.network, at.address, lookupBatch)
		if err != nil {
			return err
		}
		row = Row{
			Name: "BATCH_LOOKUP of 128, " + at.name, Value: many.rate() * lookupBatch, Unit: "keys/s", Note: latencyNote(many),
		}
		b.aim(row, ">= 1.5M/s", row.Value >= 1.5e6)
	}
	return nil
}

// latencyNote tells quantiles.
func latencyNote(o *outcome) string {
	return fmt.Sprintf("p50 %v, p99 %v", o.quantile(0.5).Round(time.Microsecond), o.quantile(0.99).Round(time.Microsecond))
}

// lookupRate looks random keys up, in batches unless batch is 1, and checks that every one is found.
func (b *bench) lookupRate(network, address string, batch int) (*outcome, error) {
	conns, err := dialMany(b.ctx, network, address, connections)
	if err != nil {
		return nil, err
	}
	defer closeAll(conns)
	t := protocol.TypeLookup
	if batch > 1 {
		t = protocol.TypeBatchLookup
	}
	build := func(i int) builder {
		random := rand.New(rand.NewPCG(uint64(i), 7)) //nolint:gosec // a load, not a secret
		storage := make([]byte, 0, 32*batch)
		req := protocol.LookupRequest{Keys: make([][]byte, batch), Packed: batch > 1}
		return func(buf []byte, wire uint32) ([]byte, bool) {
			storage = storage[:0]
			for k := range req.Keys {
				at := len(storage)
				storage = keyOf(storage, random.Uint64N(lookupEntries))
				req.Keys[k] = storage[at:]
			}
			buf, mark := protocol.BeginFrame(buf, t, wire)
			return protocol.EndFrame(req.AppendAs(buf, t), mark), true
		}
	}
	check := func(int) checker {
		var reply protocol.LookupReply
		return func(_ protocol.Header, payload []byte) error {
			if err := reply.DecodeAs(payload, t); err != nil {
				return fmt.Errorf("lookup: %w", err)
			}
			if err := reply.Err(); err != nil {
				return fmt.Errorf("lookup: %w", err)
			}
			if len(reply.Results) != batch || !reply.Results[batch-1].Found {
				return errors.New("lookup: a key that is there was not found")
			}
			return nil
		}
	}
	return driveAll(conns, inFlight/connections, b.Time, build, check)
}

// registerPasses is in how many parts REGISTER is measured, each between two runs of the bare harness: syncs of a shared
// disk take three times as long in one second as in the next.
const registerPasses = 5

// registers measures durable REGISTER on one node against the bare harnesses.
func (b *bench) registers() (err error) {
	n, err := b.single("register", 9<<30, false, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	writers, err := b.sessions(n, 512<<20)
	if err != nil {
		return err
	}
	defer hangUp(writers)
	if err := b.registerOne(writers); err != nil {
		return err
	}
	for _, s := range writers {
		if err := s.alloc(page, 3<<29); err != nil {
			return err
		}
	}
	entries, o, err := b.load(writers, 8, registerBatch, 1<<40, 1<<41, b.Time)
	if err != nil {
		return err
	}
	row := Row{
		Name: "BATCH_REGISTER of 64, durable, 32 in flight", Value: float64(entries) / o.elapsed.Seconds(), Unit: "entries/s",
		Note: latencyNote(o),
	}
	b.aim(row, ">= 300k/s", row.Value >= 300e3)
	return nil
}

// quiet drops Pebble's messages; a fatal one still ends the process.
type quiet struct{}

// Infof implements pebble.Logger.
func (quiet) Infof(string, ...any) {}

// Errorf implements pebble.Logger.
func (quiet) Errorf(string, ...any) {}

// Fatalf implements pebble.Logger.
func (quiet) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// registerOne measures REGISTERs of one entry each.
func (b *bench) registerOne(writers []*session) error {
	var server, alone []beside
	var bound []float64 // of the processors
	var o *outcome
	each := b.Time / registerPasses
	for pass := range uint64(registerPasses) {
		var bare [2][2]float64 // before and after, with sockets and without
		for i := range bare {
			if i == 1 {
				used := processorTime(self)
				entries, one, err := b.load(writers, inFlight/connections, 1, pass<<36, (pass+1)<<36, each)
				if err != nil {
					return err
				}
				used = processorTime(self) - used
				rate := float64(entries) / one.elapsed.Seconds()
				bound = append(bound, float64(entries)/used.Seconds()*float64(runtime.GOMAXPROCS(0)))
				server, alone, o = append(server, beside{value: rate}), append(alone, beside{value: rate}), one
			}
			var err error
			if bare[i][0], err = b.bareRate(each); err != nil {
				return err
			}
			if bare[i][1], err = b.pebbleRate(each); err != nil {
				return err
			}
		}
		server[pass].bound, alone[pass].bound = (bare[0][0]+bare[1][0])/2, (bare[0][1]+bare[1][1])/2
	}
	slices.Sort(bound)
	busy := bound[len(bound)/2]
	typical := middle(server)
	b.atLeast(Row{
		Name: "REGISTER, durable, 64 in flight", Value: typical.value, Unit: "entries/s", Bound: typical.bound,
		Of:   "a bare server with group commit, just before and after",
		Note: fmt.Sprintf("%s; all processors would do %.0f/s if they waited for no disk", latencyNote(o), busy),
	}, 0.8)
	typical = middle(alone)
	b.add(Row{
		Name: "the same, against callers without sockets", Value: typical.value, Unit: "entries/s", Bound: typical.bound,
		Of: "Pebble's synced Set, 64 goroutines, just before and after",
	})
	return nil
}

// replicas compares three replicas on this machine with one.
func (b *bench) replicas() error {
	one, err := b.registerOn(func() ([]*node, error) {
		n, err := b.single("alone", 3<<30, false, nil)
		return []*node{n}, err
	})
	if err != nil {
		return err
	}
	three, err := b.registerOn(func() ([]*node, error) { return b.three(3 << 30) })
	if err != nil {
		return err
	}
	b.atLeast(Row{
		Name: "REGISTER, three replicas on this machine", Value: three, Unit: "entries/s", Bound: one, Of: "one replica",
	}, 1.0/3)
	return nil
}

// registerOn measures single REGISTERs on a cluster.
func (b *bench) registerOn(start func() ([]*node, error)) (rate float64, err error) {
	nodes, err := start()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, removeAll(nodes)) }()
	writers, err := b.sessions(nodes[0], 512<<20)
	if err != nil {
		return 0, err
	}
	defer hangUp(writers)
	entries, o, err := b.load(writers, inFlight/connections, 1, 0, 1<<40, b.Time)
	if err != nil {
		return 0, err
	}
	return float64(entries) / o.elapsed.Seconds(), nil
}

// evictions compares a REQUEST_ALLOC that evicts 64 pages with one that finds free space.
func (b *bench) evictions() (err error) {
	const pages, rounds = 64, 400
	n, err := b.single("evict", 2<<30, false, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	network, address := splitAddress(n.Addr())
	s, err := openSession(b.ctx, network, address, "evictor", page, 0)
	if err != nil {
		return err
	}
	defer hangUp([]*session{s})
	var free, evicting []time.Duration
	for range rounds {
		at := time.Now()
		if err := s.alloc(page, pages*page); err != nil {
			return err
		}
		free = append(free, time.Since(at))
	}
	// Now fill the rest with one region of entries, and evict from it.
	if err := s.alloc(page, 1<<30); err != nil {
		return err
	}
	if _, _, err := b.load([]*session{s}, 8, registerBatch, 0, rounds*pages*2, 0); err != nil {
		return err
	}
	if err := b.fillPool(s); err != nil {
		return err
	}
	for range rounds {
		at := time.Now()
		reply, err := s.request(&protocol.AllocRequest{
			InstanceID: s.instance, Size: pages * page, PageSize: page, NeedPages: pages, Evict: true,
		})
		if err != nil {
			return err
		}
		if len(reply.Evicted) < pages {
			return fmt.Errorf("asked for %d pages, %d were evicted", pages, len(reply.Evicted))
		}
		evicting = append(evicting, time.Since(at))
	}
	slices.Sort(free)
	slices.Sort(evicting)
	micros := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	row := Row{
		Name: "REQUEST_ALLOC that evicts 64 pages, median", Value: micros(evicting[rounds/2]), Unit: "us",
		Bound: micros(free[rounds/2]), Of: "one that finds free space",
	}
	b.aim(row, "ratio <= 3", row.Value <= 3*row.Bound)
	return nil
}

// fillPool takes what is free, so that the next request must evict.
func (b *bench) fillPool(s *session) error {
	for size := uint64(256 << 20); size >= page; {
		reply, err := s.request(&protocol.AllocRequest{InstanceID: s.instance, Size: size, PageSize: page})
		switch {
		case err == nil && reply.Region.Length > 0:
			continue
		case err == nil || protocol.CodeOf(err) == protocol.CodeNoSpace || protocol.CodeOf(err) == protocol.CodeLimit:
			size /= 2
		default:
			return err
		}
	}
	return nil
}

// policies compares a store with space free under each policy with one under a policy that does nothing. Both take turns,
// and the best of each counts: what else a shared machine does only ever slows it.
func (b *bench) policies() error {
	const rounds, entries = 9, 200_000
	for _, name := range policy.Names() {
		if name == policyNone {
			continue
		}
		var own, none policyFigures
		for round := range rounds {
			for i := range 2 {
				best, as := &own, name
				if (i+round)%2 == 1 { // so that none always runs first
					best, as = &none, policyNone
				}
				f, err := b.policyRun(as, entries)
				if err != nil {
					return fmt.Errorf("policy %s: %w", as, err)
				}
				best.keep(f)
			}
		}
		b.policyRows(name, own, none)
	}
	return nil
}

// policyRows reports what a policy costs a store beside one that does nothing, and what the slowest stores wait.
func (b *bench) policyRows(name string, own, none policyFigures) {
	const of = "policy none, in turns"
	b.atLeast(Row{
		Name: "BATCH_REGISTER of 64 with space free, " + name, Value: own.rate, Unit: "entries/s", Bound: none.rate, Of: of,
		Note: fmt.Sprintf("CPU an entry %.2f µs, none %.2f µs", own.cost*1e6, none.cost*1e6),
	}, 0.97)
	b.atMost(Row{Name: "the same, p99, " + name, Value: own.tail, Unit: "ms", Bound: none.tail, Of: of}, 1.03)
}

// policyNone does nothing.
const policyNone = "none"

// policyFigures are what a store costs under a policy: entries per second, the p99 in milliseconds, and the seconds of
// processor time that server and clients take for one entry.
type policyFigures struct{ rate, tail, cost float64 }

// keep takes over what is better in x.
func (f *policyFigures) keep(x policyFigures) {
	if f.rate == 0 {
		*f = x
		return
	}
	f.rate, f.tail, f.cost = max(f.rate, x.rate), min(f.tail, x.tail), min(f.cost, x.cost)
}

// policyRun registers entries on a fresh server.
func (b *bench) policyRun(name string, entries uint64) (f policyFigures, err error) {
	n, err := b.single("policy", 2<<30, false, func(cfg *server.Config) { cfg.EvictionPolicy = name })
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	writers, err := b.sessions(n, 256<<20)
	if err != nil {
		return f, err
	}
	defer hangUp(writers)
	runtime.GC() // of the server before
	begin := processorTime(self)
	count, o, err := b.load(writers, 8, registerBatch, 0, entries, 0)
	if err != nil {
		return f, err
	}
	return policyFigures{
		rate: float64(count) / o.elapsed.Seconds(), tail: float64(o.quantile(0.99).Microseconds()) / 1e3,
		cost: (processorTime(self) - begin).Seconds() / float64(count),
	}, nil
}

// restart measures how long a server with entries takes to serve again.
func (b *bench) restart() error { return b.restartWith(1_000_000, 0) }

// tenMillion is the same at the size that the index is made for.
func (b *bench) tenMillion() error { return b.restartWith(10_000_000, 20*time.Second) }

// restartWith fills an index, tells its memory per entry, and restarts the server.
func (b *bench) restartWith(entries uint64, most time.Duration) (err error) {
	size := entries*page + 1<<30
	n, err := b.single("restart", server.Size(size), false, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	before := heap()
	writers, err := b.sessions(n, (entries/connections+1)*page)
	if err != nil {
		return err
	}
	defer hangUp(writers)
	if _, _, err := b.load(writers, 8, registerBatch, 0, entries, 0); err != nil {
		return err
	}
	perEntry := float64(max(heap(), before)-before) / float64(entries)
	label := strconv.FormatUint(entries, 10)
	held := Row{Name: "heap per entry at " + label + " entries with keys of 32 bytes", Value: perEntry, Unit: "B"}
	if entries < 10_000_000 {
		b.add(held) // what a server needs at any size is still a part of it
	} else {
		b.aim(held, "<= 220 B", perEntry <= 220)
	}
	pause := longestPause()
	b.aim(Row{
		Name: "longest stop of a garbage collection with " + label + " entries", Value: float64(pause.Microseconds()) / 1e3, Unit: "ms",
	}, "<= 5 ms", pause <= 5*time.Millisecond)
	hangUp(writers)
	if err := n.stop(); err != nil {
		return err
	}
	begin := time.Now()
	again, err := b.start(n.cfg)
	if err != nil {
		return err
	}
	n.Server = again.Server
	for !n.Status().Serving {
		if time.Since(begin) > readyWait {
			return fmt.Errorf("not serving after %v", readyWait)
		}
		time.Sleep(readyPoll)
	}
	took := time.Since(begin)
	found, err := b.lookupRateOnce(n, entries)
	if err != nil {
		return err
	}
	row := Row{Name: "restart with " + label + " entries until it serves", Value: took.Seconds(), Unit: "s", Note: found}
	if most == 0 {
		b.add(row)
		return nil
	}
	b.aim(row, "<= "+most.String(), took <= most)
	return nil
}

// longestPause is the longest stop of the world by the last few garbage collections, which the load caused, and one more.
func longestPause() time.Duration {
	runtime.GC()
	var s debug.GCStats
	debug.ReadGCStats(&s)
	const last = 5
	return slices.Max(s.Pause[:min(last, len(s.Pause))])
}

// heap is the live heap in bytes.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// lookupRateOnce looks for a sample of the keys that were registered before a restart.
func (b *bench) lookupRateOnce(n *node, entries uint64) (string, error) {
	const sample = protocol.MaxBatch
	network, address := splitAddress(n.Addr())
	conns, err := dialMany(b.ctx, network, address, 1)
	if err != nil {
		return "", err
	}
	defer closeAll(conns)
	req := protocol.KeysRequest{Keys: make([][]byte, sample)}
	for i := range req.Keys {
		req.Keys[i] = keyOf(nil, uint64(i)*(entries/sample))
	}
	found := 0
	_, err = driveAll(conns, 1, time.Minute, func(int) builder {
		return func(buf []byte, wire uint32) ([]byte, bool) {
			if wire > 1 {
				return buf, false
			}
			buf, mark := protocol.BeginFrame(buf, protocol.TypeBatchExists, wire)
			return protocol.EndFrame(req.AppendAs(buf, protocol.TypeBatchExists), mark), true
		}
	}, func(int) checker {
		return func(_ protocol.Header, payload []byte) error {
			var reply protocol.KeysReply
			if err := reply.DecodeAs(payload, protocol.TypeBatchExists); err != nil {
				return fmt.Errorf("exists: %w", err)
			}
			for _, ok := range reply.Results {
				if ok {
					found++
				}
			}
			return reply.Err()
		}
	})
	if err != nil {
		return "", err
	}
	if found != sample {
		return "", fmt.Errorf("%d of %d sampled entries are there after the restart", found, sample)
	}
	return fmt.Sprintf("all of %d sampled entries found", sample), nil
}
