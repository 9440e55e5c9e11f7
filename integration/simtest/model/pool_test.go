package model

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/meta/policy"
	"larder/protocol"
)

const (
	page   = 4096
	header = 2 << 20 // of a device
)

// memStore is a meta.Store and meta.Batch on a map.
type memStore map[string][]byte

func (s memStore) Scan(prefix []byte, fn func(key, value []byte) error) error {
	for _, k := range slices.Sorted(maps.Keys(s)) {
		if bytes.HasPrefix([]byte(k), prefix) {
			if err := fn([]byte(k), s[k]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s memStore) Set(k, v []byte) { s[string(k)] = bytes.Clone(v) }
func (s memStore) Delete(k []byte) { delete(s, string(k)) }

// command is a command with its header.
type command struct {
	meta.Header
	meta.Command
}

// kindEntry stands for one entry of a REGISTER.
const kindEntry = meta.Kind(255)

// kindCopy stands for one that is a copy.
const kindCopy = meta.Kind(254)

// outcome is what became of a kind of command.
type outcome struct {
	kind meta.Kind
	code protocol.Code
}

// pool is a real machine and its model, fed with the same log.
type pool struct {
	tb    testing.TB
	m     *meta.Machine
	model *Model
	store memStore
	index uint64
	now   uint64
	count int // commands
	seen  map[outcome]int
	res   meta.Results
}

func newPool(tb testing.TB) *pool {
	tb.Helper()
	p := &pool{tb: tb, store: memStore{}, model: New(), now: 1000, seen: map[outcome]int{}}
	p.m = p.open()
	return p
}

func (p *pool) open() *meta.Machine {
	m, err := meta.Open(p.store)
	require.NoError(p.tb, err)
	return m
}

// group makes a log entry.
func (p *pool) group(touches []meta.Touch, commands ...command) []byte {
	b := meta.BeginGroup(nil, p.now, touches)
	for _, c := range commands {
		c.Header.Kind = c.Command.Kind()
		b = meta.AppendCommand(b, c.Header, c.Command)
	}
	return b
}

// apply has the machine apply a log entry, and the model check what it answered.
func (p *pool) apply(touches []meta.Touch, commands ...command) {
	p.tb.Helper()
	require.NoError(p.tb, p.real(p.group(touches, commands...)))
	p.count += len(commands)
	for i := range p.res.Spans {
		kind := p.res.Spans[i].Kind
		code, body, err := meta.DecodeCode(p.res.Bytes(&p.res.Spans[i]))
		require.NoError(p.tb, err)
		p.seen[outcome{kind, code}]++
		if kind != meta.KindRegister || code != 0 || p.res.Spans[i].Remembered {
			continue
		}
		entries, err := decodeRegister(body)
		require.NoError(p.tb, err)
		for j, e := range entries {
			kind := kindEntry
			if commands[i].Command.(*meta.Register).Entries[j].Copy {
				kind = kindCopy
			}
			p.seen[outcome{kind, e.Code}]++
		}
	}
}

func (p *pool) real(group []byte) error {
	p.index++
	p.res.Reset()
	revision, incarnation := p.m.NamesRevision(), p.m.Incarnation()
	require.NoError(p.tb, p.m.Apply(p.index, group, &p.res))
	err := p.model.Apply(p.index, group, &p.res)
	if err == nil && p.m.Incarnation() == incarnation {
		p.compareChanges(revision)
	}
	return err
}

// compareChanges compares what watchers are told of the last log entry.
func (p *pool) compareChanges(after uint64) {
	for _, tenant := range []string{meta.DefaultTenant, "acme"} {
		var want, got []NameChange
		for _, c := range p.model.NameChanges() {
			if c.Tenant == tenant {
				c.Value = emptyNil(c.Value)
				want = append(want, c)
			}
		}
		require.True(p.tb, p.m.NamesSince(p.m.Tenant(tenant), "", after, func(e *meta.NameEvent) bool {
			got = append(got, NameChange{tenant, e.NameInfo, e.Deleted})
			return true
		}))
		require.Equal(p.tb, want, got)
	}
}

// answer returns the code and body of the only command of the last log entry.
func (p *pool) answer() (protocol.Code, []byte) {
	code, body, err := meta.DecodeCode(p.res.Bytes(&p.res.Spans[0]))
	require.NoError(p.tb, err)
	return code, body
}

// restart rebuilds the machine from its store.
func (p *pool) restart() {
	p.m.Flush(p.store)
	hash := p.m.StateHash()
	p.m = p.open()
	require.Equal(p.tb, hash, p.m.StateHash())
}

func (p *pool) device(uuid string, pages uint64) {
	p.apply(nil, command{Command: &meta.AddDevice{
		UUID: uuid, Path: "/dev/" + uuid, Tier: "cxl", Coherence: "hardware", Size: pages*page + header, DataOffset: header,
		Align: page, Generation: 7,
	}})
}

func (p *pool) session(instance, tenant string, ttl uint64) meta.SessionID {
	p.apply(nil, command{Command: &meta.OpenSession{
		Instance: instance, Tenant: tenant, TTLMS: ttl, Secret: p.index + 99, Features: protocol.FeaturePush,
	}})
	code, body := p.answer()
	require.Zero(p.tb, code)
	r, err := meta.DecodeSession(body)
	require.NoError(p.tb, err)
	return r.ID
}

// guard is a leader that has leased some entries at random.
type guard struct{ r *rand.Rand }

func (g guard) Leased(meta.Slot) bool                        { return g.r.IntN(8) == 0 }
func (g guard) Touched(meta.Slot) bool                       { return g.r.IntN(8) == 0 }
func (g guard) RegionBusy(meta.RegionID) bool                { return g.r.IntN(8) == 0 }
func (guard) DeviceReady(meta.DeviceID, string, uint64) bool { return true }

// generator draws commands, most of them sensible, some nonsense.
type generator struct {
	*rand.Rand
	p        *pool
	keyCount int
	sessions []meta.SessionID
	seqs     map[meta.SessionID]uint64
	sent     map[meta.SessionID][]command // not yet acked
	policies []string
	homes    []home
}

func newGenerator(p *pool, seed uint64, keys int) *generator {
	return &generator{
		Rand: rand.New(rand.NewPCG(seed, 29)), p: p, keyCount: keys, seqs: map[meta.SessionID]uint64{},
		sent: map[meta.SessionID][]command{}, policies: policy.Names(),
		homes: []home{{"node/n0/a", "a", "dram"}, {"node/n0/b", "b", "ssd"}, {"node/n1/c", "c", "ssd"}, {"node/n2/e", "e", "cxl"}},
	}
}

// one is true once in n times.
func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

func pick[T any](g *generator, list []T) T { return list[g.IntN(len(list))] }

func (g *generator) key() []byte { return fmt.Appendf(nil, "key-%d", g.IntN(g.keyCount)) }

func (g *generator) keys() [][]byte {
	keys := make([][]byte, 1+g.IntN(4))
	for i := range keys {
		keys[i] = g.key()
	}
	return keys
}

// anySession returns a session, mostly an open one; now and then a new one.
func (g *generator) anySession() meta.SessionID {
	g.sessions = slices.DeleteFunc(g.sessions, func(id meta.SessionID) bool { return !g.p.m.SessionOpen(id) && !g.one(4) })
	if len(g.sessions) < 3 || g.one(200) {
		ttl := uint64(10_000)
		if g.one(4) {
			ttl = 0
		}
		name := fmt.Sprintf("i%d", g.p.index)
		g.sessions = append(g.sessions, g.p.session(name, pick(g, []string{"", "", "acme"}), ttl))
		if len(g.sessions) > 6 {
			g.p.apply(nil, command{Command: &meta.CloseSession{ID: g.sessions[0], Fenced: g.one(2)}})
		}
	}
	return pick(g, g.sessions)
}

// step applies one log entry with some commands.
func (g *generator) step() {
	p := g.p
	p.now += g.Uint64N(40)
	p.res.WantEffects = !g.one(4)
	var touches []meta.Touch
	for range g.IntN(3) {
		touches = append(touches, meta.Touch{Slot: meta.Slot(g.IntN(g.keyCount)), Count: g.Uint32N(3)})
	}
	var commands []command
	for range 1 + g.IntN(4) {
		commands = append(commands, g.command())
	}
	if g.one(4) { // beside the others, so that there are as many of those
		id := g.anySession()
		commands = append(commands, g.protected(id, g.name(id)))
	}
	if g.one(3) { // likewise
		commands = append(commands, g.maru())
	}
	p.apply(touches, commands...)
	for _, span := range p.res.Spans {
		if code, body, _ := meta.DecodeCode(p.res.Bytes(&span)); span.Kind == meta.KindOpenSession && code == 0 {
			if r, err := meta.DecodeSession(body); err == nil && !slices.Contains(g.sessions, r.ID) {
				g.sessions = append(g.sessions, r.ID)
			}
		}
	}
}

// command draws a command of a session, sometimes one that was sent before, or one of the leader's.
func (g *generator) command() command {
	id := g.anySession()
	if sent := g.sent[id]; len(sent) > 0 && g.one(8) {
		c := pick(g, sent) // a retry
		c.Acked = min(c.Acked, c.Seq)
		return c
	}
	switch n := g.IntN(36); {
	case n < 18:
		return g.protected(id, g.clients(id, n))
	case n < 24:
		return command{Command: g.leaders(id, n-18)}
	default:
		return g.nodes(id, n-24)
	}
}

// name draws a change of a name.
func (g *generator) name(id meta.SessionID) meta.Command {
	key := fmt.Appendf(nil, "name-%d", g.IntN(9))
	info, _ := g.p.m.Session(id)
	n, _ := g.p.m.Name(g.p.m.Tenant(info.Tenant), key)
	if g.one(40) {
		key = bytes.Repeat(key, g.IntN(200))
	}
	revision := n.Modified - uint64(g.IntN(8)/7)
	if g.one(3) {
		return &meta.DeleteName{Key: key, Check: g.one(2), Revision: revision}
	}
	return &meta.PutName{Key: key, Value: bytes.Repeat([]byte("v"), g.IntN(50)), Check: g.one(2), Revision: revision, Lease: !g.one(3)}
}

// protected gives a session's command its seq.
func (g *generator) protected(id meta.SessionID, c meta.Command) command {
	h := meta.Header{Session: id}
	switch n := g.IntN(120); {
	case n < 3: // without seq
	case n < 6:
		h = meta.Header{} // nobody's
	case n < 8:
		h.Seq = g.seqs[id] + g.Uint64N(3*protocol.Window) // perhaps far ahead
	default:
		g.seqs[id]++
		h.Seq = g.seqs[id]
		h.Acked = h.Seq - min(h.Seq-1, g.Uint64N(20)) // the last answers are perhaps on their way
	}
	sent := command{h, c}
	if h.Seq != 0 {
		g.sent[id] = append(g.sent[id], sent)
		if len(g.sent[id]) > 24 {
			g.sent[id] = g.sent[id][1:]
		}
	}
	return sent
}

// clients draws what a client sends: mostly what it needs most.
func (g *generator) clients(id meta.SessionID, n int) meta.Command {
	info, _ := g.p.m.Session(id)
	if len(info.Regions) == 0 && !g.one(4) {
		return g.alloc(id)
	}
	for _, r := range info.Regions {
		if x, _ := g.p.m.Region(r); x.State == meta.RegionMarked && !g.one(4) {
			return &meta.RevokeDone{Region: r, Epoch: x.Epoch}
		}
	}
	switch n {
	case 0, 1, 2, 3:
		return g.alloc(id)
	case 4, 5, 6, 7, 8, 9, 10:
		return g.register(id)
	case 11, 12:
		c := &meta.Delete{Keys: g.keys()}
		if slot := g.any(); g.one(4) && g.p.m.Birth(slot) != 0 { // one of its locations, or nearly
			if all := g.p.m.Locations(slot, nil); len(all) > 0 {
				l := pick(g, all)
				c.Keys, c.Region, c.Offset = [][]byte{slices.Clone(g.p.m.Key(slot))}, l.Region, l.Offset+g.Uint64N(l.Length+1)
			}
		}
		return c
	case 13, 14:
		c := &meta.Pin{Undo: g.one(2), Class: meta.Class(1 + g.IntN(2)), Keys: g.keys(), Strict: g.one(4)}
		if g.one(2) {
			c.Owner = fmt.Sprintf("op%d", g.IntN(3))
		}
		if g.one(2) {
			c.Until = g.p.now + g.Uint64N(400)
		}
		return c
	case 15:
		if g.one(3) {
			next := g.seqs[id] + g.Uint64N(5)
			return &meta.Cancel{Seqs: []uint64{next, next + 1, g.seqs[id] - min(g.seqs[id], g.Uint64N(30))}}
		}
		return g.register(id)
	case 16:
		return g.clear()
	default:
		return pick(g, g.regionCommands(id))
	}
}

// regionCommands makes one of each kind about some region.
func (g *generator) regionCommands(id meta.SessionID) []meta.Command {
	x := meta.RegionInfo{ID: 77}
	if regions := g.p.m.Regions(); len(regions) > 0 {
		x = pick(g, regions)
	}
	if info, ok := g.p.m.Session(id); ok && len(info.Regions) > 0 && !g.one(4) {
		x, _ = g.p.m.Region(pick(g, info.Regions))
	}
	if !g.one(3) {
		switch x.State { // what comes next in a region's life
		case meta.RegionOwned:
			return []meta.Command{&meta.Delete{Keys: g.keys()}}
		case meta.RegionMarked:
			return []meta.Command{&meta.RevokeDone{Region: x.ID, Epoch: x.Epoch}}
		case meta.RegionOrphaned:
			return []meta.Command{&meta.Fence{ID: x.Owner}}
		case meta.RegionDeparted:
			return []meta.Command{&meta.Sweep{Limit: 9}}
		case meta.RegionDraining:
			return []meta.Command{&meta.EmptyRegion{Region: x.ID}, &meta.FreeRegion{Region: x.ID}}
		}
	}
	return []meta.Command{
		&meta.ReturnRegion{Region: x.ID, Epoch: (x.Epoch - uint64(g.IntN(8)/7)) * uint64(g.IntN(2))}, &meta.RevokeDone{Region: x.ID, Epoch: x.Epoch - uint64(g.IntN(8)/7)},
		&meta.EmptyRegion{Region: x.ID, For: id * meta.SessionID(g.IntN(2))}, &meta.FreeRegion{Region: x.ID}, &meta.Mark{Region: x.ID, For: pick(g, g.sessions)},
	}
}

// leaders draws what the leader does by itself, or for an operator.
func (g *generator) leaders(id meta.SessionID, n int) meta.Command {
	for _, x := range g.p.m.Regions() {
		if x.State == meta.RegionOrphaned && x.Live > 0 && g.one(20) { // its owner is fenced after the bytes are lost
			return &meta.Retire{Device: x.Device, Generation: x.Generation + 1}
		}
	}
	switch n {
	case 0:
		if g.one(2) {
			return g.limits()
		}
		if g.one(12) {
			return g.settings() // perhaps before the last change has ended
		}
		return &meta.ExpirePins{}
	case 1:
		return &meta.Sweep{Limit: g.Uint32N(uint32(g.keyCount))}
	case 2, 3:
		return pick(g, g.regionCommands(id))
	case 4:
		return g.devices()
	default:
		return g.sessionCommand(id)
	}
}

// limits makes limits of a tenant, some of them more than the pool has.
func (g *generator) limits() meta.Command {
	c := &meta.SetTenant{Tenant: pick(g, []string{meta.DefaultTenant, meta.DefaultTenant, "acme", "acme", "nobody"})}
	if g.one(2) {
		c.Limits.Guarantee = g.Uint64N(60) * page
	}
	if g.one(3) {
		c.Limits.MaxPins = g.Uint64N(6)
	}
	return c
}

// settings draws others, some of which are refused.
func (g *generator) settings() meta.Command {
	s := g.p.m.Settings()
	if s.Policy = pick(g, g.policies); g.one(2) {
		s.TTLMS = g.Uint64N(3) * 700
	}
	if g.one(8) {
		s.PageSize = g.Uint64N(3) * 2048
	}
	if g.one(4) {
		s.TierLow = g.Uint64N(110)
		s.TierLows = pick(g, []string{"", "dram=50%", "cxl=0%,#2=100%", "dram=101%", "ssd=5%"})
	}
	return &meta.SetSettings{Settings: s}
}

func (g *generator) devices() meta.Command {
	all := g.p.m.Devices()
	switch g.IntN(12) {
	case 0:
		return g.settings()
	case 1:
		return &meta.AddDevice{
			UUID: fmt.Sprintf("d%d", g.IntN(3)), Size: g.Uint64N(24)*page + header, DataOffset: header,
			Align: page << g.IntN(2), Generation: g.Uint64N(6),
		}
	case 2:
		for _, d := range all {
			if d.Regions == 0 {
				return &meta.DropDevice{Device: d.ID}
			}
		}
		return &meta.DropDevice{Device: meta.DeviceID(g.IntN(5))}
	case 3, 4, 5:
		if len(all) == 0 {
			return &meta.Retire{Device: 1, Generation: 1}
		}
		d := pick(g, all)
		r := &meta.Retire{Device: d.ID, Generation: d.Generation + uint64(1-g.IntN(6)/5), Fenced: g.one(2)}
		if g.one(2) {
			r.Size, r.Path = header-2*page+g.Uint64N(32)*page, "/moved"
		}
		return r
	default:
		return &meta.Sweep{Limit: g.Uint32N(uint32(g.keyCount))}
	}
}

// sessionCommand ends, fences, replaces and opens sessions.
func (g *generator) sessionCommand(id meta.SessionID) meta.Command {
	info, _ := g.p.m.Session(id)
	switch g.IntN(24) {
	case 0, 1:
		return &meta.CloseSession{ID: id, Fenced: g.one(2)}
	case 2, 3, 4, 5:
		return &meta.Fence{ID: id}
	case 6, 7, 8:
		secret := g.Uint64()
		if g.one(3) {
			secret = info.Secret // a repeated HANDSHAKE
		}
		return &meta.OpenSession{
			Instance: info.Instance, Tenant: info.Tenant, TTLMS: 1000, Secret: secret, Replaces: id,
			Proof: info.Secret + uint64(g.IntN(6)/5), Process: meta.Process{BootID: "b", PID: g.Uint64N(3)}, Features: 3,
		}
	case 9:
		if g.one(20) {
			return &meta.NewIncarnation{Incarnation: g.p.m.Incarnation() + g.Uint64N(2)}
		}
		return &meta.ExpirePins{}
	default:
		return pick(g, g.regionCommands(id))
	}
}

func (g *generator) clear() meta.Command {
	if !g.one(4) {
		return &meta.Delete{Keys: g.keys()}
	}
	return pick(g, []meta.Command{
		&meta.Clear{All: true}, &meta.Clear{Prefix: fmt.Appendf(nil, "key-%d", g.IntN(9))}, &meta.Clear{},
		&meta.Clear{Context: &meta.Context{Model: "m1"}}, &meta.Clear{Context: &meta.Context{BlockSize: 16, Tenant: "acme"}},
	})
}

func (g *generator) alloc(id meta.SessionID) meta.Command {
	if g.one(8) { // nonsense, or what became of the pool since it was planned
		c := &meta.Alloc{
			Device: meta.DeviceID(g.IntN(4)), Size: g.Uint64N(9) * page / (1 + g.Uint64N(2)), PageSize: g.Uint64N(3) * page,
			Phase: uint8(g.IntN(5)), MaxOwned: g.Uint64N(3),
		}
		switch all := g.p.m.Regions(); g.IntN(3) {
		case 0:
			if c.Region = 99; len(all) > 0 {
				c.Region = pick(g, all).ID
			}
		case 1:
			for range g.IntN(4) {
				s := meta.Slot(g.IntN(g.keyCount))
				c.Victims = append(c.Victims, meta.Victim{Slot: s, Birth: g.p.m.Birth(s) - g.Uint64N(4)/3})
			}
			c.Victims = append(c.Victims, c.Victims...) // named twice, evicted once
		}
		return c
	}
	req := &protocol.AllocRequest{
		Size: (1 + g.Uint64N(8)) * page, PageSize: page << g.IntN(2), NeedPages: g.Uint64N(4), Evict: !g.one(4),
		Whole: g.one(8),
	}
	if g.one(3) {
		req.Keys, req.FreePages = g.keys(), g.Uint64N(3)
	}
	switch plan := g.p.m.PlanAlloc(id, req, guard{g.Rand}, g.one(2)); plan.Kind {
	case meta.PlanCommand:
		return &plan.Cmd
	case meta.PlanMark:
		return &meta.Mark{Region: plan.Region, For: id}
	case meta.PlanEmpty:
		return &meta.EmptyRegion{Region: plan.Region, For: plan.For}
	default:
		return &meta.Sweep{Limit: 5}
	}
}

func (g *generator) register(id meta.SessionID) meta.Command {
	var entries []protocol.RegisterEntry
	info, _ := g.p.m.Session(id)
	all := g.p.m.Regions()
	for range 1 + g.IntN(3) {
		e := protocol.RegisterEntry{
			Key: g.key(), KVOffset: g.Uint64N(9) * page, KVLength: 1 + g.Uint64N(2*page), Checksum: g.Uint64(),
			Touch: g.one(12), Replicas: g.wished(),
		}
		switch g.IntN(12) {
		case 0:
			e.TTLMS = 300
		case 1, 2, 3:
			e.TTLMS = 20_000
		}
		x := meta.RegionInfo{}
		switch {
		case len(info.Regions) > 0 && !g.one(10):
			x, _ = g.p.m.Region(pick(g, info.Regions))
		case len(all) > 0:
			x = pick(g, all)
			for _, r := range all {
				if r.State == meta.RegionOrphaned && g.one(2) { // where only clients without epochs may store
					x = r
				}
			}
		}
		if e.RegionID = uint64(x.ID); x.PageSize > 0 && !g.one(20) {
			e.KVOffset = g.Uint64N(x.Length/x.PageSize) * x.PageSize
		}
		if info.TTLMS != 0 && !g.one(30) || g.one(3) {
			e.Epoch = x.Epoch
		}
		if g.one(2) {
			e.HasPrefix, e.Index = true, g.Uint64N(6)
			e.Hash, e.Parent, e.Group = 100+e.Index, 99+e.Index, g.Uint64N(2)<<16|(2-g.Uint64N(4)/3)
		}
		switch g.IntN(300) {
		case 0:
			e.TTLMS = 1<<64 - 1 - g.Uint64N(2000)
		case 1:
			e.Group += 1 << 32
		case 2:
			e.RegionID += 1 << 32
		case 3:
			e.KVLength = g.Uint64()
		case 4:
			e.KVOffset = g.Uint64() &^ (page - 1)
		case 5:
			e.Key = bytes.Repeat([]byte("k"), protocol.MaxKeyBytes+1)
		}
		entries = append(entries, e)
	}
	c := &meta.Register{Entries: entries}
	if g.one(2) {
		c.Context = &protocol.Context{Model: fmt.Sprintf("m%d", g.IntN(3)), BlockSize: 16}
	}
	return c
}
