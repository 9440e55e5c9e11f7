"""The data plane: worlds and groups of the Go package pg, through liblarder.so.

Everything that larder.pg asks of the library is here: a world, a group, and calls that are started and waited for.

A small collective takes the library a few microseconds, as long as Python takes for a few objects. So a call that is waited for
at once is one call of the library (Group.do), its arguments are packed into memory that is used again, and nothing is made for
its end unless something was wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _lib
from ..errors import ClosedError, ForkError, LarderError, PeerFailedError

ANY = -1  # as the rank of a receive: the next message of any rank

Region = tuple[int, int]  # address, bytes
NOWHERE: Region = (0, 0)


class Kind(enum.IntEnum):
    """What a call does: larder_call's kind."""

    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11


class Call(NamedTuple):
    """One operation. Its memory must stay where it is until it has ended."""

    kind: int
    dtype: int  # of pg/reduce
    op: int  # of pg/reduce
    root: int  # or the other rank of a send or receive
    tag: int
    src: Region
    dst: Region
    src_parts: Sequence[Region] | int = 0  # by rank, in place of src; or into how many equal parts src is to be cut
    dst_parts: Sequence[Region] | int = 0


@dataclass
class Result:
    """How a call has ended."""

    failed: Sequence[int] = ()  # ranks that were lost while it ran
    source: int = -1  # of the message that was received
    tag: int = 0
    bytes: int = 0


_MASK_WORDS = 16  # 1,024 ranks: member.MaxCap


class _Region(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


_CALL = struct.Struct("@4iQPQPQPqPq")  # larder_call
_SLICE = int(_lib.SLICE * 1e9)


class _Result(ctypes.Structure):
    _fields_ = [
        ("failed", ctypes.c_uint64 * _MASK_WORDS),
        ("tag", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("source", ctypes.c_int32),
        ("lost", ctypes.c_int32),
    ]


def _ranks(words: Sequence[int]) -> list[int]:
    return [64 * i + bit for i, word in enumerate(words) if word for bit in range(64) if word >> bit & 1]


class _Memory:
    """What one call into the library needs besides the operands: used again by later calls, of any thread."""

    def __init__(self) -> None:
        self.call = ctypes.create_string_buffer(_CALL.size)
        self.handle = ctypes.c_uint64()
        self.result = _Result()
        self.at_call, self.at_handle, self.at_result = map(ctypes.addressof, (self.call, self.handle, self.result))

    def pack(self, call: Call) -> Any:
        """Write larder_call. What is returned must be kept until the library has read it."""
        kind, dtype, op, root, tag, src, dst, src_parts, dst_parts = call
        if isinstance(src_parts, int) and isinstance(dst_parts, int):
            _CALL.pack_into(self.call, 0, kind, dtype, op, root, tag, *src, *dst, 0, src_parts, 0, dst_parts)
            return None
        lists: list[Any] = [None, None]
        for i, p in enumerate((src_parts, dst_parts)):
            if not isinstance(p, int) and p:
                regions: Any = _Region * len(p)
                lists[i] = regions(*p)
        at = [ctypes.addressof(regions) if regions is not None else 0 for regions in lists]
        n = [p if isinstance(p, int) else len(p) for p in (src_parts, dst_parts)]
        _CALL.pack_into(self.call, 0, kind, dtype, op, root, tag, *src, *dst, at[0], n[0], at[1], n[1])
        return lists


_memory: list[_Memory] = []  # that nobody uses now


def _some_memory() -> _Memory:
    try:
        return _memory.pop()  # one step, so that two threads never get the same
    except IndexError:
        return _Memory()


class Pending:
    """A call that was started. Any thread may wait for it, and any number of them."""

    def __init__(self, handle: int, waits: bool = False) -> None:
        self.result: Result | None = None  # when it has ended
        self.error: LarderError | None = None
        self.interruption: BaseException | None = None  # what a signal's handler raised while it was begun
        self._handle = handle
        self._waits = waits  # nobody carries it on but who waits for it
        self._lock = threading.Lock()  # of who waits

    @property
    def ended(self) -> bool:
        return self.result is not None

    def leave(self) -> None:
        """Leave a call that was to be waited for to the library's own thread."""
        if self.result is None and self._waits:
            self._waits = False
            with contextlib.suppress(ClosedError):  # it has just ended
                _lib.call("larder_call_leave", self._handle)

    def wait(self, limit: int) -> bool:
        """Wait for limit nanoseconds. True when it has ended, in whatever way."""
        if self.result is not None:
            return True
        if not self._lock.acquire(limit > 0, limit / 1e9 if limit > 0 else -1):
            return self.ended  # another thread is at it
        try:
            return self.result is not None or self._wait(limit)
        finally:
            self._lock.release()

    def _wait(self, limit: int) -> bool:
        memory, error = _some_memory(), None
        try:
            if not _lib.call("larder_call_wait", self._handle, limit, memory.at_result):
                _memory.append(memory)
                return False
        except ForkError:
            raise
        except LarderError as e:
            error = e
        self.end(memory.result, error)
        _memory.append(memory)
        return True

    def end(self, out: _Result, error: LarderError | None) -> None:
        """Note how it has ended."""
        failed = _ranks([int(word) for word in out.failed]) if out.lost else []
        if isinstance(error, PeerFailedError):
            error.ranks = tuple(failed)
        self.error = error
        self.result = Result(failed, out.source, out.tag, out.bytes)


class Group:
    """This process's part in a group."""

    def __init__(self, world: World, handle: int) -> None:
        self._world = world
        self._handle = handle
        self._numbers = (ctypes.c_int64 * 4)()
        self.rank = self._number(0)

    def _number(self, i: int) -> int:
        _lib.call("larder_group_numbers", self._handle, self._numbers)
        return int(self._numbers[i])

    def size(self) -> int:
        return self._number(1)

    def capacity(self) -> int:
        return self._number(2)

    def epoch(self) -> int:
        return self._number(3)

    def active(self) -> list[int]:
        words = (ctypes.c_uint64 * _MASK_WORDS)()
        _lib.call("larder_group_active", self._handle, words)
        return _ranks([int(word) for word in words])

    def peer_state(self, ranks: Sequence[int]) -> list[bool]:
        states = (ctypes.c_uint8 * len(ranks))()
        _lib.call("larder_group_peers", self._handle, (ctypes.c_int32 * len(ranks))(*ranks), len(ranks), states)
        return [bool(s) for s in states]

    def change(self, what: str, ranks: Sequence[int], timeout: float) -> dict[str, Any]:
        """activate, deactivate or sync. The answer has status, epoch, dropped and reason."""
        text = json.dumps({"what": what, "ranks": list(ranks)}).encode()
        answer = _lib.job("larder_group_change", self._handle, text, len(text), int(timeout * 1e9))
        response: dict[str, Any] = json.loads(_lib.described("larder_text", answer))
        return response

    def join(self, timeout: float) -> None:
        _lib.job("larder_group_join", self._handle, int(timeout * 1e9))

    def extend(self, capacity: int, timeout: float) -> None:
        _lib.job("larder_group_extend", self._handle, capacity, int(timeout * 1e9))

    def start(self, call: Call) -> Pending:
        """Begin a call, any number of them. Collectives of a group run in the order of their beginnings."""
        memory = _some_memory()
        kept = memory.pack(call)
        _lib.call("larder_call_start", self._handle, memory.at_call, memory.at_handle)
        del kept
        pending = Pending(memory.handle.value)
        _memory.append(memory)
        return pending

    def do(self, call: Call) -> Pending | None:
        """Make a call and wait for it, for a slice: the caller is to wait for what is returned, or to leave it. None says that it has
        ended as it should, and that no rank was lost. What interrupts it is returned, too: its memory is used until it has ended."""
        memory = _some_memory()
        memory.result.lost = 0  # of a call that does not begin
        error: LarderError | None = None
        pending: Pending | None = None
        try:
            kept = memory.pack(call)
            if not _lib.call("larder_call_do", self._handle, memory.at_call, _SLICE, memory.at_handle, memory.at_result):
                pending = Pending(memory.handle.value, True)
            del kept
        except LarderError as e:
            error = e
        except BaseException as e:
            if not memory.handle.value:
                raise
            pending = Pending(memory.handle.value, True)
            pending.interruption = e
        if pending is None and (error is not None or memory.result.lost):
            pending = Pending(0)
            pending.end(memory.result, error)
        _memory.append(memory)
        return pending

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            _lib.job("larder_group_close", handle)


class World:
    """This process's part in a job. config is worldConfig of python/native/pg.go."""

    def __init__(self, config: dict[str, Any], engine: int = 0) -> None:
        text = json.dumps(config).encode()
        self._handle = _lib.job("larder_world_open", text, len(text), engine)

    def group(self, config: dict[str, Any]) -> Group:
        """A group, from when its founders have come. config is groupConfig of python/native/pg.go."""
        text = json.dumps(config).encode()
        return Group(self, _lib.job("larder_group_open", self._handle, text, len(text)))

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            _lib.job("larder_world_close", handle)


def serve_store(address: str) -> str:
    """Have this process keep the store of its job for as long as it lives, at address, host:port. Returns where that is."""
    text = address.encode()
    server = _lib.job("larder_store_serve", text, len(text))
    return _lib.described("larder_store_address", server)
