"""Ranks of larder.pg die, come back, and are added; the others go on."""

from __future__ import annotations

import time
import unittest

try:
    import torch  # noqa: F401
except ImportError as e:
    raise unittest.SkipTest("without torch") from e

import pg_cases as cases
from ranks import Ranks, eventually, ranks

RAISING = {"max_group_size": 4}
RETRYING = {"max_group_size": 4, "retry": True}
JOINING = {"max_group_size": 4, "retry": True, "is_extension": True}


def begin(r: Ranks, size: int, options: dict | None = None, backend: str = "larder-cpu") -> None:
    """Have all ranks make the world."""
    members = range(size)
    for rank in members:
        r.tell(rank, cases.init, rank, size, "world", backend, options)
    for rank in members:
        r.hear(rank)


def come(r: Ranks, rank: int, others: list[int], size: int = 4) -> None:
    """Have a new process take a place, and the others take it in."""
    r.start(rank)
    r.on(rank, cases.init, rank, size, "world", "larder-cpu", JOINING)
    r.tell(rank, cases.join)
    take_in(r, rank, others)
    r.hear(rank)


def take_in(r: Ranks, rank: int, others: list[int]) -> None:
    """Activate a rank that is joining."""
    eventually(lambda: r.on(others[0], cases.peers, [rank]) == [True], f"rank {rank} may be activated")
    for status, reason in r.each(cases.activate, [rank], ranks=others):
        assert status == "Applied", (status, reason)


class Failures(unittest.TestCase):
    def test_the_collective_says_who_has_died_and_the_next_ones_go_on(self):
        for dead in (0, 2):
            with self.subTest(dead=dead), ranks(4) as r:
                begin(r, 4, RAISING)
                self.assertEqual(r.each(cases.total), [10] * 4)
                r.kill(dead)
                left = sorted(r.pipes)
                began = time.monotonic()
                heard = r.each(cases.failing_all_reduce)
                for what in heard:
                    self.assertIn(what, ([dead], 10 - dead - 1))  # or it was known before the collective began
                self.assertLess(time.monotonic() - began, 5)
                self.assertEqual(r.each(cases.total), [10 - dead - 1] * 3)
                self.assertEqual(r.on(left[0], cases.active), [int(i in left) for i in range(4)])

    def test_with_retry_it_is_run_again_by_those_who_are_left(self):
        with ranks(4) as r:
            begin(r, 4, RETRYING)
            r.kill(1)
            self.assertEqual(r.each(cases.total), [8] * 3)

    def test_mooncakes_backends_do_not_raise_and_hint(self):
        with ranks(3, LARDER_PG_COMPAT="mooncake") as r:
            begin(r, 3, None, "mooncake-cpu")
            for got in r.each(cases.hinted_all_reduce):
                self.assertEqual(got, (6, [0, 0, 0], True))
            r.kill(1)
            for total, hint, _ in r.each(cases.hinted_all_reduce):
                self.assertEqual(total, 4)
                self.assertIn(hint, ([0, 1, 0], [0, 0, 0]))
            self.assertEqual(r.on(0, cases.active), [1, 0, 1])

    def test_mooncakes_messages_hint_as_well(self):
        well, ill = ([[0, 0, 0]] * 2, [True] * 2), ([[0, 1, 0]] * 2, [False] * 2)
        with ranks(3, LARDER_PG_COMPAT="mooncake") as r:
            begin(r, 3, None, "mooncake-cpu")
            for rank in range(3):
                r.tell(rank, cases.hinted_messages, [other for other in range(3) if other != rank])
            for rank in range(3):
                self.assertEqual(r.hear(rank), [(other, other + 1, *well) for other in range(3) if other != rank])
            r.kill(1)
            eventually(lambda: r.on(0, cases.peers, [1]) == [False], "it is known to be dead")
            for rank in (0, 2):
                r.tell(rank, cases.hinted_messages, [1, 2 - rank])
            for rank in (0, 2):
                self.assertEqual(r.hear(rank), [(1, 0, *ill), (2 - rank, 3 - rank, *well)])
            eventually(lambda: r.on(0, cases.active) == [1, 0, 1], "the others go on without it")

    def test_manual_eviction(self):
        options = {"auto_deactivate_on_failure": False, "auto_sync_on_failure": False, "retry": True, "raise_on_failure": False}
        with ranks(4) as r:
            begin(r, 4, options)
            r.kill(1)
            for total, hint, well in r.each(cases.hinted_all_reduce):
                self.assertEqual((total, hint, well), (8, [0, 1, 0, 0], False))
            self.assertEqual(r.on(0, cases.active), [1, 1, 1, 1], "nobody has said otherwise")
            self.assertEqual(r.on(0, cases.peers, [0, 1, 2]), [True, False, True])
            self.assertEqual(set(r.each(cases.deactivate, [1])), {"Applied"})
            for got in r.each(cases.hinted_all_reduce):
                self.assertEqual(got, (8, [0, 0, 0, 0], True))

    def test_point_to_point_with_a_rank_that_has_died_fails_and_with_others_does_not(self):
        with ranks(3) as r:
            begin(r, 3)
            r.kill(1)
            r.tell(0, cases.send_value, 2, 7)
            self.assertEqual(r.on(2, cases.receive_value, 0), [7])
            r.hear(0)
            with self.assertRaisesRegex(AssertionError, "PeerFailedError|InactiveError|ClosedError"):
                r.on(2, cases.receive_value, 1)


class Elastic(unittest.TestCase):
    def test_a_new_process_takes_the_place_of_one_that_has_died(self):
        for dead in (0, 3):
            with self.subTest(dead=dead), ranks(4) as r:
                begin(r, 4, RETRYING)
                r.kill(dead)
                self.assertEqual(set(r.each(cases.total)), {10 - dead - 1})
                come(r, dead, sorted(r.pipes))
                self.assertEqual(r.each(cases.total), [10] * 4)
                self.assertEqual(r.on(1, cases.active), [1] * 4)

    def test_the_others_go_on_while_it_comes(self):
        with ranks(4) as r:
            begin(r, 4, RETRYING)
            r.kill(3)
            for rank in range(3):
                r.tell(rank, cases.reduce_until, "stop")
            r.start(3)
            r.on(3, cases.init, 3, 4, "world", "larder-cpu", JOINING)
            r.on(3, cases.signal, "stop")
            counts = [r.hear(rank) for rank in range(3)]
            self.assertEqual(len({count for count, _, _ in counts}), 1, "as many collectives at each")
            r.tell(3, cases.join)
            take_in(r, 3, [0, 1, 2])
            r.hear(3)
            self.assertEqual(r.each(cases.total), [10] * 4)

    def test_one_that_leaves_in_good_order_is_replaced_too(self):
        with ranks(4) as r:
            begin(r, 4, RETRYING)
            r.each(cases.deactivate, [2])
            r.tell(2, cases.leave)
            r.gone(2)
            self.assertEqual(r.each(cases.total), [7] * 3)
            come(r, 2, [0, 1, 3])
            self.assertEqual(r.each(cases.total), [10] * 4)

    def test_a_group_with_room_takes_in_another_rank(self):
        with ranks(3) as r:
            begin(r, 3, RETRYING)
            self.assertEqual(r.on(0, cases.active), [1, 1, 1, 0])
            r.start(3)
            self.assertEqual(r.on(3, cases.init, 3, 4, "world", "larder-cpu", JOINING), (3, 4))
            self.assertEqual(r.on(3, cases.total), 4, "until it has joined it is alone")
            r.tell(3, cases.join)
            take_in(r, 3, [0, 1, 2])
            r.hear(3)
            self.assertEqual(r.each(cases.total), [10] * 4)
            self.assertEqual(r.each(cases.size), [4] * 4)
            r.tell(3, cases.send_value, 0, 9)
            self.assertEqual(r.on(0, cases.receive_value, 3), [9])
            r.hear(3)
            r.each(cases.all_gather)
            r.each(cases.reduce_scatter_tensor)

    def test_a_group_without_room_is_given_some(self):
        with ranks(2) as r:
            begin(r, 2, {"retry": True})
            self.assertEqual(r.each(cases.extend, 3), [3, 3])
            r.start(2)
            r.on(2, cases.init, 2, 3, "world", "larder-cpu", {"retry": True, "is_extension": True})
            r.tell(2, cases.join)
            take_in(r, 2, [0, 1])
            r.hear(2)
            self.assertEqual(r.each(cases.total), [6] * 3)


if __name__ == "__main__":
    unittest.main()
