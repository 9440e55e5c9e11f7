package meta

import (
	"fmt"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// maruAt returns the key of a slot, nil if it is free.
func (m *Machine) maruAt(s Slot) *maruKey {
	if s == 0 || m.maru.at(s).birth == 0 {
		return nil
	}
	return m.maru.at(s)
}

// checkMaru verifies the list of Maru's keys that a region has, and counts them and those that are pinned.
func (p *pool) checkMaru(r *region) (keys, pinned uint32) {
	var size MaruSum
	t := &p.m.maru
	last, birth := Slot(0), uint64(0)
	for s := r.maru.first; s != 0; s = t.at(s).next {
		k := p.m.maruAt(s)
		require.NotNil(p.tb, k)
		require.Same(p.tb, r, p.m.maruRegion(k))
		region, _, length := t.location(s)
		require.Equal(p.tb, MaruInt{Abs: uint64(r.id)}, region)
		require.Equal(p.tb, s, t.find(t.key(k)))
		require.Equal(p.tb, last, k.prev)
		require.Greater(p.tb, k.birth, birth, "the oldest come first")
		last, birth = s, k.birth
		size.Add(length)
		keys++
		if k.pins > 0 {
			pinned++
		}
	}
	require.Equal(p.tb, last, r.maru.last)
	require.Equal(p.tb, size, r.maru.size)
	return keys, pinned
}

// checkMaruKeys verifies what is counted of all of Maru's keys, and that each is found.
func (p *pool) checkMaruKeys() {
	var size MaruSum
	n, count, odd := uint64(0), 0, 0
	t := &p.m.maru
	for s := range t.end {
		k := p.m.maruAt(s)
		if k == nil {
			continue
		}
		require.Equal(p.tb, s, t.find(t.key(k)))
		count++
		n += uint64(len(t.key(k)))
		_, _, length := t.location(s)
		size.Add(length)
		if k.has(maruOdd) {
			odd++
		}
		if r := p.m.maruRegion(k); r != nil {
			require.Same(p.tb, p.m.regions[r.id], r)
		}
	}
	free := 0
	for s := t.free; s != 0; s = t.at(s).same {
		require.Nil(p.tb, p.m.maruAt(s))
		free++
	}
	require.Equal(p.tb, int(t.end)-1, count+free)
	require.Equal(p.tb, n, t.bytes)
	require.Len(p.tb, t.odd, odd)
	keys, of := p.m.MaruTotal()
	require.Equal(p.tb, count, keys)
	require.Equal(p.tb, size, of)
}

// maruMirror is what Maru's own server would have, as a map, but that keys go with their regions: it is compared with the
// machine while native clients, devices and incarnations come and go.
type maruMirror map[string]*maruMirrorKey

type maruMirrorKey struct {
	entry MaruEntry
	epoch uint64 // of its region; 0 = it was not there
	pins  int
}

// lose drops the keys whose regions are gone.
func (x maruMirror) lose(m *Machine) {
	for key, k := range x {
		if k.epoch == 0 {
			continue
		}
		r := m.regions[RegionID(k.entry.Region.Abs)]
		if r == nil || r.epoch != k.epoch || r.state > RegionDeparted || r.generation != r.device.Generation {
			delete(x, key)
		}
	}
}

// step draws an operation, and has the machine and the model carry it out.
func (x maruMirror) step(g *generator) {
	p := g.p
	x.lose(p.m)
	if g.r.IntN(6) == 0 {
		x.owner(g)
		return
	}
	c := &Maru{Op: MaruOp(1 + g.r.IntN(7)), Strict: g.r.IntN(2) == 0}
	switch c.Op {
	case MaruRegister:
		x.register(g, c)
		return
	case MaruReturn:
		if g.r.IntN(3) == 0 {
			x.returned(g, c)
			return
		}
		c.Op = MaruDelete
	default:
	}
	c.Keys = g.keys()
	code, body := p.apply(Header{}, c)
	require.Zero(p.tb, code)
	r := DecodeMaru(body)
	require.Equal(p.tb, c.Op, r.Op)
	stopped := false
	for _, key := range c.Keys {
		if k := x[string(key)]; c.Op == MaruLookup {
			x.found(p, k, r.Found())
		} else {
			ok := !stopped && x.apply(c.Op, string(key), k)
			stopped = stopped || c.Strict && !ok
			require.Equal(p.tb, ok, r.Bool(), "operation %d of %s", c.Op, key)
		}
	}
	require.NoError(p.tb, r.End())
}

func (x maruMirror) apply(op MaruOp, key string, k *maruMirrorKey) bool {
	if k == nil {
		return false
	}
	switch op {
	case MaruDelete:
		if k.pins > 0 {
			return false
		}
		delete(x, key)
	case MaruPin:
		k.pins++
	case MaruUnpin:
		if k.pins == 0 {
			return false
		}
		k.pins--
	default: // it is there
	}
	return true
}

func (maruMirror) found(p *pool, k *maruMirrorKey, f MaruFound) {
	if k == nil || k.epoch == 0 || p.m.regions[RegionID(k.entry.Region.Abs)].device.mode != DeviceServing {
		require.Zero(p.tb, f.Region)
		return
	}
	require.Equal(p.tb, MaruFound{RegionID(k.entry.Region.Abs), k.epoch, k.entry.Offset, k.entry.Length}, f)
}

// register registers keys in any region, those of other clients and those that are not there included.
func (x maruMirror) register(g *generator, c *Maru) {
	p := g.p
	for _, key := range g.keys() {
		e := MaruEntry{
			Key: key, Region: MaruInt{Abs: 1 + g.r.Uint64N(12)}, Offset: MaruInt{g.r.IntN(4) == 0, 1 + g.r.Uint64(), ""},
			Length: MaruInt{Abs: g.r.Uint64N(100)},
		}
		if regions := p.m.Regions(); len(regions) > 0 && g.r.IntN(3) > 0 {
			e.Region.Abs = uint64(regions[g.r.IntN(len(regions))].ID)
		}
		switch g.r.IntN(12) {
		case 0:
			e.Region.Neg = true
		case 1:
			e.Length = MaruInt{Raw: "\xa1x"}
		case 2:
			e.Region = MaruInt{Raw: "\xc0"}
		}
		c.Entries = append(c.Entries, e)
	}
	if g.r.IntN(8) == 0 {
		c.DeadlineMS = p.now - 1
		code, _ := p.apply(Header{}, c)
		require.Equal(p.tb, protocol.CodePending, code, "nothing of what comes too late is applied")
		return
	}
	code, body := p.apply(Header{}, c)
	require.Zero(p.tb, code)
	r := DecodeMaru(body)
	for _, e := range c.Entries {
		k := x[string(e.Key)]
		require.Equal(p.tb, k == nil, r.Bool(), "%s", e.Key)
		if k != nil {
			continue
		}
		k = &maruMirrorKey{entry: e}
		at := p.m.regions[RegionID(e.Region.Abs)]
		if e.Region == (MaruInt{Abs: e.Region.Abs}) && at != nil && at.sound() && at.owner != nil && at.owner.ttlMS == 0 {
			k.epoch = at.epoch
		}
		x[string(e.Key)] = k
	}
	require.NoError(p.tb, r.End())
}

// owner has an instance of Maru's own one more region.
func (maruMirror) owner(g *generator) {
	instance := fmt.Sprintf("maru%d", g.r.IntN(3))
	id, open := g.p.m.SessionOf(instance)
	if !open {
		code, body := g.p.apply(Header{}, &OpenSession{Instance: instance, Secret: 1, Features: FeatureMaru})
		r, err := DecodeSession(body)
		require.True(g.p.tb, code == 0 && err == nil)
		id = r.ID
	}
	g.p.alloc(id, &protocol.AllocRequest{Size: (1 + g.r.Uint64N(4)) * page, PageSize: page})
}

// returned returns a region as its owner would, or somebody else.
func (x maruMirror) returned(g *generator, c *Maru) {
	p := g.p
	regions := p.m.Regions()
	if len(regions) == 0 {
		return
	}
	at := regions[g.r.IntN(len(regions))]
	c.Region, c.Instance = at.ID, at.Instance
	if g.r.IntN(4) == 0 {
		c.Instance = "somebody else"
	}
	s, _ := p.m.Session(at.Owner)
	want := at.Owner != 0 && c.Instance == at.Instance && s.TTLMS == 0 && at.State <= RegionDeparted
	_, body := p.apply(Header{}, c)
	r := DecodeMaru(body)
	require.Equal(p.tb, want, r.Bool())
	x.lose(p.m)
}
