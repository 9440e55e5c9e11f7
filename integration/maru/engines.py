"""LMCache, SGLang and vLLM keep values in larder serve through Maru's own connectors, as these come.

    python engines.py [lmcache sglang vllm]

For each engine: one instance stores, another one finds and loads, the bytes are compared; larder is killed and started again on its
data, and they go on. All tensors are on the CPU. An engine that cannot be imported is skipped, which is said; if one fails, or none is
there, the status is 1. PYTHONPATH has Maru and the engines; LARDER names the program (default: larder).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from types import SimpleNamespace

from door import START, STOP, free_port, listens

PIECES = 4  # values that are stored
POOL = 64 << 20  # bytes of an instance's memory


class Larder:
    """A larder process that is killed and started again on what it has kept."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="larder-maru-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.ports = free_port(), free_port()
        self.address = f"tcp://127.0.0.1:{self.ports[0]}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with open(f"{self.dir}/log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    os.environ.get("LARDER", "larder"), "serve", "--maru", f"127.0.0.1:{self.ports[0]}",
                    "--maru-rm", f"127.0.0.1:{self.ports[1]}", "--data-dir", f"{self.dir}/data", "--pool", f"{self.dir}/pool,size=1GiB",
                    "--listen", "none", "--socket", f"{self.dir}/socket", "--peer-listen", "none", "--admin-listen", "none",
                ],
                stdout=log, stderr=log,
            )
        deadline = time.monotonic() + START
        while not all(map(listens, self.ports)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                with open(f"{self.dir}/log") as log:
                    raise RuntimeError(f"larder does not listen:\n{log.read()}")
            time.sleep(0.02)

    def crash(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        try:
            if self.process is not None:
                self.process.terminate()
                self.process.wait(STOP)
        finally:
            if self.process is not None:
                self.process.kill()
            shutil.rmtree(self.dir, ignore_errors=True)


class LMCache:
    """LMCache's own backend for Maru, made by its storage manager's function for that."""

    def __init__(self):
        import lmcache
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend import CreateStorageBackends

        self.torch, self.backends = torch, CreateStorageBackends
        self.version = getattr(lmcache, "__version__", "of a checkout")
        self.keys = lambda batch: [CacheEngineKey("toy", 1, 0, batch * PIECES + i, torch.float16) for i in range(PIECES)]
        self.config = lambda address: LMCacheEngineConfig(
            chunk_size=16, max_local_cpu_size=0, maru_path=address.replace("tcp", "maru"), maru_pool_size=POOL / (1 << 30)
        )
        self.metadata = LMCacheMetadata("toy", 1, 1, 0, 0, torch.float16, (2, 2, 16, 2, 8), chunk_size=16)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def open(self, address, instance):
        return self.backends(self.config(address), self.metadata, self.loop, dst_device="cpu")["MaruBackend"]

    def value(self, seed):
        return self.torch.randn(2, 2, 16, 16, generator=self.torch.Generator().manual_seed(seed)).to(self.torch.float16)

    def store(self, backend, batch):
        objects = backend.batched_allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), PIECES)
        for i, o in enumerate(objects):
            o.tensor.copy_(self.value(i))
        for future in backend.batched_submit_put_task(self.keys(batch), objects):
            future.result(10)

    def found(self, backend, batch):
        one, many = sum(map(backend.contains, self.keys(batch))), backend.batched_async_contains("lookup", self.keys(batch))
        assert asyncio.run_coroutine_threadsafe(many, self.loop).result(10) == one
        return one

    def load(self, backend, batch):
        got = backend.batched_get_blocking(self.keys(batch))
        return sum(o is not None and self.torch.equal(o.tensor.cpu(), self.value(i)) for i, o in enumerate(got))

    def close(self, backend):
        backend.close()


class SGLang:
    """maru_sglang's HiCacheStorage, made by SGLang's factory, over pages of a host's memory: what it finds and loads."""

    PAGE = 4096

    def __init__(self):
        import sglang
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        self.torch, self.factory, self.config = torch, StorageBackendFactory, HiCacheStorageConfig
        self.version = getattr(sglang, "__version__", "of a checkout")
        self.keys = lambda batch: [f"page-{batch}-{i}" for i in range(PIECES)]

    def open(self, address, instance):
        config = self.config(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True, enable_storage_metrics=False,
            is_page_first_layout=True, model_name="toy", extra_config={
                "backend_name": "maru", "module_path": "maru_sglang.maru_storage", "class_name": "MaruStorage",
                "maru_server_url": address, "maru_pool_size": POOL, "maru_chunk_size_bytes": 1 << 20, "maru_instance_id": instance,
            },
        )
        memory = self.torch.zeros(PIECES, self.PAGE, dtype=self.torch.uint8)
        pool = SimpleNamespace(layout="page_first", memory=memory, get_page_buffer_meta=lambda indices: (
            [memory[i].data_ptr() for i in indices.tolist()], [self.PAGE] * len(indices)))
        storage = self.factory.create_backend("dynamic", config, pool)
        storage.register_mem_pool_host(pool)
        return storage

    def value(self, seed):
        return self.torch.randint(256, (self.PAGE,), dtype=self.torch.uint8, generator=self.torch.Generator().manual_seed(seed))

    def store(self, storage, batch):
        # Its own set and batch_set give Maru's handler what that does not take, with any server: the handler stores here.
        for i, key in enumerate(self.keys(batch)):
            handle = storage._handler.alloc(self.PAGE)
            handle.buf[: self.PAGE] = self.value(i).numpy().tobytes()
            storage._handler.store(storage._make_key(key), handle=handle)

    def found(self, storage, batch):
        return storage.batch_exists(self.keys(batch))

    def load(self, storage, batch):
        storage.mem_pool_host.memory.zero_()
        got = storage.batch_get_v1(self.keys(batch), self.torch.arange(PIECES))
        return sum(ok and self.torch.equal(storage.mem_pool_host.memory[i], self.value(i)) for i, ok in enumerate(got))

    def close(self, storage):
        storage.close()


class VLLM:
    """maru_vllm's connector, as a scheduler and a worker of vLLM have it, with vLLM's flash attention layout."""

    BLOCK, LAYERS = 16, 2

    def __init__(self):
        import torch
        import vllm
        from maru_vllm.connector import MaruConnectorMetadata, MaruKVConnector, MaruReqMeta
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        self.torch, self.version = torch, getattr(vllm, "__version__", "of a checkout")
        self.connector, self.roles = MaruKVConnector, (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        self.metadata, self.request = MaruConnectorMetadata, MaruReqMeta
        self.tokens = lambda batch: [1000 * batch + i for i in range(PIECES * self.BLOCK)]
        self.names = [f"model.layers.{i}.attn" for i in range(self.LAYERS)]

    def open(self, address, instance):
        scheduler, worker = (self.connector(SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self.BLOCK),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={
                "maru_server_url": address, "maru_pool_size": POOL, "maru_chunk_size": 1 << 20, "maru_kv_chunk_tokens": self.BLOCK,
                "maru_instance_id": f"{instance}-{role.name}",
            }),
        ), role) for role in self.roles)
        caches = {name: self.torch.zeros(2, PIECES, self.BLOCK, 2, 8) for name in self.names}
        worker.register_kv_caches(caches)
        return SimpleNamespace(scheduler=scheduler, worker=worker, caches=caches)

    def value(self, layer):
        return self.torch.randn(2, PIECES, self.BLOCK, 2, 8, generator=self.torch.Generator().manual_seed(layer))

    def step(self, c, batch, store):
        """Have the worker begin a step that stores, or loads, what is of a batch."""
        request = self.request("r", self.tokens(batch), list(range(PIECES)), store, 0 if store else PIECES)
        c.worker.bind_connector_metadata(self.metadata([request]))

    def store(self, c, batch):
        self.step(c, batch, True)
        for layer, name in enumerate(self.names):
            c.caches[name].copy_(self.value(layer))
            c.worker.save_kv_layer(name, c.caches[name], object())
        c.worker.wait_for_save()

    def found(self, c, batch):
        c.scheduler._scheduler._known_keys.clear()  # it would not ask again
        request = SimpleNamespace(prompt_token_ids=self.tokens(batch), request_id="r")
        return c.scheduler.get_num_new_matched_tokens(request, 0)[0] // self.BLOCK

    def load(self, c, batch):
        layers = {name: SimpleNamespace(kv_cache=cache.zero_()) for name, cache in c.caches.items()}
        self.step(c, batch, False)
        c.worker.start_load_kv(SimpleNamespace(attn_metadata=object(), no_compile_layers=layers))
        same = all(self.torch.equal(c.caches[name], self.value(i)) for i, name in enumerate(self.names))
        return PIECES if same else 0

    def close(self, c):
        c.worker.shutdown()
        c.scheduler.shutdown()


ENGINES = {"lmcache": LMCache, "sglang": SGLang, "vllm": VLLM}


def check(engine) -> None:
    """What each engine must see. Raises AssertionError where it does not."""
    larder = Larder()
    try:
        larder.start()
        writer, reader = (engine.open(larder.address, name) for name in ("writer", "reader"))
        assert engine.found(reader, 0) == 0, "a value is found that nobody has stored"
        engine.store(writer, 0)
        assert engine.found(reader, 0) == PIECES, "not all that was stored is found"
        assert engine.load(reader, 0) == PIECES, "not all that was stored is loaded as it was"
        larder.crash()
        larder.start()
        deadline = time.monotonic() + START
        while engine.found(reader, 0) != PIECES:  # its sockets connect again
            assert time.monotonic() < deadline, "what was stored is not found after a crash"
            time.sleep(0.1)
        assert engine.load(reader, 0) == PIECES, "what was stored is not loaded as it was after a crash"
        while engine.found(reader, 1) != PIECES:  # right after the crash a store may be refused
            assert time.monotonic() < deadline, "nothing can be stored after a crash"
            engine.store(writer, 1)
            time.sleep(0.1)
        another = engine.open(larder.address, "another")
        for batch in range(2):
            assert engine.load(another, batch) == PIECES, f"a new instance does not load batch {batch}"
        for instance in (another, reader, writer):
            engine.close(instance)
    finally:
        larder.stop()


def main(names: list[str]) -> int:
    import maru  # noqa: F401  it must be there, and what it needs

    ran = failed = 0
    for name in names or ENGINES:
        try:
            engine = ENGINES[name]()
        except ImportError as e:
            print(f"{name}: skipped, as it cannot be imported: {e}")
            continue
        ran += 1
        began = time.monotonic()
        try:
            check(engine)
            print(f"{name} {engine.version}: several instances, before and after a crash: {time.monotonic() - began:.1f} s")
        except Exception:
            failed += 1
            print(f"{name} {engine.version}: FAILED\n{traceback.format_exc()}")
    if not ran:
        print("no engine is there: install one, or name where it is in PYTHONPATH")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # engines leave threads behind
