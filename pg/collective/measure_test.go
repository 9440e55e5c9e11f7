package collective

import (
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
)

func TestMembersMeasureTheSame(t *testing.T) {
	for name, hosts := range map[string][][]int{"one host": oneHost(3), "hosts": apart(3), "2+2": {{0, 1}, {2, 3}}, "alone": oneHost(1)} {
		s := tiny
		s.hosts, s.ring, s.table, s.layout = hosts, 1<<20, Table{}, Layout(3)
		w := newWorld(t, s, 1)
		rates, next := make([]Rates, w.size()), make([]uint64, w.size())
		var wg sync.WaitGroup
		for i, c := range w.comms {
			wg.Go(func() {
				var err error
				rates[i], next[i], err = c.Measure(7, func(op Op) error {
					for {
						if done, err := op.Poll(); done || err != nil {
							return err
						}
						time.Sleep(time.Microsecond)
					}
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i := range rates {
			require.Equal(t, rates[0], rates[i], name)
			require.Equal(t, next[0], next[i], name)
		}
		require.Positive(t, rates[0].Step)
		require.Positive(t, rates[0].Copy)
		require.Equal(t, name == "hosts" || name == "2+2", rates[0].LaneMiB > 0, name)
		// What was found takes effect with the next operation.
		p := newProblem(w.rng, what{AllReduce, reduce.F32, reduce.Sum, w.size(), 0, 100_000, true}, next[0])
		for _, c := range w.comms {
			c.Table = rates[0].Table(w.size())
		}
		for i, err := range w.run(column([]problem{p}, w.size()), nil) {
			require.NoError(t, err)
			require.Empty(t, p.wrong(i), name)
		}
	}
}

func TestTableFollowsTheRates(t *testing.T) {
	const us = time.Microsecond
	quick := Rates{Step: 2 * us, Copy: 40 * us, Reduce: 60 * us}
	require.Equal(t, 52428, quick.Table(2).OneShot)
	require.Equal(t, DefaultTable.LaneChunk, quick.Table(2).LaneChunk)

	tcp := Rates{Step: 40 * us, Message: 5 * us, Copy: 40 * us, Reduce: 60 * us, LaneMiB: 250 * us}.Table(8)
	require.Equal(t, 223696, tcp.LaneOneShot) // 40 us at 250 us/MiB, of which 6/8 could be saved
	require.Equal(t, 64<<10, tcp.Split)
	require.Equal(t, 256<<10, tcp.LaneChunk)
	require.Equal(t, 42, tcp.Tree) // 41 messages take as long as five steps more

	slow := Rates{Step: 200 * us, Message: 40 * us, Copy: 40 * us, Reduce: 60 * us, LaneMiB: 10 * time.Millisecond}.Table(16)
	require.Equal(t, 23967, slow.LaneOneShot) // 200 us at 10 ms/MiB, of which 14/16 could be saved
	for _, r := range []Rates{{}, quick, {Step: time.Hour, LaneMiB: 1}, {Step: 1, LaneMiB: time.Hour, Message: time.Hour}} {
		for _, n := range []int{1, 2, 3, 1000} {
			_, err := r.Table(n).check()
			require.NoError(t, err)
		}
	}
}

func TestTableTravelsAsJSON(t *testing.T) {
	b, err := json.Marshal(DefaultTable)
	require.NoError(t, err)
	var again Table
	require.NoError(t, json.Unmarshal(b, &again))
	require.Equal(t, DefaultTable, again)
}
