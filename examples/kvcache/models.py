"""Two models that compute the next token from those before it, and keep keys and values in a Cache.

Where they are given no weights these are random, but the same in each process: what they say makes no sense then, and depends on every
token of the prompt all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from cache import Cache, Shape

# Is called with the number of a layer.
Layer = Callable[[int], None]


def ignore(layer: int) -> None:
    """Nothing is to be done about a layer."""


class Model(Protocol):
    """A decoder."""

    shape: Shape

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """What tokens say."""

    def extend(self, cache: Cache, tokens: Sequence[int], before: Layer = ignore, after: Layer = ignore) -> int:
        """Append tokens to the cache, at most to the end of a block. Returns the token that is to follow. before is called with each layer
        when its part of the cache is about to be read, and after when it has been written."""


class Numpy:
    """A transformer as GPT-2 is one, in numpy: 4 layers, and tokens are bytes."""

    LAYERS, HEADS, WIDTH, LONGEST = 4, 4, 16, 2048

    def __init__(self, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        size = self.HEADS * self.WIDTH

        def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            return (random.standard_normal((rows, columns)) * scale / np.sqrt(rows)).astype(np.float32)

        self.shape = Shape(f"numpy-{seed}", self.LAYERS, self.HEADS, self.WIDTH)
        self._embedding = matrix(256, size, 8)
        self._positions = matrix(self.LONGEST, size, 16)
        self._layers = [
            # Attention to few tokens, with much weight: with small weights it would say the same whatever it is asked.
            (matrix(size, 3 * size, 2), matrix(size, size, 2), matrix(size, 4 * size, 2), matrix(4 * size, size, 2))
            for _ in range(self.LAYERS)
        ]
        self._head = matrix(size, 256)

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes, in hexadecimal digits."""
        return bytes(tokens).hex()

    def extend(self, cache: Cache, tokens: Sequence[int], before: Layer = ignore, after: Layer = ignore) -> int:
        """Model.extend."""
        start, count = cache.length, len(tokens)
        x = self._embedding[list(tokens)] + self._positions[start : start + count]
        hidden = np.arange(start + count)[None, :] > np.arange(start, start + count)[:, None]  # what comes later
        for i, (qkv, out, up, down) in enumerate(self._layers):
            before(i)
            q, k, v = (part.reshape(count, self.HEADS, self.WIDTH) for part in np.split(_norm(x) @ qkv, 3, axis=1))
            keys, values = cache.append(i, k, v)
            after(i)
            scores = np.einsum("qhw,khw->hqk", q, keys) / np.float32(np.sqrt(self.WIDTH))
            scores[:, hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            x = x + np.einsum("hqk,khw->qhw", weights, values).reshape(count, -1) @ out
            x = x + np.maximum(_norm(x) @ up, 0) @ down
        cache.length += count
        return int(np.argmax(_norm(x[-1:]) @ self._head))


def _norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + np.float32(1e-5))


class Transformers:
    """A model of the transformers package, in float32: a Llama of 2 layers with random weights, or what save_pretrained has written into
    a directory. Its cache is ours: it is handed over layer by layer, by the interface that the package has for caches."""

    def __init__(self, weights: str = "") -> None:
        import torch
        import transformers

        self._torch = torch
        torch.manual_seed(1)
        if weights:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(weights, local_files_only=True)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(weights, local_files_only=True, dtype=torch.float32)
        else:
            self._tokenizer = None
            self._model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=2048,
                )  # fmt: skip
            )
        self._model.eval()
        config = self._model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        name = f"llama-{hashlib.sha256(weights.encode()).hexdigest()[:8]}"
        self.shape = Shape(name, config.num_hidden_layers, config.num_key_value_heads, width)

        class Paged(transformers.DynamicCache):
            """transformers' view of a Cache."""

            def __init__(self, cache: Cache, before: Layer, after: Layer) -> None:
                super().__init__()
                self._ours, self._before, self._after = cache, before, after

            def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
                """Take in keys and values (1, head, token, width) of a layer. Returns all there are."""
                self._before(layer_idx)
                both = self._ours.append(layer_idx, *(t[0].transpose(0, 1).numpy() for t in (key_states, value_states)))
                self._after(layer_idx)
                keys, values = (torch.from_numpy(np.ascontiguousarray(a.transpose(1, 0, 2)))[None] for a in both)
                return keys, values

            def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
                """How many tokens there are."""
                return self._ours.length

            def get_mask_sizes(self, query: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
                """How many keys there will be, and from which on."""
                return self._ours.length + (query if isinstance(query, int) else query.shape[0]), 0

        self._paged = Paged

    def encode(self, text: str) -> list[int]:
        """The tokenizer's tokens, or bytes where there is none."""
        return list(text.encode()) if self._tokenizer is None else list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokenizer's text, or the bytes in hexadecimal digits."""
        return bytes(tokens).hex() if self._tokenizer is None else str(self._tokenizer.decode(tokens))

    def extend(self, cache: Cache, tokens: Sequence[int], before: Layer = ignore, after: Layer = ignore) -> int:
        """Model.extend."""
        with self._torch.no_grad():
            out = self._model(
                input_ids=self._torch.tensor([list(tokens)]), past_key_values=self._paged(cache, before, after), use_cache=True
            )
        cache.length += len(tokens)
        return int(out.logits[0, -1].argmax())


def load(name: str) -> Model:
    """The model of that name: numpy, llama, or a directory."""
    if name == "numpy":
        return Numpy()
    return Transformers("" if name == "llama" else name)


def compute(model: Model, cache: Cache, tokens: Sequence[int]) -> int:
    """Append tokens to the cache, block by block. Returns the token that is to follow."""
    follows = -1
    while tokens:
        n = cache.rest_of_block(len(tokens))
        follows = model.extend(cache, tokens[:n])
        tokens = tokens[n:]
    return follows


def continued(model: Model, cache: Cache, first: int, count: int) -> list[int]:
    """An answer of count tokens, the first of which is there already."""
    answer = [first]
    while len(answer) < count:
        answer.append(model.extend(cache, answer[-1:]))
    return answer


def alone(model: Model, tokens: Sequence[int], count: int) -> list[int]:
    """The answer of a process that knows of no pool."""
    cache = Cache(model.shape, len(tokens) + count)
    return continued(model, cache, compute(model, cache, tokens), count)
