"""A KV connector of vLLM (its v1 interface), which it loads by name::

    --kv-transfer-config '{
        "kv_connector": "LarderConnector", "kv_connector_module_path": "larder.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"larder.masters": "10.0.0.5:7400"}}'

A block of a worker is one value: its layers, one behind the other. vLLM's hash of a block names it and all before it, with the adapter,
the images and the salt; the key has the model, the types, the layout and the rank besides, and the pool knows the blocks as prefixes.
There are two connectors in an engine. The scheduler's asks the pool for the longest prefix that all workers' blocks are held of, with
one exchange, and plans what is loaded and stored. A worker's reads the blocks of a step with one exchange, and has each layer in the
paged cache when its attention begins; it copies each layer out when its attention has ended, and stores blocks behind the engine's back.

Blocks that could not be loaded are reported, and vLLM computes them, with ``kv_load_failure_policy`` as above. What a step has computed
from such blocks is wrong, at all ranks, and the steps that were scheduled meanwhile compute from it: a worker therefore holds what it
has copied out until the scheduler says that no rank has failed (:class:`Verdicts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

import larder

from ._layers import LayeredCache, Load, Staged
from ._link import Link, Settings, Writer, logger, scope

# The most blocks that a lookup asks for: the protocol's limit.
MAX_BLOCKS = 4096

# Steps that a worker holds copies of while it waits to hear that they went well. An engine has a few under way.
MAX_HELD = 64


@dataclasses.dataclass
class Block:
    """A block of a request, and where it lies in the paged cache."""

    hash: bytes  # vLLM's
    parent: bytes  # the hash of the block before; empty for the first
    index: int  # its place in its request
    place: int  # in the paged cache


@dataclasses.dataclass
class Verdict:
    """Whether what a step has computed is right."""

    step: int
    good: bool


@dataclasses.dataclass
class Plan(KVConnectorMetadata):
    """What the workers are to do in a step."""

    step: int
    loads: list[Block] = dataclasses.field(default_factory=list)
    saves: list[Block] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)  # of earlier steps


@dataclasses.dataclass
class Outcome(KVConnectorWorkerMetadata):
    """How the workers' loads of steps have ended: vLLM adds up those of all ranks, and tells the scheduler."""

    steps: dict[int, bool]  # whether all has been loaded

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Outcome:
        """That of two workers."""
        assert isinstance(other, Outcome)
        steps = dict(self.steps)
        for step, good in other.steps.items():
            steps[step] = steps.get(step, True) and good
        return Outcome(steps)


class LarderConnector(KVConnectorBase_V1):
    """Blocks of a paged cache in a pool of Larder's. One KV cache group is taken: ``--disable-hybrid-kv-cache-manager``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.of(transfer.kv_connector_extra_config)
        self._layout = Layout.of(vllm_config, kv_cache_config, settings.namespace)
        self._link = Link(settings)
        self._scheduler = self._worker = None
        if role == KVConnectorRole.SCHEDULER:
            if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
                logger.warning("set kv_load_failure_policy to recompute: otherwise requests fail when the pool does")
            self._scheduler = _Scheduler(self._layout, self._link)
        else:
            self._worker = _Worker(self._layout, self._link, bool(transfer.kv_connector_extra_config.get("layerwise", True)))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for in Python, between the pieces of a graph, unless ``layerwise`` is false."""
        return bool(extra_config.get("layerwise", True))

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not stored is computed again."""
        return False

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond num_computed_tokens can be loaded, in the step itself."""
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan to load what was found, into blocks."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """What the workers are to load and store in this step."""
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn how the workers' loads have ended."""
        outcome = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(outcome, Outcome):
            self._scheduler.verdicts.learn(outcome.steps)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks may be freed: what is to be stored was copied."""
        self._scheduler.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Drop all blocks of this model from the pool."""
        prefix, timeout = self._layout.scope.encode(), self._link.settings.store_timeout
        return self._link.ask("clear the blocks", lambda c, t: c.clear(prefix, timeout=t) is None, False, timeout)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn of the paged cache."""
        self._worker.cache = LayeredCache(kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to read the blocks of this step."""
        self._worker.start_load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer is in the paged cache, or cannot be in time."""
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Begin to copy a layer out of the paged cache."""
        self._worker.save_layer(self._get_connector_metadata(), layer_name)

    def wait_for_save(self) -> None:
        """Wait until all layers are copied out. They are stored later."""
        self._worker.end_step(self._get_connector_metadata())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that have not been loaded since the last call."""
        return self._worker.take_failed()

    def build_connector_worker_meta(self) -> Outcome | None:
        """How the loads of this step have ended."""
        return self._worker.take_outcome()

    def shutdown(self) -> None:
        """End the connector, within a bounded time."""
        if self._worker is not None:
            self._worker.close()
        self._link.close()


@dataclasses.dataclass
class Layout:
    """What keys depend on, besides a block's hash."""

    scope: str  # of the keys of all ranks
    block_size: int  # tokens
    hashes_per_block: int
    rank: int  # of this worker's blocks, among ranks
    ranks: int  # that hold different parts of a block
    stores: bool  # whether this worker does: of those that hold the same part one does

    @classmethod
    def of(cls, config: Any, kv_cache_config: Any, namespace: str) -> Layout:
        """The layout of an engine. Raises ValueError for what is not supported."""
        groups = getattr(kv_cache_config, "kv_cache_groups", None) or [None]
        if len(groups) != 1:
            raise ValueError(f"{len(groups)} KV cache groups: give vLLM --disable-hybrid-kv-cache-manager")
        parallel, model = config.parallel_config, config.model_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                raise ValueError(f"{name} is {getattr(parallel, name)}: context parallelism is not supported")
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        rank = parallel.rank % (tp * pp)
        same = bool(getattr(model, "use_mla", False))  # all ranks of a stage hold the same
        size = config.cache_config.block_size
        what = (
            vllm.__version__, model.model, getattr(model, "revision", None), str(model.dtype), str(config.cache_config.cache_dtype),
            getattr(model, "quantization", None), size, tp, pp, same,
        )  # fmt: skip
        return cls(
            scope=scope("vllm", namespace, *what),
            block_size=size,
            hashes_per_block=max(1, size // (getattr(kv_cache_config, "hash_block_size", None) or size)),
            rank=rank // tp if same else rank,
            ranks=pp if same else tp * pp,
            stores=not same or rank % tp == 0,
        )

    @property
    def context(self) -> larder.PrefixContext:
        """The context of prefixes."""
        return larder.PrefixContext(model=self.scope, block_size=self.block_size)

    def key(self, hash: bytes) -> bytes:
        """Of this rank's part of a block."""
        return f"{self.scope}{self.rank}/{hash.hex()}".encode()

    def hashes(self, request: Any) -> Sequence[bytes]:
        """Of a request's whole blocks."""
        n = self.hashes_per_block
        return request.block_hashes if n == 1 else request.block_hashes[n - 1 :: n]


def short(hash: bytes) -> int:
    """A block's hash as prefixes have it, with 64 bits; 0 if it is empty. Keys have the whole one: if two have the same short one, a
    lookup finds what a load does not."""
    return int.from_bytes(hash[:8], "little") or int(bool(hash))


class Verdicts:
    """The scheduler's account of steps, each of which is right if all its loads went well, and those of the steps that were under way
    when it was scheduled."""

    def __init__(self) -> None:
        self.step = 0  # that was planned last
        self._bad_until = 0
        self._news: list[Verdict] = []

    def learn(self, steps: dict[int, bool]) -> None:
        """Take what the workers say of steps."""
        for step, good in sorted(steps.items()):
            if not good:
                self._bad_until = max(self._bad_until, self.step)  # planned before this was known
            self._news.append(Verdict(step, step > self._bad_until))

    def take(self) -> list[Verdict]:
        """Those that the workers do not know yet."""
        news, self._news = self._news, []
        return news


@dataclasses.dataclass
class _Request:
    """What the scheduler's side knows of a request."""

    request: Any  # vLLM's
    places: list[int]  # of its blocks in the paged cache
    saved: int = 0  # blocks that are held, or were planned to be stored


class _Scheduler:
    """The scheduler's side. One thread of vLLM's calls it."""

    def __init__(self, layout: Layout, link: Link) -> None:
        self._layout = layout
        self._link = link
        self.verdicts = Verdicts()
        self._requests: dict[str, _Request] = {}
        self._found: dict[str, int] = {}  # the block from which on blocks were found for a request
        self._loads: list[Block] = []  # of the step that is planned

    def matched(self, request: Any, computed: int) -> int:
        size = self._layout.block_size
        first = computed // size
        last = min((request.num_tokens - 1) // size, first + MAX_BLOCKS)  # a token is left to be computed
        hashes = [short(h) for h in self._layout.hashes(request)[first:last]]
        self._found[request.request_id] = first
        if not hashes:
            return 0
        context, ranks = self._layout.context, self._layout.ranks
        n = self._link.ask(
            "look up a prefix",
            lambda c, t: c.prefix_match(hashes, context, members=ranks, timeout=t), 0, self._link.settings.lookup_timeout,
        )  # fmt: skip
        return max(0, (first + n) * size - computed)

    def allocated(self, request: Any, places: Sequence[int], external: int) -> None:
        known = self._requests.setdefault(request.request_id, _Request(request, []))
        known.places = list(places)
        first = self._found.pop(request.request_id, 0)
        if external > 0:
            n = -(-external // self._layout.block_size)
            self._loads += self._blocks(known, first, first + n)

    def plan(self, output: Any) -> Plan:
        self.verdicts.step += 1
        loads, self._loads = self._loads, []
        plan = Plan(self.verdicts.step, loads, verdicts=self.verdicts.take())
        for new in output.scheduled_new_reqs:
            known = self._requests.get(new.req_id)
            if known is not None:
                known.places = list(new.block_ids[0])
                known.saved = new.num_computed_tokens // self._layout.block_size
                plan.saves += self._saves(known, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            known = self._requests.get(name)
            if known is None:
                continue
            fresh = list(cached.new_block_ids[i][0]) if cached.new_block_ids[i] is not None else []
            known.places = fresh if name in cached.resumed_req_ids else known.places + fresh
            plan.saves += self._saves(known, cached.num_computed_tokens[i], output)
        return plan

    def _saves(self, known: _Request, computed: int, output: Any) -> list[Block]:
        """The blocks that are whole when this step has been computed, and were not before."""
        size = self._layout.block_size
        known.saved = min(known.saved, computed // size)  # what was lost is computed, and stored, again
        end = min(
            (computed + output.num_scheduled_tokens[known.request.request_id]) // size,
            len(self._layout.hashes(known.request)), len(known.places),
        )  # fmt: skip
        saves = self._blocks(known, known.saved, end)
        known.saved = max(known.saved, end)
        return saves

    def _blocks(self, known: _Request, first: int, end: int) -> list[Block]:
        hashes = self._layout.hashes(known.request)
        return [Block(hashes[i], hashes[i - 1] if i else b"", i, known.places[i]) for i in range(first, end)]

    def forget(self, name: str) -> None:
        self._requests.pop(name, None)
        self._found.pop(name, None)


class _Worker:
    """A worker's side. One thread of vLLM's calls it."""

    def __init__(self, layout: Layout, link: Link, layerwise: bool) -> None:
        self._layout = layout
        self._link = link
        self._layerwise = layerwise
        self._writer = Writer(link)
        self.cache: LayeredCache | None = None
        self._load: Load | None = None
        self._staged: Staged | None = None  # copies of this step's blocks
        self._dropping = False  # this step's blocks, for which there is no room
        self._held: dict[int, tuple[list[Block], Staged]] = {}  # by their steps, until the scheduler's verdict
        self._failed: set[int] = set()  # blocks, by their places
        self._outcome: dict[int, bool] = {}

    # Loading.

    def start_load(self, plan: Plan) -> None:
        if self._load is not None:  # of a step that was given up
            self._load.abandon()
            self._load = None
        if not plan.loads:
            return
        self._outcome[plan.step] = True
        keys = [self._layout.key(block.hash) for block in plan.loads]
        self._load = Load(self._link, self.cache, keys, [block.place for block in plan.loads], plan.step)
        if not self._layerwise:
            self._end_load(late=False)

    def wait_for_layer(self, name: str) -> None:
        if self._load is not None:
            self._load.inject(name)

    def _end_load(self, late: bool = True) -> None:
        load, self._load = self._load, None
        if load is not None:
            failed = load.finish(late)
            self._failed |= failed
            self._outcome[load.step] = not failed

    def take_failed(self) -> set[int]:
        self._end_load()
        failed, self._failed = self._failed, set()
        return failed

    def take_outcome(self) -> Outcome | None:
        self._end_load()
        outcome, self._outcome = self._outcome, {}
        return Outcome(outcome) if outcome else None

    # Storing.

    def save_layer(self, plan: Plan, name: str) -> None:
        staged = self._stage(plan)
        if staged is not None:
            staged.copy(name)

    def _stage(self, plan: Plan) -> Staged | None:
        """Where this step's blocks are copied to; None if there are none, or there is no room."""
        if self._staged is None and plan.saves and self._layout.stores and not self._dropping:
            size = len(plan.saves) * self.cache.block_bytes
            held = self._writer.bytes + sum(staged.bytes for _, staged in self._held.values())
            if held + size > self._link.settings.queue_bytes or len(self._held) >= MAX_HELD:
                self._dropping = True
                self._link.say("full", "%d bytes wait for being stored already: others are not stored", held)
            else:
                self._staged = Staged(self.cache, [block.place for block in plan.saves])
        return self._staged

    def end_step(self, plan: Plan) -> None:
        self._end_load()
        if plan.saves:
            self._outcome.setdefault(plan.step, True)
        staged = self._stage(plan)
        self._staged, self._dropping = None, False
        if staged is not None:
            staged.finish()  # with the layers that save_kv_layer was not called for
            self._held[plan.step] = (plan.saves, staged)
        for verdict in plan.verdicts:
            held = self._held.pop(verdict.step, None)
            if held is not None and verdict.good:
                self._store(*held)
            for step in [s for s in self._held if s < verdict.step]:  # they come in order: nothing was said of these
                del self._held[step]

    def _store(self, blocks: list[Block], staged: Staged) -> None:
        context, shard = self._layout.context, (self._layout.rank, self._layout.ranks)
        keys = [self._layout.key(block.hash) for block in blocks]

        def store(client: larder.Client, timeout: float) -> None:
            items = []
            for i, there in enumerate(client.exists_batch(keys, timeout=timeout)):
                if not there:
                    block = blocks[i]
                    prefix = larder.Prefix(context, short(block.hash), short(block.parent), block.index)
                    items.append(larder.Item(keys[i], staged.values[i], prefix=prefix, shard=shard))
            if items:
                client.put_batch(items, timeout=timeout)

        self._writer.offer(staged.bytes, lambda: self._link.store("store blocks", store, None), lambda: None)

    def close(self) -> None:
        self._writer.close()
