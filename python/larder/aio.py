"""The client of a pool for asyncio: :class:`larder.Client`'s methods as coroutines.

    async with larder.aio.AsyncClient(["10.0.0.5:7400"]) as client:
        await asyncio.gather(*(client.put(key, value) for key, value in blocks.items()))
        async with client.view("prompt/42/block/0") as memory:
            ...

No thread waits for a call: the library carries all of them out, and tells of their ends by an eventfd, which the event loop watches. One
look there serves all calls that have ended meanwhile. A pool of threads, each in a call of Client's, does fewer calls in a second, and
takes the GIL from the loop for each; ``python -m larder.bench`` measures both.

A coroutine that is cancelled gives its call up, and ends when the call has: its memory is free then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import warnings
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from . import _lib, _storage
from ._storage import Item, Key, Prefix, PrefixContext, Request, Requests, Value
from .client import Allocation, LayerReader, LayerWriter, View, Views
from .errors import InvalidArgumentError, LarderError

T = TypeVar("T")

# How many calls are taken from the queue at a time; those that are left ring again.
_TAKEN = 1024


class Opening(Generic[T]):
    """What comes when it is awaited, or, for a block, when the block is entered by async with."""

    def __init__(self, opening: Awaitable[T]) -> None:
        self._opening = opening
        self._object: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._opening.__await__()

    async def __aenter__(self) -> Any:
        self._object = await self._opening
        return await self._object.__aenter__() if self._object is not None else None

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._object is not None:
            await self._object.__aexit__(kind, value, trace)


class _Call:
    """A call that is under way."""

    __slots__ = ("error", "future", "over", "progress", "request")

    def __init__(self, request: Request, future: asyncio.Future[Any], progress: array[int]) -> None:
        self.request = request
        self.future = future
        self.progress = progress
        self.over: asyncio.Future[None] | None = None  # for who waits for the end of what was cancelled
        self.error: BaseException | None = None  # that is not the call's own


class AsyncClient(Requests):
    """A client of a pool, for the event loop that opens it: ``async with``, or ``await client.open()`` and ``await client.close()``.

    Its arguments are those of :class:`larder.Client`, but for on_revoke.
    """

    def __init__(
        self, masters: Sequence[str], *, instance: str | None = None, tenant: str = "default", page_size: int = 0, region_size: int = 0,
        ttl: float = 0, checksums: bool = False, replicas: int = 0, write_through: str = "", tier: str = "", near: Sequence[str] = (),
        avoid: Sequence[str] = (), prefault: bool = False, timeout: float = 0, call_timeout: float = 0, connections: int = 0,
        token: str = "",
    ) -> None:  # fmt: skip
        self._config = _storage.configuration(
            masters=masters, near=near, avoid=avoid, instance=instance or "", tenant=tenant, page_size=page_size,
            region_size=region_size, ttl=ttl, checksums=checksums, replicas=replicas, write_through=write_through, tier=tier,
            prefault=prefault, timeout=timeout, call_timeout=call_timeout, connections=connections, token=token,
        )  # fmt: skip
        self._handle = 0
        self._queue = 0
        self._bell = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[int, _Call] = {}  # by handle
        self._taken = array("Q", bytes(8 * _TAKEN))

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not _lib.forked():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            with contextlib.suppress(Exception):  # the interpreter may be ending
                _lib.started("larder_client_close", self._handle, 0)
                self._end_queue()

    def __repr__(self) -> str:
        return f"<larder.aio.AsyncClient {self._handle or 'closed'}>"

    async def __aenter__(self) -> AsyncClient:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect to the pool, and open a session."""
        if self._handle:
            raise InvalidArgumentError("the client is open")
        loop = asyncio.get_running_loop()
        _lib.library()
        # Opening and closing wait in one of the loop's threads. No other call does.
        handle = await loop.run_in_executor(None, _lib.job, "larder_client_open", self._config, len(self._config))
        bell = -1
        try:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._queue = _lib.started("larder_queue_open", bell)
            loop.add_reader(bell, self._ready)
        except BaseException:
            if bell >= 0:
                os.close(bell)
            await loop.run_in_executor(None, _storage.close, handle, 1)
            raise
        self._loop, self._bell, self._handle = loop, bell, handle

    @property
    def closed(self) -> bool:
        """Whether it was closed, or not opened yet."""
        return not self._handle

    async def close(self, timeout: float = 5) -> bool:
        """End the session, as Client.close does. Calls that are under way fail."""
        if not self._handle:
            return True
        if _lib.forked():
            _lib.library()  # says so
        handle, self._handle = self._handle, 0
        try:
            return await self._here().run_in_executor(None, _storage.close, handle, timeout)
        finally:
            for call in list(self._calls.values()):
                await self._over(call)
            self._end_queue()

    def _here(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or asyncio.get_running_loop() is not self._loop:
            raise InvalidArgumentError("the client belongs to another event loop: open one for each loop")
        return self._loop

    def _end_queue(self) -> None:
        queue, self._queue = self._queue, 0
        bell, self._bell = self._bell, -1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(bell)
        if queue:
            _lib.call("larder_queue_close", queue)
            os.close(bell)

    # Calls.

    async def _run(self, request: Request) -> Any:
        """Make a call, and wait for its end."""
        loop = self._here()
        progress = _storage.new_progress()
        request.begin("larder_client_start", self._queue, progress)
        call = _Call(request, loop.create_future(), progress)
        self._calls[progress[1]] = call
        try:
            return await call.future
        except asyncio.CancelledError:
            await self._give_up(call)
            raise

    async def _give_up(self, call: _Call) -> None:
        """Cancel a call, and wait until it uses no memory any more, which is soon."""
        with contextlib.suppress(LarderError):
            _lib.call("larder_client_cancel", call.progress[1])
        await self._over(call)

    async def _over(self, call: _Call) -> None:
        while call.progress[1] in self._calls:
            if call.over is None:
                call.over = self._here().create_future()
            with contextlib.suppress(asyncio.CancelledError):  # it must end first
                await asyncio.shield(call.over)

    def _ready(self) -> None:
        """Take in what the queue has."""
        count = ctypes.c_int64()
        _lib.call("larder_queue_take", self._queue, self._taken.buffer_info()[0], _TAKEN, count)
        for handle in self._taken[: count.value]:
            call = self._calls.get(handle)
            if call is not None:
                self._look(handle, call)

    def _look(self, handle: int, call: _Call) -> None:
        """Take in how far a call has come, which the library has written."""
        if not _storage.has_ended(call.progress):
            if _storage.wants(call.progress) and call.error is None:
                self._bring(call)
            return
        del self._calls[handle]
        future, error, result = call.future, call.error, None
        try:
            if error is not None or future.done():
                call.request.discard(call.progress)
            else:
                result = call.request.finish(call.progress)
        except Exception as e:  # whoever waits for the call must hear of it
            error = e
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        if call.over is not None and not call.over.done():
            call.over.set_result(None)

    def _bring(self, call: _Call) -> None:
        try:
            call.request.bring(call.progress)
        except MemoryError as e:
            call.error = e
            _lib.call("larder_client_cancel", call.progress[1])

    # Values.

    async def put(
        self, key: Key, value: Value, *, ttl: float = 0, replicas: int = 0, prefix: Prefix | None = None,
        shard: tuple[int, int] | None = None, timeout: float | None = None,
    ) -> bool:  # fmt: skip
        """Client.put. The value must not change before it is done."""
        return bool(await self._run(self._put_request(key, value, ttl, replicas, prefix, shard, timeout)))

    async def put_batch(self, items: Iterable[tuple[Key, Value] | Item], *, ttl: float = 0, timeout: float | None = None) -> list[bool]:
        """Client.put_batch."""
        answer: list[bool] = await self._run(self._put_batch_request(items, ttl, timeout))
        return answer

    async def get(self, key: Key, *, timeout: float | None = None) -> bytes | None:
        """Client.get."""
        value: bytes | None = await self._run(self._get_request(key, timeout))
        return value

    async def get_batch(self, keys: Sequence[Key], *, timeout: float | None = None) -> list[bytes | None]:
        """Client.get_batch."""
        values: list[bytes | None] = await self._run(self._get_batch_request(keys, timeout))
        return values

    async def get_into(self, key: Key, buffer: Value, *, timeout: float | None = None) -> int | None:
        """Client.get_into. The buffer must be left alone until it is done."""
        length: int | None = await self._run(self._get_into_request(key, buffer, timeout))
        return length

    async def get_batch_into(self, keys: Sequence[Key], buffers: Sequence[Value], *, timeout: float | None = None) -> list[int | None]:
        """Client.get_batch_into."""
        lengths: list[int | None] = await self._run(self._get_batch_into_request(keys, buffers, timeout))
        return lengths

    def view(self, key: Key, *, timeout: float | None = None) -> Opening[AsyncView]:
        """Client.view, for async with; awaited, an AsyncView."""

        async def opening() -> AsyncView:
            return AsyncView(await self._run(self._view_request(_storage.pack_one(key), 1, False, timeout)))

        return Opening(opening())

    def view_batch(self, keys: Sequence[Key], *, stop_at_miss: bool = False, timeout: float | None = None) -> Opening[AsyncViews]:
        """Client.view_batch, for async with; awaited, AsyncViews."""

        async def opening() -> AsyncViews:
            return AsyncViews(await self._run(self._view_request(*_storage.pack(keys), stop_at_miss, timeout)))

        return Opening(opening())

    # Keys.

    async def exists(self, key: Key, *, timeout: float | None = None) -> bool:
        """Client.exists."""
        return bool(await self._run(self._key_request(_storage.EXISTS, key, timeout)))

    async def exists_batch(self, keys: Sequence[Key], *, timeout: float | None = None) -> list[bool]:
        """Client.exists_batch."""
        answer: list[bool] = await self._run(self._keys_request(_storage.EXISTS, keys, timeout))
        return answer

    async def prefix_match(
        self, hashes: Sequence[int], context: PrefixContext | None = None, *, members: int = 0, timeout: float | None = None
    ) -> int:
        """Client.prefix_match."""
        return int(await self._run(self._match_request(hashes, context, members, timeout)))

    async def delete(self, key: Key, *, timeout: float | None = None) -> bool:
        """Client.delete."""
        return bool(await self._run(self._key_request(_storage.DELETE, key, timeout)))

    async def delete_batch(self, keys: Sequence[Key], *, timeout: float | None = None) -> list[bool]:
        """Client.delete_batch."""
        answer: list[bool] = await self._run(self._keys_request(_storage.DELETE, keys, timeout))
        return answer

    def pin(self, key: Key, *, kind: str = "session", owner: str = "", ttl: float = 0, timeout: float | None = None) -> Opening[AsyncPin]:
        """Client.pin: awaited, an AsyncPin, which is true if the key is held; or for async with, which unpins it."""

        async def opening() -> AsyncPin:
            held = await self._run(self._key_request(_storage.PIN, key, timeout, _storage.pin_options(kind, owner, ttl)))
            return AsyncPin(self, key, kind, owner, bool(held))

        return Opening(opening())

    async def pin_batch(
        self, keys: Sequence[Key], *, kind: str = "session", owner: str = "", ttl: float = 0, timeout: float | None = None
    ) -> list[bool]:
        """Client.pin_batch."""
        options = _storage.pin_options(kind, owner, ttl)
        answer: list[bool] = await self._run(self._keys_request(_storage.PIN, keys, timeout, options))
        return answer

    async def unpin(self, key: Key, *, kind: str = "session", owner: str = "", timeout: float | None = None) -> bool:
        """Client.unpin."""
        return bool(await self._run(self._key_request(_storage.UNPIN, key, timeout, _storage.pin_options(kind, owner))))

    async def unpin_batch(self, keys: Sequence[Key], *, kind: str = "session", owner: str = "", timeout: float | None = None) -> list[bool]:
        """Client.unpin_batch."""
        options = _storage.pin_options(kind, owner)
        answer: list[bool] = await self._run(self._keys_request(_storage.UNPIN, keys, timeout, options))
        return answer

    async def clear(self, prefix: Key | None = None, *, timeout: float | None = None) -> None:
        """Client.clear."""
        await self._run(self._control_request("clear", timeout, prefix=prefix or b""))

    async def list_keys(self, prefix: Key = b"", *, timeout: float | None = None) -> AsyncIterator[bytes]:
        """Client.list_keys, for async for."""
        cursor = 0
        while True:
            page = await self._run(self._control_request("list", timeout, prefix=prefix, cursor=cursor, limit=_storage.PAGE))
            for key in _storage.listed(page):
                yield key
            cursor = page["cursor"]
            if not cursor:
                return

    # Values by layers.

    def put_layers(
        self, key: Key, sizes: Sequence[int], *, ttl: float = 0, prefix: Prefix | None = None, shard: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> Opening[AsyncLayerWriter]:  # fmt: skip
        """Client.put_layers, for async with; awaited, an AsyncLayerWriter."""

        async def opening() -> AsyncLayerWriter:
            attrs = _storage.attributes(ttl, 0, prefix, shard)
            handle = await self._run(self._layers_request(_storage.PUT_LAYERS, key, sizes, timeout, attrs))
            return AsyncLayerWriter(handle, timeout, self._run)

        return Opening(opening())

    def get_layers(self, key: Key, sizes: Sequence[int], *, timeout: float | None = None) -> Opening[AsyncLayerReader | None]:
        """Client.get_layers, for async with; awaited, an AsyncLayerReader, or None."""

        async def opening() -> AsyncLayerReader | None:
            handle = await self._run(self._layers_request(_storage.GET_LAYERS, key, sizes, timeout))
            return AsyncLayerReader(handle, timeout, self._run) if handle >= 0 else None

        return Opening(opening())

    # Values in place.

    def alloc(self, size: int, *, timeout: float | None = None) -> Opening[AsyncAllocation]:
        """Client.alloc, for async with; awaited, an AsyncAllocation."""

        async def opening() -> AsyncAllocation:
            return (await self.alloc_batch([size], timeout=timeout))[0]

        return Opening(opening())

    async def alloc_batch(self, sizes: Sequence[int], *, timeout: float | None = None) -> list[AsyncAllocation]:
        """Client.alloc_batch."""
        places: list[list[int]] = await self._run(self._alloc_request(sizes, timeout))
        return [AsyncAllocation(self, *place) for place in places]

    async def store_batch(self, keys: Sequence[Key], allocations: Sequence[AsyncAllocation], *, timeout: float | None = None) -> list[bool]:
        """Client.store_batch."""
        answer: list[bool] = await self._run(self._store_request(keys, [a._take() for a in allocations], timeout))
        return answer

    # What there is.

    async def stats(self) -> dict[str, Any]:
        """Client.stats."""
        return _storage.snaked(await self._run(self._control_request("stats")))

    async def server_stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Client.server_stats."""
        return _storage.reply(await self._run(self._control_request("server_stats", timeout)))

    async def usage(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Client.usage."""
        return _storage.reply(await self._run(self._control_request("usage", timeout)))


class AsyncViews(Views):
    """larder.Views for async with. close is no coroutine: it does not wait."""

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, value, trace)


class AsyncView(AsyncViews, View):
    """larder.View for async with."""


class AsyncPin:
    """larder.Pin, with coroutines."""

    def __init__(self, client: AsyncClient, key: Key, kind: str, owner: str, held: bool) -> None:
        self._client = client
        self._key = key
        self._spec = (kind, owner)
        self._held = held

    def __bool__(self) -> bool:
        return self._held

    async def __aenter__(self) -> AsyncPin:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._held and not self._client.closed:
            await self.unpin()

    async def unpin(self) -> bool:
        """Undo it. Returns whether it was there."""
        self._held = False
        kind, owner = self._spec
        return await self._client.unpin(self._key, kind=kind, owner=owner)


class AsyncAllocation(Allocation):
    """larder.Allocation, whose store is a coroutine."""

    async def __aenter__(self) -> AsyncAllocation:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    async def store(self, key: Key, *, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Allocation.store."""
        stored: list[bool] = await self._client.store_batch([key], [self], timeout=timeout)
        return stored[0]


_Run = Callable[[Request], Awaitable[Any]]


class AsyncLayerWriter(LayerWriter):
    """larder.LayerWriter, whose waits are coroutines."""

    def __init__(self, handle: int, timeout: float | None, run: _Run) -> None:
        super().__init__(handle, timeout)
        self._run = run

    async def __aenter__(self) -> AsyncLayerWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._handle:
            await (self.finish() if kind is None else self.abort())

    async def wait(self, i: int, timeout: float | None = None) -> None:  # type: ignore[override]
        """LayerWriter.wait."""
        await self._run(self._wait_request(i, timeout))
        self._keep.pop(i, None)

    async def finish(self) -> bool:  # type: ignore[override]
        """LayerWriter.finish."""
        try:
            return bool(await self._run(self._end_request(1)))
        finally:
            self._keep.clear()

    async def abort(self) -> None:  # type: ignore[override]
        """LayerWriter.abort."""
        if self._handle:
            try:
                await self._run(self._end_request(0))
            finally:
                self._keep.clear()


class AsyncLayerReader(LayerReader):
    """larder.LayerReader, whose waits are coroutines."""

    def __init__(self, handle: int, timeout: float | None, run: _Run) -> None:
        super().__init__(handle, timeout)
        self._run = run

    async def __aenter__(self) -> AsyncLayerReader:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            await self.close()
            return
        with contextlib.suppress(LarderError):  # what is under way says more
            await self.close()

    async def wait(self, i: int, timeout: float | None = None) -> None:  # type: ignore[override]
        """LayerReader.wait."""
        await self._run(self._wait_request(i, timeout))
        self._keep.pop(i, None)
        self._copy(i)

    async def close(self) -> None:  # type: ignore[override]
        """LayerReader.close."""
        if self._handle:
            try:
                await self._run(self._end_request(0))
            finally:
                self._keep.clear()
