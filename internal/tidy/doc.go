// Package tidy holds the rules of this code base that a compiler does not check, as tests: which folder imports which,
// that every package says what it is, and how long files and lines are. It has no code of its own.
package tidy
