"""SGLang's storage backend, driven as its cache controller drives one: with SGLang's own controller where it is installed."""

from __future__ import annotations

import time
import types
import unittest

import engines
from processes import Case
from servers import Server

torch = engines.torch
if torch is not None:
    REAL = engines.sglang()
    from larder.connectors import sglang as connector
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo

PAGE = 4  # tokens
LAYERS = 3
HEADS, SIZE = 2, 8
BATCH = 128  # pages that the controller asks for at a time


class HostPool:
    """The host's pool as SGLang has it for attention with several heads, in its two kinds of layout."""

    page_size = PAGE
    layer_num = LAYERS

    def __init__(self, layout: str, pages: int) -> None:
        self.layout = layout
        self.dtype = torch.float16
        tokens = pages * PAGE
        shape = (2, LAYERS, tokens, HEADS, SIZE) if layout == "layer_first" else (2, tokens, LAYERS, HEADS, SIZE)
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def get_size_per_token(self) -> int:
        return 2 * LAYERS * HEADS * SIZE * 2  # bytes

    def _page(self, index: int):
        layer_first = self.layout == "layer_first"
        return self.kv_buffer[:, :, index : index + PAGE] if layer_first else self.kv_buffer[:, index : index + PAGE]

    def get_page_buffer_meta(self, indices):
        addresses = []
        for index in indices.tolist()[::PAGE]:
            page = self._page(index)
            if self.layout == "layer_first":
                addresses += [page[kv, layer].data_ptr() for layer in range(LAYERS) for kv in range(2)]
            else:
                addresses += [page[kv].data_ptr() for kv in range(2)]
        parts = 2 * LAYERS if self.layout == "layer_first" else 2
        return addresses, [self.get_size_per_token() * PAGE // parts] * len(addresses)

    def get_data_page(self, index, flat=True):
        return self._page(int(index)).flatten()

    def get_dummy_flat_data_page(self):
        return torch.zeros(self.get_size_per_token() * PAGE // 2, dtype=self.dtype)

    def set_from_flat_data_page(self, index, page):
        self._page(int(index)).copy_(page.view(self._page(int(index)).shape))

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=generator).to(self.dtype))


class Controller:
    """What SGLang's HiCacheController does with a backend, in its order and with its arguments."""

    page_size = PAGE

    def __init__(self, pool, config, zero_copy: bool) -> None:
        self.storage_host_pool = pool
        self.storage_backend = self._create(config, pool)
        self.storage_backend.register_mem_pool_host(pool)
        if hasattr(self.storage_backend, "on_host_pools_registered"):
            self.storage_backend.on_host_pools_registered()
        self._get = self._page_get_zero_copy if zero_copy else self._generic_page_get
        self._set = self._page_set_zero_copy if zero_copy else self._generic_page_set

    def _create(self, config, pool):
        return connector.LarderStorage(config, {})

    def backup(self, hashes, indices) -> int:
        """Store pages, batch by batch. Returns how many were."""
        for i in range(0, len(hashes), BATCH):
            batch = hashes[i : i + BATCH]
            if not self._set(batch, indices[i * PAGE : (i + len(batch)) * PAGE], HiCacheStorageExtraInfo(prefix_keys=hashes[:i])):
                return i
        return len(hashes)

    def query(self, hashes) -> int:
        """How many pages are held, from the first on."""
        hits = 0
        for i in range(0, len(hashes), BATCH):
            batch = hashes[i : i + BATCH]
            n = self.storage_backend.batch_exists(batch, HiCacheStorageExtraInfo(prefix_keys=hashes[:i]))
            hits += n
            if n < len(batch):
                break
        return hits

    def prefetch(self, hashes, indices) -> int:
        """Read pages, batch by batch. Returns how many are there, from the first on."""
        operation = types.SimpleNamespace(request_id="r", is_terminated=lambda: False)
        done = 0
        for i in range(0, len(hashes), BATCH):
            batch = hashes[i : i + BATCH]
            hits = self._get(operation, batch, indices[i * PAGE : (i + len(batch)) * PAGE], HiCacheStorageExtraInfo())
            done += hits
            if hits < len(batch):
                break
        return done

    def _page_get_zero_copy(self, operation, hashes, indices, extra_info=None):
        results = self.storage_backend.batch_get_v1(hashes, indices, extra_info)
        return results.index(False) if False in results else len(results)

    def _page_set_zero_copy(self, hashes, indices, extra_info=None):
        return all(self.storage_backend.batch_set_v1(hashes, indices, extra_info))

    def _generic_page_get(self, operation, hashes, indices, extra_info=None):
        data = self.storage_backend.batch_get(hashes, [self.storage_host_pool.get_dummy_flat_data_page() for _ in hashes])
        count = 0
        for i, page in enumerate(data):
            if page is None:
                break
            self.storage_host_pool.set_from_flat_data_page(indices[i * PAGE], page)
            count += 1
        return count

    def _generic_page_set(self, hashes, indices, extra_info=None):
        return self.storage_backend.batch_set(hashes, [self.storage_host_pool.get_data_page(indices[i * PAGE]) for i in range(len(hashes))])


def controller_type():
    """SGLang's own methods over ours where it is installed, and its loading of a backend by name."""
    if not REAL:
        return Controller
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    class Own(Controller):
        _page_get_zero_copy = HiCacheController._page_get_zero_copy
        _page_set_zero_copy = HiCacheController._page_set_zero_copy
        _generic_page_get = HiCacheController._generic_page_get
        _generic_page_set = HiCacheController._generic_page_set

        def _create(self, config, pool):
            return StorageBackendFactory.create_backend("dynamic", config, pool)

    return Own


@unittest.skipIf(torch is None, "needs torch")
class HiCache(Case):
    def serve(self):
        server = Server()
        self.addCleanup(server.stop)  # after what uses it was closed
        return server

    def config(self, server, **changes):
        extra = {
            "backend_name": "larder", "module_path": "larder.connectors.sglang", "class_name": "LarderStorage", "interface_v1": 1,
            "larder.masters": server.address, "larder.lookup_timeout": 0.3, "larder.load_timeout": 0.5, "larder.store_timeout": 0.5,
            "larder.retry_interval": 0.3,
        }  # fmt: skip
        values = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
            "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "toy", "extra_config": extra,
        }  # fmt: skip
        return HiCacheStorageConfig(**{**values, **changes})

    def controller(self, server, pool, zero_copy=True, **changes):
        controller = controller_type()(pool, self.config(server, **changes), zero_copy)
        self.addCleanup(controller.storage_backend.close)
        return controller

    def test_pages_that_one_engine_backs_up_are_prefetched_by_another(self):
        pages = 2 * BATCH + 5
        hashes = [f"{i:064x}" for i in range(pages)]
        indices = torch.arange(pages * PAGE)
        for layout in ("page_first", "layer_first"):
            for zero_copy in (True, False):
                with self.subTest(layout=layout, zero_copy=zero_copy):
                    server = self.serve()
                    source, target = HostPool(layout, pages), HostPool(layout, pages)
                    source.fill(1)
                    one, other = (self.controller(server, pool, zero_copy) for pool in (source, target))
                    self.assertEqual(other.query(hashes), 0)
                    self.assertEqual(one.backup(hashes[:-1], indices[:-PAGE]), pages - 1)
                    self.assertEqual(other.query(hashes), pages - 1)
                    self.assertEqual(other.prefetch(hashes, indices), pages - 1)
                    n = (pages - 1) * PAGE
                    tokens = 2 if layout == "layer_first" else 1
                    self.assertTrue(torch.equal(source.kv_buffer.narrow(tokens, 0, n), target.kv_buffer.narrow(tokens, 0, n)))
                    self.assertFalse(target.kv_buffer.narrow(tokens, n, PAGE).any(), "a page that is not held was written")

    def test_pages_land_where_the_indices_say(self):
        server = self.serve()
        source, target = HostPool("page_first", 8), HostPool("page_first", 8)
        source.fill(2)
        one, other = self.controller(server, source), self.controller(server, target)
        at = torch.cat([torch.arange(5 * PAGE, 6 * PAGE), torch.arange(1 * PAGE, 2 * PAGE)])
        to = torch.cat([torch.arange(0 * PAGE, 1 * PAGE), torch.arange(7 * PAGE, 8 * PAGE)])
        self.assertEqual(one.backup(["a", "b"], at), 2)
        self.assertEqual(other.prefetch(["a", "b"], to), 2)
        self.assertTrue(torch.equal(target._page(0), source._page(5 * PAGE)))
        self.assertTrue(torch.equal(target._page(7 * PAGE), source._page(1 * PAGE)))

    def test_what_pages_depend_on_keeps_them_apart(self):
        server = self.serve()
        pool = HostPool("page_first", 1)
        self.assertEqual(self.controller(server, pool).backup(["a"], torch.arange(PAGE)), 1)
        for changes, held in (
            ({}, 1),
            ({"model_name": "other"}, 0),
            ({"tp_rank": 1, "tp_size": 2}, 0),
            ({"pp_rank": 1, "pp_size": 2}, 0),
        ):
            with self.subTest(**changes):
                self.assertEqual(self.controller(server, pool, **changes).query(["a"]), held)
        self.assertEqual(self.controller(server, HostPool("layer_first", 1)).query(["a"]), 0)

    def test_one_rank_of_a_model_with_mla_stores_for_all(self):
        server = self.serve()
        pool = HostPool("page_first", 1)
        ranks = [self.controller(server, pool, is_mla_model=True, tp_rank=r, tp_size=2) for r in range(2)]
        self.assertEqual(ranks[1].backup(["a"], torch.arange(PAGE)), 1, "it need not store, and has not failed")
        self.assertEqual(ranks[1].query(["a"]), 0)
        self.assertEqual(ranks[0].backup(["a"], torch.arange(PAGE)), 1)
        self.assertEqual([r.query(["a"]) for r in ranks], [1, 1])

    def test_single_pages_and_clear(self):
        server = self.serve()
        backend = self.controller(server, HostPool("page_first", 1)).storage_backend
        page = torch.arange(24, dtype=torch.float16)
        self.assertTrue(backend.set("a", page))
        self.assertTrue(backend.exists("a"))
        self.assertTrue(torch.equal(backend.get("a", torch.zeros_like(page)), page))
        self.assertIsNone(backend.get("b", torch.zeros_like(page)))
        self.assertTrue(backend.clear())
        self.assertFalse(backend.exists("a"))

    def test_a_pool_that_is_gone_or_stands_still_is_a_miss_in_time(self):
        for trouble in ("kill", "pause"):
            with self.subTest(trouble):
                server = self.serve()
                pool = HostPool("page_first", 2)
                controller = self.controller(server, pool)
                self.assertEqual(controller.backup(["a"], torch.arange(PAGE)), 1)
                getattr(server, trouble)()
                with self.assertLogs("larder.connectors", "WARNING"):
                    while controller.query(["a"]):
                        pass  # the signal is on its way
                    begun = time.monotonic()
                    self.assertEqual(controller.prefetch(["a"], torch.arange(PAGE)), 0)
                    self.assertEqual(controller.backup(["b"], torch.arange(PAGE)), 0)
                    self.assertLess(time.monotonic() - begun, 3)
                begun = time.monotonic()
                for _ in range(100):
                    self.assertEqual(controller.query(["a"]), 0)
                self.assertLess(time.monotonic() - begun, 2, "each question waits for a pool that is known to be silent")
                if trouble == "pause":
                    server.resume()
                    deadline = time.monotonic() + 20
                    while controller.query(["a"]) == 0 and time.monotonic() < deadline:
                        time.sleep(0.05)
                    self.assertEqual(controller.query(["a"]), 1, "it does not come back")

    def test_options_are_checked(self):
        for extra, says in (({}, "masters"), ({"larder.masters": "x:1", "larder.lookup_timeout": "soon"}, "lookup_timeout is a number"),
                            ({"larder.masters": "x:1", "larder.color": "red"}, "larder.color is no option")):  # fmt: skip
            with self.subTest(extra), self.assertRaisesRegex(ValueError, says):
                connector.LarderStorage(types.SimpleNamespace(extra_config=extra), {})


if __name__ == "__main__":
    unittest.main()
