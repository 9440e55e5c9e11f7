"""liblarder.so, loaded: its calls, and the rules for them that python/native/larder.h states."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable

from .errors import BY_CODE, WIRE, ForkError, LarderError, LibraryError

ABI = 5  # python/native/main.go has the same number
AGAIN = 1  # the code that says that a limit is over

# How long a call may keep a thread from looking for signals: Ctrl-C is noticed after a tenth of a second at most.
SLICE = 0.1

_ERROR_TEXT = 1020


class Error(ctypes.Structure):
    """larder_error."""

    _fields_ = [("length", ctypes.c_int32), ("text", ctypes.c_char * _ERROR_TEXT)]


class Handle(ctypes.Structure):
    """larder_handle."""

    _fields_ = [("id", ctypes.c_uint64), ("generation", ctypes.c_uint64)]


class NotificationLengths(ctypes.Structure):
    """larder_notification."""

    _fields_ = [("engine", ctypes.c_uint32), ("name", ctypes.c_uint32), ("body", ctypes.c_uint32)]


_u64, _i64, _i32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
_handle_out = ctypes.POINTER(_u64)
_text = [ctypes.c_char_p, _i64]
_out = [ctypes.c_void_p, _i64, ctypes.POINTER(_i64)]

# The arguments of each call, but for the larder_error that all have last.
_CALLS: dict[str, list[Any]] = {
    "larder_job_wait": [_u64, _i64, _handle_out],
    "larder_job_cancel": [_u64],
    "larder_engine_open": [*_text, _handle_out],
    "larder_engine_close": [_u64, _handle_out],
    "larder_engine_describe": [_u64, *_out],
    "larder_buffer_register": [_u64, ctypes.c_void_p, _u64, *_text, _handle_out, ctypes.POINTER(Handle)],
    "larder_buffer_retire": [_u64, _i64],
    "larder_buffer_forget": [_u64],
    "larder_segment_open": [_u64, *_text, _handle_out],
    "larder_segment_refresh": [_u64, _i64, _handle_out],
    "larder_segment_describe": [_u64, *_out],
    "larder_segment_close": [_u64, _handle_out],
    "larder_notify": [_u64, *_text, *_text, _i64, _handle_out],
    "larder_notified": [_u64, _i64, ctypes.c_void_p, _i64, ctypes.POINTER(NotificationLengths)],
    "larder_batch_submit": [_u64, _i32, ctypes.c_void_p, _i64, _i64, _handle_out],
    "larder_batch_wait": [_u64, _i64],
    "larder_batch_settled": [_u64, _i64],
    "larder_batch_status": [_u64, ctypes.c_void_p, _i64],
    "larder_batch_error": [_u64, _i64],
    "larder_batch_cancel": [_u64],
    "larder_batch_free": [_u64],
    "larder_client_open": [*_text, _handle_out],
    "larder_client_close": [_u64, _i64, _handle_out],
    "larder_client_start": [
        _u64, _i32, _i32, *_text, ctypes.c_void_p, _i64, ctypes.c_void_p, _i64, *_text, _i64, _u64, ctypes.c_void_p,
    ],
    "larder_client_run": [
        _u64, _i32, _i32, *_text, ctypes.c_void_p, _i64, ctypes.c_void_p, _i64, *_text, _i64, _i64, ctypes.c_void_p,
    ],
    "larder_client_wait": [ctypes.c_void_p, _i64],
    "larder_client_room": [_u64, ctypes.c_void_p],
    "larder_client_cancel": [_u64],
    "larder_view_close": [_u64],
    "larder_view_check": [_u64],
    "larder_alloc_abort": [_u64],
    "larder_layer_launch": [_u64, _i64, ctypes.c_void_p, _u64],
    "larder_prefix_hashes": [ctypes.c_void_p, _i64, _i64, _u64, ctypes.c_void_p],
    "larder_queue_open": [_i32, _handle_out],
    "larder_queue_take": [_u64, ctypes.c_void_p, _i64, ctypes.POINTER(_i64)],
    "larder_queue_close": [_u64],
    "larder_text": [_u64, *_out],
    "larder_store_serve": [*_text, _handle_out],
    "larder_store_address": [_u64, *_out],
    "larder_world_open": [*_text, _u64, _handle_out],
    "larder_world_close": [_u64, _handle_out],
    "larder_group_open": [_u64, *_text, _handle_out],
    "larder_group_close": [_u64, _handle_out],
    "larder_group_numbers": [_u64, ctypes.c_void_p],
    "larder_group_active": [_u64, ctypes.c_void_p],
    "larder_group_peers": [_u64, ctypes.c_void_p, _i64, ctypes.c_void_p],
    "larder_group_change": [_u64, *_text, _i64, _handle_out],
    "larder_group_join": [_u64, _i64, _handle_out],
    "larder_group_extend": [_u64, _i64, _i64, _handle_out],
    "larder_call_start": [_u64, ctypes.c_void_p, ctypes.c_void_p],
    "larder_call_do": [_u64, ctypes.c_void_p, _i64, ctypes.c_void_p, ctypes.c_void_p],
    "larder_call_wait": [_u64, _i64, ctypes.c_void_p],
    "larder_call_leave": [_u64],
}

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None
_forked = False  # this is a child of a process that had loaded the library


def _after_fork_in_child() -> None:
    # The library's threads are not there any more, and whoever waits for one of them waits for ever. The lock may be held
    # by a thread that is not there either.
    global _forked, _lock
    _forked = _forked or _loaded is not None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def forked() -> bool:
    """Whether this process cannot use the library."""
    return _forked


def path() -> Path:
    """Where the library is: beside this file, or where LARDER_LIBRARY says."""
    chosen = os.environ.get("LARDER_LIBRARY")
    return Path(chosen) if chosen else Path(__file__).with_name("liblarder.so")


def _load() -> ctypes.CDLL:
    at = path()
    if not at.exists():
        raise LibraryError(
            f"{at} does not exist. In a checkout of larder, `make python` builds it (with Go and a C compiler); "
            "or name one that was built elsewhere in LARDER_LIBRARY"
        )
    try:
        lib = ctypes.CDLL(str(at))
        abi = lib.larder_abi()
    except (OSError, AttributeError) as e:
        raise LibraryError(f"{at} cannot be loaded: {e}. Build it anew with `make python`") from e
    if abi != ABI:
        raise LibraryError(
            f"{at} has version {abi} of the interface, this package needs {ABI}: build it anew with `make python`, "
            "or install a package and a library of the same release"
        )
    for name, arguments in _CALLS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise LibraryError(f"{at} has no {name}: build it anew with `make python`")
        function.argtypes = [*arguments, ctypes.POINTER(Error)]
        function.restype = _i32
    return lib


def library() -> ctypes.CDLL:
    """The library, loaded at first use."""
    global _loaded
    if _forked:
        raise ForkError(
            "this process was forked after larder was used: Go's threads did not come along. Start processes with "
            "multiprocessing.get_context('spawn'), or use larder in the children only"
        )
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _load()
    return _loaded


class _PerThread(threading.local):
    """Where each thread's calls leave their errors."""

    def __init__(self) -> None:
        self.error = Error()


_thread = _PerThread()


def call(name: str, *arguments: Any) -> bool:
    """Make a call. Returns False for AGAIN, True for success; all else is raised."""
    lib = _loaded if not _forked and _loaded is not None else library()
    error = _thread.error
    code = getattr(lib, name)(*arguments, error)
    if code == 0:
        return True
    if code == AGAIN:
        return False
    text = ctypes.string_at(ctypes.addressof(error) + Error.text.offset, error.length)
    raise failed(code, text)


def failed(code: int, text: bytes) -> LarderError:
    """The exception for what a call has returned."""
    failure = BY_CODE.get(code, BY_CODE[5])(text.decode("utf-8", "replace"))
    if code > WIRE:
        failure.code = code - WIRE
    return failure


def wait(once: Callable[[int], bool], timeout: float | None) -> bool:
    """Call once with nanoseconds to wait, in slices, until it returns True or timeout seconds are over. Between slices
    signals are noticed, so that KeyboardInterrupt comes."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE if deadline is None else min(SLICE, max(0.0, deadline - time.monotonic()))
        if once(int(left * 1e9)):
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False


def started(name: str, *arguments: Any) -> int:
    """Make a call whose last argument, besides the error, is a handle that it makes."""
    handle = _u64()
    call(name, *arguments, handle)
    return handle.value


def job(name: str, *arguments: Any) -> int:
    """Begin a job, wait for it, and return the handle of what it has made. Whatever interrupts that gives it up."""
    handle = started(name, *arguments)
    made = _u64()
    try:
        wait(lambda limit: call("larder_job_wait", handle, limit, made), None)
    except LarderError:
        raise  # the job's own: it has ended
    except BaseException:
        with contextlib.suppress(LarderError):
            call("larder_job_cancel", handle)
        raise
    return made.value


def described(name: str, handle: int) -> str:
    """What a call gives as text of any length."""
    room = 16 << 10
    length = _i64()
    while True:
        out = ctypes.create_string_buffer(room)
        call(name, handle, out, room, length)
        if length.value <= room:
            return out.raw[: length.value].decode("utf-8")
        room = length.value + (4 << 10)  # it may grow meanwhile
