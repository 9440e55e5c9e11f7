"""Groups as inference engines make them: tensor, pipeline, data and expert parallel, with a prefill and a decode side, and many groups
of the same ranks that are in use at once. All cases share one set of eight processes, since starting them takes longest."""

from __future__ import annotations

import itertools
import unittest

try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    raise unittest.SkipTest("without torch") from e

import pg_cases as cases
from ranks import RanksCase

made: dict[str, list] = {}  # the groups of a topology, in the process of a rank


def make(topology, lists):
    """Every rank makes all groups, in the same order, as torch wants."""
    made[topology] = [(members, dist.new_group(members)) for members in lists]


def mine(topology):
    return [(members, group) for members, group in made[topology] if dist.get_rank() in members]


def sums(topology):
    """In each group of this rank, the sum of the ranks plus one, and what its first and last member broadcast."""
    got = []
    for members, group in mine(topology):
        t = torch.tensor([dist.get_rank() + 1], dtype=torch.int32)
        dist.all_reduce(t, group=group)
        assert int(t) == sum(members) + len(members), (members, int(t))
        for root in (members[0], members[-1]):
            b = torch.full((64,), float(dist.get_rank()))
            dist.broadcast(b, root, group=group)
            cases.same(b, torch.full((64,), float(root)))
        got.append(int(t))
    return got


def lanes(pairs, elements):
    """Values go from the first of each pair to the second."""
    me = dist.get_rank()
    sends = [dist.isend(torch.full((elements,), 10.0 * a + b), b) for a, b in pairs if a == me]
    for a, b in pairs:
        if b == me:
            t = torch.empty(elements)
            dist.recv(t, a)
            cases.same(t, torch.full((elements,), 10.0 * a + b))
    for work in sends:
        work.wait()


def traffic(topology, kind, rounds):
    """Collectives of all groups of this rank under way at the same time."""
    for i in range(rounds):
        works = []
        for members, group in mine(topology):
            n, value = len(members), float(dist.get_rank() + i)
            wanted = torch.tensor([float(m + i) for m in members])
            if kind == "all_reduce":
                t = torch.full((257,), value)
                works.append((dist.all_reduce(t, group=group, async_op=True), t, wanted.sum().expand(257)))
            else:
                t = torch.empty(33 * n)
                work = dist.all_gather_into_tensor(t, torch.full((33,), value), group=group, async_op=True)
                works.append((work, t, wanted.repeat_interleave(33)))
        for work, t, wanted in works:
            work.wait()
            cases.same(t, wanted)


def mixed(topology, rounds):
    """One kind after the other in groups that overlap, of different lengths."""
    for i in range(rounds):
        for members, group in mine(topology):
            n, me = len(members), members.index(dist.get_rank())
            elements = (1, 100, 20_000)[i % 3]
            out = torch.empty(elements)
            dist.reduce_scatter_tensor(out, torch.arange(float(n)).repeat_interleave(elements), group=group)
            cases.same(out, torch.full((elements,), float(n * me)))
            parts = torch.empty(n)
            dist.all_to_all_single(parts, torch.arange(float(n)) + 10 * me, group=group)
            cases.same(parts, 10 * torch.arange(float(n)) + me)
            dist.barrier(group=group)


def dispatch_and_combine(topology, rounds):
    """What experts do: tokens go to whom they are for, in numbers that differ, and come back."""
    for i in range(rounds):
        for members, group in mine(topology):
            n, me = len(members), members.index(dist.get_rank())
            to = [(me + r + i) % 3 for r in range(n)]
            come = [(r + me + i) % 3 for r in range(n)]
            tokens = torch.repeat_interleave(100.0 * me + torch.arange(n), torch.tensor(to))[:, None].repeat(1, 8)
            got = torch.empty(sum(come), 8)
            dist.all_to_all_single(got, tokens, come, to, group=group)
            cases.same(got[:, 0], torch.repeat_interleave(100.0 * torch.arange(n) + me, torch.tensor(come)))
            back = torch.empty_like(tokens)
            dist.all_to_all_single(back, got, to, come, group=group)
            cases.same(back, tokens)


def grid(*shape):
    """The groups along each axis of a grid of ranks."""
    ranks = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    return [ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist() for axis in range(len(shape))]


def subsets(n, size):
    return [list(c) for c in itertools.combinations(range(n), size)]


class Topologies(RanksCase):
    size = 8

    def play(self, topology, *axes):
        self.ranks.each(make, topology, [members for axis in axes for members in axis])
        for rank, got in enumerate(self.ranks.each(sums, topology)):
            self.assertEqual(got, [sum(m) + len(m) for axis in axes for m in axis if rank in m])

    def test_tensor_parallel_alone(self):
        self.play("tp", grid(2, 4)[1])

    def test_tensor_and_pipeline_parallel(self):
        pipelines, tensors = grid(2, 4)
        self.play("tp_pp", tensors, pipelines)
        self.ranks.each(lanes, [tuple(stages) for stages in pipelines], 4096)

    def test_a_pipeline_sends_and_receives(self):
        for elements in (1, 100_000):
            self.ranks.each(lanes, [(r, r + 1) for r in range(7)], elements)

    def test_prefill_and_decode(self):
        prefill, decode = [0, 1, 2, 3], [4, 5, 6, 7]
        self.play("prefill_decode", [prefill, decode])
        self.ranks.each(lanes, list(zip(prefill, decode)), 100_000)  # noqa: B905
        self.ranks.each(lanes, list(zip(decode, prefill)), 1)  # noqa: B905

    def test_data_and_tensor_parallel(self):
        data, tensors = grid(4, 2)
        self.play("dp_tp", tensors, data)
        self.ranks.each(mixed, "dp_tp", 3)

    def test_data_tensor_and_expert_parallel(self):
        data, tensors = grid(2, 4)
        experts = [[0, 1, 4, 5], [2, 3, 6, 7]]
        self.play("dp_tp_ep", tensors, data, experts)
        self.ranks.each(dispatch_and_combine, "dp_tp_ep", 6)

    def test_many_tensor_parallel_groups_at_once(self):
        pairs = grid(4, 2)[1]
        self.ranks.each(make, "many", [m for m in pairs + grid(2, 4)[1] for _ in range(3)])
        self.ranks.each(traffic, "many", "all_reduce", 10)
        self.ranks.each(traffic, "many", "all_gather", 10)

    def test_groups_that_overlap_in_every_way(self):
        self.ranks.each(make, "overlap", [list(range(8)), *subsets(4, 2), *subsets(4, 3), [1, 3, 5, 7], [2, 3, 4, 5], [0, 7]])
        self.ranks.each(traffic, "overlap", "all_reduce", 10)
        self.ranks.each(traffic, "overlap", "all_gather", 10)
        self.ranks.each(mixed, "overlap", 2)


if __name__ == "__main__":
    unittest.main()
