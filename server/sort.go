package server

import (
	"cmp"
	"maps"
	"slices"
)

// sortBy sorts a slice by a number of its elements.
func sortBy[T any](s []T, key func(T) uint64) {
	slices.SortFunc(s, func(a, b T) int { return cmp.Compare(key(a), key(b)) })
}

// sortedKeys lists the keys of a map in ascending order, so that a simulation repeats exactly.
func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
