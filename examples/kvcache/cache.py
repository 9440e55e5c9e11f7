"""The KV cache of one request, in blocks of tokens, as the pool has them: a block is one piece of memory, layer behind layer, with the
keys and then the values of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import larder

# Tokens of a block, which is stored and found as a whole.
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """What a model's KV cache is like. name goes into keys: it must differ where the same tokens have another cache."""

    name: str
    layers: int
    heads: int  # of keys and values
    width: int  # of a head, in float32

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return 2 * BLOCK * self.heads * self.width * 4

    @property
    def context(self) -> larder.PrefixContext:
        """Where the blocks' hashes mean anything."""
        return larder.PrefixContext(model=self.name, block_size=BLOCK)

    def key(self, block: int) -> str:
        """The key of the block with this hash, which names its tokens and all before them."""
        return f"{self.name}/{block:016x}"


class Cache:
    """Keys and values of the first ``length`` tokens of a request, which has at most ``tokens``."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape = shape
        self.length = 0
        self._memory = np.zeros((-(-tokens // BLOCK), shape.layers, 2, BLOCK, shape.heads, shape.width), np.float32)

    def block(self, i: int) -> np.ndarray:
        """The memory of block i: contiguous, and so a value of the pool. block(i)[j] is layer j of it."""
        return self._memory[i]

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write one layer of the tokens behind the first ``length`` (token, head, width). Returns that layer of all tokens up to there.
        Whoever has done so for each layer raises ``length``."""
        end = self.length + len(keys)
        for token in range(self.length, end):
            place = self._memory[token // BLOCK, layer, :, token % BLOCK]
            place[0], place[1] = keys[token - self.length], values[token - self.length]
        blocks = self._memory[: -(-end // BLOCK), layer]
        flat = (-1, self.shape.heads, self.shape.width)
        return blocks[:, 0].reshape(flat)[:end], blocks[:, 1].reshape(flat)[:end]

    def rest_of_block(self, tokens: int) -> int:
        """How many of tokens that are to come go into the block that is being filled. Models are given no more at a time: so the same
        sums are made whichever blocks come from the pool, and the results are the same to the last bit."""
        return min(tokens, BLOCK - self.length % BLOCK)
