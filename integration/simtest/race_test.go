//go:build race

package simtest

// raced says that the race detector is on: ten times as slow, for what runs in one goroutine. A few seeds show that the
// rest of it is clean.
const raced = true
