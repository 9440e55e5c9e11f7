package pg

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
)

// Ranks have calls of many groups under way at the same time, each of which has other ranks in common with the others.
func TestOverlappingGroups(t *testing.T) {
	const n, rounds = 8, 30
	lists := [][]int{
		upTo(n), {0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}, {0, 1, 2}, {0, 1, 3}, {0, 2, 3}, {1, 2, 3}, {1, 3, 5, 7}, {2, 3, 4, 5}, {7, 0},
	}
	j := newJob(t, n, nil)
	world := j.groups(GroupConfig{}, upTo(n)...)
	mine := make([][]*Group, n) // by rank
	for i, ranks := range lists {
		for k, g := range j.groups(GroupConfig{ID: fmt.Sprint("group", i)}, ranks...) {
			mine[ranks[k]] = append(mine[ranks[k]], g)
		}
	}
	for name, call := range map[string]func(g *Group, round int) (c Call, want [][]byte){
		"all-reduce": func(g *Group, round int) (Call, [][]byte) {
			dst := make([]byte, 4*257)
			want := float32(0)
			for _, r := range g.cfg.Ranks {
				want += float32(r + round)
			}
			return AllReduce(dst, fill(float32(g.w.Rank()+round), 257), reduce.F32, reduce.Sum), [][]byte{fill(want, 257)}
		},
		"all-gather": func(g *Group, round int) (Call, [][]byte) {
			var dst, want [][]byte
			for _, r := range g.cfg.Ranks {
				dst, want = append(dst, make([]byte, 4*33)), append(want, fill(float32(r+round), 33))
			}
			return AllGather(dst, fill(float32(g.w.Rank()+round), 33), reduce.F32), want
		},
	} {
		for way, begin := range map[string]func(g *Group, c Call) *Work{"Start": (*Group).Start, "Queue": (*Group).Queue} {
			t.Run(name+", "+way, func(t *testing.T) {
				each(t, world, func(w *Group) error {
					for round := range rounds {
						var works []*Work
						var wants [][][]byte
						for _, g := range mine[w.Rank()] {
							c, want := call(g, round)
							works, wants = append(works, begin(g, c)), append(wants, want)
						}
						for i, work := range works {
							if _, err := work.Wait(t.Context()); err != nil {
								return err
							}
							got := work.call.DstParts
							if got == nil {
								got = [][]byte{work.call.Dst}
							}
							if !slices.EqualFunc(got, wants[i], slices.Equal) {
								return fmt.Errorf("call %d of round %d: %v, not %v", i, round, got, wants[i])
							}
						}
					}
					return nil
				})
			})
		}
	}
	require.NotEmpty(t, mine[0])
}
