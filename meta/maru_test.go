package meta

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// scriptMaru is a script's command of a client of Maru's.
func (s *script) scriptMaru(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	ops := map[string]MaruOp{
		"register": MaruRegister, "lookup": MaruLookup, "exists": MaruExists, "delete": MaruDelete, "pin": MaruPin,
		"unpin": MaruUnpin, "return": MaruReturn,
	}
	names := words(d, 1)
	if d.CmdArgs[0].Key == "open" {
		code, body := s.apply(Header{}, &OpenSession{Instance: names[0], Secret: 5 + s.index, Features: FeatureMaru})
		require.Zero(t, code)
		r, err := DecodeSession(body)
		require.NoError(t, err)
		s.names[names[0]] = r.ID
		return fmt.Sprintf("session %d\n", r.ID)
	}
	c := &Maru{Op: ops[d.CmdArgs[0].Key], Strict: true, DeadlineMS: s.arg(t, d, "by")}
	for _, name := range names {
		switch {
		case name == "again":
			c.Again = true
		case c.Op == MaruReturn:
			c.Instance, c.Region = name, RegionID(s.arg(t, d, "region"))
		case c.Op == MaruRegister:
			e := MaruEntry{Key: []byte(name), Region: MaruInt{Abs: s.arg(t, d, "region")}}
			e.Offset.Abs, e.Length.Abs = s.arg(t, d, "offset"), s.arg(t, d, "length")
			c.Entries = append(c.Entries, e)
		default:
			c.Keys = append(c.Keys, []byte(name))
		}
	}
	code, body := s.apply(Header{}, c)
	if code != 0 {
		return code.String() + "\n"
	}
	var out strings.Builder
	r := DecodeMaru(body)
	for range max(len(c.Entries)+len(c.Keys), 1) {
		if c.Op != MaruLookup {
			fmt.Fprintln(&out, r.Bool())
		} else if f := r.Found(); f.Region != 0 {
			fmt.Fprintf(&out, "region %d, offset %d, length %d\n", f.Region, f.Offset.Abs, f.Length.Abs)
		} else {
			fmt.Fprintln(&out, "-")
		}
	}
	require.NoError(t, r.End())
	return out.String()
}

// maruModel is Maru's index as plainly as it can be written down.
type maruModel struct {
	keys    map[string]*maruModelKey
	regions map[RegionID]*maruModelRegion
}

type maruModelKey struct {
	e    MaruEntry
	pins int
	in   *maruModelRegion
}

type maruModelRegion struct {
	id    RegionID
	owner string
	keys  int
	gone  bool // returned
}

func (m *maruModel) apply(c *Maru) (out []bool) {
	stopped := false
	for i := range c.Entries {
		e := c.Entries[i]
		_, held := m.keys[string(e.Key)]
		out = append(out, !held)
		if held {
			continue
		}
		k := &maruModelKey{e: e}
		if !e.Region.Neg {
			k.in = m.regions[RegionID(e.Region.Abs)]
		}
		if k.in != nil {
			k.in.keys++
		}
		m.keys[string(e.Key)] = k
	}
	for _, key := range c.Keys {
		k := m.keys[string(key)]
		ok := k != nil && !stopped
		switch {
		case !ok:
		case c.Op == MaruPin:
			k.pins++
		case c.Op == MaruUnpin:
			if ok = k.pins > 0; ok {
				k.pins--
			}
		case c.Op == MaruDelete:
			if ok = k.pins == 0; ok {
				delete(m.keys, string(key))
				if k.in != nil {
					k.in.keys--
					m.settle(k.in)
				}
			}
		}
		stopped = stopped || c.Strict && !ok
		out = append(out, ok)
	}
	if c.Op == MaruReturn {
		r := m.regions[c.Region]
		ok := r != nil && r.owner == c.Instance
		if ok {
			r.gone = true
			m.settle(r)
		}
		out = append(out, ok)
	}
	return out
}

// settle frees a region that was returned and has no keys.
func (m *maruModel) settle(r *maruModelRegion) {
	if r.gone && r.keys == 0 {
		delete(m.regions, r.id)
	}
}

// TestMaruIsMarusIndex: the machine answers as the model does, whatever comes, and is the same when it is rebuilt.
func TestMaruIsMarusIndex(t *testing.T) {
	p := newPool(t)
	p.apply(Header{}, &SetSettings{func() Settings { s := p.m.Settings(); s.Version = ClusterVersion; return s }()})
	p.device(64 << 20)
	rng := rand.New(rand.NewPCG(7, 7))
	model := maruModel{keys: map[string]*maruModelKey{}, regions: map[RegionID]*maruModelRegion{}}
	key := func() []byte { return []byte(fmt.Sprint("k", rng.IntN(40))) }
	var ids []RegionID
	for i := range 4000 {
		c := &Maru{Op: MaruOp(1 + rng.IntN(6)), Strict: rng.IntN(2) == 0}
		switch op := rng.IntN(20); {
		case op == 0 && len(model.regions) < 12:
			owner := fmt.Sprint("i", rng.IntN(3))
			id, open := p.m.SessionOf(owner)
			if !open {
				_, body := p.apply(Header{}, &OpenSession{Instance: owner, Secret: uint64(i) + 1, Features: FeatureMaru})
				r, err := DecodeSession(body)
				require.NoError(t, err)
				id = r.ID
			}
			plan := p.m.PlanAlloc(id, &protocol.AllocRequest{Size: 2 << 20, PageSize: 2 << 20}, noGuard{}, false)
			require.Equal(t, PlanCommand, plan.Kind)
			code, body := p.apply(Header{Session: id}, &plan.Cmd)
			require.Zero(t, code)
			r, err := DecodeAlloc(body)
			require.NoError(t, err)
			model.regions[r.Region] = &maruModelRegion{id: r.Region, owner: owner}
			ids = append(ids, r.Region)
			continue
		case op <= 2 && len(ids) > 0:
			c = &Maru{Op: MaruReturn, Instance: fmt.Sprint("i", rng.IntN(3)), Region: ids[rng.IntN(len(ids))]}
		case c.Op == MaruRegister:
			for range rng.IntN(4) {
				e := MaruEntry{Key: key(), Region: MaruInt{Abs: 1 << 50}, Offset: MaruInt{Neg: rng.IntN(2) == 0, Abs: 7}, Length: MaruInt{Abs: 9}}
				if len(ids) > 0 && rng.IntN(8) > 0 {
					e.Region.Abs = uint64(ids[rng.IntN(len(ids))])
				}
				c.Entries = append(c.Entries, e)
			}
		case c.Op == MaruLookup:
			continue
		default:
			for range rng.IntN(4) {
				c.Keys = append(c.Keys, key())
			}
		}
		want := model.apply(c)
		code, body := p.apply(Header{}, c)
		require.Zero(t, code)
		r := DecodeMaru(body)
		for j := range want {
			require.Equal(t, want[j], r.Bool(), "%d: %+v, %d", i, c, j)
		}
		require.NoError(t, r.End())
		requireMaru(t, p.m, &model)
		if rng.IntN(50) == 0 {
			p.m = p.rebuilt()
		}
	}
}

func requireMaru(t *testing.T, m *Machine, model *maruModel) {
	t.Helper()
	count, size := m.MaruTotal()
	require.Len(t, model.keys, count)
	total, ok := size.Int()
	require.True(t, ok)
	require.Equal(t, uint64(9*count), total.Abs)
	for key, k := range model.keys {
		f := m.MaruLookup([]byte(key))
		if k.in == nil || model.regions[k.in.id] != k.in {
			require.Zero(t, f.Region)
			continue
		}
		require.Equal(t, []any{k.in.id, k.e.Offset, k.e.Length}, []any{f.Region, f.Offset, f.Length})
	}
	for _, r := range m.Regions() {
		if r.State <= RegionDeparted {
			require.Contains(t, model.regions, r.ID)
			require.EqualValues(t, model.regions[r.ID].keys, r.Live)
		}
	}
}

// TestMaruSum: sums are Python's, as far as msgpack can say them.
func TestMaruSum(t *testing.T) {
	var s MaruSum
	most := MaruInt{Abs: 1<<64 - 1}
	s.Add(most)
	got, ok := s.Int()
	require.True(t, ok)
	require.Equal(t, most, got)
	s.Add(MaruInt{Abs: 1})
	_, ok = s.Int()
	require.False(t, ok, "it is 2^64")
	s.Add(MaruInt{Neg: true, Abs: 1 << 63})
	s.Add(MaruInt{Neg: true, Abs: 1 << 63})
	got, ok = s.Int()
	require.True(t, ok)
	require.Equal(t, MaruInt{}, got)
	s.Add(MaruInt{Neg: true, Abs: 1 << 63})
	got, ok = s.Int()
	require.True(t, ok)
	require.Equal(t, MaruInt{Neg: true, Abs: 1 << 63}, got)
	s.Add(MaruInt{Raw: "\xa1x"})
	_, ok = s.Int()
	require.False(t, ok, "of what is no number there is none")
	s.add(MaruInt{Raw: "\xa1x"}, true)
	_, ok = s.Int()
	require.True(t, ok)
}
