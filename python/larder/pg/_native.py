"""The data plane: worlds and groups of the Go package pg, through liblarder.so.

Everything that larder.pg asks of the library is here: a world, a group, and calls that are started and waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _lib
from ..errors import ForkError, LarderError, PeerFailedError

ANY = -1  # as the rank of a receive: the next message of any rank

Region = tuple[int, int]  # address, bytes


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


@dataclass
class Call:
    """One operation. Its memory must stay where it is until it has ended."""

    kind: Kind
    dtype: int  # of pg/reduce
    op: int = 0  # of pg/reduce
    root: int = 0  # or the other rank of a send or receive
    tag: int = 0
    src: Region = (0, 0)
    dst: Region = (0, 0)
    src_parts: list[Region] = field(default_factory=list)  # by rank, in place of src
    dst_parts: list[Region] = field(default_factory=list)
    waits: bool = False  # the caller waits for it at once, or leaves it


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


class _Call(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("tag", ctypes.c_uint64),
        ("src", _Region),
        ("dst", _Region),
        ("src_parts", ctypes.POINTER(_Region)),
        ("src_count", ctypes.c_int64),
        ("dst_parts", ctypes.POINTER(_Region)),
        ("dst_count", ctypes.c_int64),
        ("waits", ctypes.c_int32),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        ("failed", ctypes.c_uint64 * _MASK_WORDS),
        ("tag", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("source", ctypes.c_int32),
    ]


def _ranks(words: Sequence[int]) -> list[int]:
    return [64 * i + bit for i, word in enumerate(words) if word for bit in range(64) if word >> bit & 1]


def _packed(call: Call) -> _Call:
    parts = [(_Region * len(p))(*p) if p else None for p in (call.src_parts, call.dst_parts)]
    return _Call(
        call.kind, call.dtype, call.op, call.root, call.tag, call.src, call.dst,
        parts[0], len(call.src_parts), parts[1], len(call.dst_parts), call.waits,
    )  # fmt: skip


class Pending:
    """A call that was started. Any thread may wait for it, and any number of them."""

    def __init__(self, handle: int, waits: bool) -> None:
        self.result: Result | None = None  # when it has ended
        self._waits = waits
        self.error: LarderError | None = None
        self._handle = handle
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self.result is not None and not _lib.forked():
            with contextlib.suppress(Exception):  # the interpreter may be ending
                _lib.call("larder_call_free", self._handle)

    @property
    def ended(self) -> bool:
        return self.result is not None

    def leave(self) -> None:
        """Leave a call that was to be waited for to the library's own thread."""
        if self.result is None and self._waits:
            self._waits = False
            _lib.call("larder_call_leave", self._handle)

    def wait(self, limit: int) -> bool:
        """Wait for limit nanoseconds. True when it has ended, in whatever way."""
        if self.result is not None:
            return True
        out, error = _Result(), None
        try:
            if not _lib.call("larder_call_wait", self._handle, limit, ctypes.byref(out)):
                return False
        except ForkError:
            raise
        except LarderError as e:
            error = e
        with self._lock:
            if self.result is None:  # else another thread was there first
                failed = _ranks(out.failed)
                if isinstance(error, PeerFailedError):
                    error.ranks = tuple(failed)
                self.error = error
                self.result = Result(failed, out.source, out.tag, out.bytes)
        return True


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
        return _ranks(words)

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
        return Pending(_lib.started("larder_call_start", self._handle, ctypes.byref(_packed(call))), call.waits)

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
