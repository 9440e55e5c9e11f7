package model

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// liar is a small pool of known content, whose machine is made to lie.
type liar struct {
	*pool
	a, b meta.SessionID
	r    meta.RegionInfo // a's, with x, y and z on its first pages
	seq  uint64
}

func newLiar(t *testing.T) *liar {
	t.Helper()
	l := &liar{pool: newPool(t)}
	l.device("d", 16)
	l.a, l.b = l.session("a", "", 10_000), l.session("b", "", 10_000)
	l.apply(nil, l.of(l.a, &meta.Alloc{Device: 1, Size: 8 * page, PageSize: page}))
	l.r = l.m.Regions()[0]
	l.apply(nil, l.of(l.a, l.put("x", 0)), l.of(l.a, l.put("y", 1)), l.of(l.a, l.put("z", 2)))
	l.apply(nil, l.of(l.a, &meta.Pin{Class: meta.ClassHard, Keys: keys("z")}))
	l.res.WantEffects = true
	require.NoError(t, l.model.CompareState(l.m))
	return l
}

func keys(names ...string) [][]byte {
	var all [][]byte
	for _, n := range names {
		all = append(all, []byte(n))
	}
	return all
}

// of makes a command of a session under the next seq, without acknowledging any.
func (l *liar) of(id meta.SessionID, c meta.Command) command {
	l.seq++
	return command{meta.Header{Session: id, Seq: l.seq, Acked: 1}, c}
}

func (l *liar) put(key string, at uint64) *meta.Register {
	return &meta.Register{Entries: []protocol.RegisterEntry{{
		Key: []byte(key), RegionID: uint64(l.r.ID), Epoch: l.r.Epoch, KVOffset: at * page, KVLength: page,
		HasPrefix: true, Hash: uint64(key[0]), Group: 1,
	}}}
}

// tell has the machine apply commands truly, and the model hear of it what lie makes of the results.
func (l *liar) tell(lie func(r *meta.Results), commands ...command) error {
	l.index++
	group := l.group(nil, commands...)
	l.res.Reset()
	require.NoError(l.tb, l.m.Apply(l.index, group, &l.res))
	lie(&l.res)
	return l.model.Apply(l.index, group, &l.res)
}

// first returns the first result, to be changed in place.
func first(r *meta.Results) []byte { return r.Bytes(&r.Spans[0]) }

// swap replaces a number in the first result by one that is encoded as long.
func swap(t *testing.T, was, is uint64) func(r *meta.Results) {
	t.Helper()
	return func(r *meta.Results) {
		from, to := binary.AppendUvarint(nil, was), binary.AppendUvarint(nil, is)
		i := bytes.Index(first(r), from)
		require.True(t, i >= 0 && len(from) == len(to), "%x is in %x", from, first(r))
		copy(first(r)[i:], to)
	}
}

// Every lie that a machine could tell about what it did is noticed.
func TestLiesInResults(t *testing.T) {
	truth := func(*meta.Results) {}
	setByte := func(i int, b byte) func(*meta.Results) {
		return func(r *meta.Results) {
			if i < 0 {
				i += len(first(r))
			}
			first(r)[i] = b
		}
	}
	for _, c := range []struct {
		name string
		rule string
		lie  func(t *testing.T, l *liar) error
	}{
		{"another code", "the code", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(0, byte(protocol.CodeNotFound)), l.of(l.a, &meta.ReturnRegion{Region: l.r.ID}))
		}},
		{"a code of one key", "the result", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(-1, byte(protocol.CodePinned)), l.of(l.a, &meta.Pin{Class: meta.ClassHard, Keys: keys("x")}))
		}},
		{"garbage", "results decode", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(1, 0xff), l.of(l.a, &meta.Delete{Keys: keys("x")}))
		}},
		{"a result is missing", "a result per command", func(_ *testing.T, l *liar) error {
			return l.tell(func(r *meta.Results) { r.Spans = r.Spans[:1] },
				l.of(l.a, &meta.Delete{Keys: keys("x")}), l.of(l.a, &meta.Delete{Keys: keys("y")}))
		}},
		{"results in another order", "order of the commands", func(_ *testing.T, l *liar) error {
			return l.tell(func(r *meta.Results) { r.Spans[0], r.Spans[1] = r.Spans[1], r.Spans[0] },
				l.of(l.a, &meta.Delete{Keys: keys("x")}), l.of(l.a, &meta.Delete{Keys: keys("y")}))
		}},
		{"a pinned victim", "the code", func(_ *testing.T, l *liar) error {
			// The machine does not know of the pin.
			l.does(l.of(l.a, &meta.Pin{Undo: true, Class: meta.ClassHard, Keys: keys("z")}))
			return l.tell(truth, l.of(l.a, &meta.Alloc{Phase: 1, PageSize: page, Victims: []meta.Victim{{Slot: 2, Birth: 3}}}))
		}},
		{"a page that was not evicted", "the result", func(t *testing.T, l *liar) error {
			t.Helper()
			return l.tell(swap(t, 'x', 'y'),
				l.of(l.a, &meta.Alloc{Phase: 1, PageSize: page, Victims: []meta.Victim{{Slot: 0, Birth: 1}}}))
		}},
		{"a longer page than was freed", "the result", func(t *testing.T, l *liar) error {
			t.Helper()
			return l.tell(swap(t, page, 2*page), l.of(l.a, &meta.Delete{Keys: keys("y")}))
		}},
		{"occupied pages", "the result", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(2, 9),
				l.of(l.a, &meta.Alloc{Phase: 1, PageSize: page, Victims: []meta.Victim{{Slot: 0, Birth: 1}}}))
		}},
		{"a region over another", "no byte is given twice", func(t *testing.T, l *liar) error {
			t.Helper()
			return l.tell(swap(t, header+8*page, header+7*page), l.of(l.b, &meta.Alloc{Device: 1, Size: 4 * page, PageSize: page}))
		}},
		{"a region beyond the device", "no byte is given twice", func(t *testing.T, l *liar) error {
			t.Helper()
			return l.tell(swap(t, header+8*page, header+13*page), l.of(l.b, &meta.Alloc{Device: 1, Size: 4 * page, PageSize: page}))
		}},
		{"a region that is not aligned", "no byte is given twice", func(t *testing.T, l *liar) error {
			t.Helper()
			return l.tell(swap(t, header+8*page, header+8*page+512), l.of(l.b, &meta.Alloc{Device: 1, Size: 4 * page, PageSize: page}))
		}},
		{"a region of the wrong size", "the result", func(t *testing.T, l *liar) error {
			t.Helper()
			return l.tell(swap(t, 4*page, 5*page), l.of(l.b, &meta.Alloc{Device: 1, Size: 4 * page, PageSize: page}))
		}},
		{"free space denied", "free space is given", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(0, byte(protocol.CodePending)), l.of(l.b, &meta.Alloc{Device: 1, Size: 4 * page, PageSize: page}))
		}},
		{"another's location for an existing key", "the result", func(t *testing.T, l *liar) error {
			t.Helper()
			return l.tell(swap(t, page, 2*page), l.of(l.a, l.put("y", 5)))
		}},
		{"another key held the block", "the result", func(t *testing.T, l *liar) error {
			t.Helper()
			l.apply(nil, l.of(l.a, &meta.Delete{Keys: keys("x")}))
			again := l.put("w", 0)
			again.Entries[0].Hash = 'y'
			return l.tell(swap(t, 'y', 'z'), l.of(l.a, again))
		}},
		{"a new entry is said to exist", "results decode", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(-1, 1), l.of(l.a, l.put("w", 5)))
		}},
		{"a session's secret", "the result", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(3, 77), command{Command: &meta.OpenSession{Instance: "c", Secret: 5}})
		}},
		{"a sweep that removed more", "the result", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(1, 1), command{Command: &meta.Sweep{Limit: 9}})
		}},
		{"a sweep that is not over", "the result", func(_ *testing.T, l *liar) error {
			return l.tell(setByte(2, 1), command{Command: &meta.Sweep{Limit: 9}})
		}},
		{"an answer from memory to a new seq", "answered before", func(_ *testing.T, l *liar) error {
			return l.tell(func(r *meta.Results) { r.Spans[0].Remembered = true }, l.of(l.a, &meta.Delete{Keys: keys("x")}))
		}},
		{"a repeated seq gets another answer", "byte for byte", func(_ *testing.T, l *liar) error {
			c := l.of(l.a, &meta.Delete{Keys: keys("x")})
			l.apply(nil, c)
			return l.tell(func(r *meta.Results) { first(r)[len(first(r))-1]++ }, c)
		}},
		{"a repeated seq is executed again", "byte for byte", func(_ *testing.T, l *liar) error {
			c := l.of(l.a, &meta.Delete{Keys: keys("x")})
			l.apply(nil, c)
			return l.tell(func(r *meta.Results) { r.Spans[0].Remembered = false }, c)
		}},
		{"a seq that was canceled is executed", "the code", func(_ *testing.T, l *liar) error {
			c := l.of(l.a, &meta.Delete{Keys: keys("x")})
			l.loses(l.of(l.a, &meta.Cancel{Seqs: []uint64{c.Seq}}))
			return l.tell(truth, c)
		}},
		{"a forgotten seq is executed", "the code", func(_ *testing.T, l *liar) error {
			c := l.of(l.a, &meta.Delete{Keys: keys("x")})
			far := l.of(l.a, &meta.Delete{})
			far.Acked = far.Seq
			l.loses(far)
			return l.tell(truth, c)
		}},
		{"a log entry applied twice", "once and in order", func(_ *testing.T, l *liar) error {
			return l.model.Apply(l.index, nil, &meta.Results{})
		}},
	} {
		t.Run(c.name, func(t *testing.T) { requireCaught(t, c.rule, c.lie(t, newLiar(t))) })
	}
}

// does has the machine carry out a command that is not in the log.
func (l *liar) does(c command) {
	l.index++
	var res meta.Results
	require.NoError(l.tb, l.m.Apply(l.index, l.group(nil, c), &res))
	require.NoError(l.tb, l.model.Apply(l.index, nil, &meta.Results{}))
}

// loses has the machine lose a command that is in the log, after it was answered.
func (l *liar) loses(c command) {
	l.m.Flush(l.store)
	twin := &pool{tb: l.tb, store: l.store, model: l.model, index: l.index, now: l.now}
	twin.m = twin.open()
	require.NoError(l.tb, twin.real(twin.group(nil, c)))
	l.index++
	require.NoError(l.tb, l.m.Apply(l.index, nil, &meta.Results{}))
}

func requireCaught(t *testing.T, rule string, err error) {
	t.Helper()
	require.Error(t, err)
	var v *Violation
	require.ErrorAs(t, err, &v)
	require.Contains(t, v.Rule, rule, "%v", err)
	require.NotEqual(t, v.Want, v.Got)
	require.Contains(t, err.Error(), "log entry ")
}

// What owners have to be told of is neither left out, nor doubled, nor made up.
func TestLiesInEffects(t *testing.T) {
	for _, c := range []struct {
		name string
		rule string
		lie  func(r *meta.Results)
	}{
		{"left out", "effects", func(r *meta.Results) { r.Effects = r.Effects[:1] }},
		{"doubled", "effects", func(r *meta.Results) { r.Effects = append(r.Effects, r.Effects[0]) }},
		{"another reason", "effects", func(r *meta.Results) { r.Effects[0].Reason = meta.ReasonExpired }},
		{"another page", "effects", func(r *meta.Results) { r.Effects[0].Offset += page }},
		{"another owner", "effects", func(r *meta.Results) { r.Effects[0].Owner++ }},
		{"out of order", "effects", func(r *meta.Results) { r.Effects[0], r.Effects[1] = r.Effects[1], r.Effects[0] }},
		{"a slot made up", "dropped", func(r *meta.Results) { r.Dropped = append(r.Dropped, 3) }},
		{"not asked for", "effects", func(r *meta.Results) { r.WantEffects = false }},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLiar(t)
			requireCaught(t, c.rule, l.tell(c.lie, l.of(l.b, &meta.Delete{Keys: keys("x", "y")})))
		})
	}
	t.Run("a slot left out", func(t *testing.T) {
		l := newLiar(t)
		l.apply(nil, command{Command: &meta.CloseSession{ID: l.a}})
		requireCaught(t, "dropped", l.tell(func(r *meta.Results) { r.Dropped = r.Dropped[1:] },
			l.of(l.b, &meta.Delete{Keys: keys("x")})))
	})
}

// Whatever a machine does that is not in the log shows in its state.
func TestLiesInState(t *testing.T) {
	for _, c := range []struct {
		name string
		rule string
		do   func(l *liar) meta.Command
	}{
		{"an entry leaves silently", "region", func(*liar) meta.Command { return &meta.Delete{Keys: keys("x")} }},
		{"an entry appears", "region", func(l *liar) meta.Command { return l.put("w", 5) }},
		{"a pin is forgotten", "region", func(*liar) meta.Command {
			return &meta.Pin{Undo: true, Class: meta.ClassHard, Keys: keys("z")}
		}},
		{"a durable pin", "region", func(*liar) meta.Command {
			return &meta.Pin{Class: meta.ClassHard, Owner: "op", Keys: keys("x")}
		}},
		{"a soft pin", "entry", func(*liar) meta.Command { return &meta.Pin{Class: meta.ClassSoft, Keys: keys("x")} }},
		{"a region is marked", "region", func(l *liar) meta.Command {
			l.apply(nil, l.of(l.a, &meta.Pin{Undo: true, Class: meta.ClassHard, Keys: keys("z")}))
			return &meta.Mark{Region: l.r.ID}
		}},
		{"a region is returned", "region", func(l *liar) meta.Command { return &meta.ReturnRegion{Region: l.r.ID} }},
		{"a region is given", "regions", func(*liar) meta.Command {
			return &meta.Alloc{Device: 1, Size: 2 * page, PageSize: page}
		}},
		{"keys are cleared", "sweeps pending", func(*liar) meta.Command { return &meta.Clear{Prefix: []byte("x")} }},
		{"settings change", "head", func(l *liar) meta.Command {
			s := l.m.Settings()
			s.MinRegionAgeMS++
			return &meta.SetSettings{Settings: s}
		}},
		{"a tenant has limits", "sums", func(l *liar) meta.Command {
			l.apply(nil, command{Command: &meta.SetSettings{Settings: version(l, meta.VersionTenants)}})
			return &meta.SetTenant{Tenant: meta.DefaultTenant, Limits: meta.TenantLimits{MaxPins: 9}}
		}},
		{"a session ends", "region", func(l *liar) meta.Command { return &meta.CloseSession{ID: l.a} }},
		{"a session opens", "sessions", func(*liar) meta.Command { return &meta.OpenSession{Instance: "c"} }},
		{"a device joins", "devices", func(*liar) meta.Command {
			return &meta.AddDevice{UUID: "e", Size: header, DataOffset: header, Generation: 1}
		}},
		{"a device loses its bytes", "sweeps pending", func(*liar) meta.Command {
			return &meta.Retire{Device: 1, Generation: 8}
		}},
		{"a seq is canceled", "session", func(l *liar) meta.Command { return &meta.Cancel{Seqs: []uint64{l.seq + 3}} }},
		{"an incarnation", "head", func(*liar) meta.Command { return &meta.NewIncarnation{Incarnation: 1} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLiar(t)
			cmd := command{Command: c.do(l)}
			switch cmd.Command.(type) {
			case *meta.Mark, *meta.SetSettings, *meta.CloseSession, *meta.OpenSession, *meta.AddDevice, *meta.Retire,
				*meta.NewIncarnation, *meta.SetTenant:
			default:
				cmd.Session = l.a // without a seq: no answer gives it away
			}
			l.does(cmd)
			requireCaught(t, c.rule, l.model.CompareState(l.m))
		})
	}
	t.Run("a pin is counted twice", func(t *testing.T) {
		l := newLiar(t)
		l.does(command{meta.Header{Session: l.a}, &meta.Pin{Class: meta.ClassHard, Keys: keys("z")}})
		l.apply(nil, l.of(l.a, &meta.Pin{Undo: true, Class: meta.ClassHard, Keys: keys("z")}))
		requireCaught(t, "region", l.model.CompareState(l.m))
	})
	t.Run("an answer is kept for ever", func(t *testing.T) {
		l := newLiar(t)
		far := l.of(l.a, &meta.Delete{})
		far.Acked = far.Seq
		l.loses(far)
		requireCaught(t, "session", l.model.CompareState(l.m))
	})
	t.Run("time goes on", func(t *testing.T) {
		l := newLiar(t)
		l.now++
		l.does(command{Command: &meta.ExpirePins{}})
		requireCaught(t, "head", l.model.CompareState(l.m))
	})
	t.Run("a use is not counted", func(t *testing.T) {
		l := newLiar(t)
		group := meta.BeginGroup(nil, l.now, []meta.Touch{{Slot: 0, Count: 1}})
		require.NoError(t, l.model.Apply(l.index+1, group, &meta.Results{}))
		require.NoError(t, l.m.Apply(l.index+1, nil, &meta.Results{}))
		requireCaught(t, "order of eviction", l.model.CompareState(l.m))
		requireCaught(t, "counters", l.model.CompareCounters(l.m))
	})
	t.Run("a log entry is missing", func(t *testing.T) {
		l := newLiar(t)
		require.NoError(t, l.model.Apply(l.index+1, nil, &meta.Results{}))
		requireCaught(t, "head", l.model.CompareState(l.m))
	})
}

// A log entry that does not decode is no violation of the machine's, and yet an error.
func TestCorruptEntry(t *testing.T) {
	var v *Violation
	err := New().Apply(1, []byte{99}, &meta.Results{})
	require.Error(t, err)
	require.NotErrorAs(t, err, &v)
}

// A clone goes on by itself.
func TestClone(t *testing.T) {
	l := newLiar(t)
	old, oldMachine := l.model.Clone(), l.m
	l.restart()
	l.apply(nil, l.of(l.a, &meta.Delete{Keys: keys("x")}), l.of(l.a, &meta.Pin{Undo: true, Class: meta.ClassHard, Keys: keys("z")}))
	l.apply(nil, command{Command: &meta.CloseSession{ID: l.a, Fenced: true}})
	require.NoError(t, l.model.CompareState(l.m))
	require.NoError(t, old.CompareState(oldMachine))
	require.Equal(t, oldMachine.Applied(), old.Applied())
}

// version is the settings of a pool whose version is raised.
func version(l *liar, to uint32) meta.Settings {
	s := l.m.Settings()
	s.Version = to
	return s
}
