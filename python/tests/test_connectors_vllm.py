"""vLLM's KV connector, driven as its scheduler and its model runner drive one, with what they exchange going through pickle as between
vLLM's processes. The base classes and the scheduler's messages are vLLM's own where it is installed."""

from __future__ import annotations

import hashlib
import pickle
import time
import types
import unittest
from unittest import mock

import engines
from processes import Case
from servers import Server

torch = engines.torch
if torch is not None:
    REAL = engines.vllm()
    from larder.connectors import vllm as connector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

BLOCK = 4  # tokens
LAYERS = [f"model.layers.{i}.attn" for i in range(3)]
BLOCKS = 32  # of a paged cache
HEADS, SIZE = 2, 8


class Request:
    """A request as the scheduler has it."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.request_id = name
        self.all_token_ids = tokens
        self.num_computed_tokens = 0
        self.places: list[int] = []  # the scheduler's own account
        self.fresh = True

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        hashes, parent = [], b"root"
        for i in range(self.num_tokens // BLOCK):
            parent = hashlib.sha256(parent + repr(self.all_token_ids[i * BLOCK : (i + 1) * BLOCK]).encode()).digest()
            hashes.append(parent)
        return hashes


class Blocks:
    """KVCacheBlocks, as far as connectors see them."""

    def __init__(self, places: list[int]) -> None:
        self.places = places

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.places),)


def true_value(tokens: list[int], position: int, layer: int, rank: int) -> float:
    """What a cache holds for a token: it depends on all tokens before, as attention does."""
    seed = hashlib.sha256(repr((tokens[: position + 1], layer, rank)).encode()).digest()
    return int.from_bytes(seed[:2], "little") / 65536


class Worker:
    """A worker: its connector, its paged cache, and a model that computes the cache from the cache."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.rank = rank
        shape = (2, BLOCKS, BLOCK, HEADS, SIZE) if engine.kv_first else (BLOCKS, HEADS, BLOCK, SIZE)
        self.caches = {name: torch.full(shape, -1.0, dtype=torch.float32) for name in LAYERS}
        self.kv_first = engine.kv_first
        self.connector = connector.LarderConnector(engine.config(rank), KVConnectorRole.WORKER, engine.kv_cache_config)
        self.connector.register_kv_caches(self.caches)
        self.hooks = engine.hooks

    def token(self, layer: int, place: int, offset: int):
        cache = self.caches[LAYERS[layer]]
        return cache[:, place, offset] if self.kv_first else cache[place, :, offset]

    def execute(self, plan_bytes: bytes, work: list[tuple[Request, int, int]], finished: set[str], has_loads: bool):
        """A step, in the order of vLLM's ActiveKVConnector and maybe_transfer_kv_layer."""
        c = self.connector
        c.bind_connector_metadata(pickle.loads(plan_bytes))
        if has_loads:
            c.start_load_kv(types.SimpleNamespace())
        for layer, name in enumerate(LAYERS):
            if self.hooks:
                c.wait_for_layer_load(name)
            for request, begin, end in work:
                self.compute(request, layer, begin, end)
            if self.hooks:
                c.save_kv_layer(name, self.caches[name], None)
        if not has_loads:
            c.start_load_kv(types.SimpleNamespace())
        c.wait_for_save()
        assert c.get_finished(finished) == (None, None)
        invalid = c.get_block_ids_with_load_errors()
        meta = c.build_connector_worker_meta()
        c.clear_connector_metadata()
        return invalid, pickle.loads(pickle.dumps(meta))

    def compute(self, request: Request, layer: int, begin: int, end: int) -> None:
        """Right only if all before is."""
        tokens = request.all_token_ids
        right = all(
            bool((self.token(layer, request.places[p // BLOCK], p % BLOCK) == true_value(tokens, p, layer, self.rank)).all())
            for p in range(begin)
        )
        for p in range(begin, end):
            value = true_value(tokens, p, layer, self.rank) if right else -2.0
            self.token(layer, request.places[p // BLOCK], p % BLOCK).fill_(value)


class Engine:
    """vLLM's scheduler, as far as it has to do with a connector, and workers."""

    def __init__(self, server, ranks=1, kv_first=False, layerwise=True, hooks=True, model="toy", **extra) -> None:
        self.options = {
            "larder.masters": server.address, "larder.lookup_timeout": 0.3, "larder.load_timeout": 0.5, "larder.store_timeout": 2,
            "larder.retry_interval": 0.3, "layerwise": layerwise, **extra,
        }  # fmt: skip
        self.ranks, self.kv_first, self.hooks, self.model = ranks, kv_first, hooks, model
        self.kv_cache_config = types.SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[None], hash_block_size=BLOCK)
        self.connector = connector.LarderConnector(self.config(0), KVConnectorRole.SCHEDULER, self.kv_cache_config)
        self.workers = [Worker(self, rank) for rank in range(ranks)]
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.free = list(range(BLOCKS))
        self.loaded = 0  # tokens
        self.finished: set[str] = set()

    def config(self, rank: int):
        transfer = types.SimpleNamespace(
            kv_connector_extra_config=self.options, kv_load_failure_policy="recompute", is_kv_producer=True, engine_id="e"
        )
        return types.SimpleNamespace(
            kv_transfer_config=transfer,
            parallel_config=types.SimpleNamespace(tensor_parallel_size=self.ranks, pipeline_parallel_size=1, rank=rank),
            model_config=types.SimpleNamespace(model=self.model, revision=None, dtype="float32", quantization=None, use_mla=False),
            cache_config=types.SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        self.connector.shutdown()

    def flush(self) -> None:
        for worker in self.workers:
            assert worker.connector._worker._writer.flush(30)

    def generate(self, name: str, tokens: list[int], chunk: int = 1000) -> Request:
        """Compute a prompt, in chunks, and finish. The engine goes on for a step after that, as vLLM's does."""
        request = Request(name, list(tokens))
        self.waiting.append(request)
        while self.running or self.waiting:
            self.step(chunk)
        self.step(chunk)
        self.flush()
        return request

    def schedule(self, chunk: int):
        """One step's plan: the scheduler's output, and what the workers compute."""
        new, work, has_loads = [], [], False
        cached = {"req_ids": [], "resumed_req_ids": set(), "new_block_ids": [], "num_computed_tokens": []}
        counts = {}
        for request in self.running:
            n = min(chunk, request.num_tokens - request.num_computed_tokens)
            fresh = self.allocate(request, request.num_computed_tokens + n)
            cached["req_ids"].append(request.request_id)
            cached["new_block_ids"].append((fresh,) if fresh else None)
            cached["num_computed_tokens"].append(request.num_computed_tokens)
            counts[request.request_id] = n
            work.append((request, request.num_computed_tokens, request.num_computed_tokens + n))
        while self.waiting:
            request = self.waiting.pop(0)
            external, asynchronous = self.connector.get_num_new_matched_tokens(request, 0)
            assert not asynchronous and external % BLOCK == 0 and external < request.num_tokens
            self.loaded += external
            has_loads = has_loads or external > 0
            n = min(chunk, request.num_tokens - external)
            self.allocate(request, external + n)
            self.connector.update_state_after_alloc(request, Blocks(request.places), external)
            request.num_computed_tokens = external
            new.append(types.SimpleNamespace(req_id=request.request_id, block_ids=(list(request.places),), num_computed_tokens=external))
            counts[request.request_id] = n
            work.append((request, external, external + n))
            self.running.append(request)
        output = types.SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=types.SimpleNamespace(**cached), num_scheduled_tokens=counts,
            finished_req_ids=self.finished,
        )  # fmt: skip
        plan = pickle.dumps(self.connector.build_connector_meta(output))
        for request, _, end in work:
            request.num_computed_tokens = end  # vLLM's scheduler goes ahead as well
        return plan, work, has_loads

    def allocate(self, request: Request, tokens: int) -> list[int]:
        fresh = [self.free.pop(0) for _ in range(-(-tokens // BLOCK) - len(request.places))]
        request.places += fresh
        return fresh

    def execute(self, scheduled) -> tuple[list, set[int], object]:
        plan, work, has_loads = scheduled
        finished, self.finished = self.finished, set()
        results = [worker.execute(plan, work, finished, has_loads) for worker in self.workers]
        invalid = set().union(*(i for i, _ in results))
        meta = None
        for _, m in results:
            meta = m if meta is None else meta.aggregate(m)
        return work, invalid, meta

    def update(self, result) -> None:
        """As Scheduler.update_from_output: requests of blocks that failed are set back to these."""
        work, invalid, meta = result
        self.connector.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=meta, invalid_block_ids=invalid))
        for request, begin, _ in work:
            failed = [i for i, place in enumerate(request.places) if place in invalid and i * BLOCK < begin]
            if failed:
                request.num_computed_tokens = failed[0] * BLOCK
            elif request.num_computed_tokens >= request.num_tokens and request in self.running:
                self.running.remove(request)
                assert self.connector.request_finished(request, request.places) == (False, None)
                self.finished.add(request.request_id)
                self.free += request.places

    def step(self, chunk: int = 1000) -> None:
        self.update(self.execute(self.schedule(chunk)))

    def is_right(self, request: Request) -> bool:
        """Whether all workers' caches hold what they should."""
        return all(
            bool((w.token(layer, request.places[p // BLOCK], p % BLOCK) == true_value(request.all_token_ids, p, layer, w.rank)).all())
            for w in self.workers for layer in range(len(LAYERS)) for p in range(request.num_tokens)
        )  # fmt: skip


PROMPT = list(range(100, 100 + 5 * BLOCK + 2))


@unittest.skipIf(torch is None, "needs torch")
class Connector(Case):
    def serve(self):
        server = Server(pool="1GiB")  # each rank stores in a region of its own
        self.addCleanup(server.stop)  # after what uses it was closed
        return server

    def engine(self, server, **options):
        engine = Engine(server, **options)
        self.addCleanup(engine.close)
        return engine

    def test_a_prefix_that_one_engine_computes_another_loads(self):
        for options in ({}, {"ranks": 2}, {"kv_first": True}, {"layerwise": False, "hooks": False}):
            with self.subTest(**options):
                server = self.serve()
                one, other = self.engine(server, **options), self.engine(server, **options)
                self.assertTrue(one.is_right(one.generate("a", PROMPT)))
                self.assertEqual(one.loaded, 0)
                request = other.generate("b", PROMPT[: 3 * BLOCK] + [7] * 9)
                self.assertEqual(other.loaded, 3 * BLOCK)
                self.assertTrue(other.is_right(request))

    def test_at_least_one_token_is_computed(self):
        server = self.serve()
        one, other = self.engine(server), self.engine(server)
        one.generate("a", PROMPT[: 4 * BLOCK])
        self.assertTrue(other.is_right(other.generate("b", PROMPT[: 4 * BLOCK])))
        self.assertEqual(other.loaded, 3 * BLOCK)

    def test_blocks_are_stored_as_chunks_of_a_prompt_complete_them(self):
        for chunk in (1, 3, BLOCK, 7):
            with self.subTest(chunk=chunk):
                server = self.serve()
                one, other = self.engine(server), self.engine(server)
                one.generate("a", PROMPT, chunk=chunk)
                self.assertTrue(other.is_right(other.generate("b", PROMPT)))
                self.assertEqual(other.loaded, 5 * BLOCK)

    def test_other_models_and_layouts_share_nothing(self):
        server = self.serve()
        self.engine(server).generate("a", PROMPT)
        for options in ({"model": "another"}, {"ranks": 2}, {"larder.namespace": "b"}):
            with self.subTest(**options):
                other = self.engine(server, **options)
                self.assertTrue(other.is_right(other.generate("b", PROMPT)))
                self.assertEqual(other.loaded, 0)

    def test_a_block_counts_only_if_all_ranks_hold_it(self):
        server = self.serve()
        self.engine(server, ranks=2).generate("a", PROMPT)
        other = self.engine(server, ranks=2)
        hashes = Request("a", PROMPT).block_hashes
        with server.client() as client:
            self.assertTrue(client.delete(other.workers[1].connector._layout.key(hashes[2])))
        self.assertTrue(other.is_right(other.generate("b", PROMPT)))
        self.assertEqual(other.loaded, 2 * BLOCK)

    def test_blocks_that_are_gone_when_they_are_loaded_are_computed_and_stored_again(self):
        for ranks, layer_hooks in ((1, True), (2, True), (1, False)):
            with self.subTest(ranks=ranks, hooks=layer_hooks):
                server = self.serve()
                options = {"ranks": ranks, "hooks": layer_hooks, "layerwise": layer_hooks}
                self.engine(server, **options).generate("a", PROMPT)
                other = self.engine(server, **options)
                request = Request("b", PROMPT)
                other.waiting.append(request)
                scheduled = other.schedule(1000)
                with server.client() as client:
                    self.assertTrue(client.delete(other.workers[-1].connector._layout.key(request.block_hashes[1])))
                result = other.execute(scheduled)
                self.assertEqual(result[1], {request.places[1]})
                other.update(result)
                self.assertEqual(request.num_computed_tokens, 1 * BLOCK)
                while other.running:
                    other.step()
                other.step()
                other.flush()
                self.assertTrue(other.is_right(request))
                third = self.engine(server, **options)
                self.assertTrue(third.is_right(third.generate("c", PROMPT)))
                self.assertEqual(third.loaded, 5 * BLOCK)

    def test_what_was_computed_from_blocks_that_failed_is_never_stored(self):
        # As with asynchronous scheduling: a second step is under way when the first one's failure is found.
        server = self.serve()
        self.engine(server, ranks=2).generate("a", PROMPT)
        other = self.engine(server, ranks=2)
        request = Request("b", [*PROMPT[: 4 * BLOCK], *range(5 * BLOCK)])
        other.waiting.append(request)
        first = other.schedule(2 * BLOCK)
        with server.client() as client:
            self.assertTrue(client.delete(other.workers[0].connector._layout.key(request.block_hashes[1])))
        result = other.execute(first)
        second = other.schedule(2 * BLOCK)  # before the first one's result is known
        late = other.execute(second)
        other.update(result)
        other.update((late[0], set(), late[2]))
        request.num_computed_tokens = 1 * BLOCK
        for worker in other.workers:  # no request of vLLM's is needed to learn of it: a step without work says so
            worker.execute(pickle.dumps(connector.Plan(99, verdicts=other.connector._scheduler.verdicts.take())), [], set(), False)
        other.flush()
        with server.client() as client:
            for worker in other.workers:
                keys = [worker.connector._layout.key(h) for h in request.block_hashes]
                self.assertEqual(client.exists_batch(keys[4:]), [False] * 5)

    def test_a_pool_that_is_gone_or_stands_still_costs_a_bounded_wait(self):
        for trouble in ("kill", "pause"):
            with self.subTest(trouble):
                server = self.serve()
                one = Engine(server)
                one.generate("a", PROMPT)
                one.close()
                other = self.engine(server)
                request = Request("b", PROMPT)
                other.waiting.append(request)
                scheduled = other.schedule(1000)
                self.assertEqual(other.loaded, 5 * BLOCK)
                getattr(server, trouble)()
                begun = time.monotonic()
                with self.assertLogs("larder.connectors", "WARNING"):
                    time.sleep(0.1)  # the signal is on its way
                    other.update(other.execute(scheduled))
                while other.running:
                    other.step()
                self.assertTrue(other.is_right(request))
                again = Request("c", PROMPT)
                other.waiting.append(again)
                while other.running or other.waiting:
                    other.step()
                self.assertTrue(other.is_right(again))
                self.assertLess(time.monotonic() - begun, 5)

    def test_stores_that_wait_are_bounded(self):
        server = self.serve()
        one = self.engine(server, **{"larder.queue_bytes": 100})
        with self.assertLogs("larder.connectors", "WARNING"):
            self.assertTrue(one.is_right(one.generate("a", PROMPT)))
        other = self.engine(server)
        other.generate("b", PROMPT)
        self.assertEqual(other.loaded, 0)

    def test_a_request_that_is_preempted_goes_on_with_other_blocks(self):
        server = self.serve()
        one = self.engine(server)
        request = Request("a", PROMPT)
        one.waiting.append(request)
        one.step(2 * BLOCK)
        one.flush()
        one.running.remove(request)  # preempted: its blocks go, and it begins again
        request.places, one.free = [], [*one.free[8:], *one.free[:8], *request.places]
        external, _ = one.connector.get_num_new_matched_tokens(request, 0)
        one.step(1)  # what was stored before is known to have gone well
        one.flush()
        external, _ = one.connector.get_num_new_matched_tokens(request, 0)
        self.assertEqual(external, 2 * BLOCK)
        one.allocate(request, request.num_tokens)
        one.connector.update_state_after_alloc(request, Blocks(request.places), external)
        output = types.SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=["a"], resumed_req_ids={"a"}, new_block_ids=[(list(request.places),)], num_computed_tokens=[external]
            ),
            num_scheduled_tokens={"a": request.num_tokens - external},
        )  # fmt: skip
        plan = pickle.dumps(one.connector.build_connector_meta(output))
        one.running.append(request)
        one.update(one.execute((plan, [(request, external, request.num_tokens)], True)))
        self.assertTrue(one.is_right(request))

    def test_a_step_that_is_given_up_does_not_keep_the_next_one_from_loading(self):
        server = self.serve()
        self.engine(server).generate("a", PROMPT)
        other = self.engine(server)
        worker = other.workers[0].connector
        request = Request("b", PROMPT)
        other.waiting.append(request)
        plan, _, _ = other.schedule(1000)
        given_up = pickle.loads(plan)
        given_up.loads = given_up.loads[:1]
        given_up.loads[0].place = BLOCKS - 1
        worker.bind_connector_metadata(given_up)
        worker.start_load_kv(None)
        worker.bind_connector_metadata(pickle.loads(plan))
        worker.start_load_kv(None)
        for name in LAYERS:
            worker.wait_for_layer_load(name)
        self.assertEqual(worker.get_block_ids_with_load_errors(), set())
        request.all_token_ids = PROMPT[: 5 * BLOCK]
        self.assertTrue(other.is_right(request))
        for cache in other.workers[0].caches.values():
            self.assertTrue(bool((cache[BLOCKS - 1] == -1).all()), "a block that may be somebody else's by now was written")

    def test_a_model_that_does_not_wait_for_layers_is_not_taken_to_have_had_them(self):
        server = self.serve()
        self.engine(server).generate("a", PROMPT)
        other = self.engine(server, hooks=False)
        request = Request("b", PROMPT)
        other.waiting.append(request)
        with self.assertLogs("larder.connectors", "WARNING"):
            result = other.execute(other.schedule(1000))
        self.assertEqual(result[1], set(request.places[:5]))
        other.update(result)
        while other.running:
            other.step()
        self.assertTrue(other.is_right(request))

    def test_layers_that_nobody_waits_for_are_there_for_a_model_that_comes_after(self):
        server = self.serve()
        self.engine(server).generate("a", PROMPT)
        other = self.engine(server)
        request = Request("b", PROMPT)
        other.waiting.append(request)
        plan, _, _ = other.schedule(1000)
        worker = other.workers[0].connector
        worker.bind_connector_metadata(pickle.loads(plan))
        worker.start_load_kv(None)
        worker.wait_for_layer_load(LAYERS[0])
        self.assertEqual(worker.get_block_ids_with_load_errors(), set())
        request.all_token_ids = PROMPT[: 5 * BLOCK]
        self.assertTrue(other.is_right(request))

    def test_engines_that_are_not_supported_are_refused(self):
        server = self.serve()
        engine = self.engine(server)
        config = engine.config(0)
        for change, says in (
            (lambda: vars(config.parallel_config).update(decode_context_parallel_size=2), "decode_context_parallel_size is 2"),
            (lambda: vars(engine.kv_cache_config).update(kv_cache_groups=[None, None]), "--disable-hybrid-kv-cache-manager"),
        ):
            change()
            with self.assertRaisesRegex(ValueError, says):
                connector.LarderConnector(config, KVConnectorRole.SCHEDULER, engine.kv_cache_config)


class InstalledEngine:
    """vLLM's own scheduler and the part of its model runner that calls connectors, around a model of ours."""

    kv_first = hooks = False

    def __init__(self, server) -> None:
        from vllm import config as vllm_config
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        config = vllm_config.VllmConfig(
            cache_config=vllm_config.CacheConfig(block_size=BLOCK), device_config=vllm_config.DeviceConfig(device="cpu"),
            kv_transfer_config=vllm_config.KVTransferConfig(
                kv_connector="LarderConnector", kv_connector_module_path="larder.connectors.vllm", kv_role="kv_both",
                kv_load_failure_policy="recompute", kv_connector_extra_config={"larder.masters": server.address},
            ),
        )  # fmt: skip

        class Model(types.SimpleNamespace):  # vLLM's own needs its compiled parts; the scheduler asks it what it is not
            def __getattr__(self, name):
                return False

        config.model_config = Model(model="toy", max_model_len=256, dtype=torch.float32, runner_type="generate")
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
        groups = [KVCacheGroupSpec(LAYERS, spec)]
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = Scheduler(config, caches, mock.MagicMock(), block_size=BLOCK, include_finished_set=True)
        self.agent = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        self.rank = 0
        self.caches = {name: torch.full((BLOCKS, HEADS, BLOCK, SIZE), -1.0) for name in LAYERS}
        kv_transfer_state._KV_CONNECTOR_AGENT = self.agent  # as ensure_kv_transfer_initialized does
        self.runner = ActiveKVConnector(config, self.caches)
        self.external = 0  # tokens that were found

    token = Worker.token if torch is not None else None
    compute = Worker.compute if torch is not None else None

    def close(self) -> None:
        self.agent.shutdown()
        self.scheduler.connector.shutdown()

    def generate(self, name: str, tokens: list[int], before_execution=lambda output: None) -> bool:
        """Run a request to its end. Returns whether all that the cache holds of it is right."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as OwnRequest

        request = OwnRequest(
            request_id=name, prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=6), pooling_params=None,
            block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        while self.scheduler.has_requests():
            output = self.scheduler.schedule()
            before_execution(output)
            self.scheduler.update_from_output(output, self.execute(output))
        self.agent._worker._writer.flush(30)
        seen = types.SimpleNamespace(all_token_ids=list(request.all_token_ids), places=self.places)
        return all(
            bool((self.token(layer, seen.places[p // BLOCK], p % BLOCK) == true_value(seen.all_token_ids, p, layer, 0)).all())
            for layer in range(len(LAYERS)) for p in range(request.num_computed_tokens)
        )  # fmt: skip

    def execute(self, output):
        """A step of the model runner."""
        from vllm.v1.outputs import ModelRunnerOutput

        output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        if not output.total_num_scheduled_tokens:
            return self.runner.no_forward(output)
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begins.update(zip(cached.req_ids, cached.num_computed_tokens))
        (name, begin), = begins.items()
        request = self.scheduler.requests[name]
        self.places = list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])
        self.external += begin if output.has_sync_kv_loads else 0
        work = types.SimpleNamespace(all_token_ids=list(request.all_token_ids), places=self.places)
        end = begin + output.num_scheduled_tokens[name]
        self.runner.pre_forward(output)
        for layer, layer_name in enumerate(LAYERS):  # as maybe_transfer_kv_layer does around attention
            self.agent.wait_for_layer_load(layer_name)
            self.compute(work, layer, begin, end)
            self.agent.save_kv_layer(layer_name, self.caches[layer_name], None)
        self.runner.finish_forward()
        result = self.runner.post_forward(output.finished_req_ids)
        sampled = [[7]] if end >= request.num_tokens else [[]]
        return ModelRunnerOutput(
            req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=sampled, kv_connector_output=pickle.loads(pickle.dumps(result))
        )


@unittest.skipUnless(torch is not None and REAL, "needs vLLM")
class Installed(Case):
    """vLLM's own scheduler decides, and its own model runner calls the workers' side."""

    def engine(self, server):
        engine = InstalledEngine(server)
        self.addCleanup(engine.close)
        return engine

    def serve(self):
        server = Server(pool="1GiB")
        self.addCleanup(server.stop)
        return server

    def test_a_prefix_is_shared_with_what_was_generated(self):
        server = self.serve()
        one = self.engine(server)
        self.assertTrue(one.generate("a", PROMPT))
        other = self.engine(server)
        self.assertTrue(other.generate("b", [*PROMPT, *[7] * 4]))
        self.assertEqual((one.external, other.external), (0, 6 * BLOCK))

    def test_blocks_that_are_gone_are_computed_again(self):
        server = self.serve()
        self.assertTrue(self.engine(server).generate("a", PROMPT))
        other, third = self.engine(server), None

        def lose(output):
            if output.has_sync_kv_loads and other.external == 0:
                with server.client() as client:
                    block = output.kv_connector_metadata.loads[2]
                    self.assertTrue(client.delete(other.agent._layout.key(block.hash)))

        self.assertTrue(other.generate("b", PROMPT, lose))
        self.assertEqual(other.external, 5 * BLOCK)
        third = self.engine(server)
        self.assertTrue(third.generate("c", PROMPT))
        self.assertEqual(third.external, 5 * BLOCK)

    def test_a_pool_that_dies_is_not_noticed(self):
        server = self.serve()
        self.assertTrue(self.engine(server).generate("a", PROMPT))
        other = self.engine(server)
        self.assertTrue(other.generate("b", PROMPT, lambda output: server.kill()))
        self.assertTrue(other.generate("c", PROMPT[::-1]))


if __name__ == "__main__":
    unittest.main()
