package collective

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
)

// TestDisagreementIsNamed has one member call something else than all others. Whoever notices says what both have called, and
// nobody hangs: each has completed its operation, or knows of the disagreement.
func TestDisagreementIsNamed(t *testing.T) {
	const n, odd = 4, 2
	usual := func(k Kind) what { return what{k, reduce.F32, reduce.Sum, n, 0, 300, false} }
	with := func(x what, change func(*what)) what { change(&x); return x }
	tests := []struct {
		name       string
		one, other what
		late       bool // the odd one is one operation behind
	}{
		{"kind", usual(AllReduce), usual(AllGather), false},
		{"dtype", usual(AllReduce), with(usual(AllReduce), func(x *what) { x.dt = reduce.I32 }), false},
		{"op", usual(AllReduce), with(usual(AllReduce), func(x *what) { x.op = reduce.Max }), false},
		{"count", usual(AllReduce), with(usual(AllReduce), func(x *what) { x.count++ }), false},
		{"count, by far", usual(AllReduce), with(usual(AllReduce), func(x *what) { x.count = 1 }), false},
		{"order", usual(AllReduce), usual(AllReduce), true},
		{"order, of what only one sends", usual(Broadcast), usual(Broadcast), true},
		{"barrier", usual(AllReduce), usual(Barrier), false},
		{"parts", usual(ReduceScatter), with(usual(ReduceScatter), func(x *what) { x.count = 5 }), false},
		{"part of an all-to-all", usual(AllToAll), with(usual(AllToAll), func(x *what) { x.count = 1000 }), false},
		{"count of a broadcast", usual(Broadcast), with(usual(Broadcast), func(x *what) { x.count = 7 }), false},
		{"root of a reduction", usual(Reduce), with(usual(Reduce), func(x *what) { x.root = odd }), false},
		{"nobody is the root", with(usual(Broadcast), func(x *what) { x.root = odd }), usual(Broadcast), false},
		{"gather and scatter", usual(Gather), usual(Scatter), false},
	}
	for mesh, hosts := range map[string][][]int{"one host": oneHost(n), "hosts": apart(n), "2+2": {{0, 1}, {2, 3}}, "3+1": {{0, 1, 2}, {3}}} {
		for _, tree := range []int{2, 100} {
			for _, test := range tests {
				t.Run(mesh+", "+test.name, func(t *testing.T) {
					s := tiny
					s.hosts, s.table.Tree = hosts, tree
					w := newWorld(t, s, 5)
					var usual, others []problem
					for i := range uint64(3) {
						usual, others = append(usual, newProblem(w.rng, test.one, i)), append(others, newProblem(w.rng, test.other, i))
					}
					ops := column(usual, n)
					ops[odd] = column(others, n)[odd]
					if test.late {
						ops[odd] = ops[odd][1:]
					}
					found := 0
					for i, err := range w.run(ops, nil) {
						var e *MismatchError
						if err == nil {
							continue
						}
						require.ErrorAs(t, err, &e, "member %d", i)
						require.NotEqual(t, e.Want, e.Got)
						found++
						if i != odd && e.Want.Kind != AllToAll {
							require.Equal(t, test.one.kind, e.Want.Kind)
						}
					}
					require.Positive(t, found)
				})
			}
		}
	}
}

// TestWhoWaitsInTheSameOperationDoesNotDisagree, though it says so between the two looks that a member takes at what others publish.
func TestWhoWaitsInTheSameOperationDoesNotDisagree(t *testing.T) {
	w := newWorld(t, setting{hosts: oneHost(2), layout: tiny.layout, table: tiny.table}, 1)
	p := newProblem(w.rng, what{AllReduce, reduce.F32, reduce.Sum, 2, 0, 10, false}, 4)
	op := w.comms[0].Start(p.args[0])
	done, err := op.Poll()
	require.NoError(t, err)
	require.False(t, done)
	o, room := op.(*flow), w.comms[0].flat.(*inRoom)
	other, err := newInRoom(w.comms[1])
	require.NoError(t, err)
	other.notify(notice{seq: o.seq, sig: o.sig})
	room.compare(o)
	require.NoError(t, o.err)
	room.hear(o)
	require.NoError(t, o.err)
	other.notify(notice{seq: o.seq + 1<<stageBits, sig: o.sig})
	room.look(o)
	var e *MismatchError
	require.ErrorAs(t, o.err, &e, "it has gone on without its part of this one")
	require.Equal(t, []uint64{4, 5}, []uint64{e.Want.Seq, e.Got.Seq})
}

func TestSignatureNamesTheCall(t *testing.T) {
	for _, s := range []Signature{
		{Kind: AllReduce, DType: reduce.BF16, Op: reduce.Avg, Count: maxCount - 1, Seq: 7},
		{Kind: Broadcast, DType: reduce.F8E8M0, Root: maxMembers - 1, Count: 3},
		{Kind: Barrier, Seq: 1 << 50},
	} {
		require.Equal(t, s, unpack(s.Seq<<stageBits|3, s.pack()))
	}
	require.Equal(t, "all_reduce(1024 float32, sum), number 7", Signature{Kind: AllReduce, DType: reduce.F32, Count: 1024, Seq: 7}.String())
	require.Equal(t, "broadcast(3 int8, root 2), number 0", Signature{Kind: Broadcast, DType: reduce.I8, Root: 2, Count: 3}.String())
	require.Equal(t, "barrier(), number 9", Signature{Kind: Barrier, Seq: 9}.String())
}

func FuzzHeader(f *testing.F) {
	ok := make([]byte, headerBytes+noticeBytes)
	header{seq: 5 << stageBits, sig: 77, left: 3, len: noticeBytes, track: notices}.put(ok)
	notice{cause: down, member: 3}.put(ok[headerBytes:])
	f.Add(ok)
	f.Add(ok[:headerBytes-1])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		const most = 4096
		h, ok, err := readHeader(b, most)
		if err != nil {
			require.ErrorIs(t, err, ErrProtocol)
		}
		if !ok {
			return
		}
		require.Less(t, int(h.track), tracks)
		require.LessOrEqual(t, int(h.len), most)
		again := make([]byte, headerBytes)
		h.put(again)
		require.Equal(t, b[:headerBytes], again)
		_ = unpack(h.seq, h.sig).String()
		n, err := readNotice(h.seq, h.sig, b[headerBytes:min(len(b), headerBytes+int(h.len))])
		if err == nil && n.cause != waits {
			require.Error(t, n.errorOf(1))
		}
	})
}
