// Package conductor knows which serving engine holds which blocks of which prompts, from the events that engines publish
// (see [larder/conductor/kvevent]), and tells for a prompt how much of it each has.
//
// An [Index] names a block by a rolling hash of the tokens up to its end, which it computes itself: engines whose own hashes
// differ, since their seeds do, still match, and what an engine calls a block is only kept to find it again. It is compact:
// a block is 16 bytes in a table without pointers, one bit of which stands for each place that it may lie at, and 16 more for
// its engines' name. Clearing an engine does not touch its blocks; a sweep does, later.
package conductor
