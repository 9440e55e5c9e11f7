"""Transfers between memory of processes: the Go package transfer, for Python.

One process registers memory, and others read and write it, as they like and without its doing anything::

    with larder.TransferEngine(listen=["0.0.0.0:7500"]) as engine:
        cache = engine.allocate(1 << 30, name="cache")   # cache.memory is writable; processes of this host map it
        ...

    with larder.TransferEngine() as engine:
        peer = engine.open("10.0.0.7:7500")
        pages = [bytearray(65536) for _ in range(16)]
        transfer = engine.batch_read(peer["cache"], offsets=[i << 16 for i in range(16)], into=pages)
        transfer.wait(timeout=5)

The methods of all classes may be called by several threads. The GIL is not held while something waits or moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import itertools
import json
import mmap
import os
import threading
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Union

from . import _lib
from ._memory import Memory, memory_of
from .errors import (
    ClosedError,
    ForkError,
    InvalidArgumentError,
    LarderError,
    OutOfRangeError,
    ReadOnlyError,
    TimedOutError,
    UnknownNameError,
    UnsettledError,
)

_READ, _WRITE = 1, 2

# How long opening a segment, refreshing it or a notification may take, in seconds, unless the caller says otherwise.
_DIAL_TIMEOUT = 10.0

# The room that a notification may need: the sender's id, a name, a body.
_NOTIFICATION_ROOM = 32 + 128 + (64 << 10)

# What may be read into or written from: an object with the buffer protocol, a CPU tensor, a part of a registered buffer, or
# (address, length) within registered memory.
Local = Union[Any, "LocalRange", "tuple[int, int]"]


class State(enum.IntEnum):
    """How far a request has come. All but PENDING are final."""

    PENDING = 0
    DONE = 1  # all bytes have been moved
    FAILED = 2  # some may have been, and none will be
    UNSETTLED = 3  # a write has failed, and bytes may still land: see Transfer.settled


@dataclass(frozen=True)
class RemoteBuffer:
    """A buffer of another process, as its segment describes it."""

    segment: "Segment"
    name: str
    size: int  # bytes
    id: int
    generation: int  # of this registration: requests for another one fail with StaleError
    read_only: bool
    location: str  # where its memory lies, as the peer's topology calls it; empty if that is not known

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class LocalRange:
    """A part of a registered buffer."""

    buffer: "Buffer"
    offset: int
    length: int


@dataclass(frozen=True)
class Notification:
    """A message from another engine."""

    engine: str  # the sender's id
    name: str  # what it is about, as sender and receiver have agreed
    body: bytes


class TransferEngine:
    """One process's end of transfers.

    Without ``listen`` it reaches others and nobody reaches it. Close it, or use it as a context manager: memory that is
    registered is kept alive until then.

    Args:
        name: of this process's segment, for others to read and, with ``masters``, to find it by.
        listen: addresses, host:port, at which others reach this process, one for each rail. Port 0 takes a free one.
        advertise: what others are told instead of the addresses that were bound, one for each.
        source: local addresses from which rails leave; none means as the system routes.
        token: what others must know, too. Who knows it may read and write what is registered.
        transports: those that may be used, of local, shm, rdma and tcp; none means all.
        nics: NICs for RDMA, as mlx5_0 or mlx5_0/2; ["none"] for none; all if it is empty.
        timeout: seconds that a batch may take whose submitter named no time; 30 if it is 0.
        stall_timeout, abort_timeout, idle_timeout: seconds that a connection may be stuck, that a peer may take to confirm
            that one is closed, and that one stays open without work; 5, 5 and 60 if they are 0.
        slice_size: bytes that are moved at once, 64 KiB if it is 0; 4 KiB to 16 MiB.
        connections: of each rail; 2 if it is 0.
        retries: how often a slice is tried again; 8 if it is 0.
        zero_copy: whether the kernel copies long bodies over TCP: auto, on or off.
        checksums: has each slice carry a checksum of its bytes, which excludes RDMA.
        masters: addresses of a pool's masters, where ``open(name=...)`` finds the segments of ``tenant`` by name.
        tenant: whose names these are.
    """

    def __init__(
        self,
        name: str = "",
        *,
        listen: Sequence[str] = (),
        advertise: Sequence[str] = (),
        source: Sequence[str] = (),
        token: str = "",
        transports: Sequence[str] = (),
        nics: Sequence[str] = (),
        timeout: float = 0,
        stall_timeout: float = 0,
        abort_timeout: float = 0,
        idle_timeout: float = 0,
        slice_size: int = 0,
        connections: int = 0,
        retries: int = 0,
        zero_copy: str = "auto",
        checksums: bool = False,
        masters: Sequence[str] = (),
        tenant: str = "",
    ) -> None:
        self._handle = 0
        self._lock = threading.RLock()
        self._buffers: dict[int, Buffer] = {}  # by handle
        self._segments: dict[int, Segment] = {}
        self._transfers: dict[int, Transfer] = {}  # those whose memory is in use
        self._inbox = threading.Lock()  # held by whoever receives
        lists = {"listen": listen, "advertise": advertise, "source": source, "transports": transports, "nics": nics, "masters": masters}
        for key, value in lists.items():
            if isinstance(value, str):
                raise InvalidArgumentError(f"{key} is a list of strings: [{value!r}]")
        config = {
            **{key: list(value) for key, value in lists.items()},
            "name": name, "token": token, "timeout": timeout, "stall_timeout": stall_timeout, "abort_timeout": abort_timeout,
            "idle_timeout": idle_timeout, "slice_size": slice_size, "connections": connections, "retries": retries,
            "zero_copy": zero_copy, "checksums": checksums, "tenant": tenant,
        }  # fmt: skip
        text = json.dumps(config).encode()
        self._handle = _lib.job("larder_engine_open", text, len(text))

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not _lib.forked():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            with contextlib.suppress(Exception):  # the interpreter may be ending
                self.close()

    def __repr__(self) -> str:
        return f"<larder.TransferEngine {'closed' if not self._handle else self._handle}>"

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._handle

    def close(self) -> None:
        """End the engine: transfers that are under way fail, and memory that was registered is free again.

        Raises UnsettledError if a peer was stopped in the middle of a copy: the memory is then kept for ever.
        """
        with self._lock:
            handle, self._handle = self._handle, 0
        if not handle:
            return
        try:
            _lib.job("larder_engine_close", handle)
        except UnsettledError:
            _kept_for_ever.extend(self._buffers.values())
            _kept_for_ever.extend(self._transfers.values())
            raise
        finally:
            self._forget()

    def _forget(self) -> None:
        """Let go of everything, after the engine was closed."""
        with self._lock:
            buffers, self._buffers = self._buffers, {}
            transfers, self._transfers = self._transfers, {}
            segments, self._segments = self._segments, {}
        for transfer in transfers.values():
            with contextlib.suppress(LarderError):
                transfer.wait()
        for segment in segments.values():
            segment._closed(wait=True)
        for buffer in buffers.values():
            with contextlib.suppress(LarderError):
                _lib.call("larder_buffer_forget", buffer._handle)
            buffer._gone()

    def _open(self) -> int:
        handle = self._handle
        if not handle:
            if _lib.forked():
                _lib.library()  # says so
            raise ClosedError("the engine is closed")
        return handle

    # What this process has.

    @property
    def id(self) -> str:
        """Names this engine, and no other one ever."""
        return str(self.describe()["engine"])

    @property
    def addresses(self) -> list[str]:
        """Where others reach this process."""
        return list(self.describe()["rails"] or [])

    def describe(self) -> dict[str, Any]:
        """The descriptor of this process's segment: what others need to reach it, for ``open(descriptor=...)``."""
        description: dict[str, Any] = json.loads(_lib.described("larder_engine_describe", self._open()))
        return description

    def allocate(self, size: int, name: str = "", *, read_only: bool = False, listed: bool = True) -> Buffer:
        """Make memory and register it. Processes of this host map it, and copy by themselves: that is the fastest way.

        ``buffer.memory`` is a writable memoryview of it, which numpy.frombuffer and torch.frombuffer take.
        """
        if size <= 0:
            raise InvalidArgumentError(f"allocate {size} bytes: at least one")
        fd = os.memfd_create("larder-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # Neither this process nor one that maps it can have memory vanish under the other.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            pages = mmap.mmap(fd, size)
            return self._register(memory_of(pages), name, read_only, listed, fd, 0)
        finally:
            os.close(fd)

    def register(
        self, memory: Any, name: str = "", *, read_only: bool | None = None, listed: bool = True,
        file: int | None = None, offset: int = 0,
    ) -> Buffer:  # fmt: skip
        """Make memory reachable for others.

        Args:
            memory: bytes, bytearray, memoryview, mmap, a numpy array, a torch tensor in CPU memory: contiguous. It is kept
                alive, and where the buffer protocol can do that in its place, until it is unregistered.
            name: for descriptors: others find it by that.
            read_only: others may not write to it; as the memory is if it is None.
            listed: it stands in descriptors.
            file: a file descriptor that the memory is mapped from, shared, at ``offset``: processes of this host map it, too.
        """
        return self._register(memory_of(memory), name, read_only, listed, file, offset)

    def register_address(
        self, address: int, length: int, name: str = "", *, read_only: bool = False, listed: bool = True, keep: Any = None
    ) -> Buffer:
        """Make memory reachable for others that an allocator has given out. It must stay there until it is unregistered;
        ``keep`` is an object that sees to that, if there is one."""
        if address <= 0 or length <= 0 or address + length >= 1 << 64:
            raise InvalidArgumentError(f"{length} bytes at {address:#x} are no memory")
        return self._register(Memory(address, length, read_only, keep), name, read_only, listed, None, 0)

    def _register(self, memory: Memory, name: str, read_only: bool | None, listed: bool, file: int | None, offset: int) -> Buffer:
        engine = self._open()
        if memory.length == 0:
            raise InvalidArgumentError("register no memory: it has 0 bytes")
        if memory.readonly and read_only is False:
            raise ReadOnlyError("the memory cannot be written: register it with read_only=True, or give a bytearray, say")
        fixed = memory.readonly if read_only is None else read_only
        options: dict[str, Any] = {"name": name, "read_only": fixed, "unlisted": not listed, "offset": offset}
        if file is not None:
            options["file"] = file
        text = json.dumps(options).encode()
        handle, info = ctypes.c_uint64(), _lib.Handle()
        _lib.call("larder_buffer_register", engine, memory.address, memory.length, text, len(text), handle, info)
        buffer = Buffer(self, handle.value, name, memory, info.id, info.generation, fixed)
        with self._lock:
            self._buffers[handle.value] = buffer
        return buffer

    # What others have.

    def open(
        self, *addresses: str, name: str = "", descriptor: dict[str, Any] | str | None = None, timeout: float = _DIAL_TIMEOUT
    ) -> Segment:
        """Get to know another process's memory: by one of its addresses, by a descriptor that came some other way, or by
        its name, with ``masters``."""
        ways = (bool(addresses), bool(name), descriptor is not None)
        if sum(ways) != 1:
            raise InvalidArgumentError("open a segment by addresses, or by name=, or by descriptor=: one of them")
        if isinstance(descriptor, str):
            descriptor = json.loads(descriptor)
        how: dict[str, Any] = {"addresses": addresses, "name": name, "timeout": timeout}
        if descriptor is not None:
            how["descriptor"] = descriptor
        text = json.dumps(how).encode()
        segment = Segment(self, _lib.job("larder_segment_open", self._open(), text, len(text)))
        with self._lock:
            self._segments[segment._handle] = segment
        return segment

    def batch_read(
        self, source: RemoteBuffer, offsets: Sequence[int], into: Sequence[Local], timeout: float | None = None
    ) -> Transfer:
        """Begin to read: the bytes at each offset of a remote buffer, into the piece of memory that stands at the same place
        in ``into``, as many as that has. Returns at once; :class:`Transfer` tells the outcome.

        Memory must not be used until the transfer has ended. It ends after ``timeout`` seconds at the latest, as the engine
        was made if that is None. Requests that cannot be right raise here, and then none is begun.
        """
        return self._submit(_READ, source, offsets, into, timeout)

    def batch_write(
        self, target: RemoteBuffer, offsets: Sequence[int], data: Sequence[Local], timeout: float | None = None
    ) -> Transfer:
        """Begin to write: each piece of memory in ``data`` to the offset of a remote buffer at the same place. As
        :meth:`batch_read` otherwise."""
        return self._submit(_WRITE, target, offsets, data, timeout)

    def read(self, source: RemoteBuffer, offset: int, into: Local, timeout: float | None = None) -> None:
        """Read into one piece of memory, and wait for it."""
        self.batch_read(source, [offset], [into], timeout)._finish()

    def write(self, target: RemoteBuffer, offset: int, data: Local, timeout: float | None = None) -> None:
        """Write one piece of memory, and wait for it."""
        self.batch_write(target, [offset], [data], timeout)._finish()

    def _submit(
        self, op: int, remote: RemoteBuffer, offsets: Sequence[int], local: Sequence[Local], timeout: float | None
    ) -> Transfer:
        self._open()
        if not isinstance(remote, RemoteBuffer):
            raise InvalidArgumentError(f"{type(remote).__name__} is no remote buffer: take segment['name']")
        if remote.segment.engine is not self:
            raise InvalidArgumentError("the remote buffer belongs to a segment of another engine: open it with this one")
        if isinstance(local, (bytes, bytearray, memoryview)) or hasattr(local, "data_ptr"):
            raise InvalidArgumentError("give a list of pieces of memory, one for each offset, not one piece: [piece]")
        if len(offsets) != len(local):
            raise InvalidArgumentError(f"{len(offsets)} offsets for {len(local)} pieces of memory: one for each")
        if op == _WRITE and remote.read_only:
            raise ReadOnlyError(f"the remote buffer {remote.name!r} is registered for reading only")
        words = array("Q")  # larder_request, one after the other
        keep = []
        for i, (offset, piece) in enumerate(zip(offsets, local)):
            memory = self._local(piece)
            if op == _READ and memory.readonly:
                raise ReadOnlyError(f"request {i}: a {type(piece).__name__} cannot be read into: give memory that can be written")
            if offset < 0 or offset + memory.length > remote.size:
                raise OutOfRangeError(
                    f"request {i}: {memory.length} bytes at {offset} do not lie within the remote buffer {remote.name!r}, "
                    f"which has {remote.size}"
                )
            words.extend((remote.id, remote.generation, offset, memory.address, memory.length))
            keep.append(memory)
        nanoseconds = 0 if timeout is None else max(1, int(timeout * 1e9))
        at, _ = words.buffer_info()
        transfer = Transfer(self, len(keep), keep)
        with self._lock:  # so that close knows of it
            self._open()
            transfer._handle = _lib.started("larder_batch_submit", remote.segment._open(), op, at, len(keep), nanoseconds)
            self._transfers[transfer._handle] = transfer
        self._sweep()
        return transfer

    def _local(self, piece: Local) -> Memory:
        """The memory that a caller means."""
        if isinstance(piece, LocalRange):
            return piece.buffer._range(piece.offset, piece.length)
        if isinstance(piece, Buffer):
            return piece._range(0, piece.size)
        if isinstance(piece, tuple):
            address, length = piece
            with self._lock:
                for buffer in self._buffers.values():
                    if buffer.address <= address and address + length <= buffer.address + buffer.size and length >= 0:
                        return buffer._range(address - buffer.address, length)
            raise InvalidArgumentError(
                f"{length} bytes at {address:#x} are not within memory that is registered with this engine: register it first"
            )
        return memory_of(piece)

    def _sweep(self) -> None:
        """Let go of transfers that have ended and that nobody has waited for. There are a few at a time."""
        with self._lock:
            some = list(itertools.islice(self._transfers.values(), 8))
            for transfer in some:  # others' turn next time
                self._transfers[transfer._handle] = self._transfers.pop(transfer._handle)
        for transfer in some:
            with contextlib.suppress(LarderError):
                transfer._poll(0)

    # Notifications.

    def receive(self, timeout: float | None = None) -> Notification:
        """The next notification that another engine has sent. Raises TimedOutError after ``timeout`` seconds; None waits for
        ever. Whoever does not take them has senders fail with FullError."""
        lengths = _lib.NotificationLengths()
        room = ctypes.create_string_buffer(_NOTIFICATION_ROOM)

        def once(limit: int) -> bool:
            return _lib.call("larder_notified", self._open(), limit, room, _NOTIFICATION_ROOM, lengths)

        if not _lib.wait(once, timeout):
            raise TimedOutError(f"no notification came within {timeout} s")
        name, body = lengths.engine, lengths.engine + lengths.name
        text = memoryview(room)
        return Notification(
            engine=str(text[:name], "ascii"), name=str(text[name:body], "utf-8", "replace"), body=bytes(text[body : body + lengths.body])
        )


# Memory that a peer that was stopped in the middle of a copy may still use.
_kept_for_ever: list[Any] = []


class Buffer:
    """Memory of this process that others may reach. It is a context manager that unregisters it."""

    def __init__(
        self, engine: TransferEngine, handle: int, name: str, memory: Memory, id: int, generation: int, read_only: bool
    ) -> None:
        self.engine = engine
        self.name = name
        self.address = memory.address
        self.size = memory.length
        self.id = id
        self.generation = generation
        self.read_only = read_only
        self._handle = handle
        self._memory: Memory | None = memory

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.unregister()

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<larder.Buffer {self.name!r} {self.size} bytes{'' if self._memory else ', unregistered'}>"

    @property
    def registered(self) -> bool:
        """Whether others may reach it."""
        return self._memory is not None

    @property
    def memory(self) -> memoryview:
        """Its bytes. They may be used for as long as one likes: the memory goes with the last reference to it."""
        keep = self._kept().keep
        if not isinstance(keep, memoryview):
            raise InvalidArgumentError("the buffer was registered by address, or is a tensor's: use what was registered")
        return keep.cast("B") if keep.nbytes else keep

    def range(self, offset: int, length: int) -> LocalRange:
        """A part of it, to be read into or written from."""
        self._range(offset, length)
        return LocalRange(self, offset, length)

    def unregister(self, timeout: float | None = None) -> None:
        """Take it back. When this returns nobody reads from it or writes to it for a peer any more, and transfers that were
        at work in it have failed there with StaleError. Raises TimedOutError after ``timeout`` seconds: call it again before
        the memory is used for something else."""
        if self._memory is None:
            return
        self.engine._open()
        if not _lib.wait(lambda limit: _lib.call("larder_buffer_retire", self._handle, limit), timeout):
            raise TimedOutError(f"a peer is in the middle of a copy after {timeout} s: call unregister again")
        with self.engine._lock:
            self.engine._buffers.pop(self._handle, None)
        self._gone()

    def _gone(self) -> None:
        self._memory = None

    def _kept(self) -> Memory:
        if self._memory is None:
            raise ClosedError(f"the buffer {self.name!r} is not registered any more")
        return self._memory

    def _range(self, offset: int, length: int) -> Memory:
        memory = self._kept()
        if offset < 0 or length < 0 or offset + length > self.size:
            raise OutOfRangeError(f"{length} bytes at {offset} do not lie within the buffer {self.name!r}, which has {self.size}")
        return Memory(memory.address + offset, length, memory.readonly, memory)


class Segment:
    """Another process's registered memory, as this one knows it: a mapping of names to :class:`RemoteBuffer`."""

    def __init__(self, engine: TransferEngine, handle: int) -> None:
        self.engine = engine
        self._handle = handle
        self._buffers: dict[str, RemoteBuffer] | None = None  # None: not asked yet

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, name: str) -> RemoteBuffer:
        known = self._known()
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise UnknownNameError(f"the segment has no buffer {name!r}, but {names}: refresh() asks again")
        return known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def describe(self) -> dict[str, Any]:
        """Its descriptor, as it was described last."""
        description: dict[str, Any] = json.loads(_lib.described("larder_segment_describe", self._open()))
        return description

    def remote(self, id: int, generation: int, size: int, *, name: str = "", read_only: bool = False) -> RemoteBuffer:
        """A buffer that is not listed, of which one was told in another way."""
        self._open()
        return RemoteBuffer(self, name, size, id, generation, read_only, "")

    def refresh(self, timeout: float = _DIAL_TIMEOUT) -> None:
        """Ask the process again which buffers it has."""
        _lib.job("larder_segment_refresh", self._open(), int(timeout * 1e9))
        self._buffers = None

    def notify(self, name: str, body: bytes = b"", timeout: float = _DIAL_TIMEOUT) -> None:
        """Tell the other process something: a name of at most 128 bytes and a body of at most 64 KiB. It is delivered at most
        once, and in order. Sent after a transfer has ended, it is seen after the transfer's bytes. Raises FullError if the
        receiver has too many that it has not taken; after UncertainError it may have been delivered."""
        text, content = name.encode(), bytes(body)
        _lib.job("larder_notify", self._open(), text, len(text), content, len(content), int(timeout * 1e9))

    def close(self) -> None:
        """End what is under way with it. When this returns nothing lands in local memory any more."""
        handle = self._closed(wait=False)
        if handle and not self.engine.closed:
            _lib.job("larder_segment_close", handle)

    def _closed(self, *, wait: bool) -> int:
        with self.engine._lock:
            handle, self._handle = self._handle, 0
            self.engine._segments.pop(handle, None)
        if wait and handle:
            with contextlib.suppress(LarderError):
                _lib.job("larder_segment_close", handle)
        return handle

    def _open(self) -> int:
        self.engine._open()
        if not self._handle:
            raise ClosedError("the segment is closed")
        return self._handle

    def _known(self) -> dict[str, RemoteBuffer]:
        self._open()
        if self._buffers is None:
            self._buffers = {
                b.get("name", ""): RemoteBuffer(
                    self, b.get("name", ""), b["bytes"], b["id"], int(b["generation"]), b.get("read_only", False), b.get("location", "")
                )
                for b in self.describe()["buffers"] or []
            }
        return self._buffers


class Transfer:
    """A batch of requests that is under way. What it reads into or writes from is kept alive until it has ended."""

    def __init__(self, engine: TransferEngine, count: int, keep: list[Memory]) -> None:
        self._engine = engine
        self._handle = 0
        self._count = count
        self._keep: list[Memory] | None = keep
        self._lock = threading.Lock()
        self._states: list[State] | None = None  # when it has ended
        self._error: LarderError | None = None  # of the first request that failed

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.cancel()
        _lib.wait(self._poll, None)
        if kind is None and self._error is not None:
            raise self._error

    def __del__(self) -> None:
        if self._handle and not _lib.forked():
            with contextlib.suppress(Exception):
                _lib.call("larder_batch_free", self._handle)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all requests have ended. Raises what the first that failed has failed with, and TimedOutError after
        ``timeout`` seconds: the transfer goes on then, and may be waited for again, or canceled."""
        if not _lib.wait(self._poll, timeout):
            raise TimedOutError(f"the transfer has not ended after {timeout} s and goes on: wait for it again, or cancel it")
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        """Whether all requests have ended, in whatever way."""
        return self._poll(0)

    def status(self) -> list[State]:
        """How far each request has come."""
        if self._states is not None:
            return list(self._states)
        out = bytearray(max(1, self._count))
        _lib.call("larder_batch_status", self._handle, memory_of(out).address, self._count)
        return [State(s) for s in out[: self._count]]

    def error(self, i: int) -> LarderError | None:
        """What one request has failed with; None if it has not."""
        if not 0 <= i < self._count:
            raise OutOfRangeError(f"request {i} of {self._count}")
        try:
            _lib.call("larder_batch_error", self._handle, i)
        except LarderError as e:
            return e
        return None

    def settled(self, timeout: float = 0) -> bool:
        """Whether nothing of it can land any more, here or there. Only after UnsettledError does that come later than its end:
        leave the remote range alone until then."""
        return _lib.wait(lambda limit: _lib.call("larder_batch_settled", self._handle, limit), timeout)

    def cancel(self) -> None:
        """Have it end soon, with CanceledError. Wait for it: its memory is in use until then."""
        _lib.call("larder_batch_cancel", self._handle)

    def _finish(self) -> None:
        """Wait for it, and cancel it if that is interrupted: the caller's memory is free in any case."""
        try:
            self.wait()
        except LarderError:
            raise
        except BaseException:
            self.cancel()
            with contextlib.suppress(LarderError):
                self.wait()
            raise

    def _poll(self, limit: int) -> bool:
        """Wait for its end for limit nanoseconds, and note it."""
        if self._states is not None:
            return True
        error = None
        try:
            if not _lib.call("larder_batch_wait", self._handle, limit):
                return False
        except ForkError:
            raise
        except LarderError as e:
            error = e
        with self._lock:
            if self._states is None:
                self._error, self._states, self._keep = error, self.status(), None
        with self._engine._lock:
            self._engine._transfers.pop(self._handle, None)
        return True
