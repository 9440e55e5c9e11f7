package server

import (
	"cmp"
	"slices"
)

// sortBy sorts a slice by a number of its elements.
func sortBy[T any](s []T, key func(T) uint64) {
	slices.SortFunc(s, func(a, b T) int { return cmp.Compare(key(a), key(b)) })
}
