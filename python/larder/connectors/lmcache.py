"""A storage plugin of LMCache, which it loads by name. In LMCache's configuration::

    storage_plugins: ["larder"]
    extra_config:
      storage_plugin.larder.module_path: larder.connectors.lmcache
      storage_plugin.larder.class_name: LarderBackend
      larder.masters: "10.0.0.5:7400"

A chunk of LMCache, or a layer of one, is one value. It is copied between LMCache's own memory of the host, which is pinned where there
is a GPU, and the pool: once. What LMCache calls a pin is a soft pin for at most :data:`PIN_TTL` seconds here, so that one which it
forgets keeps nothing for good.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

import larder

from ._link import Link, Settings, Writer, key_of, logger, scope

# Seconds for which a pin holds: what LMCache pins at a lookup it loads next.
PIN_TTL = 60.0

Stored = Callable[[CacheEngineKey], None]


class LarderBackend(StoragePluginInterface):
    """Chunks of an LMCache in a pool of Larder's. What cannot be read in time is a miss, and what cannot be stored is dropped."""

    def __init__(
        self, config: Any = None, metadata: Any = None, local_cpu_backend: Any = None, loop: Any = None, dst_device: str = "cpu"
    ) -> None:
        super().__init__(dst_device=dst_device, config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, loop=loop)
        if config is None or metadata is None:
            raise ValueError("LMCache gives a storage plugin its configuration and the metadata of its engine: both are needed")
        settings = Settings.of(config.extra_config)
        self._chunk = _Chunk(config, metadata)
        self._scope = scope("lmcache", settings.namespace, self._chunk.what)
        # Workers of a model with MLA hold the same chunks: all use the first one's, which it alone stores.
        shared = metadata.use_mla and metadata.world_size > 1
        self._first_only = shared and config.get_extra_config_value("remote_enable_mla_worker_id_as0", True)
        self._stores = not self._first_only or metadata.worker_id == 0
        self._link = Link(settings)
        self._writer = Writer(self._link)
        self._lock = threading.Lock()
        self._storing: set[CacheEngineKey] = set()

    def __str__(self) -> str:
        return type(self).__name__

    # Storing.

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Whether key waits for being stored."""
        with self._lock:
            return key in self._storing

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj], transfer_spec: Any = None,
        on_complete_callback: Stored | None = None,
    ) -> list[Future] | None:  # fmt: skip
        """Store chunks, in the background. Returns a future of the batch; None if there is nothing to store, or no room to wait."""
        if not self._stores:
            return None
        with self._lock:
            batch = [(key, obj) for key, obj in zip(keys, objs) if key not in self._storing]
            self._storing.update(key for key, _ in batch)
        if not batch:
            return None
        for _, obj in batch:
            obj.ref_count_up()
        done: Future = Future()

        def release() -> None:
            with self._lock:
                self._storing.difference_update(key for key, _ in batch)
            for _, obj in batch:
                obj.ref_count_down()
            if not done.done():
                done.set_result(None)

        size = sum(obj.get_size() for _, obj in batch)
        admitted = self._writer.offer(size, lambda: self._store(batch, on_complete_callback), release)
        return [done] if admitted else None

    async def async_batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj], transfer_spec: Any = None,
        on_complete_callback: Stored | None = None,
    ) -> None:  # fmt: skip
        """As batched_submit_put_task."""
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def _store(self, batch: list[tuple[CacheEngineKey, MemoryObj]], stored: Stored | None) -> None:
        names = [self._name(key) for key, _ in batch]

        def store(client: larder.Client, timeout: float) -> bool:
            held = client.exists_batch(names, timeout=timeout)
            items = [(name, obj.byte_array) for name, (_, obj), there in zip(names, batch, held) if not there]
            if items:
                client.put_batch(items, timeout=timeout)
            return True

        if self._link.store("store chunks", store, False) and stored is not None:
            for key, _ in batch:
                try:
                    stored(key)
                except Exception:  # LMCache's own: the chunk is stored
                    logger.exception("LMCache's callback has failed for %s", key)

    # Reading.

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """A chunk, in memory of LMCache's; None if it is not held."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Chunks, each in memory of LMCache's; None for those that are not held."""
        if self.local_cpu_backend is None or not keys:  # None in a scheduler, which loads nothing
            return [None] * len(keys)
        names = [self._name(key) for key in keys]
        allocate = self.local_cpu_backend.batched_allocate
        objs = allocate(self._chunk.shapes, self._chunk.dtypes, len(keys), self._chunk.format, busy_loop=False)
        if objs is None:
            self._link.say("memory", "no memory of LMCache's for %d chunks: raise max_local_cpu_size", len(keys))
            return [None] * len(keys)

        def read(client: larder.Client, timeout: float) -> list[int | None]:
            return client.get_batch_into(names, [obj.byte_array for obj in objs], timeout=timeout)

        nothing: list[int | None] = [None] * len(keys)
        lengths = self._link.ask("read chunks", read, nothing, self._link.settings.load_timeout)
        return [self._taken(obj, length) for obj, length in zip(objs, lengths)]

    def _taken(self, obj: MemoryObj, length: int | None) -> MemoryObj | None:
        if length is not None and self._chunk.fit(obj, length):
            return obj
        obj.ref_count_down()
        return None

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The chunks that are held, from the first on."""
        objs = await asyncio.to_thread(self.batched_get_blocking, keys)
        n = objs.index(None) if None in objs else len(objs)
        for obj in objs[n:]:
            if obj is not None:
                obj.ref_count_down()
        return [obj for obj in objs[:n] if obj is not None]

    # Keys.

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether key is held, and pinned if pin."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many of keys are held, from the first on, and pinned if pin."""
        names = [self._name(key) for key in keys]

        def look(client: larder.Client, timeout: float) -> list[bool]:
            if pin:
                return client.pin_batch(names, kind="soft", ttl=PIN_TTL, timeout=timeout)
            return client.exists_batch(names, timeout=timeout)

        held = self._link.ask("look up chunks", look, [False], self._link.settings.lookup_timeout)
        return held.index(False) if False in held else len(held)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """As batched_contains."""
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    def pin(self, key: CacheEngineKey) -> bool:
        """Have key evicted after all others for a while. False if it is not held."""
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Undo a pin. False if there is none."""
        name, timeout = self._name(key), self._link.settings.lookup_timeout
        return self._link.ask("unpin a chunk", lambda c, t: c.unpin(name, kind="soft", timeout=t), False, timeout)

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk. Returns whether it was removed."""
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """Remove chunks. Returns how many were."""
        names, timeout = [self._name(key) for key in keys], self._link.settings.load_timeout
        return sum(self._link.ask("remove chunks", lambda c, t: c.delete_batch(names, timeout=t), [], timeout))

    # The rest.

    def get_allocator_backend(self) -> Any:
        """Whose memory chunks are read into: LMCache's own."""
        if self.local_cpu_backend is None:
            raise RuntimeError("LMCache has no memory here: a scheduler loads nothing, and others need max_local_cpu_size > 0")
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        """Nothing: the pool sees itself what is used."""

    def close(self) -> None:
        """End the backend. What waits for being stored is given up, and what is stored stays."""
        self._writer.close()
        self._link.close()

    def _name(self, key: CacheEngineKey) -> bytes:
        return key_of(self._scope, (key.with_new_worker_id(0) if self._first_only else key).to_string())


class _Chunk:
    """What a whole chunk is like in LMCache's memory: of all layers, or of one where LMCache works layer by layer."""

    def __init__(self, config: Any, metadata: Any) -> None:
        layers, kv, _, heads, head_size = metadata.kv_shape
        tokens, hidden = metadata.chunk_size, heads * head_size
        self.dtypes = [metadata.kv_dtype]
        if not config.use_layerwise:
            self.format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
            self.shapes, self.dtypes = metadata.get_shapes(), metadata.get_dtypes()
            self._token_dimension = 2
        elif config.enable_blending:
            self.format, self.shapes, self._token_dimension = MemoryFormat.KV_2TD, [torch.Size([kv, tokens, hidden])], 1
        else:
            self.format, self.shapes, self._token_dimension = MemoryFormat.KV_T2D, [torch.Size([tokens, kv, hidden])], 0
        self._bytes = sum(shape.numel() * torch.empty(0, dtype=dtype).element_size() for shape, dtype in zip(self.shapes, self.dtypes))
        # The scheduler's lookups name the same keys, and it knows of the model no more than this.
        self.what = (self.format.name, layers, kv, heads, head_size, str(metadata.kv_dtype))

    def fit(self, obj: MemoryObj, length: int) -> bool:
        """Make obj, of a whole chunk, one of length bytes: fewer tokens, as a prompt's last chunk has. False if it cannot have them."""
        if length == self._bytes:
            return True
        if len(self.shapes) != 1 or length > self._bytes:
            return False
        shape = list(self.shapes[0])
        token = self._bytes // shape[self._token_dimension]
        tokens, rest = divmod(length, token)
        if rest or not tokens:
            return False
        shape[self._token_dimension] = tokens
        obj.raw_data = obj.raw_data[:length]
        obj.meta.shape = torch.Size(shape)
        obj.group_prefix_sum = [0, length]
        return True
