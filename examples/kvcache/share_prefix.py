"""Two engines that share a prefix: the first stores the KV cache of what it is asked, the second finds how much of its own question
that is, reads it, and computes the rest alone. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import larder
import models
from cache import BLOCK, Cache
from processes import Engine, serving

SYSTEM = (
    "You are the keeper of a larder. You know what lies on which shelf, since when, and who may have of it. You answer in one "
    "sentence, you are polite, and if you do not know something you say so. Today there are apples, pears, honey, and flour. "
)
QUESTIONS = ("Is there any honey left?", "What could be baked of what is there?")


@dataclass
class Answer:
    """What an engine says, and what it took."""

    tokens: list[int]
    read: int  # tokens whose keys and values came from the pool
    computed: int  # tokens of the prompt that were computed
    milliseconds: float  # until the first token


@contextlib.contextmanager
def engine(address: str, name: str) -> Iterator[Callable[..., Answer]]:
    """An engine with a pool behind it."""
    model = models.load(name)
    with larder.Client([address]) as client:
        yield lambda tokens, count: answer(client, model, tokens, count)


def answer(client: larder.Client, model: models.Model, tokens: list[int], count: int) -> Answer:
    """Answer a prompt, with the blocks that the pool has of it, and store the others."""
    start = time.perf_counter()
    cache = Cache(model.shape, len(tokens) + count)
    hashes = larder.prefix_hashes(tokens, BLOCK)
    cache.length = BLOCK * read(client, cache, hashes[: (len(tokens) - 1) // BLOCK])  # the last token is computed: the answer follows it
    found = cache.length
    first = models.compute(model, cache, tokens[found:])
    took = time.perf_counter() - start
    store(client, cache, hashes, found // BLOCK)
    return Answer(models.continued(model, cache, first, count), found, len(tokens) - found, 1000 * took)


def read(client: larder.Client, cache: Cache, hashes: list[int]) -> int:
    """Read the longest prefix that the pool has. Returns its blocks."""
    held = client.prefix_match(hashes, cache.shape.context)
    keys = [cache.shape.key(h) for h in hashes[:held]]
    lengths = client.get_batch_into(keys, [cache.block(i) for i in range(held)]) if held else []
    return lengths.index(None) if None in lengths else held  # some may have been evicted in between


def store(client: larder.Client, cache: Cache, hashes: list[int], first: int) -> None:
    """Store the whole blocks of a prompt, from the first that the pool does not have."""
    client.put_batch(
        larder.Item(
            cache.shape.key(hashes[i]), cache.block(i),
            prefix=larder.Prefix(cache.shape.context, hashes[i], hashes[i - 1] if i else 0, i),
        )
        for i in range(first, len(hashes))
    )  # fmt: skip


def main() -> int:
    """Ask two engines, and compare what they say with what one alone says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="numpy", help="numpy, llama, or a directory of weights: see README.md")
    parser.add_argument("--tokens", type=int, default=16, help="how long answers are")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("an answer has a token at least")

    model = models.load(options.model)
    prompts = [model.encode(SYSTEM + question) for question in QUESTIONS]
    shared = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b) // BLOCK * BLOCK
    print(f"the questions have {[len(p) for p in prompts]} tokens, of which {shared} are whole blocks that both begin with")
    right = True
    with serving() as address, Engine(engine, address, options.model) as one, Engine(engine, address, options.model) as two:
        for name, process, prompt, expected in (("one", one, prompts[0], 0), ("two", two, prompts[1], shared)):
            said: Answer = process.ask(prompt, options.tokens)
            same = said.tokens == models.alone(model, prompt, options.tokens)
            print(
                f"engine {name}: read {said.read} tokens, computed {said.computed}, first token after {said.milliseconds:.1f} ms, "
                f"{'as one alone' if same else 'NOT what one alone says'}: {model.decode(said.tokens)!r}"
            )
            if said.read != expected:
                print(f"engine {name} was to read {expected} tokens")
            right = right and same and said.read == expected
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
