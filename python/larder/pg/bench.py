"""Measures collectives, with the flags and the columns that nccl-tests and Mooncake's pgbench have::

    python -m larder.pg.bench --collective all_reduce --backend larder-cpu -g 2 -b 8 -e 1M -f 2 --compare gloo

Ranks are processes of this host. A row has the time of one operation, algbw (bytes by time), busbw (algbw by how often each byte
must pass a rank's link at least) and wrong elements, for results apart from operands and in their place. With --compare each
size is measured with both backends, one after the other in the same processes, so that a busy machine does not favour one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import larder.pg  # noqa: F401 - registers the backends

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_OPS = {"sum": "SUM", "prod": "PRODUCT", "max": "MAX", "min": "MIN", "avg": "AVG"}
_COLLECTIVES = ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "alltoall", "sendrecv"]


def _bytes(text: str) -> int:
    text = text.upper().removesuffix("B").removesuffix("I")
    unit = text[-1:] if text[-1:] in "KMG" else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m larder.pg.bench", description=(__doc__ or "").split("::")[0])
    p.add_argument("--collective", choices=_COLLECTIVES, default="all_reduce")
    p.add_argument("--backend", default="larder-cpu")
    p.add_argument("--compare", help="another backend to measure beside it: gloo")
    p.add_argument("-g", "--ranks", type=int, default=2, help="processes")
    p.add_argument("-b", "--minbytes", type=_bytes, default=32 << 20)
    p.add_argument("-e", "--maxbytes", type=_bytes, default=32 << 20)
    p.add_argument("-i", "--stepbytes", type=_bytes, default=1 << 20)
    p.add_argument("-f", "--stepfactor", type=int, default=1, help="multiply sizes, rather than add -i, if it is more than 1")
    p.add_argument("-n", "--iters", type=int, default=20)
    p.add_argument("-w", "--warmup", type=int, default=1)
    p.add_argument("-c", "--check", type=int, default=1)
    p.add_argument("-d", "--datatype", default="float32", help="as torch names it")
    p.add_argument("-o", "--op", choices=sorted(_OPS), default="sum")
    p.add_argument("-r", "--root", type=int, default=0)
    return p


def _sizes(a: argparse.Namespace) -> list[int]:
    sizes, size = [], max(1, a.minbytes)
    while size <= a.maxbytes:
        sizes.append(size)
        size = size * a.stepfactor if a.stepfactor > 1 else size + max(1, a.stepbytes)
    return sizes


class _Bench:
    """One size of one collective in one group: what to run, and what must come out."""

    def __init__(self, a: argparse.Namespace, group: Any, size: int, in_place: bool) -> None:
        self.name, self.group, self.in_place = a.collective, group, in_place
        self.n, self.rank, self.root = dist.get_world_size(), dist.get_rank(), a.root
        self.op = getattr(dist.ReduceOp, _OPS[a.op])
        self.op_name = a.op
        dtype = getattr(torch, a.datatype)
        parts = self.name in ("all_gather", "reduce_scatter", "alltoall")
        self.count = max(1, size // torch.empty((), dtype=dtype).element_size() // (self.n if parts else 1))
        whole = self.count * (self.n if parts else 1)
        self.bytes = whole * torch.empty((), dtype=dtype).element_size()
        self.src = torch.empty(self.count if self.name == "all_gather" else whole, dtype=dtype)
        self.dst = torch.empty(self.count if self.name == "reduce_scatter" else whole, dtype=dtype)
        if in_place:
            mine = slice(self.rank * self.count, (self.rank + 1) * self.count)
            if self.name == "all_gather":
                self.src = self.dst[mine]
            elif self.name == "reduce_scatter":
                self.dst = self.src[mine]
            elif self.name in ("all_reduce", "broadcast"):
                self.dst = self.src

    def reset(self) -> None:
        self.dst.zero_()
        self.src.fill_(self.rank + 1)

    def run(self) -> None:
        if self.name == "all_reduce":
            if not self.in_place:
                self.dst.copy_(self.src)
            dist.all_reduce(self.dst, op=self.op, group=self.group)
        elif self.name == "broadcast":
            if not self.in_place and self.rank == self.root:
                self.dst.copy_(self.src)
            dist.broadcast(self.dst, self.root, group=self.group)
        elif self.name == "all_gather":
            dist.all_gather_into_tensor(self.dst, self.src, group=self.group)
        elif self.name == "reduce_scatter":
            dist.reduce_scatter_tensor(self.dst, self.src, op=self.op, group=self.group)
        elif self.name == "alltoall":
            dist.all_to_all_single(self.dst, self.src, group=self.group)
        else:
            ops = [
                dist.P2POp(dist.isend, self.src, (self.rank + 1) % self.n, self.group),
                dist.P2POp(dist.irecv, self.dst, (self.rank - 1) % self.n, self.group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def wrong(self) -> int:
        """How many elements of the result of one run are not what they must be."""
        ranks = torch.arange(1, self.n + 1, dtype=torch.float64)
        reduced = {"sum": ranks.sum(), "avg": ranks.mean(), "min": ranks.min(), "max": ranks.max(), "prod": ranks.prod()}[self.op_name]
        want = {
            "all_reduce": reduced, "reduce_scatter": reduced, "broadcast": torch.tensor(self.root + 1.0),
            "sendrecv": torch.tensor((self.rank - 1) % self.n + 1.0),
        }.get(self.name)  # fmt: skip
        expected = ranks.repeat_interleave(self.count) if want is None else want.expand(self.dst.numel())
        return int((self.dst != expected.to(self.dst.dtype)).sum())

    @property
    def busy(self) -> float:
        """How often each byte passes a link at least, for busbw."""
        if self.name == "all_reduce":
            return 2 * (self.n - 1) / self.n
        return (self.n - 1) / self.n if self.name in ("all_gather", "reduce_scatter", "alltoall") else 1.0


def _measure(bench: _Bench, a: argparse.Namespace) -> tuple[float, float, float, int]:
    """Time in microseconds, the mean of all ranks'; algbw and busbw in GB/s; wrong elements of all ranks."""
    bench.reset()
    bench.run()
    wrong = bench.wrong() if a.check else 0
    for _ in range(a.warmup):
        bench.run()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(a.iters):
        bench.run()
    took = (time.perf_counter() - began) / a.iters
    result = torch.tensor([took, float(wrong)], dtype=torch.float64)
    dist.all_reduce(result)
    took, wrong = float(result[0]) / bench.n, int(result[1])
    return took * 1e6, bench.bytes / took / 1e9, bench.bytes / took / 1e9 * bench.busy, wrong


def run_ranks(target: Callable[..., None], a: argparse.Namespace, address: str = "127.0.0.1", port: int = 0) -> int:
    """Run target(rank, a, address, port) in a process for each of a.ranks, which meet at that port. Returns how many have failed."""
    store = dist.TCPStore(address, port, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=target, args=(r, a, address, store.port)) for r in range(a.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)


def meet(rank: int, a: argparse.Namespace, address: str, port: int) -> dict[str, Any]:
    """The groups of all ranks, of a.backend and what it is compared with, by the backends' names."""
    store = dist.TCPStore(address, port, None, False, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    dist.init_process_group(a.backend, store=store, rank=rank, world_size=a.ranks)
    groups = {a.backend: dist.group.WORLD}
    if a.compare:
        groups[a.compare] = dist.new_group(list(range(a.ranks)), backend=a.compare)
    return groups


def _rank(rank: int, a: argparse.Namespace, address: str, port: int) -> None:
    groups = meet(rank, a, address, port)
    if rank == 0:
        print(f"# {a.collective} of {a.ranks} ranks, torch {torch.__version__}\n#")
        print(f"# {'':32}{'out of place':^42}{'in place':^40}")
        columns = f"{'time':>10}{'algbw':>9}{'busbw':>9}{'#wrong':>8}"
        print(f"# {'backend':>10}{'size':>12}{'count':>12}{'type':>10}{'redop':>6}{columns}{columns}")
        print(f"# {'':>10}{'(B)':>12}{'':>28}{'(us)':>10}{'(GB/s)':>9}{'(GB/s)':>9}{'':>8}{'(us)':>10}{'(GB/s)':>9}{'(GB/s)':>9}", flush=True)
    for size in _sizes(a):
        for name, group in groups.items():
            rows = []
            for in_place in (False, True):
                bench = _Bench(a, group, size, in_place)
                rows.append("{:10.1f}{:9.2f}{:9.2f}{:8d}".format(*_measure(bench, a)))
            if rank == 0:
                redop = a.op if a.collective in ("all_reduce", "reduce_scatter") else "-"
                print(f"  {name:>10}{bench.bytes:12d}{bench.count:12d}{a.datatype:>10}{redop:>6}{''.join(rows)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run the ranks. Returns how many of them have failed."""
    return run_ranks(_rank, _parser().parse_args())


if __name__ == "__main__":
    sys.exit(main())
