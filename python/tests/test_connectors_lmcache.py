"""LMCache's storage plugin: with LMCache's own storage manager and memory where it is installed, and else as these call it."""

from __future__ import annotations

import asyncio
import threading
import time
import types
import unittest

import engines
from processes import Case
from servers import Server

torch = engines.torch
if torch is not None:
    REAL = engines.lmcache()
    from larder.connectors import lmcache as connector
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryFormat

LAYERS, HEADS, SIZE = 2, 2, 8
CHUNK = 16  # tokens


class Memory:
    """A memory object as LMCache has it: a tensor in a part of its memory, which is given back with the last reference."""

    def __init__(self, owner, shape, dtype, fmt) -> None:
        self.owner = owner
        self.meta = types.SimpleNamespace(shape=shape, dtype=dtype, fmt=fmt)
        size = shape.numel() * torch.empty(0, dtype=dtype).element_size()
        self.raw_data = torch.zeros(size, dtype=torch.uint8)
        self.group_prefix_sum = [0, size]
        self.references = 1

    def get_size(self) -> int:
        return self.group_prefix_sum[-1]

    @property
    def byte_array(self):
        return memoryview(self.raw_data.numpy())[: self.get_size()]

    @property
    def tensor(self):
        return self.raw_data[: self.get_size()].view(self.meta.dtype).view(self.meta.shape)

    def get_ref_count(self) -> int:
        return self.references

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1
        if self.references == 0:
            self.owner.used -= 1


class Allocator:
    """LMCache's memory of the host."""

    def __init__(self, limit: int = 1000) -> None:
        self.used = 0
        self.limit = limit

    def allocate(self, shapes, dtypes, fmt=None, eviction=True, busy_loop=True):
        objs = self.batched_allocate(shapes, dtypes, 1, fmt, eviction, busy_loop)
        return objs[0] if objs else None

    def batched_allocate(self, shapes, dtypes, batch_size, fmt=None, eviction=True, busy_loop=True):
        shape = shapes[0] if isinstance(shapes, list) else shapes
        dtype = dtypes[0] if isinstance(dtypes, list) else dtypes
        if self.used + batch_size > self.limit:
            return None
        self.used += batch_size
        return [Memory(self, shape, dtype, fmt) for _ in range(batch_size)]


class Metadata:
    """What LMCache tells of an engine."""

    def __init__(self, **changes) -> None:
        self.kv_shape = (LAYERS, 2, CHUNK, HEADS, SIZE)
        self.kv_dtype = torch.float16
        self.use_mla, self.world_size, self.worker_id, self.chunk_size = False, 1, 0, CHUNK
        vars(self).update(changes)

    def get_shapes(self):
        return [torch.Size([self.kv_shape[1], LAYERS, CHUNK, HEADS * SIZE])]

    def get_dtypes(self):
        return [self.kv_dtype]


class Config:
    """A configuration of LMCache."""

    use_layerwise = False
    enable_blending = False

    def __init__(self, server, **changes) -> None:
        self.extra_config = {
            "storage_plugin.larder.module_path": "larder.connectors.lmcache", "larder.masters": server.address,
            "larder.lookup_timeout": 0.3, "larder.load_timeout": 0.5, "larder.store_timeout": 0.5, "larder.retry_interval": 0.3,
        }  # fmt: skip
        vars(self).update(changes)

    def get_extra_config_value(self, name, default=None):
        return self.extra_config.get(name, default)


def key(i: int, worker: int = 0, world: int = 1):
    return CacheEngineKey("toy", world, worker, i, torch.float16)


@unittest.skipIf(torch is None, "needs torch")
class Plugin(Case):
    def serve(self):
        server = Server()
        self.addCleanup(server.stop)  # after what uses it was closed
        return server

    def backend(self, server, limit=1000, metadata=None, **config):
        backend = connector.LarderBackend(Config(server, **config), metadata or Metadata(), Allocator(limit), None, "cpu")
        self.addCleanup(backend.close)
        return backend

    def chunk(self, backend, seed: int, tokens: int = CHUNK):
        """A chunk with something in it."""
        shape = list(backend._chunk.shapes[0])
        shape[backend._chunk._token_dimension] = tokens
        obj = backend.local_cpu_backend.allocate(torch.Size(shape), torch.float16, backend._chunk.format)
        obj.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half())
        return obj

    def put(self, backend, chunks):
        """As StorageManager.batched_put does: it lets go of the objects at once."""
        futures = backend.batched_submit_put_task(list(chunks), list(chunks.values()), transfer_spec=None)
        for obj in chunks.values():
            obj.ref_count_down()
        for future in futures or ():
            future.result(30)

    def test_chunks_of_one_engine_are_read_by_another(self):
        for layerwise in (False, True):
            with self.subTest(layerwise=layerwise):
                server = self.serve()
                one, other = (self.backend(server, use_layerwise=layerwise) for _ in range(2))
                chunks = {key(i): self.chunk(one, i) for i in range(5)}
                wanted = [obj.tensor.clone() for obj in chunks.values()]
                self.put(one, chunks)
                self.assertEqual(one.local_cpu_backend.used, 0, "objects were not given back")
                keys = [*chunks, key(9)]
                self.assertEqual(other.batched_contains(keys), 5)
                self.assertEqual(other.batched_contains(keys[::-1]), 0, "a prefix begins with the first")
                objs = other.batched_get_blocking(keys)
                self.assertIsNone(objs[5])
                for obj, tensor in zip(objs, wanted):
                    self.assertTrue(torch.equal(obj.tensor, tensor))
                    obj.ref_count_down()
                self.assertEqual(other.local_cpu_backend.used, 0, "what was allocated for a miss was not given back")

    def test_the_asynchronous_calls_stop_at_the_first_miss(self):
        server = self.serve()
        backend = self.backend(server)
        self.put(backend, {key(i): self.chunk(backend, i) for i in (0, 1, 3)})

        async def load():
            keys = [key(i) for i in range(4)]
            n = await backend.batched_async_contains("lookup", keys, pin=True)
            return n, await backend.batched_get_non_blocking("lookup", keys, {"cum_chunk_lengths": [0, 16, 32]})

        n, objs = asyncio.run(load())
        self.assertEqual((n, len(objs), backend.local_cpu_backend.used), (2, 2, 2))

    def test_the_last_chunk_of_a_prompt_has_fewer_tokens(self):
        for layerwise in (False, True):
            with self.subTest(layerwise=layerwise):
                backend = self.backend(self.serve(), use_layerwise=layerwise)
                obj = self.chunk(backend, 1, tokens=5)
                wanted = obj.tensor.clone()
                self.put(backend, {key(0): obj})
                found = backend.get_blocking(key(0))
                self.assertEqual(found.meta.shape, wanted.shape)
                self.assertTrue(torch.equal(found.tensor, wanted))

    def test_pins_and_removal(self):
        server = self.serve()
        backend = self.backend(server)
        self.put(backend, {key(0): self.chunk(backend, 0)})
        self.assertTrue(backend.contains(key(0), pin=True))
        self.assertFalse(backend.pin(key(1)))
        self.assertTrue(backend.unpin(key(0)))
        self.assertFalse(backend.unpin(key(0)))
        self.assertTrue(backend.remove(key(0)))
        self.assertFalse(backend.contains(key(0)))
        self.assertFalse(backend.remove(key(0)))

    def test_workers_of_a_model_with_mla_use_what_the_first_stores(self):
        server = self.serve()
        first, second = (self.backend(server, metadata=Metadata(use_mla=True, world_size=2, worker_id=w)) for w in range(2))
        self.assertIsNone(second.batched_submit_put_task([key(0, 1, 2)], [self.chunk(second, 0)]))
        self.put(first, {key(0, 0, 2): self.chunk(first, 1)})
        self.assertTrue(second.contains(key(0, 1, 2)))

    def test_what_is_being_stored_is_known_and_told_of(self):
        backend = self.backend(self.serve())
        gate, told = threading.Event(), []
        backend._writer.offer(0, gate.wait, lambda: None)
        futures = backend.batched_submit_put_task([key(0)], [self.chunk(backend, 0)], on_complete_callback=told.append)
        self.assertTrue(backend.exists_in_put_tasks(key(0)))
        self.assertIsNone(backend.batched_submit_put_task([key(0)], [self.chunk(backend, 0)]), "it is stored twice")
        gate.set()
        futures[0].result(30)
        self.assertFalse(backend.exists_in_put_tasks(key(0)))
        self.assertEqual(told, [key(0)])

    def test_what_there_is_no_room_for_is_not_stored(self):
        backend = self.backend(self.serve())
        backend._link.settings.queue_bytes = 10
        obj = self.chunk(backend, 0)
        with self.assertLogs("larder.connectors", "WARNING"):
            self.assertIsNone(backend.batched_submit_put_task([key(0)], [obj]))
        self.assertEqual(obj.get_ref_count(), 1)
        self.assertFalse(backend.exists_in_put_tasks(key(0)))

    def test_without_memory_of_lmcache_it_is_a_miss(self):
        backend = self.backend(self.serve(), limit=1)
        self.put(backend, {key(0): self.chunk(backend, 0)})
        with self.assertLogs("larder.connectors", "WARNING"):
            self.assertEqual(backend.batched_get_blocking([key(0), key(1)]), [None, None])

    def test_a_pool_that_is_gone_is_a_miss_in_time(self):
        server = self.serve()
        backend = self.backend(server)
        self.put(backend, {key(0): self.chunk(backend, 0)})
        server.kill()
        with self.assertLogs("larder.connectors", "WARNING"):
            begun = time.monotonic()
            self.assertEqual(backend.batched_contains([key(0)]), 0)
            self.assertIsNone(backend.get_blocking(key(0)))
            obj = self.chunk(backend, 1)
            self.put(backend, {key(1): obj})
            self.assertFalse(backend.remove(key(0)))
            self.assertLess(time.monotonic() - begun, 3)
        self.assertEqual(backend.local_cpu_backend.used, 0)

    def test_an_engine_starts_without_a_pool_and_finds_it_later(self):
        server = self.serve()
        server.kill()
        with self.assertLogs("larder.connectors", "WARNING"):
            backend = self.backend(server, extra_config={"larder.masters": server.address, "larder.connect_timeout": 0.2,
                                                         "larder.retry_interval": 0.2})  # fmt: skip
            self.assertEqual(backend.batched_contains([key(0)]), 0)
        server.start()
        deadline = time.monotonic() + 30
        while not backend.contains(key(0)) and time.monotonic() < deadline:
            self.put(backend, {key(0): self.chunk(backend, 0)})
            time.sleep(0.05)
        self.assertTrue(backend.contains(key(0)))


@unittest.skipUnless(torch is not None and REAL, "needs LMCache")
class Installed(Case):
    """LMCache's own storage manager loads the plugin by its name, and puts and gets through it."""

    def test_storage_manager(self):
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        server = Server()
        self.addCleanup(server.stop)

        def manager():
            config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.05)
            config.storage_plugins = ["larder"]
            config.extra_config = {
                "storage_plugin.larder.module_path": "larder.connectors.lmcache", "storage_plugin.larder.class_name": "LarderBackend",
                "larder.masters": server.address,
            }  # fmt: skip
            metadata = LMCacheMetadata(
                model_name="toy", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=torch.float16,
                kv_shape=(LAYERS, 2, CHUNK, HEADS, SIZE), chunk_size=CHUNK, role="worker",
            )  # fmt: skip
            m = StorageManager(config, metadata, EventManager())
            self.addCleanup(m.close)
            self.assertIn("larder", m.storage_backends)
            return m

        one, other = manager(), manager()
        shape = torch.Size([2, LAYERS, CHUNK, HEADS * SIZE])
        objs = one.batched_allocate([shape], [torch.float16], 3, MemoryFormat.KV_2LTD)
        for i, obj in enumerate(objs):
            obj.tensor.fill_(i + 1)
        keys = [key(i) for i in range(3)]
        one.batched_put(keys, objs)
        self.assertTrue(one.storage_backends["larder"]._writer.flush(30))
        hits, mapping = other.batched_contains([*keys, key(7)])
        self.assertEqual((hits, {name: len(found) for name, found in mapping.items()}), (3, {"larder": 3}))
        found = other.batched_get(keys, location="larder")
        for i, obj in enumerate(found):
            self.assertTrue(torch.equal(obj.tensor, torch.full(shape, i + 1, dtype=torch.float16)))
            obj.ref_count_down()


if __name__ == "__main__":
    unittest.main()
