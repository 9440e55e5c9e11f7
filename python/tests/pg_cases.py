"""What ranks do in tests of larder.pg: each function runs in the process of a rank, and raises if something is wrong."""

from __future__ import annotations

import os
import signal as signals
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

import larder
from larder import pg

groups: dict[str, object] = {}  # that a case has made for a later one


def store(name):
    client = dist.TCPStore("127.0.0.1", int(os.environ["TEST_STORE_PORT"]), None, False, timeout=timedelta(seconds=60))
    return dist.PrefixStore(name, client)


def init(rank, size, name, backend="larder-cpu", options=None):
    if isinstance(options, dict):
        options = pg.BackendOptions(**options)
    dist.init_process_group(
        backend, store=store(name), rank=rank, world_size=size, pg_options=options, timeout=timedelta(seconds=60)
    )
    return dist.get_rank(), dist.get_world_size()


def destroy():
    dist.destroy_process_group()


def leave():
    """End in good order."""
    dist.destroy_process_group()
    os._exit(0)


def same(got, want):
    if not torch.equal(got, want):
        raise AssertionError(f"{got} is not {want}")


def world():
    return dist.group.WORLD


def rank():
    return dist.get_rank()


def size():
    return dist.get_world_size()


def total(value=None):
    """The sum of all ranks' values, each its rank plus one as a rule."""
    t = torch.tensor([rank() + 1 if value is None else value], dtype=torch.int32)
    dist.all_reduce(t)
    return int(t)


# Collectives.


def all_reduce(dtype, op, elements):
    op = getattr(dist.ReduceOp, op)
    mine = [(torch.arange(elements) % 7 + r + 1).to(dtype) for r in range(size())]
    want = mine[0].clone()
    for other in mine[1:]:
        want = {
            dist.ReduceOp.SUM: lambda a, b: a + b, dist.ReduceOp.PRODUCT: lambda a, b: a * b, dist.ReduceOp.MIN: torch.minimum,
            dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.AVG: lambda a, b: a + b, dist.ReduceOp.BAND: torch.bitwise_and,
            dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor,
        }[op](want, other)  # fmt: skip
    if op == dist.ReduceOp.AVG:
        want = want / size()
    t = mine[rank()].clone()
    dist.all_reduce(t, op=op)
    same(t, want.to(dtype))


def all_reduce_not_contiguous():
    t = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(t)
    same(t, torch.arange(6.0).reshape(2, 3).t() * size())


def async_all_reduces(count):
    tensors = [torch.full((100,), float(rank() + i)) for i in range(count)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in works:
        work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    for i, t in enumerate(tensors):
        same(t, torch.full((100,), float(sum(range(size())) + i * size())))


def works_that_nobody_keeps():
    for _ in range(50):
        dist.all_reduce(torch.ones(10), async_op=True)
    assert total(1) == size()


def futures():
    t = torch.ones(3)
    work = dist.all_reduce(t, async_op=True)
    same(work.get_future().wait()[0], torch.full((3,), float(size())))


def interrupted(after):
    """All ranks but the last wait for it in an all_reduce until a signal comes, which ends their waiting and not the all_reduce."""

    def interrupt(*_):
        raise KeyboardInterrupt

    if rank() == size() - 1:
        time.sleep(1)
        same(total_of(torch.ones(1000)), torch.full((1000,), float(size())))
    else:
        previous = signals.signal(signals.SIGALRM, interrupt)
        began = time.monotonic()
        signals.setitimer(signals.ITIMER_REAL, after)
        try:
            total_of(torch.ones(1000))  # nobody here has it any more when the last rank comes
        except KeyboardInterrupt:
            took = time.monotonic() - began
            assert took < after + 0.4, f"{took} s to be interrupted after {after} s"
        else:
            raise AssertionError("not interrupted")
        finally:
            signals.signal(signals.SIGALRM, previous)
    assert total(1) == size()


def messages_that_nobody_sends():
    """A receive that waits for longer than set_p2p_timeout_us says, and gets its message all the same."""
    t = torch.zeros(4)
    if rank() == 0:
        pg.set_p2p_timeout_us(200_000)
        try:
            work = dist.irecv(t, 1)
            try:
                work.wait()
            except larder.TimedOutError:
                assert not pg.get_local_success(work)
            else:
                raise AssertionError("nobody has sent yet")
            dist.barrier()
            assert work.wait(timedelta(seconds=60)) and pg.get_local_success(work)
            same(t, torch.ones(4))
        finally:
            pg._registry.settings.p2p_timeout = None
    else:
        dist.barrier()
        if rank() == 1:
            dist.send(torch.ones(4), 0)


def parameters_that_are_not_contiguous():
    p = torch.nn.Parameter(torch.ones(4, 2))
    dist.all_reduce(p.t())
    same(p.detach(), torch.full((4, 2), float(size())))
    with torch.inference_mode():
        t = torch.ones(8)
        work = dist.all_reduce(t[::2], async_op=True)
    work.wait()  # in another mode
    same(t[::2].clone(), torch.full((4,), float(size())))


def total_of(tensor):
    dist.all_reduce(tensor)
    return tensor


def threads_that_wait_for_one_work():
    if rank() == 0:
        time.sleep(0.3)
    t = torch.ones(5)
    work = dist.all_reduce(t, async_op=True)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: work.wait() and work.is_success(), range(8)))
    same(t, torch.full((5,), float(size())))


def broadcast(root):
    t = torch.full((5,), rank())
    dist.broadcast(t, root)
    same(t, torch.full((5,), root))


def reduce(root):
    t = torch.full((5,), rank() + 1)
    dist.reduce(t, root)
    if rank() == root:
        same(t, torch.full((5,), size() * (size() + 1) // 2))


def all_gather():
    out = [torch.empty(3, dtype=torch.int32) for _ in range(size())]
    dist.all_gather(out, torch.full((3,), rank(), dtype=torch.int32))
    for r, t in enumerate(out):
        same(t, torch.full((3,), r, dtype=torch.int32))


def all_gather_into_tensor():
    out = torch.empty(3 * size())
    dist.all_gather_into_tensor(out, torch.full((3,), float(rank())))
    same(out, torch.arange(float(size())).repeat_interleave(3))


def reduce_scatter():
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(r + rank())) for r in range(size())])
    same(out, torch.full((2,), float(size() * rank() + sum(range(size())))))


def reduce_scatter_tensor():
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * size()))
    same(out, torch.arange(2.0 * size())[2 * rank() : 2 * rank() + 2] * size())


def all_to_all():
    out = [torch.empty(1) for _ in range(size())]
    dist.all_to_all(out, [torch.tensor([10.0 * rank() + r]) for r in range(size())])
    for r, t in enumerate(out):
        same(t, torch.tensor([10.0 * r + rank()]))


def all_to_all_single():
    rows = [r + 1 for r in range(size())]
    out = torch.empty(((rank() + 1) * size(), 2))
    dist.all_to_all_single(out, torch.full((sum(rows), 2), float(rank())), [rank() + 1] * size(), rows)
    same(out, torch.arange(float(size())).repeat_interleave(rank() + 1)[:, None].expand(-1, 2))
    even = torch.empty(size())
    dist.all_to_all_single(even, torch.arange(float(size())) + 10 * rank())
    same(even, torch.arange(size()) * 10.0 + rank())


def gather(root):
    out = [torch.empty(2) for _ in range(size())] if rank() == root else None
    dist.gather(torch.full((2,), float(rank())), out, dst=root)
    for r, t in enumerate(out or []):
        same(t, torch.full((2,), float(r)))


def scatter(root):
    out = torch.empty(2)
    dist.scatter(out, [torch.full((2,), float(r)) for r in range(size())] if rank() == root else None, src=root)
    same(out, torch.full((2,), float(rank())))


def barrier():
    dist.barrier()


def objects():
    everybody = [None] * size()
    dist.all_gather_object(everybody, {"rank": rank()})
    assert everybody == [{"rank": r} for r in range(size())], everybody
    said = ["hello"] if rank() == 0 else [None]
    dist.broadcast_object_list(said, 0)
    assert said == ["hello"]


# Point to point.


def ring():
    n, out = size(), torch.empty(4)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank())), (rank() + 1) % n),
            dist.P2POp(dist.irecv, out, (rank() - 1) % n),
        ]
    ):
        work.wait()
    same(out, torch.full((4,), float((rank() - 1) % n)))


def messages_in_order(count, elements):
    if rank() == 0:
        for i in range(count):
            dist.send(torch.full((elements,), float(i)), 1)
    elif rank() == 1:
        for i in range(count):
            t = torch.empty(elements)
            dist.recv(t, 0)
            same(t, torch.full((elements,), float(i)))


def tags():
    if rank() == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    elif rank() == 1:
        for tag in (3, 1, 2):
            t = torch.empty(1)
            dist.recv(t, 0, tag=tag)
            same(t, torch.tensor([float(tag)]))


def many_to_one():
    if rank() != 0:
        dist.send(torch.tensor([float(rank())]), 0)
        return
    seen = set()
    for _ in range(size() - 1):
        t = torch.empty(1)
        source = dist.recv(t)
        same(t, torch.tensor([float(source)]))
        seen.add(source)
    assert seen == set(range(1, size())), seen


def send_value(to, value):
    dist.send(torch.full((1024,), value, dtype=torch.int32), to)


def receive_value(source):
    t = torch.empty(1024, dtype=torch.int32)
    dist.recv(t, source)
    return t.unique().tolist()


# Groups.


def subgroups(lists):
    """The sum of the global ranks, plus one, in each group of lists that this rank is in."""
    sums = {}
    for i, members in enumerate(lists):
        group = dist.new_group(members)
        if rank() in members:
            t = torch.tensor([rank() + 1])
            dist.all_reduce(t, group=group)
            sums[i] = int(t)
            root = members[-1]
            b = torch.tensor([rank()])
            dist.broadcast(b, root, group=group)
            same(b, torch.tensor([root]))
            groups[str(i)] = group
    for i in sums:
        dist.destroy_process_group(groups.pop(str(i)))
    return sums


def used_after_destroy():
    group = dist.new_group(list(range(size())))
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    try:
        group.barrier().wait()
    except larder.ClosedError:
        return
    raise AssertionError("a group was used after it had been destroyed")


def overlapping(rounds):
    """Collectives of two groups that overlap, in the order of each."""
    n = size()
    left, right = dist.new_group(list(range(n - 1))), dist.new_group(list(range(1, n)))
    for i in range(rounds):
        works = []
        for group, members in ((left, range(n - 1)), (right, range(1, n))):
            if rank() in members:
                t = torch.tensor([rank() + i])
                works.append((dist.all_reduce(t, group=group, async_op=True), t, sum(members) + i * len(members)))
        for work, t, want in works:
            work.wait()
            assert int(t) == want, (int(t), want)
    for group in (left, right):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def train(steps):
    """Distributed data parallel: parameters stay the same everywhere, though the data are not."""
    torch.manual_seed(rank())
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3)), bucket_cap_mb=0.005
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
    for parameter in model.parameters():
        out = [torch.empty_like(parameter) for _ in range(size())]
        dist.all_gather(out, parameter.detach())
        for other in out:
            same(other, out[0])


# Bad input.


def refused(what):
    """What a mistake of this rank alone raises."""
    mistakes = {
        "parts": lambda: dist.all_gather([torch.empty(2)], torch.empty(2)),
        "sizes": lambda: dist.all_gather_into_tensor(torch.empty(7), torch.empty(2)),
        "splits": lambda: dist.all_to_all_single(torch.empty(size()), torch.empty(size()), [1], [1]),
        "complex": lambda: world().allreduce([torch.ones(2, dtype=torch.complex64)]),
        "sparse": lambda: world().broadcast([torch.ones(2, 2).to_sparse()], 0),
        "premultiplied": lambda: world().allreduce([torch.ones(2)], dist.ReduceOp.PREMUL_SUM),
        "peers": lambda: pg.get_peer_state(world(), [99]),
        "foreign": lambda: pg.get_active_ranks(object()),
        "late": lambda: pg.set_host_ip("10.0.0.1"),
        "options": lambda: dist.new_group(list(range(size())), pg_options={"retry": True}),
    }
    try:
        mistakes[what]()
    except (larder.LarderError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    raise AssertionError("it was not refused")


def different_calls(what):
    """Ranks that call different things hear of it."""
    last = rank() == size() - 1
    t = torch.ones(4)
    try:
        if what == "kind":
            dist.broadcast(t, 0) if last else dist.all_reduce(t)
        elif what == "count":
            dist.all_reduce(torch.ones(8) if last else t)
        elif what == "dtype":
            dist.all_reduce(t.int() if last else t)
        elif what == "op":
            dist.all_reduce(t, op=dist.ReduceOp.MAX if last else dist.ReduceOp.SUM)
        elif what == "root":
            dist.reduce(t, 1 if last else 0)
    except larder.MismatchError as e:
        return str(e)
    return ""


# Failures.


def crash():
    os._exit(1)


def active():
    return pg.get_active_ranks(world()).tolist()


def failing_all_reduce(value=None):
    """An all_reduce in which somebody has died: what the exception names, or the sum."""
    try:
        return total(value)
    except larder.PeerFailedError as e:
        return list(e.ranks)


def hinted_all_reduce():
    """The same in a group that does not raise: the sum, the hint, and whether it has succeeded."""
    t = torch.tensor([rank() + 1], dtype=torch.int32)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    return int(t), pg.get_failed_ranks_hint(work).tolist(), pg.get_local_success(work)


def hinted_messages(others):
    """A message to each of others, and one from each, in a group that does not raise: of each its rank, what was received, the hints of
    both, and whether both have succeeded."""
    works = []
    for other in others:
        t = torch.zeros(1, dtype=torch.int32)
        works.append((other, t, dist.isend(torch.tensor([rank() + 1], dtype=torch.int32), other), dist.irecv(t, other)))
    for _, _, sent, received in works:
        sent.wait()
        received.wait()
    return [
        (other, int(t), [pg.get_failed_ranks_hint(w).tolist() for w in pair], [pg.get_local_success(w) for w in pair])
        for other, t, *pair in works
    ]


def reduce_until(name, most=60.0):
    """All-reduces until every rank has found a key in the store: how many, and the longest pause between two, in seconds."""
    stop, count, longest = store("signals"), 0, 0.0
    begun = last = time.monotonic()
    while True:
        told = int(stop.add(name, 0) > 0)
        t = torch.tensor([told, 1])
        dist.all_reduce(t)
        now = time.monotonic()
        longest, last, count = max(longest, now - last), now, count + 1
        if int(t[0]) == int(t[1]) or now - begun > most:
            return count, longest, int(t[1])


def signal(name):
    store("signals").add(name, 1)


def join():
    pg.join_group(world())


def peers(ranks):
    return pg.get_peer_state(world(), ranks)


def activate(ranks):
    response = pg.recover_ranks(world(), ranks)
    return response.status.name, response.reject_reason


def deactivate(ranks):
    return pg.deactivate_ranks(world(), ranks).status.name


def sync():
    return pg.sync_after_failure(world()).status.name


def extend(capacity):
    pg.extend_group_size_to(world(), capacity)
    return len(pg.get_active_ranks(world()))


def epoch():
    return pg.get_current_epoch(world())


# Subgroups that grow.


def make_subgroups(lists, **options):
    """Groups of these ranks, each with its capacity; None for a rank that is in none."""
    for i, (members, capacity) in enumerate(lists):
        chosen = pg.BackendOptions(max_group_size=capacity, retry=True, **options)
        groups[f"sub{i}"] = dist.new_group(members, pg_options=chosen)


def join_subgroups(which):
    for i in which:
        pg.join_group(groups[f"sub{i}"])


def activate_in(i, ranks):
    return pg.activate_ranks(groups[f"sub{i}"], ranks).status.name


def peers_in(i, ranks):
    return pg.get_peer_state(groups[f"sub{i}"], ranks)


def total_in(i):
    t = torch.tensor([rank() + 1], dtype=torch.int32)
    dist.all_reduce(t, group=groups[f"sub{i}"])
    return int(t)
