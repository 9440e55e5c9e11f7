package model

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// tiers is a liar with a node, which has a copy of x.
type tiers struct {
	*liar
	node meta.SessionID
	far  meta.RegionInfo // the node's
	task meta.TaskID     // to copy y and z there
}

const nodeName = "node/n/ssd"

func newTiers(t *testing.T) *tiers {
	t.Helper()
	l := &tiers{liar: newLiar(t)}
	l.apply(nil, command{Command: &meta.SetSettings{Settings: version(l.liar, meta.VersionTiers)}})
	l.node = l.opens()
	l.apply(nil, command{Command: &meta.AddDevice{
		UUID: nodeName, Tier: "ssd", Size: 8 * page, Align: page, Generation: 7, Home: nodeName,
	}})
	l.apply(nil, l.of(l.node, &meta.Alloc{Device: 2, Size: 8 * page, PageSize: page}))
	l.far = l.m.Regions()[1]
	l.apply(nil, l.of(l.node, l.copy("x", 0)))
	l.apply(nil, command{Command: &meta.AddTask{TaskKind: meta.TaskDemote, Device: 2, Items: []meta.Victim{l.victim("y"), l.victim("z")}}})
	l.task = l.m.Tasks()[0].ID
	require.NoError(t, l.model.CompareState(l.m))
	return l
}

// opens begins a session of the node.
func (l *tiers) opens() meta.SessionID {
	l.apply(nil, command{Command: &meta.OpenSession{
		Instance: nodeName, TTLMS: 10_000, Secret: l.index, Features: protocol.FeatureNode | protocol.FeaturePush,
	}})
	_, body := l.answer()
	r, err := meta.DecodeSession(body)
	require.NoError(l.tb, err)
	return r.ID
}

func (l *tiers) victim(key string) meta.Victim {
	slot, ok := l.m.Find(meta.TenantID{}, []byte(key))
	require.True(l.tb, ok)
	return meta.Victim{Slot: slot, Birth: l.m.Birth(slot)}
}

func (l *tiers) copy(key string, at uint64) *meta.Register {
	v := l.victim(key)
	return &meta.Register{Entries: []protocol.RegisterEntry{{
		Key: []byte(key), RegionID: uint64(l.far.ID), Epoch: l.far.Epoch, KVOffset: at * page, KVLength: page,
		Copy: true, Slot: uint64(v.Slot), Of: v.Birth,
	}}}
}

// Every lie about copies is noticed.
func TestLiesAboutCopies(t *testing.T) {
	truth := func(*meta.Results) {}
	for _, c := range []struct {
		name string
		rule string
		lie  func(l *tiers) error
	}{
		{"a copy of another version", "the result", func(l *tiers) error {
			old := l.copy("y", 1)
			l.apply(nil, l.of(l.a, &meta.Delete{Keys: keys("y")}), l.of(l.a, l.put("y", 1)))
			old.Entries[0].Slot = uint64(l.victim("y").Slot)
			return l.tell(func(r *meta.Results) {
				copy(first(r)[len(first(r))-2:], []byte{0, 0}) // it was taken
			}, l.of(l.node, old))
		}},
		{"a copy is refused", "the result", func(l *tiers) error {
			c := l.copy("y", 1)
			l.does(command{meta.Header{Session: l.a}, &meta.Delete{Keys: keys("y")}})
			return l.tell(truth, l.of(l.node, c))
		}},
		{"leases of an entry that fell are over", "the result", func(l *tiers) error {
			return l.tell(func(r *meta.Results) {
				lives := []byte{0x80, 0x80, 0x80, 0x80, 0x10} // the mark in the slot of a page
				i := bytes.Index(first(r), lives)
				require.Positive(l.tb, i)
				first(r)[i+4] = 0
			}, l.of(l.a, &meta.Alloc{Phase: 1, PageSize: page, Victims: []meta.Victim{l.victim("x")}}))
		}},
		{"the owner of a copy is not told", "effects", func(l *tiers) error {
			return l.tell(func(r *meta.Results) { r.Effects = r.Effects[1:] }, l.of(l.b, &meta.Delete{Keys: keys("x")}))
		}},
		{"the owner of a copy takes it for the entry", "effects", func(l *tiers) error {
			return l.tell(func(r *meta.Results) { r.Effects[0].Copy = false }, l.of(l.b, &meta.Delete{Keys: keys("x")}))
		}},
		{"the owner of what has moved is not told", "effects", func(l *tiers) error {
			c := l.copy("y", 1)
			c.Entries[0].MoveFrom = 1
			return l.tell(func(r *meta.Results) { r.Effects = nil }, l.of(l.node, c))
		}},
		{"it moved for another reason", "effects", func(l *tiers) error {
			c := l.copy("y", 1)
			c.Entries[0].MoveFrom = 1
			return l.tell(func(r *meta.Results) { r.Effects[0].Reason = meta.ReasonLost }, l.of(l.node, c))
		}},
		{"leases of what has moved may be renewed", "parted", func(l *tiers) error {
			return l.tell(func(r *meta.Results) { r.Parted = nil }, command{Command: &meta.Mark{Region: l.far.ID}})
		}},
		{"an entry that falls has left", "dropped", func(l *tiers) error {
			return l.tell(func(r *meta.Results) { r.Dropped = append(r.Dropped, 0) }, l.of(l.a, &meta.Delete{Keys: keys("z")}),
				command{Command: &meta.Retire{Device: 1, Generation: 8, Fenced: true}}, command{Command: &meta.Sweep{Limit: 1}})
		}},
		{"a task gets another's id", "the result", func(l *tiers) error {
			return l.tell(func(r *meta.Results) { first(r)[1]-- },
				command{Command: &meta.AddTask{TaskKind: meta.TaskCopy, Device: 2, Items: []meta.Victim{l.victim("y")}}})
		}},
		{"a task that was canceled goes on", "the code", func(l *tiers) error {
			l.loses(command{Command: &meta.CancelTask{Task: l.task}})
			return l.tell(truth, l.of(l.node, &meta.TaskDone{Task: l.task, Done: 1, Copied: 1}))
		}},
		{"a device is fenced that was not", "the code", func(l *tiers) error {
			return l.tell(func(r *meta.Results) { first(r)[0] = 0 },
				command{Command: &meta.FencedRegion{Region: l.far.ID, Epoch: l.far.Epoch - 1}})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newTiers(t)
			requireCaught(t, c.rule, c.lie(l))
		})
	}
}

// Whatever happens to copies, homes and tasks that is not in the log shows.
func TestLiesInTiers(t *testing.T) {
	for _, c := range []struct {
		name string
		rule string
		do   func(l *tiers) command
	}{
		{"a copy appears", "region", func(l *tiers) command { return l.of(l.node, l.copy("y", 1)) }},
		{"a copy leaves", "region", func(l *tiers) command {
			return l.of(l.node, &meta.Alloc{Phase: 1, PageSize: page, Victims: []meta.Victim{l.victim("x")}})
		}},
		{"an entry falls", "region", func(l *tiers) command {
			return l.of(l.a, &meta.Alloc{Phase: 1, PageSize: page, Victims: []meta.Victim{l.victim("x")}})
		}},
		{"a device is away", "device", func(*tiers) command {
			return command{Command: &meta.SetDevice{Device: 2, Mode: meta.DeviceAway}}
		}},
		{"a device is away for longer", "device", func(l *tiers) command {
			l.apply(nil, command{Command: &meta.SetDevice{Device: 2, Mode: meta.DeviceAway, UntilMS: 5}})
			return command{Command: &meta.SetDevice{Device: 2, Mode: meta.DeviceAway, UntilMS: 6}}
		}},
		{"a device drains", "device", func(*tiers) command { return command{Command: &meta.SetDevice{Device: 1, Mark: true, Draining: true}} }},
		{"a task appears", "tasks", func(l *tiers) command {
			return command{Command: &meta.AddTask{TaskKind: meta.TaskMove, Device: 2, MoveFrom: 1, Items: []meta.Victim{l.victim("z")}}}
		}},
		{"a task goes on", "task", func(l *tiers) command {
			return command{Command: &meta.TaskDone{Task: l.task, Done: 1, Skipped: 1}}
		}},
		{"a task ends", "task", func(l *tiers) command { return command{Command: &meta.CancelTask{Task: l.task}} }},
		{"a region changes hands", "region", func(l *tiers) command {
			l.apply(nil, command{Command: &meta.Mark{Region: l.far.ID}})
			return command{Command: &meta.FencedRegion{Region: l.far.ID, Epoch: l.far.Epoch}}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newTiers(t)
			cmd := c.do(l)
			cmd.Seq = 0 // no answer gives it away
			l.does(cmd)
			requireCaught(t, c.rule, l.model.CompareState(l.m))
		})
	}
	t.Run("a promotion", func(t *testing.T) {
		l := newTiers(t)
		l.apply(nil, l.of(l.a, &meta.Alloc{Phase: 1, PageSize: page, Victims: []meta.Victim{l.victim("x")}}))
		up := l.put("x", 5)
		up.Entries[0].Copy, up.Entries[0].Of = true, l.victim("x").Birth
		l.does(command{meta.Header{Session: l.a}, up})
		requireCaught(t, "region", l.model.CompareState(l.m))
	})
}

// Of tasks there are a number at a time, and as many are remembered when they are over. A home that comes back has its
// regions under new epochs, and goes on with its tasks.
func TestManyTasks(t *testing.T) {
	l := newTiers(t)
	add := command{Command: &meta.AddTask{TaskKind: meta.TaskCopy, Device: 2, Items: []meta.Victim{l.victim("z")}}}
	for range 2 {
		for range meta.MaxTasks + 1 {
			l.apply(nil, add)
		}
		code, _ := l.answer()
		require.Equal(t, protocol.CodeBusy, code)
		l.apply(nil, command{Command: &meta.CloseSession{ID: l.node}})
		l.node = l.opens()
		r, _ := l.m.Region(l.far.ID)
		require.Greater(t, r.Epoch, l.far.Epoch)
		for _, task := range l.m.Tasks() {
			l.apply(nil, command{Command: &meta.TaskDone{Task: task.ID, Done: task.Total, Skipped: task.Total}})
		}
		require.NoError(t, l.model.CompareState(l.m))
	}
	require.Len(t, l.m.Tasks(), meta.MaxTasks+256-1)
	l.restart()
	require.NoError(t, l.model.CompareState(l.m))
}
