"""LMCache, SGLang and vLLM keep values in larder serve through Maru's own connectors, as these come.

    python engines.py [lmcache sglang vllm]

For each engine: one instance stores, another one finds and loads, the bytes are compared; larder is killed and started again on its
data, and they go on. All tensors are on the CPU. An engine that cannot be imported is skipped, which is said; if one fails the status
is 1. PYTHONPATH has Maru and the engines; LARDER names the program (default: larder).
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
        self.start()

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
        self.process.terminate()
        try:
            self.process.wait(STOP)
        finally:
            self.process.kill()
            shutil.rmtree(self.dir, ignore_errors=True)


class LMCache:
    """MaruBackend of LMCache, which a maru_path has it make."""

    def __init__(self):
        import lmcache
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.maru_backend import MaruBackend

        self.torch, self.backend = torch, MaruBackend
        self.version = getattr(lmcache, "__version__", "of a checkout")
        self.keys = [CacheEngineKey("toy", 1, 0, i, torch.float16) for i in range(PIECES)]
        self.config = lambda address: LMCacheEngineConfig(chunk_size=16, maru_path=address, maru_pool_size=POOL / (1 << 30))
        self.metadata = LMCacheMetadata("toy", 1, 1, 0, 0, torch.float16, (2, 2, 16, 2, 8), chunk_size=16)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def open(self, address, instance):
        return self.backend(self.config(address), self.metadata, self.loop, "cpu")

    def value(self, seed):
        return self.torch.randn(2, 2, 16, 16, generator=self.torch.Generator().manual_seed(seed)).to(self.torch.float16)

    def store(self, backend):
        objects = backend.batched_allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), PIECES)
        for i, o in enumerate(objects):
            o.tensor.copy_(self.value(i))
        for future in backend.batched_submit_put_task(self.keys, objects):
            future.result(10)

    def found(self, backend):
        return sum(map(backend.contains, self.keys))

    def load(self, backend):
        got = backend.batched_get_blocking(self.keys)
        return sum(o is not None and self.torch.equal(o.tensor.cpu(), self.value(i)) for i, o in enumerate(got))

    def close(self, backend):
        backend.close()


class SGLang:
    """maru_sglang's HiCacheStorage, over pages of a host's memory: what it finds and loads."""

    PAGE = 4096

    def __init__(self):
        import sglang
        import torch
        from maru_sglang.maru_storage import MaruStorage
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

        self.torch, self.storage, self.config = torch, MaruStorage, HiCacheStorageConfig
        self.version = getattr(sglang, "__version__", "of a checkout")
        self.keys = [f"page-{i}" for i in range(PIECES)]

    def open(self, address, instance):
        extra = {"maru_server_url": address, "maru_pool_size": POOL, "maru_instance_id": instance, "maru_chunk_size_bytes": 1 << 20}
        storage = self.storage(self.config(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True, enable_storage_metrics=False,
            is_page_first_layout=True, model_name="toy", extra_config=extra,
        ), {})
        memory = self.torch.zeros(PIECES, self.PAGE, dtype=self.torch.uint8)
        storage.register_mem_pool_host(SimpleNamespace(layout="page_first", memory=memory, get_page_buffer_meta=lambda indices: (
            [memory[i].data_ptr() for i in indices.tolist()], [self.PAGE] * len(indices))))
        return storage

    def value(self, seed):
        return self.torch.randint(256, (self.PAGE,), dtype=self.torch.uint8, generator=self.torch.Generator().manual_seed(seed))

    def store(self, storage):
        # Its own set and batch_set fail before anything is sent: they give the handler what that does not take. Not so what reads.
        for i, key in enumerate(self.keys):
            handle = storage._handler.alloc(self.PAGE)
            handle.buf[: self.PAGE] = self.value(i).numpy().tobytes()
            assert storage._handler.store(storage._make_key(key), handle=handle), "not stored"

    def found(self, storage):
        return storage.batch_exists(self.keys)

    def load(self, storage):
        storage.mem_pool_host.memory.zero_()
        got = storage.batch_get_v1(self.keys, self.torch.arange(PIECES))
        return sum(ok and self.torch.equal(storage.mem_pool_host.memory[i], self.value(i)) for i, ok in enumerate(got))

    def close(self, storage):
        storage.close()


class VLLM:
    """maru_vllm's connector: its scheduler's and its worker's half, with vLLM's flash attention layout."""

    BLOCK, LAYERS = 16, 2

    def __init__(self):
        import torch
        import vllm
        from maru_vllm.connector import MaruConnectorMetadata, MaruReqMeta, MaruSchedulerConnector, MaruWorkerConnector

        self.torch, self.version = torch, getattr(vllm, "__version__", "of a checkout")
        self.halves, self.metadata, self.request = (MaruSchedulerConnector, MaruWorkerConnector), MaruConnectorMetadata, MaruReqMeta
        self.tokens = list(range(PIECES * self.BLOCK))
        self.names = [f"model.layers.{i}.attn" for i in range(self.LAYERS)]

    def open(self, address, instance):
        halves = [half(self.BLOCK, self.BLOCK, {
            "maru_server_url": address, "maru_pool_size": POOL, "maru_chunk_size": 1 << 20, "maru_instance_id": f"{instance}-{half.__name__}",
        }) for half in self.halves]
        caches = {name: self.torch.zeros(2, PIECES, self.BLOCK, 2, 8) for name in self.names}
        halves[1].register_kv_caches(caches)
        return SimpleNamespace(scheduler=halves[0], worker=halves[1], caches=caches)

    def value(self, layer):
        return self.torch.randn(2, PIECES, self.BLOCK, 2, 8, generator=self.torch.Generator().manual_seed(layer))

    def step(self, store):
        return self.metadata([self.request("r", self.tokens, list(range(PIECES)), store, 0 if store else PIECES)])

    def store(self, c):
        for layer, name in enumerate(self.names):
            c.caches[name].copy_(self.value(layer))
            c.worker.save_kv_layer(name, c.caches[name], object(), self.step(True))

    def found(self, c):
        c.scheduler._known_keys.clear()  # it would not ask again
        request = SimpleNamespace(prompt_token_ids=self.tokens, request_id="r")
        return c.scheduler.get_num_new_matched_tokens(request, 0)[0] // self.BLOCK

    def load(self, c):
        layers = {name: SimpleNamespace(kv_cache=cache.zero_()) for name, cache in c.caches.items()}
        c.worker.start_load_kv(SimpleNamespace(attn_metadata=object(), no_compile_layers=layers), self.step(False))
        same = all(self.torch.equal(c.caches[name], self.value(i)) for i, name in enumerate(self.names))
        return PIECES if same else 0

    def close(self, c):
        c.worker.shutdown()
        if c.scheduler._handler is not None:
            c.scheduler._handler.close()


ENGINES = {"lmcache": LMCache, "sglang": SGLang, "vllm": VLLM}


def check(engine) -> None:
    """What each engine must see. Raises AssertionError where it does not."""
    larder = Larder()
    try:
        writer, reader = (engine.open(larder.address, name) for name in ("writer", "reader"))
        assert engine.found(reader) == 0, "a value is found that nobody has stored"
        engine.store(writer)
        assert engine.found(reader) == PIECES, "not all that was stored is found"
        assert engine.load(reader) == PIECES, "not all that was stored is loaded as it was"
        larder.crash()
        larder.start()
        deadline = time.monotonic() + START
        while engine.found(reader) != PIECES:  # its sockets connect again
            assert time.monotonic() < deadline, "what was stored is not found after a crash"
            time.sleep(0.1)
        assert engine.load(reader) == PIECES, "what was stored is not loaded as it was after a crash"
        another = engine.open(larder.address, "another")
        assert engine.load(another) == PIECES, "a new instance does not load what was stored before the crash"
        for instance in (another, reader, writer):
            engine.close(instance)
    finally:
        larder.stop()


def main(names: list[str]) -> int:
    failed = 0
    for name in names or ENGINES:
        try:
            engine = ENGINES[name]()
        except ImportError as e:
            print(f"{name}: skipped, as it cannot be imported: {e}")
            continue
        began = time.monotonic()
        try:
            check(engine)
            print(f"{name} {engine.version}: stored, found and loaded by several instances, also after a crash: {time.monotonic() - began:.1f} s")
        except Exception:
            failed += 1
            print(f"{name} {engine.version}: FAILED\n{traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # engines leave threads behind
