"""Prefill and decode in different engines: one computes a prompt and stores its KV cache, layer by layer while later layers are being
computed; the other reads it, layer by layer while earlier layers are being used, and answers. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import larder
import models
from cache import BLOCK, Cache, Shape
from processes import Engine, serving

PROMPTS = (
    "Larder keeps the keys and values of tokens that some engine has computed, so that no other engine computes them again.",
    "Larder keeps the keys and values of tokens that some engine has computed, in memory that all engines of a host map.",
    "A short one.",
)


@dataclass
class Prefilled:
    """What a prefill engine gives to a decode engine besides the blocks: as much as goes into a request's parameters."""

    request: str
    first: int  # token of the answer


@dataclass
class Answer:
    """What a decode engine says."""

    tokens: list[int]
    computed: int  # tokens of the prompt that it had to compute itself
    milliseconds: float  # until the second token


def keys_of(shape: Shape, request: str, tokens: list[int]) -> list[str]:
    """The keys of a prompt's blocks. The last one, if it is not whole, belongs to the request alone."""
    keys = [shape.key(h) for h in larder.prefix_hashes(tokens, BLOCK)]
    return keys + [f"{shape.name}/request/{request}"] * (len(tokens) % BLOCK > 0)


@contextlib.contextmanager
def prefill_engine(address: str, name: str) -> Iterator[Callable[..., Prefilled]]:
    """An engine that computes prompts."""
    model = models.load(name)
    with larder.Client([address]) as client:
        yield lambda request, tokens: Prefilled(request, prefill(client, model, request, tokens))


def prefill(client: larder.Client, model: models.Model, request: str, tokens: list[int]) -> int:
    """Compute a prompt, and store its blocks. Returns the token that is to follow."""
    shape = model.shape
    cache = Cache(shape, len(tokens))
    hashes = larder.prefix_hashes(tokens, BLOCK)
    follows = -1
    for i, key in enumerate(keys_of(shape, request, tokens)):
        memory = cache.block(i)
        prefix = larder.Prefix(shape.context, hashes[i], hashes[i - 1] if i else 0, i) if i < len(hashes) else None
        with client.put_layers(key, [shape.layer_bytes] * shape.layers, prefix=prefix) as writer:

            def launch(layer: int, writer: larder.LayerWriter = writer, memory: object = memory) -> None:
                writer.launch(layer, memory[layer])  # type: ignore[index]

            follows = model.extend(cache, tokens[i * BLOCK : (i + 1) * BLOCK], after=launch)
        # Leaving the block has waited for the copies, and made the block known.
    return follows


@contextlib.contextmanager
def decode_engine(address: str, name: str) -> Iterator[Callable[..., Answer]]:
    """An engine that answers prompts that others have computed."""
    model = models.load(name)
    with larder.Client([address]) as client:
        yield lambda prefilled, tokens, count: decode(client, model, prefilled, tokens, count)


def decode(client: larder.Client, model: models.Model, prefilled: Prefilled, tokens: list[int], count: int) -> Answer:
    """Answer a prompt from the pool's blocks of it; what is not there any more is computed."""
    start = time.perf_counter()
    cache = Cache(model.shape, len(tokens) + count)
    keys = keys_of(model.shape, prefilled.request, tokens)
    try:
        second = read(client, model, cache, keys, tokens, prefilled.first)
    except larder.LarderError as e:
        logging.warning("the prompt is computed again: %s", e)
        second, cache.length = None, 0
    computed = 0
    if second is None:
        computed = len(tokens) - cache.length
        models.compute(model, cache, tokens[cache.length :])
        second = model.extend(cache, [prefilled.first])
    took = time.perf_counter() - start
    if len(tokens) % BLOCK:
        client.delete(keys[-1])  # nobody else can use it
    answer = [prefilled.first, *models.continued(model, cache, second, count - 1)]
    return Answer(answer, computed, 1000 * took)


def read(client: larder.Client, model: models.Model, cache: Cache, keys: list[str], tokens: list[int], first: int) -> int | None:
    """Read blocks, and compute the second token meanwhile: each layer when it has come. Without all of them no token comes out, and
    the cache has those from the first on that are there."""
    sizes = [cache.shape.layer_bytes] * cache.shape.layers
    with contextlib.ExitStack() as readers:
        blocks: list[larder.LayerReader] = []
        for key in keys:
            reader = client.get_layers(key, sizes)
            if reader is None:
                break
            blocks.append(readers.enter_context(reader))
        for layer in range(cache.shape.layers):
            for i, reader in enumerate(blocks):
                reader.launch(layer, cache.block(i)[layer])

        def arrived(layer: int) -> None:
            for reader in blocks:
                reader.wait(layer)

        cache.length = min(len(blocks) * BLOCK, len(tokens))
        if len(blocks) == len(keys):
            return model.extend(cache, [first], before=arrived)
        for layer in range(cache.shape.layers):
            arrived(layer)
        return None
    # Leaving the block has raised an error if a block was not ours any more while it was read.


def main() -> int:
    """Have prompts answered by two engines, and compare what they say with what one alone says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="numpy", help="numpy, llama, or a directory of weights: see README.md")
    parser.add_argument("--tokens", type=int, default=16, help="how long answers are; 2 at least")
    parser.add_argument("--lose", action="store_true", help="clear the pool between prefill and decode")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error("the first token is prefill's: with fewer than 2 there is nothing to decode")

    model = models.load(options.model)
    right = True
    with (
        serving() as address,
        Engine(prefill_engine, address, options.model) as prefilling,
        Engine(decode_engine, address, options.model) as decoding,
        larder.Client([address]) as router,
    ):
        for prompt in PROMPTS:
            tokens = model.encode(prompt)
            prefilled: Prefilled = prefilling.ask(uuid.uuid4().hex, tokens)
            if options.lose:
                router.clear()
            said: Answer = decoding.ask(prefilled, tokens, options.tokens)
            same = said.tokens == models.alone(model, tokens, options.tokens)
            print(
                f"{len(tokens)} tokens: decode computed {said.computed} of them, second token after {said.milliseconds:.1f} ms, "
                f"{'as one alone' if same else 'NOT what one alone says'}: {model.decode(said.tokens)!r}"
            )
            right = right and same and said.computed == (len(tokens) if options.lose else 0)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
