"""What the clients of a pool have in common: calls of the library, put together and taken apart.

A :class:`Request` is one call: packed keys, memory, room for results, and what its results are to the caller. Client runs it and
waits, larder.aio's AsyncClient runs it and is told of its end. Keys of a call are packed into one string of bytes, and memory and
results are arrays: an operation costs one call of the library and a handful of objects, however many keys it has.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import re
import struct
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _device, _lib
from ._memory import Memory, memory_of
from .errors import ClosedError, ForkError, InvalidArgumentError, LarderError, ReadOnlyError, TimedOutError, UnavailableError

Key = str | bytes

# What has the buffer protocol, or is a torch tensor.
Value = Any

# The kinds of calls, as in python/native/client_kinds.go.
PUT, GET, GET_INTO, EXISTS, DELETE, PIN, UNPIN, MATCH, VIEW = range(1, 10)
PUT_LAYERS, GET_LAYERS, LAYER, END_LAYERS, ALLOC, STORE, CONTROL, EVENTS = range(10, 18)

_MAX_KEY = 1024
_MAX_VALUE = (1 << 32) - 1
_length = struct.Struct("<I").pack

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_new_bytes.restype = ctypes.py_object
_address_of_bytes = ctypes.pythonapi.PyBytes_AsString
_address_of_bytes.argtypes = [ctypes.py_object]
_address_of_bytes.restype = ctypes.c_void_p


@dataclass(frozen=True)
class PrefixContext:
    """Scopes prefix hashes: two blocks are the same only within the same model, adapter, salt, block size and seed."""

    model: str = ""
    lora: str = ""
    salt: str = ""
    block_size: int = 0  # tokens
    seed: int = 0  # of the hash


@dataclass(frozen=True)
class Prefix:
    """Which prefix block a value is."""

    context: PrefixContext
    hash: int  # of the block and all before it: see prefix_hashes
    parent: int = 0  # the hash of the block before; 0 for the first
    index: int = 0  # the block's place in its request


@dataclass
class Item:
    """A value of put_batch, with what put says of it besides."""

    key: Key
    value: Value
    ttl: float = 0
    replicas: int = 0
    prefix: Prefix | None = None
    shard: tuple[int, int] | None = None


def prefix_hashes(tokens: Sequence[int], block_size: int, seed: int = 0) -> list[int]:
    """The rolling hash of each whole block of block_size tokens, as prefix_match and Prefix have them. A hash names its block and all
    that are before it; a part of a block at the end has none."""
    if block_size <= 0:
        raise InvalidArgumentError(f"a block of {block_size} tokens: it has at least one")
    if isinstance(tokens, bytes | bytearray) or isinstance(tokens, memoryview) and tokens.format in ("B", "b", "c"):
        raise InvalidArgumentError("bytes may be tokens of a byte each, or packed ones: give a list of numbers")
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError) as e:
        raise InvalidArgumentError(f"tokens are numbers of 32 bits: {e}") from None
    hashes = array("Q", bytes(8 * (len(packed) // block_size)))
    _lib.call("larder_prefix_hashes", packed.buffer_info()[0], len(packed), block_size, seed, hashes.buffer_info()[0])
    return hashes.tolist()


class Request:
    """A call that is to be made."""

    __slots__ = (
        "answer",
        "progress",
        "count",
        "keep",
        "keys",
        "kind",
        "memory",
        "options",
        "regions",
        "results",
        "settle",
        "target",
        "timeout",
        "undo",
    )

    def __init__(
        self, target: int, kind: int, count: int, results: int, answer: Callable[[Request], Any], timeout: float | None,
        keys: bytes = b"", options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self.kind = kind
        self.count = count
        self.keys = keys
        self.options = json.dumps(options).encode() if options else b""
        self.results = array("q", bytes(8 * results))
        self.answer = answer  # makes of results what the caller gets
        self.timeout = timeout
        self.regions: array[int] | None = None  # address, length, address, length ...
        self.keep: list[Any] = []  # what memory belongs to
        self.progress: array[int] | None = None  # of who waits for the call
        self.memory: list[bytes | None] = []  # that was made for values
        self.settle: Callable[[], None] | None = None  # what is to be done with the memory when the call has ended well
        self.undo: Callable[[], None] | None = None  # what is to be done with what it has made when nobody wants that any more

    def begin(self, name: str, waits: int, progress: array[int]) -> None:
        """Begin, with larder_client_start and a queue or larder_client_run and a limit, or _PATIENT."""
        regions, keys, options, results = self.regions, self.keys, self.options, self.results
        timeout = self.timeout
        _lib.call(
            name, self.target, self.kind, self.count, keys, len(keys),
            regions.buffer_info()[0] if regions else None, len(regions) // 2 if regions else 0, results.buffer_info()[0], len(results),
            options, len(options), int(timeout * 1e9) or 1 if timeout is not None else 0, waits, progress.buffer_info()[0],
        )  # fmt: skip

    def bring(self, progress: array[int]) -> None:
        """Make memory for the values that the call has found."""
        handle, first, count = progress[1:4]
        regions = array("Q", bytes(16 * count))
        for i in range(count):
            size = self.results[first + i]
            if size > 0:
                memory = _new_bytes(None, size)
                self.memory[first + i] = memory
                regions[2 * i], regions[2 * i + 1] = _address_of_bytes(memory), size
        with contextlib.suppress(ClosedError):  # it has ended meanwhile
            _lib.call("larder_client_room", handle, regions.buffer_info()[0])

    def finish(self, progress: array[int]) -> Any:
        """What the caller gets, when it has ended."""
        self.undo = None  # it refers to the request
        code = progress[0] >> 32
        if code:
            said = progress[4:].tobytes()
            raise _lib.failed(code, said[4 : 4 + int.from_bytes(said[:4], sys.byteorder)])
        if self.settle is not None:
            self.settle()
        return self.answer(self)

    def discard(self, progress: array[int]) -> None:
        """Undo a call that was given up, and has ended well all the same."""
        if self.undo is not None and has_ended(progress) and not progress[0] >> 32:
            with contextlib.suppress(LarderError):
                self.undo()


# larder_progress, as 64-bit words: state and code, handle, from, count, and the error.
_PROGRESS = bytes(32 + ctypes.sizeof(_lib.Error))
_WANTS, _ENDED = 1, 2
_SLICE = int(_lib.SLICE * 1e9)

# In place of a limit: signals come to the main thread alone, so that others need not look for any.
_PATIENT = -1
_main_thread = threading.main_thread().ident


def new_progress() -> array[int]:
    """Where a call leaves how far it has come."""
    return array("Q", _PROGRESS)


def has_ended(progress: array[int]) -> bool:
    """Whether a call has ended."""
    return progress[0] & 0xFFFFFFFF == _ENDED


def wants(progress: array[int]) -> bool:
    """Whether a call waits for memory."""
    return progress[0] & 0xFFFFFFFF == _WANTS


# Calls that are under way, for whose threads signals may come at any time: their memory is kept here, whatever becomes of the threads.
_under_way: set[Request] = set()


def run(request: Request) -> Any:
    """Make a call and wait for it. What interrupts that gives it up; its memory is free in any case."""
    progress = request.progress = new_progress()
    _under_way.add(request)
    try:
        request.begin("larder_client_run", _SLICE if threading.get_ident() == _main_thread else _PATIENT, progress)
        while progress[0] & 0xFFFFFFFF != _ENDED:
            if wants(progress):
                request.bring(progress)
            _lib.call("larder_client_wait", progress.buffer_info()[0], _SLICE)
    except BaseException:
        _abandon(progress)
        _under_way.discard(request)
        request.discard(progress)
        raise
    _under_way.discard(request)
    return request.finish(progress)


def _abandon(progress: array[int]) -> None:
    """End a call, and wait until it uses no memory any more, which is soon."""
    if not progress[1]:
        return  # it was not begun
    canceled = False
    while not has_ended(progress):
        try:
            if not canceled:
                _lib.call("larder_client_cancel", progress[1])
                canceled = True
            if wants(progress):
                time.sleep(0.001)  # it does not wait for that any more
            _lib.call("larder_client_wait", progress.buffer_info()[0], _SLICE)
        except ForkError:
            return
        except LarderError:
            canceled = True  # it has just ended
        except BaseException:
            continue  # one more Ctrl-C: it must end first


def key_bytes(key: Key) -> bytes:
    """A key as the pool has it."""
    k = key.encode() if isinstance(key, str) else key
    if not isinstance(k, bytes):
        raise InvalidArgumentError(f"a key is str or bytes, not {type(key).__name__}")
    if not 0 < len(k) <= _MAX_KEY:
        raise InvalidArgumentError(f"a key of {len(k)} bytes: it has 1 to {_MAX_KEY}, so use a hash of what is longer")
    return k


def pack(keys: Iterable[Key]) -> tuple[bytes, int]:
    """Keys as calls have them, and how many there are."""
    if isinstance(keys, (str, bytes)):
        raise InvalidArgumentError(f"keys are a list: [{keys!r}]")
    encoded = [k.encode() if isinstance(k, str) else k for k in keys]
    try:
        lengths = array("I", map(len, encoded))
        packed = b"".join(encoded)
    except TypeError:
        for k in encoded:
            key_bytes(k)
        raise
    if encoded and (min(lengths) == 0 or max(lengths) > _MAX_KEY):
        for k in encoded:
            key_bytes(k)
    return lengths.tobytes() + packed, len(encoded)


def pack_one(key: Key) -> bytes:
    k = key_bytes(key)
    return _length(len(k)) + k


def _flags(r: Request) -> list[bool]:
    return [n == 1 for n in r.results]


def _flag(r: Request) -> bool:
    return r.results[0] == 1


def _value(r: Request) -> bytes | None:
    return _value_at(r, 0)


def _value_at(r: Request, i: int) -> bytes | None:
    n, memory = r.results[i], r.memory[i]
    if n < 0 or memory is None:
        return None
    return memory if len(memory) == n else memory[:n]


def _length_of(r: Request) -> int | None:
    return r.results[0] if r.results[0] >= 0 else None


def text_of(r: Request) -> Any:
    """What a call has made as JSON."""
    return json.loads(_lib.described("larder_text", r.results[0]))


def source(value: Value) -> Memory:
    """The memory of a value that is to be stored."""
    memory = _device.source(value) if _device.is_on_device(value) else memory_of(value)
    if not 0 < memory.length <= _MAX_VALUE:
        raise InvalidArgumentError(f"a value of {memory.length} bytes: it has 1 to {_MAX_VALUE}")
    return memory


def target(buffer: Value, settle: list[Callable[[], None]]) -> Memory:
    """Memory that a value is read into."""
    if _device.is_on_device(buffer):
        memory, copy = _device.target(buffer)
        settle.append(copy)
        return memory
    memory = memory_of(buffer)
    if memory.readonly:
        raise ReadOnlyError(f"the {type(buffer).__name__} cannot be written: give a bytearray, an array or a tensor that can be")
    return memory


def attributes(ttl: float, replicas: int, prefix: Prefix | None, shard: tuple[int, int] | None) -> dict[str, Any] | None:
    if not (ttl or replicas or prefix is not None or shard is not None):
        return None
    a: dict[str, Any] = {"ttl": ttl, "replicas": replicas}
    if prefix is not None:
        a["context"] = vars(prefix.context)
        a["prefix"] = {"hash": prefix.hash, "parent": prefix.parent, "index": prefix.index}
    if shard is not None:
        a["shard"] = list(shard)
    return a


class Requests:
    """Puts together the calls of a client."""

    _guess = 0  # the length of the value that was read last, which the next one is likely to have

    _handle = 0

    def _open(self) -> int:
        """The client's handle."""
        handle = self._handle
        if not handle:
            if _lib.forked():
                _lib.library()  # says so
            raise ClosedError("the client is closed")
        return handle

    def _put_request(
        self, key: Key, value: Value, ttl: float, replicas: int, prefix: Prefix | None, shard: tuple[int, int] | None,
        timeout: float | None,
    ) -> Request:  # fmt: skip
        attrs = attributes(ttl, replicas, prefix, shard)
        memory = source(value)
        r = Request(self._open(), PUT, 1, 1, _flag, timeout, pack_one(key), {"attrs": [attrs]} if attrs else None)
        r.regions = array("Q", (memory.address, memory.length))
        r.keep.append(memory)
        return r

    def _put_batch_request(self, items: Iterable[tuple[Key, Value] | Item], ttl: float, timeout: float | None) -> Request:
        keys, memories, attrs, plain = [], [], [], True
        for item in items:
            if isinstance(item, Item):
                keys.append(item.key)
                memories.append(source(item.value))
                attrs.append(attributes(item.ttl or ttl, item.replicas, item.prefix, item.shard))
            else:
                key, value = item
                keys.append(key)
                memories.append(source(value))
                attrs.append(attributes(ttl, 0, None, None))
            plain = plain and attrs[-1] is None
        packed, n = pack(keys)
        r = Request(self._open(), PUT, n, n, _flags, timeout, packed, None if plain else {"attrs": attrs})
        r.regions = array("Q", (number for m in memories for number in (m.address, m.length)))
        r.keep = memories
        return r

    def _get_request(self, key: Key, timeout: float | None) -> Request:
        r = Request(self._open(), GET, 1, 1, self._got, timeout, pack_one(key))
        guess = self._guess
        if guess:
            memory = _new_bytes(None, guess)
            r.memory = [memory]
            r.regions = array("Q", (_address_of_bytes(memory), guess))
        else:
            r.memory = [None]
            r.regions = array("Q", (0, 0))
        return r

    def _got(self, r: Request) -> bytes | None:
        if r.results[0] > 0:
            self._guess = r.results[0]
        return _value_at(r, 0)

    def _get_batch_request(self, keys: Sequence[Key], timeout: float | None) -> Request:
        packed, n = pack(keys)
        r = Request(self._open(), GET, n, n, lambda r: [_value_at(r, i) for i in range(r.count)], timeout, packed)
        r.regions = array("Q", bytes(16 * n))
        r.memory = [None] * n
        return r

    def _into_request(self, packed: bytes, buffers: Sequence[Value], answer: Callable[[Request], Any], timeout: float | None) -> Request:
        copies: list[Callable[[], None]] = []
        memories = [target(b, copies) for b in buffers]
        n = len(memories)
        r = Request(self._open(), GET_INTO, n, n, answer, timeout, packed)
        r.regions = array("Q", (number for m in memories for number in (m.address, m.length)))
        r.keep = memories
        if copies:

            def settle() -> None:
                for copy in copies:
                    copy()

            r.settle = settle
        return r

    def _get_into_request(self, key: Key, buffer: Value, timeout: float | None) -> Request:
        return self._into_request(pack_one(key), (buffer,), _length_of, timeout)

    def _get_batch_into_request(self, keys: Sequence[Key], buffers: Sequence[Value], timeout: float | None) -> Request:
        packed, n = pack(keys)
        if n != len(buffers):
            raise InvalidArgumentError(f"{n} keys and {len(buffers)} buffers: a buffer for each")
        return self._into_request(packed, buffers, lambda r: [v if v >= 0 else None for v in r.results], timeout)

    def _key_request(self, kind: int, key: Key, timeout: float | None, options: dict[str, Any] | None = None) -> Request:
        return Request(self._open(), kind, 1, 1, _flag, timeout, pack_one(key), options)

    def _keys_request(self, kind: int, keys: Iterable[Key], timeout: float | None, options: dict[str, Any] | None = None) -> Request:
        packed, n = pack(keys)
        return Request(self._open(), kind, n, n, _flags, timeout, packed, options)

    def _match_request(self, hashes: Sequence[int], context: PrefixContext | None, members: int, timeout: float | None) -> Request:
        try:
            packed = array("Q", hashes)
        except (TypeError, OverflowError) as e:
            raise InvalidArgumentError(f"hashes are numbers of 64 bits: {e}") from None
        options = {"context": vars(context or PrefixContext()), "members": members}
        return Request(self._open(), MATCH, len(packed), 1, lambda r: r.results[0], timeout, packed.tobytes(), options)

    def _view_request(self, packed: bytes, n: int, stop: bool, timeout: float | None) -> Request:
        r = Request(self._open(), VIEW, n, 4 * n + 2, Mapped, timeout, packed, {"stop": True} if stop else None)

        def undo() -> None:
            _lib.call("larder_view_close", r.results[4 * n])

        r.undo = undo
        return r

    def _layers_request(
        self, kind: int, key: Key, sizes: Sequence[int], timeout: float | None, attrs: dict[str, Any] | None = None
    ) -> Request:
        options: dict[str, Any] = {"sizes": list(sizes)}
        if attrs is not None:
            options["attrs"] = [attrs]
        r = Request(self._open(), kind, 1, 1, lambda r: r.results[0], timeout, pack_one(key), options)
        r.undo = lambda: run(Request(r.results[0], END_LAYERS, 0, 1, lambda r: None, None))
        return r

    def _alloc_request(self, sizes: Sequence[int], timeout: float | None) -> Request:
        n = len(sizes)

        def answer(r: Request) -> list[list[int]]:
            return [list(r.results[6 * i : 6 * i + 6]) for i in range(n)]

        def undo() -> None:
            for place in answer(r):
                _lib.call("larder_alloc_abort", place[0])

        r = Request(self._open(), ALLOC, 0, 6 * n, answer, timeout, options={"sizes": list(sizes)})
        r.undo = undo
        return r

    def _store_request(self, keys: Sequence[Key], handles: Sequence[int], timeout: float | None) -> Request:
        packed, n = pack(keys)
        r = Request(self._open(), STORE, n, n, _flags, timeout, packed, {"handles": list(handles)})
        r.results = array("q", [-1] * n)  # what is not stored
        return r

    def _control_request(self, do: str, timeout: float | None = None, *, prefix: Key = b"", **options: Any) -> Request:
        packed, n = (pack_one(prefix), 1) if prefix else (b"", 0)
        return Request(self._open(), CONTROL, n, 1, text_of, timeout, packed, {"do": do, **options})


def close(handle: int, timeout: float) -> bool:
    """Close a client, and return whether a master has heard of it. In any case nothing is left of it here."""
    try:
        _lib.job("larder_client_close", handle, int(timeout * 1e9))
    except (TimedOutError, UnavailableError):
        return False
    return True


# How many keys list_keys asks for at a time.
PAGE = 1000


def listed(page: dict[str, Any]) -> list[bytes]:
    """The keys of a page."""
    return [base64.b64decode(k) for k in page["keys"] or ()]


def snaked(answer: dict[str, Any]) -> dict[str, Any]:
    """What the library has as JSON, with names as Python's are."""
    return {_CAMEL.sub("_", name).lower(): _snaked(value) for name, value in answer.items()}


def _snaked(value: Any) -> Any:
    if isinstance(value, dict):
        return snaked(value)
    return [_snaked(v) for v in value] if isinstance(value, list) else value


def reply(answer: dict[str, Any]) -> dict[str, Any]:
    """What a master has answered, without the fields of errors, of which there is none."""
    return {name: value for name, value in snaked(answer).items() if name not in ("code", "message", "leader", "retry_after_ms")}


def configuration(**options: Any) -> bytes:
    """The configuration of a client, for the library."""
    for name in ("masters", "near", "avoid"):
        if isinstance(options[name], str):
            raise InvalidArgumentError(f"{name} is a list of strings: [{options[name]!r}]")
        options[name] = list(options[name])
    return json.dumps(options).encode()


_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def writable(address: int, size: int) -> memoryview:
    """Memory of the library's that may be written."""
    return memoryview(_bytes_type(size).from_address(address)).cast("B")


def pin_options(kind: str, owner: str, ttl: float = 0) -> dict[str, Any] | None:
    """The options of a pin."""
    if kind not in ("session", "durable", "soft"):
        raise InvalidArgumentError(f"a pin of kind {kind!r}: session, durable or soft")
    return {"pin": {"kind": kind, "owner": owner, "ttl": ttl}}


@functools.lru_cache(maxsize=64)
def _bytes_type(size: int) -> Any:
    """The type of so many bytes. To make one takes as long as everything else of a view; most values have one of few sizes."""
    return ctypes.c_ubyte * size


class Mapped:
    """Values in place, and the lease under which they are."""

    def __init__(self, r: Request) -> None:
        self.handle = r.results[4 * r.count]
        self.places: list[tuple[int, int] | None] = []  # region and offset of each
        self.memory: list[memoryview | None] = []
        self._bases: list[Any] = []  # what each memoryview is of: it lives as long as anything that uses the memory
        lease = Lease(self.handle)
        self.lease = lease
        for i in range(r.results[4 * r.count + 1]):
            address, size, region, offset = r.results[4 * i : 4 * i + 4]
            if size < 0:
                self.places.append(None)
                self.memory.append(None)
                continue
            base = _bytes_type(size).from_address(address)
            lease.bind(base)
            self._bases.append(weakref.ref(base))
            self.places.append((region, offset))
            self.memory.append(memoryview(base).cast("B").toreadonly())
        if not self._bases:
            lease.release()

    def close(self) -> None:
        """End the lease. Raises LeaseError if what was read may be wrong, and BufferError if something still uses the memory: it stays
        where it is until that is gone."""
        for m in self.memory:
            if m is not None:
                m.release()
        self.memory = []
        if any(base() is not None for base in self._bases):
            raise BufferError(
                "something still uses memory of the view, a slice of it or an array over it: let go of that before the block ends, "
                "or copy it. The memory stays readable until that is gone"
            )
        self.lease.release()


class Lease:
    """The handle of a view, which is closed when nobody uses its memory any more."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._users = 0
        self._error: LarderError | None = None  # that it was closed with

    def bind(self, base: Any) -> None:
        """Keep the view open for as long as base lives."""
        self._users += 1
        weakref.finalize(base, self._unbind).atexit = False

    def _unbind(self) -> None:
        self._users -= 1
        if self._users == 0 and self._error is None:
            self._error = self._close()

    def _close(self) -> LarderError | None:
        handle, self._handle = self._handle, 0
        if not handle or _lib.forked() or sys.is_finalizing():
            return None
        try:
            _lib.call("larder_view_close", handle)
        except LarderError as e:
            return e
        return None

    def check(self) -> None:
        """Raise LeaseError if what was read so far may be wrong."""
        if self._handle:
            _lib.call("larder_view_check", self._handle)
        elif self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Raise what it was closed with, if it was."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def release(self) -> None:
        """Close it, unless that has been done, and raise what that has failed with."""
        self._error = self._error or self._close()
        self.settle()
