"""Ranks of larder.pg that come back: in place after they were taken for dead, and as new processes, with messages and with parts by rank;
and groups that share a transfer engine which their caller owns."""

from __future__ import annotations

import functools
import os
import signal
import time
import unittest

try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    raise unittest.SkipTest("without torch") from e

import larder
import pg_cases as cases
from larder import pg
from ranks import Ranks, eventually, ranks
from test_pg_elastic import begin, come, take_in

RETRYING = {"max_group_size": 4, "retry": True}


def ping_pong(a, b):
    """A message from a to b, which comes back with one more."""
    t = torch.full((1024,), 7, dtype=torch.int32)
    if dist.get_rank() == a:
        dist.send(t, b)
        dist.recv(t, b)
        cases.same(t, torch.full((1024,), 8, dtype=torch.int32))
    elif dist.get_rank() == b:
        dist.recv(t, a)
        dist.send(t + 1, a)


def computes(r: Ranks, total: int, a: int, b: int) -> None:
    """All ranks agree on a sum, have parts for each of them, and two of them messages."""
    assert set(r.each(cases.total)) == {total}, total
    for case in (cases.all_gather, cases.all_gather_into_tensor, cases.reduce_scatter, cases.reduce_scatter_tensor, cases.all_to_all):
        r.each(case)
    r.each(ping_pong, a, b)
    r.each(ping_pong, b, a)


def is_out():
    """Whether this rank is told that others have gone on without it."""
    try:
        cases.total()
    except (larder.InactiveError, larder.IsolatedError) as e:
        return type(e).__name__
    return ""


def join_when_it_may():
    """Join, as soon as the store has taken this process again."""
    while True:
        try:
            return pg.join_group(dist.group.WORLD)
        except larder.IsolatedError:
            time.sleep(0.05)


def share_an_engine(rank, size):
    """Two groups over an engine that is in use meanwhile, and after them."""
    engine = larder.TransferEngine(listen=["127.0.0.1:0"])
    pg.set_transfer_engine(engine)
    cases.init(rank, size, "shared")
    other = dist.new_group([0, 1])
    for _ in range(5):
        assert cases.total() == 3
        t = torch.ones(100_000)
        dist.all_reduce(t, group=other)
        cases.same(t, torch.full((100_000,), 2.0))
        itself(engine)
    dist.destroy_process_group(other)
    itself(engine)
    dist.destroy_process_group()
    itself(engine)
    engine.close()


def itself(engine):
    """The engine reads memory of its own."""
    memory = bytearray(range(256))
    with engine.register(memory, "mine"), engine.open(*engine.addresses) as segment:
        got = bytearray(256)
        engine.read(segment["mine"], 0, got)
        assert got == memory


class Recovery(unittest.TestCase):
    def test_messages_and_parts_before_and_after(self):
        with ranks(2) as r:
            begin(r, 2, RETRYING)
            computes(r, 3, 0, 1)
            for life in ("killed", "left"):
                with self.subTest(life):
                    if life == "killed":
                        r.kill(1)
                    else:
                        r.tell(1, cases.leave)
                        r.gone(1)
                    self.assertEqual(r.each(cases.total), [1])
                    self.assertEqual(r.on(0, cases.active)[:2], [1, 0])
                    come(r, 1, [0], 2)
                    computes(r, 3, 0, 1)
                    self.assertEqual(r.on(0, cases.active)[:2], [1, 1])

    def test_one_that_was_stopped_joins_in_its_place(self):
        with ranks(3) as r:
            begin(r, 3, RETRYING)
            computes(r, 6, 1, 2)
            os.kill(r.processes[1].pid, signal.SIGSTOP)
            self.assertEqual(r.each(cases.total, ranks=[0, 2]), [4, 4])
            self.assertEqual(r.on(0, cases.active)[:3], [1, 0, 1])
            os.kill(r.processes[1].pid, signal.SIGCONT)
            eventually(lambda: r.on(1, is_out) != "", "it knows that it is out")
            self.assertEqual(r.each(cases.total, ranks=[0, 2]), [4, 4], "it disturbs nobody")
            r.tell(1, join_when_it_may)
            take_in(r, 1, [0, 2])
            r.hear(1)
            computes(r, 6, 1, 2)

    def test_manual_eviction_and_replacement(self):
        options = {"auto_deactivate_on_failure": False, "auto_sync_on_failure": False, "retry": True, "raise_on_failure": False}
        with ranks(3) as r:
            begin(r, 3, {"max_group_size": 4, **options})
            r.kill(1)
            for total, hint, well in r.each(cases.hinted_all_reduce):
                self.assertEqual((total, hint[:3], well), (4, [0, 1, 0], False))
            for rank in (0, 2):
                self.assertEqual([r.on(rank, cases.sync), r.on(rank, cases.sync)], ["Reconciled", "NoPending"])
            self.assertEqual(set(r.each(cases.deactivate, [1])), {"Applied"})
            r.start(1)
            r.on(1, cases.init, 1, 3, "world", "larder-cpu", {"max_group_size": 4, "is_extension": True, **options})
            r.tell(1, cases.join)
            take_in(r, 1, [0, 2])
            r.hear(1)
            computes(r, 6, 0, 1)
            for total, hint, well in r.each(cases.hinted_all_reduce):
                self.assertEqual((total, hint, well), (6, [0, 0, 0, 0], True))


class Subgroups(unittest.TestCase):
    def test_they_grow_with_their_world(self):
        """Those who are there make groups of the ranks that they have, with room for the others, who come later."""
        begun, grown = [([0], 2), ([1], 2), ([0, 1], 4)], [([0, 2], 2), ([1, 3], 2), ([0, 1, 2, 3], 4)]
        joining = {2: [0, 2], 3: [1, 2]}  # which groups they are in
        with ranks(2) as r:
            begin(r, 2, RETRYING)
            r.each(cases.make_subgroups, begun)
            self.assertEqual([r.on(0, cases.total_in, 0), r.on(1, cases.total_in, 1)], [1, 2])
            self.assertEqual(r.each(cases.total_in, 2), [3, 3])
            for rank in joining:
                r.start(rank)
            for rank in joining:
                r.tell(rank, cases.init, rank, 4, "world", "larder-cpu", {**RETRYING, "is_extension": True})
            for rank in joining:
                r.hear(rank)
            for rank in joining:
                r.tell(rank, cases.join)
            for rank in joining:
                take_in(r, rank, [0, 1])
            for rank in joining:
                r.hear(rank)
            for rank in joining:
                r.tell(rank, functools.partial(cases.make_subgroups, is_extension=True), grown)
            for rank in joining:
                r.hear(rank)
            for rank, which in joining.items():
                r.tell(rank, cases.join_subgroups, which)
            for i, by, new in ((0, 0, [1]), (1, 1, [1]), (2, 0, [2, 3])):
                eventually(lambda i=i, by=by, new=new: all(r.on(by, cases.peers_in, i, new)), f"group {i} may grow")
                self.assertEqual(r.on(by, cases.activate_in, i, new), "Applied")
            for rank in joining:
                r.hear(rank)
            self.assertEqual(r.each(cases.total), [10] * 4)
            self.assertEqual(r.each(cases.total_in, 2), [10] * 4)
            self.assertEqual(r.each(cases.total_in, 0, ranks=[0, 2]), [4, 4])
            self.assertEqual(r.each(cases.total_in, 1, ranks=[1, 3]), [6, 6])


class Engines(unittest.TestCase):
    def test_groups_share_one_that_its_owner_goes_on_using(self):
        with ranks(2, LARDER_PG_TRANSPORTS="engine") as r:
            for rank in range(2):
                r.tell(rank, share_an_engine, rank, 2)
            for rank in range(2):
                r.hear(rank)


if __name__ == "__main__":
    unittest.main()
