"""Serving engines for the tests of connectors: their own packages where they are installed, and else as much of their interfaces as
the connectors see, with the names, arguments and results of the versions that docs/CONNECTORS.md tells."""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
import sys
import types
from typing import Any

try:
    import torch
except ImportError:
    torch = None


def _module(name: str, **contents: object) -> types.ModuleType:
    """Put a module where import finds it, and the packages that it lies in."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            sys.modules[path] = types.ModuleType(path)
            sys.modules[path].__path__ = []
        if i > 1:
            setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path])
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


def _calls(*names: str) -> type:
    """A class whose subclasses must have methods of these names, as an engine demands it."""
    return abc.ABCMeta("Calls", (), {name: abc.abstractmethod(lambda self, *arguments, **named: None) for name in names})


def _installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        for module in [m for m in sys.modules if m.split(".")[0] == name.split(".")[0]]:
            del sys.modules[module]  # halves of a package
        return False
    return True


def vllm() -> bool:
    """Have vLLM's modules. Returns whether they are its own."""
    if _installed("vllm.distributed.kv_transfer.kv_connector.v1.base"):
        return True

    class KVConnectorRole(enum.Enum):
        SCHEDULER = 0
        WORKER = 1

    class KVConnectorMetadata:
        pass

    class KVConnectorWorkerMetadata(_calls("aggregate")):
        pass

    worker = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
    scheduler = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")

    class KVConnectorBase_V1(_calls(*worker, *scheduler)):
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._connector_metadata = None
            self._kv_cache_config = kv_cache_config

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            self._connector_metadata = None

        def _get_connector_metadata(self) -> Any:
            assert self._connector_metadata is not None
            return self._connector_metadata

        def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
            return None, None

    _module("vllm", __version__="0.33.0")
    _module(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", KVConnectorRole=KVConnectorRole, KVConnectorMetadata=KVConnectorMetadata,
        KVConnectorWorkerMetadata=KVConnectorWorkerMetadata, KVConnectorBase_V1=KVConnectorBase_V1,
    )  # fmt: skip
    return False


def sglang() -> bool:
    """Have SGLang's modules. Returns whether they are its own."""
    if _installed("sglang.srt.mem_cache.hicache_storage"):
        return True

    @dataclasses.dataclass
    class HiCacheStorageConfig:
        tp_rank: int
        tp_size: int
        pp_rank: int
        pp_size: int
        attn_cp_rank: int
        attn_cp_size: int
        is_mla_model: bool
        enable_storage_metrics: bool
        is_page_first_layout: bool
        model_name: str | None
        extra_config: dict[str, Any] | None = None

    @dataclasses.dataclass
    class HiCacheStorageExtraInfo:
        prefix_keys: list[str] | None = None
        extra_info: dict[str, Any] | None = None

    class HiCacheStorage(_calls("get", "batch_get", "set", "batch_set", "exists")):
        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            self.mem_pool_host = mem_pool_host

    _module(
        "sglang.srt.mem_cache.hicache_storage", HiCacheStorage=HiCacheStorage, HiCacheStorageConfig=HiCacheStorageConfig,
        HiCacheStorageExtraInfo=HiCacheStorageExtraInfo,
    )  # fmt: skip
    return False


def lmcache() -> bool:
    """Have LMCache's modules. Returns whether they are its own."""
    if _installed("lmcache.v1.storage_backend.storage_manager"):
        return True

    @dataclasses.dataclass(frozen=True)
    class CacheEngineKey:
        model_name: str
        world_size: int
        worker_id: int
        chunk_hash: int
        dtype: Any

        def to_string(self) -> str:
            return f"{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash:x}@{self.dtype}"

        def with_new_worker_id(self, worker_id: int) -> CacheEngineKey:
            return dataclasses.replace(self, worker_id=worker_id)

    class MemoryFormat(enum.Enum):
        KV_2LTD = 1
        KV_T2D = 2
        KV_2TD = 3
        KV_MLA_FMT = 4

    keys = ("contains", "exists_in_put_tasks", "pin", "unpin", "remove")
    values = ("batched_submit_put_task", "get_blocking", "get_allocator_backend", "close")

    class StoragePluginInterface(_calls(*keys, *values)):
        def __init__(
            self, dst_device: str = "cpu", config: Any = None, metadata: Any = None, local_cpu_backend: Any = None, loop: Any = None
        ) -> None:
            self.dst_device = dst_device
            self.config, self.metadata, self.local_cpu_backend, self.loop = config, metadata, local_cpu_backend, loop

    _module("lmcache.utils", CacheEngineKey=CacheEngineKey)
    _module("lmcache.v1.memory_management", MemoryFormat=MemoryFormat, MemoryObj=object)
    _module("lmcache.v1.storage_backend.abstract_backend", StoragePluginInterface=StoragePluginInterface)
    return False
