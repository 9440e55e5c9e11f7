"""The client of a pool: values of KV cache, kept in memory that processes and hosts share.

    with larder.Client(["10.0.0.5:7400"]) as client:
        client.put("prompt/42/block/0", tensor)               # a copy goes into the pool
        client.get_into("prompt/42/block/0", other)           # and out of it, into memory that is there
        block = client.get("prompt/42/block/0")               # or into new bytes; None if it is not held
        with client.view("prompt/42/block/0") as memory:      # or is read in place
            ...

Values are written to and read from mapped memory by this process, where the pool's memory is mapped here, and by transfers where it
is not; no master sees them. They are what has the buffer protocol (bytes, bytearray, memoryview, mmap, numpy arrays), and torch
tensors of any dtype: contiguous. A value is copied once, with the GIL released; tensors of a GPU go through pinned memory.

A miss is not an error: get and its kin return None. All else that goes wrong is a :class:`larder.LarderError`, whose ``code`` is the
wire's, if it came from there. Methods repeat themselves through new leaders, lost connections and new sessions until ``timeout``.

Methods may be called by several threads at once. Ctrl-C ends each of them, within a tenth of a second. :mod:`larder.aio` has the same
client for asyncio.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from . import _lib, _storage
from ._storage import Item, Key, Prefix, PrefixContext, Request, Value, run
from .errors import ClosedError, InvalidArgumentError, LarderError

logger = logging.getLogger(__name__)


class Client(_storage.Requests):
    """A client of a pool, and a session of its own there.

    Close it, or use it as a context manager: what it has stored stays in the pool, and the pool's memory that it owned goes back.

    Args:
        masters: addresses of masters, host:port or unix:/path. One is enough: it names the others.
        instance: names the client to the pool, which gives memory to it; one process at a time may use a name. None makes one.
        tenant: whose entries these are.
        page_size: granularity of stores in bytes, a multiple of 4 KiB: a value takes whole pages. 64 KiB if it is 0.
        region_size: bytes that are asked for at a time when no page is left. 64 MiB if it is 0.
        ttl: seconds for which the pool keeps a session that it does not hear from; 10 if it is 0.
        checksums: store a checksum with each value, and verify it when one is read.
        replicas: on how many nodes each value is stored, as far as they have room. One if it is 0.
        write_through: a tier (cxl, dram, ssd) where one of the replicas lies; none if it is empty.
        tier: the tier where this client's memory is preferred to lie; any if it is empty.
        near, avoid: names of hosts, NUMA nodes (host/0) or devices (#3) where that memory is to lie if there is room, or not.
        prefault: map memory completely when it is mapped, so that no later copy waits for a page fault.
        timeout: seconds that a call may take which says nothing else, its repetitions included; 30 if it is 0.
        call_timeout: seconds after which a master that does not answer is taken for lost; 2 if it is 0.
        connections: to the leader; one if it is 0.
        token: what nodes demand of those who reach their memory by transfer.
        on_revoke: is told of regions that were taken away, as a dict of region, bytes and reason, by a thread of the client.
    """

    def __init__(
        self,
        masters: Sequence[str],
        *,
        instance: str | None = None,
        tenant: str = "default",
        page_size: int = 0,
        region_size: int = 0,
        ttl: float = 0,
        checksums: bool = False,
        replicas: int = 0,
        write_through: str = "",
        tier: str = "",
        near: Sequence[str] = (),
        avoid: Sequence[str] = (),
        prefault: bool = False,
        timeout: float = 0,
        call_timeout: float = 0,
        connections: int = 0,
        token: str = "",
        on_revoke: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._handle = 0
        self._events: threading.Thread | None = None
        config = _storage.configuration(
            masters=masters, near=near, avoid=avoid, instance=instance or "", tenant=tenant, page_size=page_size,
            region_size=region_size, ttl=ttl, checksums=checksums, replicas=replicas, write_through=write_through, tier=tier,
            prefault=prefault, timeout=timeout, call_timeout=call_timeout, connections=connections, token=token,
            events=on_revoke is not None,
        )  # fmt: skip
        self._handle = _lib.job("larder_client_open", config, len(config))
        if on_revoke is not None:
            self._events = threading.Thread(target=self._tell, args=(on_revoke,), name="larder-events", daemon=True)
            self._events.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not _lib.forked():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            with contextlib.suppress(Exception):  # the interpreter may be ending
                self.close()

    def __repr__(self) -> str:
        return f"<larder.Client {self._handle or 'closed'}>"

    def close(self, timeout: float = 5) -> bool:
        """End the session, and give the client's memory back; what it has stored stays. Views stay readable until they are closed.
        Returns whether a master has heard of it in time: otherwise the pool finds out by the session's ttl. A second close does nothing."""
        handle = self._handle
        if not handle:
            return True
        if _lib.forked():
            _lib.library()  # says so
        self._handle = 0
        try:
            return _storage.close(handle, timeout)
        finally:
            if self._events is not None and threading.current_thread() is not self._events:
                self._events.join(timeout)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._handle

    def _tell(self, on_revoke: Callable[[dict[str, Any]], None]) -> None:
        """Tell of what the library has to tell, until the client is closed."""
        with contextlib.suppress(ClosedError):
            while True:
                for event in run(Request(self._open(), _storage.EVENTS, 0, 1, _storage.text_of, None)):
                    try:
                        on_revoke(event)
                    except Exception:  # the next event is told all the same
                        logger.exception("on_revoke has failed")

    # Values.

    def put(
        self, key: Key, value: Value, *, ttl: float = 0, replicas: int = 0, prefix: Prefix | None = None,
        shard: tuple[int, int] | None = None, timeout: float | None = None,
    ) -> bool:  # fmt: skip
        """Store a copy of value. Returns whether it is a new entry: if the key is held already nothing changes but its recency, and
        the value is not compared, since keys name content.

        Args:
            key: 1 to 1,024 bytes; text is encoded in UTF-8.
            value: what has the buffer protocol, or a tensor: contiguous, 1 byte to 4 GiB.
            ttl: the entry's time to live in seconds, under the ttl policy.
            replicas: on how many nodes it is stored; 0 as the client was made.
            prefix: which prefix block it is, for prefix_match.
            shard: (member, members), of a block that several ranks hold together.
            timeout: in seconds; None as the client was made.
        """
        return bool(run(self._put_request(key, value, ttl, replicas, prefix, shard, timeout)))

    def put_batch(self, items: Iterable[tuple[Key, Value] | Item], *, ttl: float = 0, timeout: float | None = None) -> list[bool]:
        """Store copies of many values, with one exchange that makes room for them and one that registers them. Returns whether each is
        a new entry. Raises what the first that failed has failed with; others may be held then."""
        answer: list[bool] = run(self._put_batch_request(items, ttl, timeout))
        return answer

    def get(self, key: Key, *, timeout: float | None = None) -> bytes | None:
        """The value of key; None if it is not held, or its bytes did not survive."""
        value: bytes | None = run(self._get_request(key, timeout))
        return value

    def get_batch(self, keys: Sequence[Key], *, timeout: float | None = None) -> list[bytes | None]:
        """Many values, with one exchange for each 128: None for each that is not held."""
        values: list[bytes | None] = run(self._get_batch_request(keys, timeout))
        return values

    def get_into(self, key: Key, buffer: Value, *, timeout: float | None = None) -> int | None:
        """Read the value of key into memory that can be written. Returns its length in bytes; None if it is not held. Raises if the
        value is longer than the buffer, of which nothing is written then; a shorter one leaves its rest alone."""
        length: int | None = run(self._get_into_request(key, buffer, timeout))
        return length

    def get_batch_into(self, keys: Sequence[Key], buffers: Sequence[Value], *, timeout: float | None = None) -> list[int | None]:
        """Read many values, each into the buffer at the same place, as get_into does."""
        lengths: list[int | None] = run(self._get_batch_into_request(keys, buffers, timeout))
        return lengths

    def view(self, key: Key, *, timeout: float | None = None) -> View:
        """The value in place, without a copy, as a context manager::

            with client.view(key) as memory:      # None if it is not held
                total = sum(memory)
            # here it is certain that what was read is what was stored: otherwise leaving raises LeaseError

        ``memory`` is a memoryview that can be read, under a lease that is renewed until the block ends."""
        return View(run(self._view_request(_storage.pack_one(key), 1, False, timeout)))

    def view_batch(self, keys: Sequence[Key], *, stop_at_miss: bool = False, timeout: float | None = None) -> Views:
        """As view, for at most 4,096 keys with one exchange: the block gets a list of memoryviews, None for those that are not held.
        With stop_at_miss the list ends before the first of these."""
        return Views(run(self._view_request(*_storage.pack(keys), stop_at_miss, timeout)))

    # Keys.

    def exists(self, key: Key, *, timeout: float | None = None) -> bool:
        """Whether key is held. It counts as no use of it."""
        return bool(run(self._key_request(_storage.EXISTS, key, timeout)))

    def exists_batch(self, keys: Sequence[Key], *, timeout: float | None = None) -> list[bool]:
        """Whether each of keys is held."""
        answer: list[bool] = run(self._keys_request(_storage.EXISTS, keys, timeout))
        return answer

    def prefix_match(
        self, hashes: Sequence[int], context: PrefixContext | None = None, *, members: int = 0, timeout: float | None = None
    ) -> int:
        """How many of hashes, from the first on, are held in a context: the longest prefix that need not be computed. members, if not
        0, demands all of so many shards of a block. At most 4,096 hashes; :func:`larder.prefix_hashes` computes them."""
        return int(run(self._match_request(hashes, context, members, timeout)))

    def delete(self, key: Key, *, timeout: float | None = None) -> bool:
        """Remove a key, of whatever client. Returns whether it was removed: one that is pinned is not."""
        return bool(run(self._key_request(_storage.DELETE, key, timeout)))

    def delete_batch(self, keys: Sequence[Key], *, timeout: float | None = None) -> list[bool]:
        """Remove many keys."""
        answer: list[bool] = run(self._keys_request(_storage.DELETE, keys, timeout))
        return answer

    def pin(self, key: Key, *, kind: str = "session", owner: str = "", ttl: float = 0, timeout: float | None = None) -> Pin:
        """Keep a key from being evicted and deleted, until it is unpinned. The result is true if the key is held, and so is pinned now; as
        a context manager it unpins it at the end of its block.

        Args:
            kind: session ends with this session at the latest; durable lasts, under the name of an owner; soft is evicted last, but
                before a store fails.
            owner: of a durable pin.
            ttl: seconds after which a durable or soft one ends; 0 never, and is for durable ones only.
        """
        held = bool(run(self._key_request(_storage.PIN, key, timeout, _storage.pin_options(kind, owner, ttl))))
        return Pin(self, key, kind, owner, held)

    def pin_batch(
        self, keys: Sequence[Key], *, kind: str = "session", owner: str = "", ttl: float = 0, timeout: float | None = None
    ) -> list[bool]:
        """Pin many keys. Returns whether each is held, and so is pinned now."""
        options = _storage.pin_options(kind, owner, ttl)
        answer: list[bool] = run(self._keys_request(_storage.PIN, keys, timeout, options))
        return answer

    def unpin(self, key: Key, *, kind: str = "session", owner: str = "", timeout: float | None = None) -> bool:
        """Undo a pin of that kind. Returns whether there was one."""
        return bool(run(self._key_request(_storage.UNPIN, key, timeout, _storage.pin_options(kind, owner))))

    def unpin_batch(self, keys: Sequence[Key], *, kind: str = "session", owner: str = "", timeout: float | None = None) -> list[bool]:
        """Undo many pins."""
        options = _storage.pin_options(kind, owner)
        answer: list[bool] = run(self._keys_request(_storage.UNPIN, keys, timeout, options))
        return answer

    def clear(self, prefix: Key | None = None, *, timeout: float | None = None) -> None:
        """Drop the tenant's entries, or those whose keys begin with prefix. What it costs does not depend on how many there are."""
        run(self._control_request("clear", timeout, prefix=prefix or b""))

    def list_keys(self, prefix: Key = b"", *, timeout: float | None = None) -> Iterator[bytes]:
        """The keys that begin with prefix, in no particular order. They are asked for in pages: what comes and goes meanwhile may be
        seen or not."""
        cursor = 0
        while True:
            page = run(self._control_request("list", timeout, prefix=prefix, cursor=cursor, limit=_storage.PAGE))
            yield from _storage.listed(page)
            cursor = page["cursor"]
            if not cursor:
                return

    # Values by layers.

    def put_layers(
        self, key: Key, sizes: Sequence[int], *, ttl: float = 0, prefix: Prefix | None = None, shard: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> LayerWriter:  # fmt: skip
        """Store a value layer by layer, while later layers are being computed. sizes are those of the layers in bytes, which lie one
        behind the other: the value is an entry as any other. It is seen when finish has returned::

            with client.put_layers(key, [n] * 32) as writer:
                for i in range(32):
                    writer.launch(i, compute(i))      # copies in the background; the memory must not change until wait(i)
            # leaving the block finishes, or aborts if an exception leaves it
        """
        attrs = _storage.attributes(ttl, 0, prefix, shard)
        return LayerWriter(run(self._layers_request(_storage.PUT_LAYERS, key, sizes, timeout, attrs)), timeout)

    def get_layers(self, key: Key, sizes: Sequence[int], *, timeout: float | None = None) -> LayerReader | None:
        """Read a value layer by layer, each while those before it are being used; None if it is not held::

        with client.get_layers(key, [n] * 32) as reader:
            for i in range(32):
                reader.launch(i, buffers[i])
            for i in range(32):
                reader.wait(i)                    # buffers[i] has the layer from here on
        """
        handle = run(self._layers_request(_storage.GET_LAYERS, key, sizes, timeout))
        return LayerReader(handle, timeout) if handle >= 0 else None

    # Values in place.

    def alloc(self, size: int, *, timeout: float | None = None) -> Allocation:
        """Memory of the pool for a value of size bytes, to be filled in place and stored::

        with client.alloc(1 << 20) as space:
            space.memory[:] = data
            space.store("key")
        # what was not stored is given back
        """
        return self.alloc_batch([size], timeout=timeout)[0]

    def alloc_batch(self, sizes: Sequence[int], *, timeout: float | None = None) -> list[Allocation]:
        """Memory for several values, with one exchange that makes room for all of them. At most 4,096."""
        places: list[list[int]] = run(self._alloc_request(sizes, timeout))
        return [Allocation(self, *place) for place in places]

    def store_batch(self, keys: Sequence[Key], allocations: Sequence[Allocation], *, timeout: float | None = None) -> list[bool]:
        """Store what was allocated and filled, each under the key at the same place. Returns whether each is a new entry. All of the
        allocations end. Raises what the first that failed has failed with; others may be held then."""
        answer: list[bool] = run(self._store_request(keys, [a._take() for a in allocations], timeout))
        return answer

    # What there is.

    def stats(self) -> dict[str, Any]:
        """What this client has done since it was made, and what it has now."""
        answer: dict[str, Any] = run(self._control_request("stats"))
        return _storage.snaked(answer)

    def server_stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The leader's counters."""
        return _storage.reply(run(self._control_request("server_stats", timeout)))

    def usage(self, *, timeout: float | None = None) -> dict[str, Any]:
        """What instances hold, and how much of the pool is free: pool_total, pool_free, and instances, by name."""
        return _storage.reply(run(self._control_request("usage", timeout)))

    @property
    def instance(self) -> str:
        """The name by which the pool knows this client."""
        return str(run(self._control_request("describe"))["instance"])


class Views:
    """Values in place, until they are closed: a list of memoryviews that can be read, None for those that are not held. As a context
    manager it gives that list."""

    def __init__(self, mapped: _storage.Mapped) -> None:
        self._mapped = mapped

    def __enter__(self) -> list[memoryview | None]:
        return list(self._mapped.memory)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(LarderError, BufferError):  # what is under way says more
            self.close()

    @property
    def memory(self) -> list[memoryview | None]:
        """What the context manager gives."""
        return list(self._mapped.memory)

    def close(self) -> None:
        """End them. Raises LeaseError if what was read may be wrong, and BufferError if a slice of them, or an array over one, is still
        there: copy what is to stay. A tensor of torch.frombuffer is not noticed, and must not be used after this."""
        self._mapped.close()


class View(Views):
    """One value in place: as Views, but its memory is the memoryview, or None."""

    def __enter__(self) -> memoryview | None:  # type: ignore[override]
        return self._mapped.memory[0]

    @property
    def memory(self) -> memoryview | None:  # type: ignore[override]
        """What the context manager gives."""
        return self._mapped.memory[0]


class Pin:
    """A pin of a key. It is true if the key is held."""

    def __init__(self, client: Client, key: Key, kind: str, owner: str, held: bool) -> None:
        self._client = client
        self._key = key
        self._spec = (kind, owner)
        self._held = held

    def __bool__(self) -> bool:
        return self._held

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._held and not self._client.closed:
            self.unpin()

    def unpin(self) -> bool:
        """Undo it. Returns whether it was there."""
        self._held = False
        kind, owner = self._spec
        return self._client.unpin(self._key, kind=kind, owner=owner)


class Allocation:
    """Memory of the pool that this client fills, and stores. One that is neither stored nor given up is kept from everybody else."""

    def __init__(self, client: Any, handle: int, address: int, size: int, region: int, offset: int, length: int) -> None:
        self._client = client
        self._handle = handle
        self._size = size
        self.memory: memoryview = _storage.writable(address, size)  # until it is stored or given up
        self.region = region  # the number of the region that it lies in
        self.offset = offset  # where it lies there, in bytes
        self.region_size = length  # of the region, in bytes

    def __len__(self) -> int:
        return self._size

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not _lib.forked():
            with contextlib.suppress(Exception):  # the interpreter may be ending
                self.abort()

    def store(self, key: Key, *, timeout: float | None = None) -> bool:
        """Register what was written under a key. Returns whether it is a new entry. The memory must not be touched any more. Raises
        RevokedError or SessionExpiredError if it was taken away meanwhile: allocate and fill another one then."""
        return bool(self._client.store_batch([key], [self], timeout=timeout)[0])

    def abort(self) -> None:
        """Give the memory back unused; nothing if it was stored."""
        if self._handle:
            _lib.call("larder_alloc_abort", self._take())

    def _take(self) -> int:
        handle, self._handle = self._handle, 0
        if not handle:
            raise ClosedError("the allocation was stored or given up before")
        with contextlib.suppress(BufferError):  # an array over it: who has that knows that it must leave it alone
            self.memory.release()
        return handle


class _Layers:
    """What LayerWriter and LayerReader have in common."""

    def __init__(self, handle: int, timeout: float | None) -> None:
        self._handle = handle
        self._timeout = timeout
        self._keep: dict[int, Any] = {}  # memory of layers that are under way

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not _lib.forked():
            with contextlib.suppress(Exception):  # the interpreter may be ending
                self._end(0)

    def _open(self) -> int:
        if not self._handle:
            raise ClosedError("the layers have ended")
        return self._handle

    def _launch(self, i: int, memory: Any) -> None:
        self._keep[i] = memory
        try:
            _lib.call("larder_layer_launch", self._open(), i, memory.address, memory.length)
        except BaseException:
            self._keep.pop(i, None)  # it was not begun
            raise

    def wait(self, i: int, timeout: float | None = None) -> None:
        """Wait until layer i, which was launched, is where it is to be. Its memory is free then."""
        run(self._wait_request(i, timeout))
        self._keep.pop(i, None)  # otherwise it may be in use until the end

    def _wait_request(self, i: int, timeout: float | None) -> Request:
        if i < 0:
            raise InvalidArgumentError(f"layer {i}: the first is 0")
        return Request(self._open(), _storage.LAYER, i, 0, lambda r: None, timeout)

    def _end(self, how: int) -> bool:
        request = self._end_request(how)
        try:
            return bool(run(request))
        finally:
            self._keep.clear()

    def _end_request(self, how: int) -> Request:
        handle, self._handle = self._open(), 0
        request = Request(handle, _storage.END_LAYERS, how, 1, lambda r: r.results[0] == 1, self._timeout)
        request.keep = list(self._keep.values())  # until it has ended
        return request


class LayerWriter(_Layers):
    """A value that is stored layer by layer. As a context manager it finishes, or aborts if an exception leaves the block."""

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self._handle:
            return
        if kind is None:
            self.finish()
        else:
            self.abort()

    def launch(self, i: int, layer: Value) -> None:
        """Begin to copy layer i to the pool, in the background. Its memory must not change until wait(i), or the end."""
        self._launch(i, _storage.source(layer))

    def finish(self) -> bool:
        """Wait for all layers, each of which must have been launched, and register the value. Returns whether it is a new entry. It ends
        the writer in any case."""
        return self._end(1)

    def abort(self) -> None:
        """Give the value up; nothing if the writer has ended."""
        if self._handle:
            self._end(0)


class LayerReader(_Layers):
    """A value that is read layer by layer. As a context manager it is closed at the end of the block."""

    def __init__(self, handle: int, timeout: float | None) -> None:
        super().__init__(handle, timeout)
        self._copies: dict[int, Callable[[], None]] = {}  # to devices

    def __enter__(self) -> LayerReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self._handle:
            return
        if kind is None:
            self.close()
            return
        with contextlib.suppress(LarderError):  # what is under way says more
            self.close()

    def launch(self, i: int, buffer: Value) -> None:
        """Begin to read layer i into memory of its size, which must not be touched until wait(i)."""
        copies: list[Callable[[], None]] = []
        self._launch(i, _storage.target(buffer, copies))
        if copies:
            self._copies[i] = copies[0]

    def wait(self, i: int, timeout: float | None = None) -> None:
        """Wait until layer i, which was launched, is there. Raises LeaseError if it came too late, and must be read again."""
        super().wait(i, timeout)
        self._copy(i)

    def _copy(self, i: int) -> None:
        copy = self._copies.pop(i, None)
        if copy is not None:
            copy()

    def close(self) -> None:
        """End the reader. Raises LeaseError, or MissingError if the checksum is wrong, if what was waited for is not what was stored."""
        if self._handle:
            self._end(0)
