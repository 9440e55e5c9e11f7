package meta

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// memStore is a Store and Batch on a map.
type memStore struct{ records map[string][]byte }

func newMemStore() *memStore { return &memStore{records: map[string][]byte{}} }

func (s *memStore) Scan(prefix []byte, fn func(key, value []byte) error) error {
	for _, k := range slices.Sorted(maps.Keys(s.records)) {
		if bytes.HasPrefix([]byte(k), prefix) {
			if err := fn([]byte(k), s.records[k]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *memStore) Set(k, v []byte) { s.records[string(k)] = bytes.Clone(v) }
func (s *memStore) Delete(k []byte) { delete(s.records, string(k)) }

// noGuard is a leader that has granted no lease.
type noGuard struct{}

func (noGuard) Leased(Slot) bool         { return false }
func (noGuard) Touched(Slot) bool        { return false }
func (noGuard) RegionBusy(RegionID) bool { return false }

func (noGuard) DeviceReady(DeviceID, string, uint64) bool { return true }

// pool drives a machine as a leader would: it stamps time, plans, and applies one command at a time.
type pool struct {
	tb    testing.TB
	m     *Machine
	store *memStore
	index uint64
	now   uint64
	seqs  map[SessionID]uint64
	log   [][]byte
	res   Results
}

func newPool(tb testing.TB) *pool {
	tb.Helper()
	store := newMemStore()
	m, err := Open(store)
	require.NoError(tb, err)
	return &pool{tb: tb, m: m, store: store, seqs: map[SessionID]uint64{}, now: 1000}
}

// apply runs one command and returns its result, code first.
func (p *pool) apply(h Header, c Command) (protocol.Code, []byte) {
	p.index++
	g := AppendCommand(BeginGroup(nil, p.now, nil), h, c)
	p.log = append(p.log, g)
	p.res.Reset()
	require.NoError(p.tb, p.m.Apply(p.index, g, &p.res))
	code, body, err := DecodeCode(p.res.Bytes(&p.res.Spans[0]))
	require.NoError(p.tb, err)
	return code, bytes.Clone(body)
}

// do runs a command of a session under its next seq, acknowledging everything before.
func (p *pool) do(id SessionID, c Command) (protocol.Code, []byte) {
	p.seqs[id]++
	return p.apply(Header{Session: id, Seq: p.seqs[id], Acked: p.seqs[id]}, c)
}

func (p *pool) device(size uint64) DeviceID {
	code, body := p.apply(Header{}, &AddDevice{
		UUID: "d" + string(rune('a'+len(p.m.devices))), Path: "/dev/shm/d", Tier: "cxl", Coherence: "hardware",
		Size: size + 2<<20, DataOffset: 2 << 20, Align: 4096, Generation: 7,
	})
	require.Zero(p.tb, code)
	r, err := DecodeCount(body)
	require.NoError(p.tb, err)
	return DeviceID(r.Count)
}

func (p *pool) open(instance string) SessionID { return p.openOf(DefaultTenant, instance) }

func (p *pool) openOf(tenant, instance string) SessionID {
	code, body := p.apply(Header{}, &OpenSession{
		Instance: instance, Tenant: tenant, TTLMS: 10_000, Secret: p.index + 99, Features: protocol.FeaturePush,
	})
	require.Zero(p.tb, code)
	r, err := DecodeSession(body)
	require.NoError(p.tb, err)
	return r.ID
}

// alloc plans and applies a REQUEST_ALLOC. The plan is PlanCommand, or nothing was applied.
func (p *pool) alloc(id SessionID, req *protocol.AllocRequest) (AllocPlan, AllocResult) {
	plan := p.m.PlanAlloc(id, req, noGuard{}, false)
	if plan.Kind != PlanCommand {
		return plan, AllocResult{}
	}
	code, body := p.do(id, &plan.Cmd)
	require.Zero(p.tb, code)
	r, err := DecodeAlloc(body)
	require.NoError(p.tb, err)
	return plan, r
}

func (p *pool) register(id SessionID, ctx *protocol.Context, entries ...protocol.RegisterEntry) []RegisterResult {
	code, body := p.do(id, &Register{Context: ctx, Entries: entries})
	require.Zero(p.tb, code)
	it := DecodeRegister(body)
	var out []RegisterResult
	for r := (RegisterResult{}); it.Next(&r); {
		out = append(out, r)
	}
	require.NoError(p.tb, it.Err())
	return out
}

func entryAt(key string, r AllocResult, page int) protocol.RegisterEntry {
	return protocol.RegisterEntry{
		Key: []byte(key), RegionID: uint64(r.Region), Epoch: r.Epoch, KVOffset: uint64(page) * r.PageSize, KVLength: r.PageSize,
	}
}

// flush writes the state to the store.
func (p *pool) flush() { p.m.Flush(p.store) }

// rebuilt opens a second machine from the store: it must be the same.
func (p *pool) rebuilt() *Machine {
	p.flush()
	m, err := Open(p.store)
	require.NoError(p.tb, err)
	requireSame(p.tb, p.m, m)
	return m
}

// describe writes out what goes into the state hash.
func (m *Machine) describe() []string {
	out := []string{fmt.Sprintf("head %x", m.head.appendTo(nil)), fmt.Sprintf("settings %+v", m.settings)}
	line := func(r record) { out = append(out, fmt.Sprintf("%q %q", r.appendKey(nil), r.appendValue(nil))) }
	for _, d := range m.sortedDevices() {
		line(d)
	}
	for _, c := range m.sortedContexts() {
		line(c)
	}
	for _, c := range m.sortedContexts() {
		if c.id == c.tenant.base && c.tenant.limits.TenantLimits != (TenantLimits{}) {
			line(c.tenant.limits)
		}
	}
	for _, s := range m.sortedSessions() {
		line(s)
		for _, a := range s.answers {
			if a != nil {
				line(a)
			}
		}
		for _, p := range s.parts {
			out = append(out, fmt.Sprintf("partition %d %d %d: %d entries, state %x, old %v", s.id, p.pageSize, p.class, p.pol.Len(), p.pol.StateHash(), p.old != nil))
		}
	}
	for _, r := range m.regionList {
		line(r)
	}
	line(&m.names)
	for _, c := range m.sortedContexts() {
		for _, n := range c.tenant.names {
			line(n)
		}
	}
	for s := range m.maru.end {
		if k := m.maruAt(s); k != nil {
			out = append(out, fmt.Sprintf("%q %q", m.appendMaruKey(nil, k), m.appendMaruValue(nil, s)))
		}
	}
	for s := range m.table.end {
		if x := m.table.at(s); x.birth != 0 {
			out = append(out, fmt.Sprintf("entry %d %s hash %x order %+v pins %d flags %x", s, m.Key(s), m.entryHash(s, x), x.place(), x.pins, x.flags))
		}
	}
	for _, pins := range sortedValues(m.pinsOf, func(p []*pin) uint64 { return uint64(p[0].slot) }) {
		for _, p := range pins {
			line(p)
		}
	}
	return append(out, fmt.Sprintf("sums %x %x %x", m.entrySum, m.orderSum, m.objectSum))
}

// requireSame fails with the first few differences between two machines, if their state hashes differ.
func requireSame(tb testing.TB, want, got *Machine) {
	tb.Helper()
	if want.StateHash() == got.StateHash() {
		return
	}
	a, b := want.describe(), got.describe()
	for _, x := range a {
		if !slices.Contains(b, x) {
			tb.Logf("only in the first:  %.300s", x)
		}
	}
	for _, x := range b {
		if !slices.Contains(a, x) {
			tb.Logf("only in the second: %.300s", x)
		}
	}
	require.Fail(tb, "the state hashes differ")
}
