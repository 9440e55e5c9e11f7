// Package model is the naive reference of the state machine in package meta: the same commands, carried out on maps and
// slices by looking at everything each time. It has no slots sets, arenas, bitmaps, free lists or incremental sums, so
// that it is wrong in other ways than the real one, if at all. It shares with meta only the types of commands and
// results and how they are decoded.
//
// A test feeds it the committed log, entry by entry, together with what a real machine answered. Apply predicts each
// result and compares; where the specification leaves a choice, which free extent a region is cut from, it checks that
// the choice is legal and goes on with it. After each entry it checks the invariants of the design on its own state, and
// CompareState compares that with everything that a real machine lets be read.
package model
