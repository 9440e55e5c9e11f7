"""torch.distributed over larder.pg: every call of it, with several processes."""

from __future__ import annotations

import unittest

try:
    import torch
except ImportError as e:
    raise unittest.SkipTest("without torch") from e

import pg_cases as cases
from ranks import RanksCase, ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
ELEMENTS = [1, 5, 1000, 300_000]


class Collectives(RanksCase):
    def test_all_reduce_of_every_dtype(self):
        for dtype in DTYPES:
            with self.subTest(dtype=dtype):
                self.ranks.each(cases.all_reduce, dtype, "SUM", 1001)
        self.ranks.each(cases.all_reduce, torch.bool, "MAX", 33)

    def test_all_reduce_by_every_operation(self):
        for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            with self.subTest(op=op):
                self.ranks.each(cases.all_reduce, torch.int32, op, 100)
        self.ranks.each(cases.all_reduce, torch.float32, "AVG", 100)

    def test_all_reduce_of_every_length(self):
        for elements in ELEMENTS:
            with self.subTest(elements=elements):
                self.ranks.each(cases.all_reduce, torch.float32, "SUM", elements)

    def test_tensors_that_are_not_contiguous(self):
        self.ranks.each(cases.all_reduce_not_contiguous)

    def test_parameters_and_inference_tensors(self):
        self.ranks.each(cases.parameters_that_are_not_contiguous)

    def test_roots(self):
        for case in (cases.broadcast, cases.reduce, cases.gather, cases.scatter):
            for root in (0, 3):
                with self.subTest(case=case.__name__, root=root):
                    self.ranks.each(case, root)

    def test_the_others(self):
        for case in (
            cases.all_gather, cases.all_gather_into_tensor, cases.reduce_scatter, cases.reduce_scatter_tensor, cases.all_to_all,
            cases.all_to_all_single, cases.barrier, cases.objects,
        ):  # fmt: skip
            with self.subTest(case=case.__name__):
                self.ranks.each(case)

    def test_works(self):
        self.ranks.each(cases.async_all_reduces, 100)
        self.ranks.each(cases.works_that_nobody_keeps)
        self.ranks.each(cases.futures)

    def test_threads_that_wait_for_one_work(self):
        self.ranks.each(cases.threads_that_wait_for_one_work)

    def test_signals_end_waiting_and_not_the_operation(self):
        for after in (0.05, 0.3):
            with self.subTest(after=after):
                self.ranks.each(cases.interrupted, after)

    def test_distributed_data_parallel(self):
        self.ranks.each(cases.train, 4)


class PointToPoint(RanksCase):
    def test_ring(self):
        self.ranks.each(cases.ring)

    def test_messages_of_a_pair_keep_their_order(self):
        for elements in (1, 1000, 300_000):
            with self.subTest(elements=elements):
                self.ranks.each(cases.messages_in_order, 4, elements)

    def test_waiting_for_messages_ends_when_it_was_limited(self):
        self.ranks.each(cases.messages_that_nobody_sends)

    def test_tags(self):
        self.ranks.each(cases.tags)

    def test_messages_from_anybody(self):
        self.ranks.each(cases.many_to_one)


class Groups(RanksCase):
    def test_disjoint(self):
        self.assertEqual(self.ranks.each(cases.subgroups, [[0, 2], [1, 3]]), [{0: 4}, {1: 6}, {0: 4}, {1: 6}])

    def test_tensor_pipeline_and_data_parallel_at_once(self):
        for lists in ([[0, 1, 2, 3]], [[0, 1], [2, 3], [0, 2], [1, 3]], [[0, 1], [2, 3], [3, 0]]):
            with self.subTest(lists=lists):
                for rank, sums in enumerate(self.ranks.each(cases.subgroups, lists)):
                    self.assertEqual(sums, {i: sum(m) + len(m) for i, m in enumerate(lists) if rank in m})

    def test_overlapping_groups_at_the_same_time(self):
        self.ranks.each(cases.overlapping, 20)

    def test_a_group_that_was_destroyed_is_refused(self):
        self.ranks.each(cases.used_after_destroy)


class Mistakes(RanksCase):
    size = 2

    def test_of_one_rank(self):
        for what, said in [
            ("parts", "1 tensors for a group of 2"),
            ("sizes", "all_gather_into_tensor: 7 elements"),
            ("splits", "2 numbers that make 2 rows"),
            ("complex", "view_as_real"),
            ("sparse", "make it dense"),
            ("premultiplied", "PREMUL_SUM is not supported"),
            ("peers", "rank 99"),
            ("foreign", "no process group of larder's"),
            ("late", "before the first"),
            ("options", "give larder.pg.BackendOptions"),
        ]:
            with self.subTest(what):
                for heard in self.ranks.each(cases.refused, what):
                    self.assertIn(said, heard)
        self.assertEqual(self.ranks.each(cases.total), [3, 3])

    def test_of_ranks_that_differ_are_named_to_both(self):
        for what in ("kind", "count", "dtype", "op", "root"):
            with self.subTest(what):
                first, second = self.ranks.each(cases.different_calls, what)
                self.assertIn("rank 1", first)
                self.assertIn("rank 0", second)
                self.assertEqual(self.ranks.each(cases.total), [3, 3], "the group goes on")


class Lives(unittest.TestCase):
    def test_a_process_may_join_destroy_and_join_again(self):
        with ranks(2) as r:
            for life in ("first", "second"):
                r.tell(0, cases.init, 0, 2, life)
                self.assertEqual(r.on(1, cases.init, 1, 2, life), (1, 2))
                self.assertEqual(r.hear(0), (0, 2))
                self.assertEqual(r.each(cases.total), [3, 3])
                r.each(cases.destroy)

    def test_a_world_of_one(self):
        with ranks(1, LARDER_PG_STORE="") as r:
            self.assertEqual(r.on(0, cases.init, 0, 1, "alone"), (0, 1))
            self.assertEqual(r.on(0, cases.total), 1)

    def test_without_a_store_of_its_own_rank_0_serves_one(self):
        with ranks(2, LARDER_PG_STORE="") as r:
            r.tell(0, cases.init, 0, 2, "env")
            r.on(1, cases.init, 1, 2, "env")
            r.hear(0)
            self.assertEqual(r.each(cases.total), [3, 3])


if __name__ == "__main__":
    unittest.main()
