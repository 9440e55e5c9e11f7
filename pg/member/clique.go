package member

import "slices"

// clique picks from ranks, which are in order, those who stay together: the least connected one is left out, of several the
// highest, until all who are left are connected to each other; then those who are connected to all of them after all come back, in
// their order. It is not always the largest such set, which nobody can afford to look for, but a set that everybody picks alike.
func clique(ranks []int, apart func(a, b int) bool) []int {
	keep := slices.Clone(ranks)
	lost := make(map[int]int, len(keep)) // how many of keep each is apart from
	broken := 0
	for i, a := range keep {
		for _, b := range keep[i+1:] {
			if apart(a, b) {
				lost[a]++
				lost[b]++
				broken++
			}
		}
	}
	for broken > 0 {
		worst := len(keep) - 1
		for i := len(keep) - 2; i >= 0; i-- {
			if lost[keep[i]] > lost[keep[worst]] {
				worst = i
			}
		}
		out := keep[worst]
		keep = slices.Delete(keep, worst, worst+1)
		for _, b := range keep {
			if apart(out, b) {
				lost[b]--
				broken--
			}
		}
	}
	for _, a := range ranks {
		if i, in := slices.BinarySearch(keep, a); !in && !slices.ContainsFunc(keep, func(b int) bool { return apart(a, b) }) {
			keep = slices.Insert(keep, i, a)
		}
	}
	return keep
}
