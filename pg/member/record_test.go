package member

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"larder/pg/store"
)

// TestRecordsFit: a view of the most members, and another one proposed, fit into a record, and so does a row that knows all peers.
func TestRecordsFit(t *testing.T) {
	t.Parallel()
	var v View
	r := row{State: stateActive, Ack: &ack{Report: make([]byte, MaxReport/2)}}
	for i := range MaxCap {
		v.Members = append(v.Members, Member{i, MaxGlobal - 1 - i, 1<<64 - 1 - uint64(i)})
		r.Up = append(r.Up, peer{i, 1<<64 - 1})
	}
	v.Table, v.Detail = make([]byte, MaxReport/2), strings.Repeat("x", maxDetail)
	next := v
	next.Table = nil // it is set by the commit
	next.Epoch = 1
	value := encode(record{Last: 1, Committed: v, Proposed: &next})
	assert.LessOrEqual(t, len(value), store.MaxValueBytes)
	assert.LessOrEqual(t, len(encode(r)), store.MaxValueBytes)
	back, err := decodeRecord(value)
	require.NoError(t, err)
	assert.Equal(t, v.Members, back.Proposed.Members)
	got, err := decodeRow(encode(r))
	require.NoError(t, err)
	assert.Equal(t, r.Up, got.Up)
}

// TestClique: who stays, by who cannot reach whom.
func TestClique(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		ranks []int
		apart [][2]int
		keep  []int
	}{
		{"all are connected", []int{0, 1, 2}, nil, []int{0, 1, 2}},
		{"of two the higher goes", []int{3, 7}, [][2]int{{3, 7}}, []int{3}},
		{"the least connected goes", []int{0, 1, 2, 3}, [][2]int{{0, 1}, {0, 2}}, []int{1, 2, 3}},
		{"two halves", []int{0, 1, 2, 3}, [][2]int{{0, 2}, {0, 3}, {1, 2}, {1, 3}}, []int{0, 1}},
		{"who was left out first comes back", []int{0, 1, 2, 3, 4}, [][2]int{{2, 4}, {3, 4}, {0, 2}, {1, 3}}, []int{0, 1, 4}},
		{"nobody", nil, nil, nil},
	} {
		keep := clique(c.ranks, func(a, b int) bool {
			for _, x := range c.apart {
				if x == pair(a, b) {
					return true
				}
			}
			return false
		})
		assert.Equal(t, c.keep, keep, c.name)
	}
}

// FuzzRecords: whatever the store holds is refused, or can be written again and means the same; the core takes it in its stride.
func FuzzRecords(f *testing.F) {
	v := View{Epoch: 3, Phase: PhaseCommit, Members: Members{{0, 10, 5}, {2, 12, 6}}, Active: MaskOf(0, 2)}
	p := v
	p.Epoch = 4
	f.Add(encode(record{Generation: 1, Last: 4, Committed: v, Proposed: &p}), encode(row{
		Generation: 1, Incarnation: 5, State: stateActive,
		Up: peers{{2, 6}}, Down: []doubt{{1, 9, "x"}}, Heard: peers{{1, 9}}, Ack: &ack{Epoch: 4, Held: true}, Resync: &resync{Epoch: 3},
	}))
	f.Add([]byte(`{"committed":{"members":"0/1:z 0/2:z"}}`), []byte(`{"state":"active","up":"1:2 0:1"}`))
	f.Add([]byte(`{"last":9,"proposed":{"epoch":9,"members":"1023/0:1"}}`), []byte(`{"gen":1,"inc":7,"state":"awaiting","down":[{"rank":-1}]}`))
	f.Add(encode(spec{Ranks: []int{10, 11, 12}, Founders: 2, Cap: 3}), []byte("null"))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if r, err := decodeRecord(a); err == nil {
			again, err := decodeRecord(encode(r))
			require.NoError(t, err)
			require.Equal(t, encode(r), encode(again))
		}
		if r, err := decodeRow(b); err == nil {
			again, err := decodeRow(encode(r))
			require.NoError(t, err)
			require.Equal(t, encode(r), encode(again))
		}
		if s, err := decodeSpec(a); err == nil {
			require.NoError(t, checkRanks(s.Ranks))
		}
		c := newCore(coreConfig{group: "g", rank: 0, incarnation: 5, generation: 1, lease: simLease},
			spec{Ranks: []int{10, 11, 12}, Founders: 3, Cap: 4}, 0)
		c.begin(callActivate, []int{1, 3})
		c.begin(callSync, nil)
		c.attached = true
		c.linked(1, 7)
		c.linked(2, 6)
		for i, key := range []string{keyView, "slot/0", "slot/1", "slot/2", "slot/3", "slot/9999", keyView} {
			value := b
			if key == keyView {
				value = a
			}
			c.change(key, value, uint64(i+1), false)
			c.tick(simLease/2*1, 0)
			c.step()
			for _, o := range c.take() {
				if o.kind == outPut {
					c.stored(o.id, fateDone, o.value, 100)
				}
			}
			c.suspect(2, 6, "gone", 0)
			c.step()
		}
	})
}

func TestMask(t *testing.T) {
	t.Parallel()
	m := MaskOf(0, 63, 64, 200)
	assert.Equal(t, []int{0, 63, 64, 200}, m.Ranks())
	assert.Equal(t, "0,63,64,200", m.String())
	assert.Equal(t, 4, m.Len())
	m.Clear(200)
	m.Clear(1000)
	assert.False(t, m.Has(200))
	assert.False(t, m.Has(-1))
	assert.True(t, m.Equal(MaskOf(0, 63, 64)), "however many words it has")
}
