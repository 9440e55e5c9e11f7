"""The interface of Maru's handler on a session of larder's own: programs that were written for ``maru.MaruHandler`` change an import.

    from larder.maru import MaruConfig, MaruHandler

    with MaruHandler(MaruConfig(server_url="tcp://10.0.0.5:7400")) as handler:
        handle = handler.alloc(size=len(data))
        handle.buf[:] = data
        handler.store(key="k", handle=handle)
        info = handler.retrieve(key="k")          # info.view is a memoryview in place

An unmodified client of Maru's can use a larder server, too (``larder serve --maru``), but that protocol has no way to tell it that
something was evicted. Here there is one:

- When no page is free, the master evicts by the policy that the server was started with: this client's own coldest entries, in the
  same exchange that asks for memory, as many as are missing; then regions whose owners are gone; then a region of another client.
- A client that loses a region is told, moves what it was storing there, and forgets the region: ``on_region_removed``, and
  ``get_owned_region_ids``.
- What retrieve returns is under a lease, which is renewed for as long as the memoryview, or anything made of it, lives. When the master
  needs that memory all the same the lease ends, in a second at most: read first, and then ask ``info.valid``, or call
  ``info.release()``, which raises LeaseError. What is pinned stays.

What else is different: ``server_url`` names masters of larder (several, with commas); memory comes in regions of ``pool_size``, of which
the server's ``max_regions_per_instance`` says how many there may be, not ``auto_expand``; memory of retrieve is read-only; a pin ends
with its session at the latest. rm_address, use_async_rpc, max_inflight, eager_map and enable_stats are accepted and do nothing.
"""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from . import _storage
from .client import Allocation, Client
from .errors import ClosedError, LarderError, LeaseError, NoSpaceError

logger = logging.getLogger(__name__)
logger.addHandler(logging.NullHandler())  # who wants to read it says so

_PAGE = 4096  # what page sizes are multiples of

# How many values are retrieved in one exchange.
_VIEWED = 4096

# How long the master may take to answer a healthcheck, in seconds.
_HEALTH = 2.0


@dataclass
class MaruConfig:
    """How a handler behaves. The fields are those of Maru's configuration, and tenant.

    Attributes:
        server_url: masters of larder: tcp://host:port or unix:/path; several with commas in between.
        instance_id: names the client; made if it is None.
        pool_size: bytes that are asked for at a time.
        chunk_size_bytes: the size of a page, which is the longest value.
        auto_connect: ``with`` connects.
        timeout_ms: for which a call may take, its repetitions included.
        tenant: whose entries these are.
    """

    server_url: str = "tcp://localhost:7400"
    instance_id: str | None = None
    pool_size: int = 100 << 20
    chunk_size_bytes: int = 1 << 20
    auto_connect: bool = True
    timeout_ms: int = 2000
    use_async_rpc: bool = True
    max_inflight: int = 64
    eager_map: bool = True
    auto_expand: bool = True
    expand_size: int | None = None
    rm_address: str = ""
    enable_stats: bool = False
    tenant: str = "default"

    def __post_init__(self) -> None:
        if self.instance_id is None:
            self.instance_id = str(uuid.uuid4())
        if self.chunk_size_bytes <= 0:
            raise ValueError(f"chunk_size_bytes is {self.chunk_size_bytes}: it must be positive")
        if self.pool_size < self.chunk_size_bytes:
            raise ValueError(f"pool_size is {self.pool_size}: it must be chunk_size_bytes ({self.chunk_size_bytes}) at least")
        if self.expand_size is not None and self.expand_size < self.chunk_size_bytes:
            raise ValueError(f"expand_size is {self.expand_size}: it must be chunk_size_bytes ({self.chunk_size_bytes}) at least")

    @property
    def masters(self) -> list[str]:
        """The addresses in server_url."""
        return [url.strip().removeprefix("tcp://") for url in self.server_url.split(",")]


@dataclass(eq=False)
class AllocHandle:
    """A page that was allocated: fill buf, and store it."""

    buf: memoryview
    region_id: int
    page_index: int
    size: int  # in bytes
    _allocation: Allocation = field(repr=False)
    _key: str | bytes | None = field(default=None, repr=False)  # that it was stored under

    @property
    def stored(self) -> bool:
        """Whether it was stored."""
        return self._key is not None


@dataclass(eq=False)
class MemoryInfo:
    """A value in place."""

    view: memoryview
    region_id: int = 0
    page_index: int = 0
    _lease: _storage.Lease | None = field(default=None, repr=False)

    @property
    def valid(self) -> bool:
        """Whether what was read from the view until now is what was stored."""
        try:
            self._check()
        except LeaseError:
            return False
        return True

    def release(self) -> None:
        """Let the value go before the memoryview is garbage. Raises LeaseError if what was read may not be what was stored."""
        try:
            self._check()
        finally:
            self._lease = None
            self.view.release()

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.check()


class MaruHandler:
    """Stores and retrieves values of at most a page each. Its methods may be called by several threads at once.

    Those that Maru's handler answers with False, None or a list of these when the server fails do so here, and log why.
    """

    def __init__(self, config: MaruConfig | None = None) -> None:
        self._config = config or MaruConfig()
        self._chunk = self._config.chunk_size_bytes
        self._page = -(-self._chunk // _PAGE) * _PAGE
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._regions: dict[int, int] = {}  # those that this client is known to have: pages
        self._handles: weakref.WeakSet[AllocHandle] = weakref.WeakSet()
        self._on_added: Callable[[int, int], None] | None = None
        self._on_removed: Callable[[int], None] | None = None

    # Connection.

    def connect(self) -> bool:
        """Connect, and get a first region. Returns whether that has worked."""
        if self._client is not None:
            return True
        pool = max(self._config.pool_size // self._page, 1) * self._page
        try:
            self._client = Client(
                self._config.masters, instance=self._config.instance_id, tenant=self._config.tenant, page_size=self._page,
                region_size=pool, timeout=self._config.timeout_ms / 1000, on_revoke=self._revoked,
            )  # fmt: skip
            self.free(self.alloc(1))
        except (LarderError, ValueError) as e:
            logger.error("cannot connect to %s: %s", self._config.server_url, e)
            self.close()
            return False
        return True

    def close(self) -> None:
        """Give all regions back: what was stored stays in the pool. Values that were retrieved stay readable while they are held."""
        client, self._client = self._client, None
        if client is None:
            return
        if not client.close():
            logger.warning("no master has heard of the end of %s: the pool finds out by itself", self.instance_id)
        with self._lock:
            self._regions.clear()

    def __enter__(self) -> MaruHandler:
        if self._config.auto_connect:
            self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether connect has succeeded, and close was not called since."""
        return self._client is not None

    @property
    def instance_id(self) -> str:
        """The name by which the pool knows this client."""
        return str(self._config.instance_id)

    def healthcheck(self) -> bool:
        """Whether a master answers."""
        client = self._client
        if client is None:
            return False
        try:
            client.usage(timeout=_HEALTH)
        except LarderError as e:
            logger.warning("healthcheck failed: %s", e)
            return False
        return True

    def _connected(self) -> Client:
        client = self._client
        if client is None:
            raise RuntimeError("not connected: call connect() first")
        return client

    # Pages.

    def alloc(self, size: int) -> AllocHandle:
        """A page to write to. When none is free, more memory is asked for, or entries are evicted.

        Raises ValueError if size is more than a page, or if nothing can be evicted.
        """
        return self.batch_alloc([size])[0]

    def batch_alloc(self, sizes: Sequence[int]) -> list[AllocHandle]:
        """Pages to write to: what is missing is asked for, or evicted, in one exchange. All are allocated, or none is."""
        client = self._connected()
        for size in sizes:
            if not 0 < size <= self._chunk:
                raise ValueError(f"a value of {size} bytes: it has 1 to chunk_size_bytes, {self._chunk}")
        try:
            allocations = client.alloc_batch(sizes)
        except NoSpaceError as e:
            raise ValueError(f"cannot allocate {len(sizes)} pages: {e}") from e
        except ClosedError as e:
            raise RuntimeError("the handler is closing") from e
        handles = [AllocHandle(a.memory, a.region, a.offset // self._page, len(a), a) for a in allocations]
        added = []
        with self._lock:
            self._handles.update(handles)
            for a in allocations:
                if a.region not in self._regions:
                    self._regions[a.region] = a.region_size // self._page
                    added.append(a.region)
        for region in added:
            self._added(region)
        return handles

    def free(self, handle: AllocHandle) -> None:
        """Give a page back: unused, or, if it was stored, by deleting its key. Raises ValueError if that was done before."""
        client = self._connected()
        with self._lock:
            if handle not in self._handles:
                raise ValueError("the page was given back before, or is not this handler's")
            self._handles.discard(handle)
        if handle._key is not None:
            client.delete(handle._key)
        else:
            handle._allocation.abort()

    # Values.

    def store(self, key: str, handle: AllocHandle | Any) -> bool:
        """Register a page that was filled, or store a copy of a buffer. Returns whether the key is held: also if it was before, when the
        page is given back."""
        return self.batch_store([key], [handle])[0]

    def batch_store(self, keys: Sequence[str], handles: Sequence[AllocHandle | Any]) -> list[bool]:
        """Register many pages, or store copies of buffers: for these, memory is made for all that are missing in one exchange."""
        client = self._connected()
        if len(keys) != len(handles):
            raise ValueError(f"{len(keys)} keys and {len(handles)} handles: a handle for each")
        held = [False] * len(keys)
        pages = [i for i, h in enumerate(handles) if isinstance(h, AllocHandle)]
        copies = [i for i, h in enumerate(handles) if not isinstance(h, AllocHandle)]
        self._store_pages(client, keys, handles, pages, held)
        if copies:
            try:
                client.put_batch([(keys[i], handles[i]) for i in copies])
                for i in copies:
                    held[i] = True
            except LarderError as e:
                logger.error("cannot store: %s", e)
                for i, there in zip(copies, self.batch_exists([keys[i] for i in copies]), strict=True):
                    held[i] = there
        return held

    def _store_pages(
        self, client: Client, keys: Sequence[str], handles: Sequence[AllocHandle], which: Sequence[int], held: list[bool]
    ) -> None:
        """Register pages."""
        with self._lock:
            for i in which:
                if handles[i] not in self._handles or handles[i]._key is not None:
                    raise ValueError(f"the page for {keys[i]!r} was stored or given back before, or is not this handler's")
                handles[i]._key = keys[i]
        outcome: list[int] = []
        if which:
            request = client._store_request([keys[i] for i in which], [handles[i]._allocation._take() for i in which], None)
            try:
                _storage.run(request)
            except LarderError as e:
                logger.error("cannot store: %s", e)
            outcome = list(request.results)
        for i, result in zip(which, outcome, strict=True):
            held[i] = result >= 0
            if result != 1:  # the page is free again
                with self._lock:
                    self._handles.discard(handles[i])

    def retrieve(self, key: str) -> MemoryInfo | None:
        """A value in place; None if the key is not held."""
        return self.batch_retrieve([key])[0]

    def batch_retrieve(self, keys: Sequence[str]) -> list[MemoryInfo | None]:
        """Values in place, with one exchange for each 4,096. What it returns is kept in place together, until the last is let go."""
        client = self._connected()
        found: list[MemoryInfo | None] = []
        try:
            for first in range(0, len(keys), _VIEWED):
                packed, n = _storage.pack(keys[first : first + _VIEWED])
                mapped = _storage.run(client._view_request(packed, n, False, None))
                for memory, place in zip(mapped.memory, mapped.places, strict=True):
                    hit = memory is not None and place is not None
                    found.append(MemoryInfo(memory, place[0], place[1] // self._page, mapped.lease) if hit else None)
        except LarderError as e:
            logger.error("cannot retrieve: %s", e)
        return found + [None] * (len(keys) - len(found))

    def exists(self, key: str) -> bool:
        """Whether a key is held."""
        return self.batch_exists([key])[0]

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is held."""
        return self._flags("exists", keys, self._connected().exists_batch)

    def delete(self, key: str) -> bool:
        """Delete a key. Returns whether it was: one that is pinned is not."""
        return self._flags("delete", [key], self._connected().delete_batch)[0]

    def batch_delete(self, keys: Sequence[str]) -> list[bool]:
        """Delete many keys."""
        return self._flags("delete", keys, self._connected().delete_batch)

    def pin(self, key: str) -> bool:
        """Keep a key from being evicted and deleted. Returns whether it is held, and so is pinned now."""
        return self.batch_pin([key])[0]

    def batch_pin(self, keys: Sequence[str]) -> list[bool]:
        """Pin keys up to the first that is not held; it and those behind it are not pinned."""
        client = self._connected()
        pinned = self._flags("pin", keys, client.pin_batch)
        if False in pinned:
            first = pinned.index(False)
            beyond = [key for key, yes in zip(keys[first:], pinned[first:], strict=True) if yes]
            if beyond:
                self._flags("unpin", beyond, client.unpin_batch)
            pinned[first:] = [False] * (len(pinned) - first)
        return pinned

    def unpin(self, key: str) -> bool:
        """Undo a pin. Returns whether there was one."""
        return self.batch_unpin([key])[0]

    def batch_unpin(self, keys: Sequence[str]) -> list[bool]:
        """Undo many pins."""
        return self._flags("unpin", keys, self._connected().unpin_batch)

    def _flags(self, what: str, keys: Sequence[str], call: Callable[[Sequence[str]], list[bool]]) -> list[bool]:
        try:
            return call(keys)
        except LarderError as e:
            logger.error("cannot %s: %s", what, e)
            return [False] * len(keys)

    # What there is.

    def get_chunk_size(self) -> int:
        """The size of a page in bytes."""
        return self._chunk

    def get_owned_region_ids(self) -> list[int]:
        """The regions that this client has, as far as it has used them."""
        with self._lock:
            return sorted(self._regions)

    def get_region_page_count(self, region_id: int) -> int | None:
        """The pages of a region of this client's; None if it has no such region."""
        with self._lock:
            return self._regions.get(region_id)

    def get_buffer_view(self, region_id: int, offset: int, size: int) -> memoryview | None:
        """Memory of a page that was allocated and not stored yet; None for any other."""
        with self._lock:
            for h in self._handles:
                start = offset - h.page_index * self._page
                if h.region_id == region_id and not h.stored and start >= 0 and start + size <= h.size:
                    return h.buf[start : start + size]
        return None

    def get_stats(self) -> dict[str, Any]:
        """The server's counters, and this client's."""
        client = self._connected()
        server, own = client.server_stats(), client.stats()
        return {
            "kv_manager": {name: server[name] for name in ("total_entries", "total_size")},
            "allocation_manager": {name: server[name] for name in ("num_allocations", "total_allocated", "active_clients")},
            "stats_manager": {"clients": server["clients"] or {}},
            "store_regions": {"num_regions": own["regions"], "total_free": own["free_pages"], "total_bytes": own["bytes"]},
            "eviction": {
                "own_entries": own["evicted"], "by_others": own["freed"], "regions_lost": own["revoked"], "requests": own["allocs"],
                "by_phase": own["by_phase"],
            },
        }  # fmt: skip

    def set_on_region_added(self, callback: Callable[[int, int], None] | None) -> None:
        """Have callback(region_id, page_count) called for each region that this client has, and gets."""
        self._on_added = callback
        for region in self.get_owned_region_ids():
            self._added(region)

    def set_on_region_removed(self, callback: Callable[[int], None] | None) -> None:
        """Have callback(region_id) called for each region that is taken away, by a thread of the handler."""
        self._on_removed = callback

    def _added(self, region: int) -> None:
        callback, pages = self._on_added, self.get_region_page_count(region)
        if callback is not None and pages is not None:
            callback(region, pages)

    def _revoked(self, event: dict[str, Any]) -> None:
        """Forget a region that the master has taken away; the client has given it up."""
        region = event["region"]
        with self._lock:
            known = self._regions.pop(region, None) is not None
            gone = [h for h in self._handles if h.region_id == region]
            for h in gone:
                if h.stored:
                    self._handles.discard(h)
        logger.info("region %d was taken away (%s): %d pages were in use", region, event["reason"], len(gone))
        if known and self._on_removed is not None:
            self._on_removed(region)
