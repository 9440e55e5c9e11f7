package protocol

import (
	"errors"
	"strconv"
)

// Code says why a request failed, in a form that programs act on; Error.Message says it to people.
// Codes are never renumbered. A peer may send a code that this package does not know: it is then not retryable.
type Code uint16

// The codes. "Retry" means: the same request with the same seq may succeed later or elsewhere.
const (
	CodeOK              Code = 0  // no error
	CodeBadRequest      Code = 1  // malformed, or a field is missing or of the wrong type
	CodeNotLeader       Code = 2  // retry at Error.Leader, or at any other member if that is empty
	CodeUnavailable     Code = 3  // no quorum, or the server is starting or stopping: retry
	CodeTooOld          Code = 4  // the seq lies below acked: its answer has been forgotten
	CodeCanceled        Code = 5  // the seq was canceled, and is refused for ever
	CodeSessionExpired  Code = 6  // the session is unknown or ended: open a new one
	CodeStaleEpoch      Code = 7  // the region was taken away, or re-issued, since the client learnt its epoch
	CodeStaleGeneration Code = 8  // the device may have lost its bytes since the client learnt its generation
	CodeOutOfRegion     Code = 9  // the location leaves its region
	CodeOverlap         Code = 10 // the location overlaps another entry's
	CodeMisaligned      Code = 11 // offset, length or page size is not a multiple of what it must be
	CodeKeyTooLong      Code = 12 // longer than MaxKeyBytes
	CodeNoSpace         Code = 13 // nothing is evictable, or the request is larger than the pool
	CodeDiskFull        Code = 14 // a master's disk is nearly full and it refuses writes: retry
	CodePending         Code = 15 // not decided within the request's time: retry with the same seq
	CodeLimit           Code = 16 // a limit of the protocol, the instance or the tenant is reached
	CodePinned          Code = 17 // the entry is pinned
	CodeNotFound        Code = 18 // no such key, region, lease or session
	CodeNotOwner        Code = 19 // the region belongs to another instance
	CodeUnsupported     Code = 20 // unknown message type, or one that this server or session does not have
	CodeBusy            Code = 21 // back-pressure: retry after Error.RetryAfterMS
	CodeInternal        Code = 22 // a defect of the server; its log says more
	CodeTimeout         Code = 23 // the outcome is not known: retry with the same seq
	CodeRevoking        Code = 24 // the region is being taken away: retry in another one
	CodeDuplicate       Code = 25 // the same content is already held, see RegisterResult.ExistingKey
	CodeTooManyUnacked  Code = 26 // seq runs more than Window ahead of acked: retry when some are answered
	CodeForbidden       Code = 27 // not this tenant's or session's to do
	CodeWrongPool       Code = 28 // the server serves another pool
	CodeConflict        Code = 29 // the name has another revision than the request asked for
)

var codeNames = [...]string{
	CodeOK:              "OK",
	CodeBadRequest:      "BAD_REQUEST",
	CodeNotLeader:       "NOT_LEADER",
	CodeUnavailable:     "UNAVAILABLE",
	CodeTooOld:          "TOO_OLD",
	CodeCanceled:        "CANCELED",
	CodeSessionExpired:  "SESSION_EXPIRED",
	CodeStaleEpoch:      "STALE_EPOCH",
	CodeStaleGeneration: "STALE_GENERATION",
	CodeOutOfRegion:     "OUT_OF_REGION",
	CodeOverlap:         "OVERLAP",
	CodeMisaligned:      "MISALIGNED",
	CodeKeyTooLong:      "KEY_TOO_LONG",
	CodeNoSpace:         "NO_SPACE",
	CodeDiskFull:        "DISK_FULL",
	CodePending:         "PENDING",
	CodeLimit:           "LIMIT",
	CodePinned:          "PINNED",
	CodeNotFound:        "NOT_FOUND",
	CodeNotOwner:        "NOT_OWNER",
	CodeUnsupported:     "UNSUPPORTED",
	CodeBusy:            "BUSY",
	CodeInternal:        "INTERNAL",
	CodeTimeout:         "TIMEOUT",
	CodeRevoking:        "REVOKING",
	CodeDuplicate:       "DUPLICATE",
	CodeTooManyUnacked:  "TOO_MANY_UNACKED",
	CodeForbidden:       "FORBIDDEN",
	CodeWrongPool:       "WRONG_POOL",
	CodeConflict:        "CONFLICT",
}

// String returns the code's name, such as "NOT_LEADER", or "CODE_123" for one that this package does not know.
func (c Code) String() string {
	if int(c) < len(codeNames) {
		return codeNames[c]
	}
	return "CODE_" + strconv.Itoa(int(c))
}

// Retryable reports whether the same request, with the same seq, may succeed later or at another member.
func (c Code) Retryable() bool {
	return c < 64 && retryable>>c&1 != 0
}

const retryable uint64 = 1<<CodeNotLeader | 1<<CodeUnavailable | 1<<CodeDiskFull | 1<<CodePending | 1<<CodeBusy |
	1<<CodeTimeout | 1<<CodeRevoking | 1<<CodeTooManyUnacked

// Error describes e for people, code first. It makes *Error an error; replies embed Error as a field of that name,
// so that they are not errors themselves.
func (e *Error) Error() string {
	s := e.Code.String()
	if e.Message != "" {
		s += ": " + e.Message
	}
	if e.Leader != "" {
		s += " (leader: " + e.Leader + ")"
	}
	return s
}

// Err returns nil if e.Code is CodeOK, else a copy of e, which stays as it is when the reply is decoded into again.
func (e *Error) Err() error {
	if e.Code == CodeOK {
		return nil
	}
	c := *e
	return &c
}

// CodeOf returns the code of the first *Error, *DecodeError or *FrameError in err's tree: CodeOK for nil, and
// CodeInternal if there is none.
func CodeOf(err error) Code {
	if err == nil {
		return CodeOK
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	if e, ok := errors.AsType[*DecodeError](err); ok {
		return e.Code
	}
	if _, ok := errors.AsType[*FrameError](err); ok {
		return CodeBadRequest
	}
	return CodeInternal
}

// FrameError says that a stream or body does not hold a frame. The stream cannot be followed any further: close it.
type FrameError struct {
	Reason string // for people
}

// Error describes e for people.
func (e *FrameError) Error() string { return "protocol: bad frame: " + e.Reason }

// DecodeError says that a payload is not the message that its type announces. Only that message is lost: the frames
// after it can still be read. A server answers it with Code and the text.
type DecodeError struct {
	Field  string // path of the field, such as "entries[3].key"; "" = the payload as a whole
	Reason string // for people
	Code   Code   // CodeBadRequest, CodeKeyTooLong or CodeLimit
}

// Error describes e for people.
func (e *DecodeError) Error() string {
	if e.Field == "" {
		return "bad message: " + e.Reason
	}
	return "bad message: " + e.Field + ": " + e.Reason
}

// Reply returns what a server answers to a request that failed with e.
func (e *DecodeError) Reply() *Error { return &Error{Code: e.Code, Message: e.Error()} }
