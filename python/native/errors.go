//go:build cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"unicode/utf8"

	"larder/transfer"
)

// code is what a call returns, or codeWire and a code of the wire. python/larder/errors.py has an exception for each; their values
// never change.
type code int32

// The codes.
const (
	codeOK        code = 0
	codeAgain     code = 1 // the limit is over: call again
	codeInternal  code = 2 // a defect of the library
	codeInvalid   code = 3 // an argument is wrong
	codeClosed    code = 4
	codeFailed    code = 5 // whatever has no code of its own
	codeTimeout   code = 6
	codeCanceled  code = 7
	codeStale     code = 8
	codeRange     code = 9
	codeReadOnly  code = 10
	codeNoPath    code = 11
	codeChecksum  code = 12
	codeMemory    code = 13
	codeStorage   code = 14
	codeMissing   code = 15
	codeFull      code = 16
	codeUncertain code = 17
	codeRefused   code = 18
	codeUnsettled code = 19
	codeUnknown   code = 20 // no segment of that name
	codePeer      code = 21 // ranks were lost
	codeMismatch  code = 22 // another rank has called something else
	codeInactive  code = 23
	codeIsolated  code = 24
	codeLease     code = 25 // what was read in place may be wrong
)

// errAgain says that the time that a call may take is over.
var errAgain = errors.New("not done yet")

// invalidError is an argument that is wrong.
type invalidError struct{ text string }

func (e *invalidError) Error() string { return e.text }

func invalid(format string, args ...any) error { return &invalidError{fmt.Sprintf(format, args...)} }

// handleError is a handle that names no object of its kind.
type handleError struct {
	kind   string
	handle uint64
}

func (e *handleError) Error() string {
	return fmt.Sprintf("the %s is closed (handle %d)", e.kind, e.handle)
}

// panicError is a defect that came up during a call.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string {
	return fmt.Sprintf("a defect in larder, please report it: %v\n%s", e.value, e.stack)
}

// protect runs a call, and turns a panic into its error.
func protect(call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicError{p, debug.Stack()}
		}
	}()
	return call()
}

// reasons are errors that have a code, the more telling ones first: an unsettled request has timed out, too.
var reasons = []struct {
	err  error
	code code
}{
	{errAgain, codeAgain},
	{transfer.ErrUnsettled, codeUnsettled},
	{transfer.ErrStale, codeStale},
	{transfer.ErrRange, codeRange},
	{transfer.ErrReadOnly, codeReadOnly},
	{transfer.ErrCanceled, codeCanceled},
	{transfer.ErrChecksum, codeChecksum},
	{transfer.ErrMemory, codeMemory},
	{transfer.ErrMissing, codeMissing},
	{transfer.ErrStorage, codeStorage},
	{transfer.ErrFull, codeFull},
	{transfer.ErrUncertain, codeUncertain},
	{transfer.ErrRefused, codeRefused},
	{transfer.ErrUnknown, codeUnknown},
	{transfer.ErrClosed, codeClosed},
	{transfer.ErrTimeout, codeTimeout},
	{transfer.ErrNoPath, codeNoPath},
	{context.DeadlineExceeded, codeTimeout},
	{context.Canceled, codeCanceled},
}

// codeOf finds the code of an error.
func codeOf(err error) code {
	var (
		wrong    *invalidError
		handle   *handleError
		panicked *panicError
	)
	switch {
	case err == nil:
		return codeOK
	case errors.As(err, &wrong):
		return codeInvalid
	case errors.As(err, &handle):
		return codeClosed
	case errors.As(err, &panicked):
		return codeInternal
	}
	if c := pgCode(err); c != codeFailed {
		return c // before what it was caused by
	}
	if c := clientCode(err); c != codeFailed {
		return c
	}
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			return r.code
		}
	}
	return codeFailed
}

// clip cuts a text to at most n bytes, between characters.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
