"""The examples do what their README says, and notice when they do not."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import unittest
from pathlib import Path

if importlib.util.find_spec("numpy") is None:
    raise unittest.SkipTest("numpy is missing, and so what computes the examples")

import disaggregate
import larder
import models
import numpy as np
import share_prefix
from cache import BLOCK, Cache, Shape
from processes import PATIENCE, Engine, serving

COUNT = 8  # tokens of an answer


class ExamplesTest(unittest.TestCase):
    """The programs, as they are run by hand: they check themselves, and exit with 1 if they are wrong."""

    def run_example(self, name: str, *options: str) -> str:
        place = Path(__file__).parent
        paths = os.pathsep.join(p for p in (str(Path(larder.__file__).parents[1]), os.environ.get("PYTHONPATH")) if p)
        done = subprocess.run(
            [sys.executable, place / name, *options], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
            timeout=2 * PATIENCE, check=False,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_second_engine_reads_what_both_prompts_begin_with(self) -> None:
        output = self.run_example("share_prefix.py")
        self.assertIn("engine one: read 0 tokens, computed 265", output)
        self.assertIn("engine two: read 240 tokens, computed 38", output)

    def test_decode_engine_computes_nothing_of_a_prompt(self) -> None:
        self.assertEqual(self.run_example("disaggregate.py").count("decode computed 0 of them"), len(disaggregate.PROMPTS))

    def test_decode_engine_computes_what_the_pool_has_lost(self) -> None:
        self.assertIn("decode computed 118 of them", self.run_example("disaggregate.py", "--lose"))

    @unittest.skipIf(importlib.util.find_spec("transformers") is None, "transformers is missing")
    def test_model_of_transformers(self) -> None:
        self.assertIn("engine two: read 240 tokens", self.run_example("share_prefix.py", "--model", "llama"))
        self.assertIn("decode computed 0 of them", self.run_example("disaggregate.py", "--model", "llama"))


class PoolTest(unittest.TestCase):
    """Answers come from the bytes that are in the pool."""

    @classmethod
    def setUpClass(cls) -> None:
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        cls.address = stack.enter_context(serving())
        cls.client = stack.enter_context(larder.Client([cls.address]))
        cls.model = models.Numpy()
        cls.tokens = cls.model.encode(share_prefix.SYSTEM)[: 5 * BLOCK + 3]
        cls.expected = models.alone(cls.model, cls.tokens, COUNT)

    def setUp(self) -> None:
        self.client.clear()

    def disaggregated(self) -> disaggregate.Answer:
        """An answer by way of the pool, with both engines in this process."""
        return self.decoded(disaggregate.prefill(self.client, self.model, "r", self.tokens))

    def decoded(self, first: int) -> disaggregate.Answer:
        return disaggregate.decode(self.client, self.model, disaggregate.Prefilled("r", first), self.tokens, COUNT)

    def test_wrong_block_makes_a_wrong_answer(self) -> None:
        first = share_prefix.answer(self.client, self.model, self.tokens, COUNT)
        second = share_prefix.answer(self.client, self.model, self.tokens, COUNT)
        self.assertEqual((first.read, second.read), (0, 5 * BLOCK))
        self.assertEqual((first.tokens, second.tokens), (self.expected, self.expected))
        shape = self.model.shape
        key = shape.key(larder.prefix_hashes(self.tokens, BLOCK)[2])
        self.assertTrue(self.client.delete(key))
        self.client.put(key, np.random.default_rng(1).standard_normal(shape.layers * shape.layer_bytes // 4).astype(np.float32))
        self.assertNotEqual(self.disaggregated().tokens, self.expected)

    def test_rest_is_computed_where_a_block_is_gone(self) -> None:
        for gone in (0, 2, 5):
            with self.subTest(gone=gone):
                first = disaggregate.prefill(self.client, self.model, "r", self.tokens)
                self.assertTrue(self.client.delete(disaggregate.keys_of(self.model.shape, "r", self.tokens)[gone]))
                said = self.decoded(first)
                self.assertEqual((said.tokens, said.computed), (self.expected, len(self.tokens) - gone * BLOCK))

    def test_tail_is_deleted_when_it_has_been_used(self) -> None:
        said = self.disaggregated()
        self.assertEqual((said.tokens, said.computed), (self.expected, 0))
        keys = disaggregate.keys_of(self.model.shape, "r", self.tokens)
        self.assertEqual(self.client.exists_batch(keys), [True] * 5 + [False])

    def test_errors_of_an_engine_come_out(self) -> None:
        with Engine(share_prefix.engine, self.address, "numpy") as engine:
            with self.assertRaises(larder.InvalidArgumentError):
                engine.ask([-1], COUNT)
            self.assertEqual(engine.ask(self.tokens, COUNT).tokens, self.expected)


class ModelTest(unittest.TestCase):
    """What is computed is a language model's, and not a constant."""

    def test_answers_depend_on_every_block(self) -> None:
        model = models.Numpy()
        tokens = model.encode(share_prefix.SYSTEM)[: 6 * BLOCK]
        answers = {tuple(models.alone(model, tokens, COUNT))}
        for block in range(6):
            other = [*tokens]
            other[block * BLOCK : (block + 1) * BLOCK] = reversed(other[block * BLOCK : (block + 1) * BLOCK])
            answers.add(tuple(models.alone(model, other, COUNT)))
        self.assertEqual(len(answers), 7)

    def test_cache_keeps_tokens_in_order(self) -> None:
        cache = Cache(Shape("m", layers=2, heads=1, width=2), tokens=40)
        rows = np.arange(80, dtype=np.float32).reshape(40, 1, 2)
        for start, end in ((0, 5), (5, 16), (16, 33), (33, 40)):
            for layer in range(2):
                keys, values = cache.append(layer, rows[start:end] + layer, -rows[start:end])
                np.testing.assert_array_equal(keys, rows[:end] + layer)
                np.testing.assert_array_equal(values, -rows[:end])
            cache.length = end
        self.assertEqual(cache.block(1).nbytes, 2 * cache.shape.layer_bytes)
        np.testing.assert_array_equal(cache.block(1)[1, 0], rows[16:32] + 1)


if __name__ == "__main__":
    unittest.main()
