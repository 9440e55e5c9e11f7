//go:build rdma && cgo && linux

package verbs

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"syscall"
)

// Errors that are not the device's. Compare with errors.Is.
var (
	// ErrClosed says that an object was used after its Close, or after that of what it was made from.
	ErrClosed = errors.New("verbs: closed")
	// ErrInUse says that an object cannot be closed yet: close first what was made from it.
	ErrInUse = errors.New("verbs: still in use: close first what was made from it")
	// ErrFull says that a list of work requests has no room for another one: post it, reset it.
	ErrFull = errors.New("verbs: the list is full: post it and reset it")
	// ErrBounds says that a piece of memory does not lie in its region.
	ErrBounds = errors.New("verbs: outside of the region")
)

// Error is a verb that failed. It unwraps to its errno, a syscall.Errno.
type Error struct {
	Verb  string        // as libibverbs calls it: ibv_reg_mr
	Errno syscall.Errno // what it failed with
	Hint  string        // what to do, where that is known
}

// Error implements error.
func (e *Error) Error() string {
	text := fmt.Sprintf("verbs: %s: %s (errno %d)", e.Verb, e.Errno.Error(), int(e.Errno))
	if e.Hint != "" {
		text += ": " + e.Hint
	}
	return text
}

// Unwrap gives the errno.
func (e *Error) Unwrap() error { return e.Errno }

// hints are what to do about what fails most often, by verb and errno. A verb "" is any other.
var hints = map[string]map[syscall.Errno]string{
	"ibv_open_device": {
		syscall.EACCES: "grant this user read and write of /dev/infiniband/uverbs*",
		syscall.EPERM:  "grant this user read and write of /dev/infiniband/uverbs*",
		syscall.ENOENT: "load the kernel module ib_uverbs",
	},
	"ibv_reg_mr": {
		syscall.ENOMEM: "raise the limit of locked memory (ulimit -l), or register less",
		syscall.EFAULT: "the memory is not mapped, or not writable",
		syscall.EINVAL: "remote writing needs local writing; the device may lack an access flag",
	},
	"ibv_dereg_mr": {
		syscall.EINVAL: "a window is bound to the region: invalidate or close it first",
		syscall.EBUSY:  "a window is bound to the region: invalidate or close it first",
	},
	"ibv_create_qp": {
		syscall.ENOMEM: "too many queue pairs, or too deep ones: see the attributes MaxQP, MaxWR and MaxSGE of the device",
		syscall.EINVAL: "a depth is beyond the attributes MaxWR or MaxSGE of the device",
	},
	"ibv_create_cq": {
		syscall.EINVAL: "a depth is beyond the attribute MaxCQE of the device",
	},
	"ibv_modify_qp to RTR": {
		syscall.EINVAL:      "the peer's address does not fit this port: another link layer, or a GID of another kind",
		syscall.ENETUNREACH: "there is no route to the peer's GID: look at the addresses of both network devices",
		syscall.ETIMEDOUT:   "the peer's address is not resolved: look at the network between both devices",
	},
	"ibv_post_send": {
		syscall.ENOMEM: "the send queue is full: wait for completions, or make it deeper",
		syscall.EINVAL: "the queue pair is not connected, or a request has too many pieces",
	},
	"": {
		syscall.EBUSY:      "close first what was made from it",
		syscall.EOPNOTSUPP: "the device cannot do this",
		syscall.ENODEV:     "the device is gone: open it again when it is back",
		syscall.EIO:        "the device has failed: close all that was made from it, and open it again",
	},
}

// failed makes an Error. An errno of 0 is one that the provider has not set.
func failed(verb string, errno syscall.Errno) error {
	if errno == 0 {
		errno = syscall.EIO
	}
	hint := hints[verb][errno]
	if hint == "" {
		hint = hints[""][errno]
	}
	return &Error{Verb: verb, Errno: errno, Hint: hint}
}

// failedWith makes an Error of the second value of a cgo call.
func failedWith(verb string, err error) error {
	var errno syscall.Errno
	errors.As(err, &errno)
	return failed(verb, errno)
}

// returned makes an Error of what a verb returned: 0, an errno, or -1 with the errno beside it.
func returned(verb string, rc C.int, err error) error {
	switch {
	case rc == 0:
		return nil
	case rc > 0:
		return failed(verb, syscall.Errno(rc))
	}
	return failedWith(verb, err)
}

// Status is what has become of a work request.
type Status uint32

// The outcomes that one-sided work has. Others are printed by number.
const (
	Success          Status = C.IBV_WC_SUCCESS
	LocalLength      Status = C.IBV_WC_LOC_LEN_ERR
	LocalOperation   Status = C.IBV_WC_LOC_QP_OP_ERR
	LocalProtection  Status = C.IBV_WC_LOC_PROT_ERR
	Flushed          Status = C.IBV_WC_WR_FLUSH_ERR
	WindowBind       Status = C.IBV_WC_MW_BIND_ERR
	BadResponse      Status = C.IBV_WC_BAD_RESP_ERR
	LocalAccess      Status = C.IBV_WC_LOC_ACCESS_ERR
	RemoteInvalid    Status = C.IBV_WC_REM_INV_REQ_ERR
	RemoteAccess     Status = C.IBV_WC_REM_ACCESS_ERR
	RemoteOperation  Status = C.IBV_WC_REM_OP_ERR
	RetryExceeded    Status = C.IBV_WC_RETRY_EXC_ERR
	RNRRetryExceeded Status = C.IBV_WC_RNR_RETRY_EXC_ERR
	RemoteAborted    Status = C.IBV_WC_REM_ABORT_ERR
	Fatal            Status = C.IBV_WC_FATAL_ERR
	General          Status = C.IBV_WC_GENERAL_ERR
)

// statuses say what each means, and what to do.
var statuses = map[Status]string{
	Success:          "success",
	LocalLength:      "local length error: the request is longer than the port's largest message",
	LocalOperation:   "local operation error: the request does not fit the queue pair",
	LocalProtection:  "local protection error: a local piece is not, or no longer, registered",
	Flushed:          "flushed: the queue pair is in the state ERR, look for the first request that failed otherwise",
	WindowBind:       "window bind error: the region was registered without AllowWindows, or the range is not in it",
	BadResponse:      "bad response: the peer's device does not follow the protocol",
	LocalAccess:      "local access error: a local piece may not be written",
	RemoteInvalid:    "remote invalid request: the peer's queue pair does not take such requests, or so many READs at once",
	RemoteAccess:     "remote access error: the rkey is not valid there, or not for this range, direction or queue pair",
	RemoteOperation:  "remote operation error: the peer's device could not do it",
	RetryExceeded:    "retries exceeded: the peer does not answer; its queue pair, or the way to it, is gone",
	RNRRetryExceeded: "receiver-not-ready retries exceeded: the peer has no room",
	RemoteAborted:    "remote aborted: the peer's queue pair failed",
	Fatal:            "fatal: the device or the queue pair has failed",
	General:          "general error: the device does not say more",
}

// String implements fmt.Stringer.
func (s Status) String() string {
	if text, ok := statuses[s]; ok {
		return fmt.Sprintf("%s (status %d)", text, uint32(s))
	}
	return fmt.Sprintf("status %d: %s", uint32(s), C.GoString(C.ibv_wc_status_str(uint32(s))))
}

// Err is nil for Success, and a *StatusError otherwise.
func (s Status) Err() error {
	if s == Success {
		return nil
	}
	return &StatusError{Status: s}
}

// StatusError is a work request that did not succeed. All that fail put their queue pair into the state ERR.
type StatusError struct {
	Status Status
}

// Error implements error.
func (e *StatusError) Error() string { return "verbs: " + e.Status.String() }
