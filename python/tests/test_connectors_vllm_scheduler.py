"""The KV connector under vLLM's own scheduler: its factory makes the connector, its Scheduler and its block pool decide what is computed,
loaded, preempted and computed again, and its ActiveKVConnector calls a worker's side. Only the model is ours: it computes a cache from the
cache, on the CPU, and each token that it answers tells whether the cache was right. Skipped where vLLM is not installed."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import tempfile
import unittest

import engines
from processes import Case
from servers import Server

try:
    if engines.torch is None or not engines.vllm():
        raise unittest.SkipTest("needs vLLM")
    import torch
    from vllm import SamplingParams
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
except ImportError as e:
    raise unittest.SkipTest(f"vLLM's scheduler cannot be imported: {e}") from None

BLOCK = 4  # tokens
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
HEADS, SIZE = 2, 8
WRONG = 999  # the token that is answered from a wrong cache
STEPS = 2000  # more than any test needs

# What vLLM wants to know of a model before it schedules anything.
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HEADS * SIZE, "intermediate_size": 32, "vocab_size": 1000,
    "num_hidden_layers": len(LAYERS), "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 256,
    "torch_dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip


def true_value(tokens: list[int], position: int, layer: int) -> float:
    """What a cache holds for a token: it depends on all tokens before, as attention does."""
    digest = hashlib.sha256(repr((tokens[: position + 1], layer)).encode()).digest()
    return int.from_bytes(digest[:2], "little") / 65536


def next_token(tokens: list[int]) -> int:
    """What follows tokens."""
    return int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:2], "little") % WRONG


def answer(prompt: list[int], count: int) -> list[int]:
    """What an engine answers that is right."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Engine:
    """vLLM's scheduler, and a worker on the CPU."""

    def __init__(self, server: Server, model: str, blocks: int = 64, batch: int = 64) -> None:
        options = {
            "larder.masters": server.address, "larder.lookup_timeout": 0.5, "larder.load_timeout": 0.5, "larder.store_timeout": 2,
            "larder.retry_interval": 0.3,
        }  # fmt: skip
        config = VllmConfig(
            model_config=ModelConfig(model=model, dtype="float32", max_model_len=128, skip_tokenizer_init=True),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=batch, max_model_len=128, enable_chunked_prefill=True,
                is_encoder_decoder=False, disable_hybrid_kv_cache_manager=True,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="LarderConnector", kv_connector_module_path="larder.connectors.vllm", kv_role="kv_both",
                kv_load_failure_policy="recompute", kv_connector_extra_config=options,
            ),
            device_config=DeviceConfig("cpu"), parallel_config=ParallelConfig(),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
        kv_cache_config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)])
        self.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=kv_cache_config, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, hash_block_size=BLOCK,
        )  # fmt: skip
        self.caches = {name: torch.full((blocks, HEADS, BLOCK, SIZE), -1.0) for name in LAYERS}
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)
        previous = kv_transfer_state._KV_CONNECTOR_AGENT  # one a process, where each worker is one
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            self.active = ActiveKVConnector(config, self.caches)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = previous
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.failed = 0  # blocks that were not loaded
        self.places: dict[str, list[int]] = {}  # of requests' blocks, as the worker is told
        self.answers: dict[str, list[int]] = {}
        self.loaded: dict[str, int] = {}  # tokens that requests began with, of the pool and of vLLM's own cache
        self.preempted = 0

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.connector.shutdown()

    def add(self, name: str, prompt: list[int], count: int = 3) -> None:
        """Have a prompt answered."""
        parameters = SamplingParams(max_tokens=count, ignore_eos=True)
        parameters.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(name, prompt, parameters, None, block_hasher=self.hasher))
        self.answers[name] = []

    def step(self, between=lambda: None) -> None:
        """A step of vLLM's. between is called when it is planned and has not begun."""
        out = self.scheduler.schedule()
        self.preempted += len(out.preempted_req_ids or ())
        out.kv_connector_metadata = pickle.loads(pickle.dumps(out.kv_connector_metadata))  # as between processes
        between()
        work = self.work(out)
        self.active.pre_forward(out)
        sound = {request.request_id: True for request, _, _ in work}  # whether layers so far have seen what they should
        for i, name in enumerate(LAYERS if work else ()):
            self.connector.wait_for_layer_load(name)
            for request, begin, end in work:  # all keys and values are written before any attention of the layer
                self.write(request, i, begin, end, sound[request.request_id])
            for request, _, end in work:
                sound[request.request_id] &= self.is_right(request, i, end)
            self.connector.save_kv_layer(name, self.caches[name], None)
        self.active.finish_forward()
        output = pickle.loads(pickle.dumps(self.active.post_forward(out.finished_req_ids)))
        self.failed += len(output.invalid_block_ids)
        names = [request.request_id for request, _, _ in work]
        tokens = [next_token(list(request.all_token_ids)) if sound[request.request_id] else WRONG for request, _, _ in work]
        sampled = [[token] if end == request.num_tokens else [] for token, (request, _, end) in zip(tokens, work)]
        result = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled, kv_connector_output=output)
        for outputs in self.scheduler.update_from_output(out, result).values():
            for o in outputs.outputs:
                self.answers[o.request_id] += o.new_token_ids

    def work(self, out) -> list[tuple[Request, int, int]]:
        """What is to be computed: requests, and from which token to which."""
        work = []
        for new in out.scheduled_new_reqs:
            self.places[new.req_id] = list(new.block_ids[0])
            self.loaded.setdefault(new.req_id, new.num_computed_tokens)
            work.append((new.req_id, new.num_computed_tokens))
        cached = out.scheduled_cached_reqs
        for name, fresh, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            known = [] if name in cached.resumed_req_ids else self.places[name]
            self.places[name] = known + list(fresh[0] if fresh is not None else ())
            work.append((name, computed))
        return [(self.scheduler.requests[n], computed, computed + out.num_scheduled_tokens[n]) for n, computed in work]

    def is_right(self, request: Request, layer: int, end: int) -> bool:
        """Whether a layer of the tokens before end is what it should be."""
        places, tokens, cache = self.places[request.request_id], list(request.all_token_ids), self.caches[LAYERS[layer]]
        return all(bool((cache[places[p // BLOCK], :, p % BLOCK] == true_value(tokens, p, layer)).all()) for p in range(end))

    def write(self, request: Request, layer: int, begin: int, end: int, sound: bool) -> None:
        """Write a layer of tokens: nonsense, if layers before have seen some."""
        tokens = list(request.all_token_ids)
        for p in range(begin, end):
            place = self.places[request.request_id][p // BLOCK]
            self.caches[LAYERS[layer]][place, :, p % BLOCK] = true_value(tokens, p, layer) if sound else -2.0

    def run(self, between=lambda: None) -> None:
        """Go on until vLLM has nothing to do any more, and all is stored."""
        for _ in range(STEPS):
            if not self.scheduler.has_requests():
                break
            self.step(between)
        else:
            raise AssertionError("the scheduler comes to no end")
        assert self.connector._worker._writer.flush(30)


PROMPT = list(range(100, 100 + 5 * BLOCK + 2))


class UnderScheduler(Case):
    @classmethod
    def setUpClass(cls) -> None:
        init_none_hash(sha256)
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.model = directory.name
        with open(f"{cls.model}/config.json", "w") as file:
            json.dump(MODEL, file)

    def serve(self) -> Server:
        server = Server(pool="1GiB")
        self.addCleanup(server.stop)
        return server

    def engine(self, server: Server, **options) -> Engine:
        engine = Engine(server, self.model, **options)
        self.addCleanup(engine.close)
        return engine

    def check(self, engine: Engine, prompts: dict[str, list[int]], count: int = 3) -> None:
        self.assertEqual({n: engine.answers[n] for n in prompts}, {n: answer(p, count) for n, p in prompts.items()})

    def test_a_prefix_that_one_engine_computes_another_loads(self) -> None:
        server = self.serve()
        one, other = self.engine(server), self.engine(server, batch=8)
        one.add("a", PROMPT)
        one.run()
        self.check(one, {"a": PROMPT})
        longer = [*PROMPT[: 4 * BLOCK], *range(30)]
        other.add("b", longer)
        other.run()
        self.check(other, {"b": longer})
        self.assertEqual((one.loaded["a"], other.loaded["b"]), (0, 4 * BLOCK))

    def test_answers_are_stored_as_prompts_are(self) -> None:
        server = self.serve()
        one, other = self.engine(server), self.engine(server)
        one.add("a", PROMPT, count=20)
        one.run()
        dialogue = [*PROMPT, *answer(PROMPT, 20), 1, 2, 3]
        other.add("b", dialogue)
        other.run()
        self.check(other, {"b": dialogue})
        self.assertEqual(other.loaded["b"], (len(PROMPT) + 19) // BLOCK * BLOCK)  # the last token was never computed

    def test_blocks_that_are_gone_when_they_are_loaded_are_computed(self) -> None:
        longer = [*PROMPT, *range(3 * BLOCK)]  # the step computes blocks, too, and computes them from nonsense
        for gone in (0, 2, 4):
            with self.subTest(gone=gone):
                server = self.serve()
                one, other, third = (self.engine(server) for _ in range(3))
                one.add("a", PROMPT)
                one.run()
                with server.client() as client:
                    other.add("b", longer)
                    key = other.connector._layout.key(other.scheduler.requests["b"].block_hashes[gone])
                    other.step(lambda: self.assertTrue(client.delete(key)))
                    other.run()
                    self.check(other, {"b": longer})
                    self.assertEqual(other.loaded["b"], 5 * BLOCK)
                    self.assertTrue(client.exists(key))  # it was stored again
                third.add("c", longer)
                third.run()
                self.check(third, {"c": longer})  # nor was the nonsense stored
                self.assertEqual(third.loaded["c"], 8 * BLOCK)

    def test_requests_that_are_preempted_go_on(self) -> None:
        server = self.serve()
        tight, other = self.engine(server, blocks=16), self.engine(server)
        prompts = {str(i): [*PROMPT[:BLOCK], *range(i, i + 14)] for i in range(4)}
        for engine in (tight, other):
            for name, prompt in prompts.items():
                engine.add(name, prompt, count=16)
            engine.run()
            self.check(engine, prompts, count=16)
        self.assertGreater(tight.preempted, 0)
        self.assertGreaterEqual(min(other.loaded.values()), 4 * BLOCK)

    def test_a_pool_that_dies_between_plan_and_step(self) -> None:
        server = self.serve()
        one, other = self.engine(server), self.engine(server)
        one.add("a", PROMPT)
        one.run()
        other.add("b", PROMPT)
        other.step(server.kill)
        other.add("c", PROMPT[::-1])
        for _ in range(STEPS):
            if not other.scheduler.has_requests():
                break
            other.step()
        self.check(other, {"b": PROMPT, "c": PROMPT[::-1]})

    def test_random_requests_of_two_engines_while_blocks_vanish(self) -> None:
        server = self.serve()
        draw = random.Random(1)
        pair = [self.engine(server, blocks=24, batch=16), self.engine(server, blocks=48, batch=32)]
        with server.client() as client:

            def vanish() -> None:
                keys = list(client.list_keys())
                if keys and draw.random() < 0.5:
                    client.delete_batch(draw.sample(keys, min(3, len(keys))))

            prompts: dict[str, list[int]] = {}
            for turn in range(12):
                for engine in pair:
                    batch = {f"{turn}-{i}": [*PROMPT[: draw.randrange(22)], *range(draw.randrange(1, 12))] for i in range(4)}
                    for name, prompt in batch.items():
                        engine.add(name, prompt, count=4)
                    self.assertTrue(engine.scheduler.reset_prefix_cache())  # what is found is the pool's
                    engine.run(vanish)
                    self.check(engine, batch, count=4)
                    prompts |= batch
        for engine in pair:
            self.assertGreater(sum(engine.loaded.values()), 0)
            self.assertGreater(engine.failed, 0)


if __name__ == "__main__":
    unittest.main()
