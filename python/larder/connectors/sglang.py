"""A storage backend of SGLang's HiCache, which it loads by name::

    --hicache-storage-backend dynamic --hicache-mem-layout page_first --hicache-storage-backend-extra-config '{
        "backend_name": "larder", "module_path": "larder.connectors.sglang", "class_name": "LarderStorage",
        "interface_v1": 1, "larder.masters": "10.0.0.5:7400"}'

A page of the host's pool is one value. With interface_v1 it is copied between the host's pool and Larder's, and nowhere else; without
it SGLang makes a copy of its own in between. Page hashes of SGLang name a page and all before it; the key has the model and the rank
as well. SGLang calls the backend from threads of its own, and waits there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

import larder
from larder._memory import Memory, memory_of

from ._link import Link, Settings, key_of, scope

# A page in memory of the host: address and length of each of its parts, which lie one behind the other in the pool.
Parts = list[tuple[int, int]]


class LarderStorage(HiCacheStorage):
    """Pages of a HiCache in a pool of Larder's. What cannot be read or written in time is a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._link = Link(Settings.of(storage_config.extra_config))
        c = storage_config
        # Ranks of a model with MLA hold the same pages: one of them stores.
        self._stores = not c.is_mla_model or c.tp_rank == getattr(c, "dcp_rank", 0)
        rank = (getattr(c, "dcp_rank", 0), getattr(c, "dcp_size", 1)) if c.is_mla_model else (c.tp_rank, c.tp_size)
        self._identity = (c.model_name, rank, c.pp_rank, c.pp_size, c.attn_cp_rank, c.attn_cp_size)
        self._scope = ""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn of the host's pool. What its pages are like is a part of their keys, so that they are not taken for others."""
        super().register_mem_pool_host(mem_pool_host)
        pool = mem_pool_host
        page = (type(pool).__name__, pool.layout, pool.page_size, str(pool.dtype), pool.layer_num, pool.get_size_per_token())
        self._scope = scope("sglang", self._link.settings.namespace, *self._identity, *page)

    # With the addresses of pages.

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host's pool. Returns which are there."""
        return self._read(keys, self._pages(keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host's pool. Returns which are held now."""
        pages = self._pages(keys, host_indices)
        return self._write(keys, lambda wanted: [pages[i] for i in wanted])

    def _pages(self, keys: Sequence[str], indices: torch.Tensor) -> list[Parts]:
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(indices)
        if not isinstance(sizes, list):
            sizes = [sizes] * len(addresses)
        n = len(addresses) // len(keys) if keys else 0
        parts = list(zip(addresses, sizes))
        return [parts[i * n : (i + 1) * n] for i in range(len(keys))]

    # With tensors, which SGLang copies.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The page of key, in target_location; None if it is not held."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """The pages of keys, in target_locations, None for those that are not held."""
        held = self._read(keys, [_tensor_parts(t) for t in target_locations])
        return [tensor if ok else None for tensor, ok in zip(target_locations, held)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page. Returns whether it is held now."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store pages. Returns whether all are held now."""
        tensors = [v.contiguous() for v in values]
        return all(self._write(keys, lambda wanted: [_tensor_parts(tensors[i]) for i in wanted]))

    # Keys.

    def exists(self, key: str) -> bool:
        """Whether key is held."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of keys are held, from the first on."""
        held = self._held(keys)
        return held.index(False) if False in held else len(held)

    def clear(self) -> bool:
        """Drop the pages of this model and rank, of whatever engine."""
        clear = self._scope.encode()
        timeout = self._link.settings.store_timeout
        return self._link.ask("clear the pages", lambda c, t: c.clear(clear, timeout=t) is None, False, timeout)

    def close(self) -> None:
        """End the backend. What it has stored stays."""
        self._link.close()

    def _held(self, keys: list[str]) -> list[bool]:
        names = self._names(keys)
        missing = [False] * len(keys)
        return self._link.ask(
            "look up pages", lambda c, t: c.exists_batch(names, timeout=t), missing, self._link.settings.lookup_timeout
        )

    def _names(self, keys: list[str]) -> list[bytes]:
        return [key_of(self._scope, key) for key in keys]

    def _read(self, keys: list[str], pages: list[Parts]) -> list[bool]:
        names = self._names(keys)

        def read(client: larder.Client, timeout: float) -> list[bool]:
            if all(len(parts) == 1 for parts in pages):
                whole = [_memory(parts[0]) for parts in pages]
                lengths = client.get_batch_into(names, whole, timeout=timeout)
                return [length == memory.length for length, memory in zip(lengths, whole)]
            with client.view_batch(names, timeout=timeout) as values:
                return [_scatter(value, parts) for value, parts in zip(values, pages)]

        return self._link.ask("read pages", read, [False] * len(keys), self._link.settings.load_timeout)

    def _write(self, keys: list[str], pages_of: Callable[[list[int]], list[Parts]]) -> list[bool]:
        if not self._stores:
            return [True] * len(keys)  # another rank does
        held = self._held(keys)
        wanted = [i for i, there in enumerate(held) if not there]
        if not wanted:
            return held
        names = self._names([keys[i] for i in wanted])
        pages = pages_of(wanted)

        def write(client: larder.Client, timeout: float) -> bool:
            if all(len(parts) == 1 for parts in pages):
                client.put_batch([(name, _memory(parts[0])) for name, parts in zip(names, pages)], timeout=timeout)
                return True
            spaces = client.alloc_batch([sum(size for _, size in parts) for parts in pages], timeout=timeout)
            for space, parts in zip(spaces, pages):
                _gather(space.memory, parts)
            client.store_batch(names, spaces, timeout=timeout)
            return True

        done = self._link.store("store pages", write, False)
        return [there or done for there in held]


def _memory(part: tuple[int, int]) -> Memory:
    return Memory(*part, readonly=False, keep=None)


def _tensor_parts(tensor: torch.Tensor) -> Parts:
    memory = memory_of(tensor)
    return [(memory.address, memory.length)]


def _scatter(value: memoryview | None, parts: Parts) -> bool:
    """Copy a value to the parts of a page. False if it is not held, or not of their size."""
    if value is None or len(value) != sum(size for _, size in parts):
        return False
    offset = memory_of(value).address
    for address, size in parts:
        ctypes.memmove(address, offset, size)
        offset += size
    return True


def _gather(space: memoryview, parts: Parts) -> None:
    """Copy the parts of a page to the pool."""
    offset = memory_of(space).address
    for address, size in parts:
        ctypes.memmove(offset, address, size)
        offset += size
