"""Measures collectives, with the flags and the columns that nccl-tests and Mooncake's pgbench have::

    python -m larder.pg.bench --collective all_reduce --backend larder-cpu -g 2 -b 8 -e 1M -f 2 --compare gloo

Ranks are processes of this host. A row has the time of one operation, algbw (bytes by time), busbw (algbw by how often each byte
must pass a rank's link at least) and wrong elements, for results apart from operands and in their place. With --compare each
size is measured with both backends, one after the other in the same processes, so that a busy machine does not favour one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import larder.pg  # noqa: F401 - registers the backends

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_COLLECTIVES = [
    "all_reduce", "all_gather", "all_gather_base", "broadcast", "reduce_scatter", "alltoall", "sendrecv", "reduce", "gather",
    "scatter", "barrier",
]  # fmt: skip
_PARTS = {"all_gather", "all_gather_base", "reduce_scatter", "alltoall", "gather", "scatter"}  # with a part for each rank
_REDUCE = {"all_reduce", "reduce_scatter", "reduce"}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}

_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
_BITWISE = {"band": int.__and__, "bor": int.__or__, "bxor": int.__xor__}

# The names that nccl-tests has for dtypes, besides torch's.
_DTYPES = {"half": "float16", "float": "float32", "double": "float64", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
_ALL_DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]

# Backends for tensors in the host's memory, and those that have avg.
_ON_CPU = {"larder-cpu", "mooncake-cpu", "gloo", "mpi"}
_AVERAGES = {"larder", "larder-cpu", "mooncake", "mooncake-cpu", "nccl"}


def _bytes(text: str) -> int:
    text = text.upper().removesuffix("B").removesuffix("I")
    unit = text[-1:] if text[-1:] in "KMG" else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m larder.pg.bench", description=(__doc__ or "").split("::")[0])

    def flag(*names: str, **what: Any) -> None:
        what["help"] += "" if what.get("action") or what.get("default") is None else " (default %(default)s)"
        p.add_argument(*names, **what)

    flag("--collective", choices=_COLLECTIVES, default="all_reduce", help="all_gather has lists, all_gather_base one tensor")
    flag("--backend", default="larder-cpu", help="of torch.distributed")
    flag("--compare", help="another backend to measure beside it: gloo")
    flag("--device", choices=["cpu", "cuda"], help="where tensors are (default: where the backend has them)")
    flag("-g", "--ngpus", "--ranks", dest="ranks", type=int, default=2, help="ranks, a process each")
    flag("-b", "--minbytes", type=_bytes, default="32M", help="smallest size")
    flag("-e", "--maxbytes", type=_bytes, default="32M", help="largest size")
    flag("-i", "--stepbytes", type=_bytes, default="1M", help="from one size to the next")
    flag("-f", "--stepfactor", type=int, default=1, help="factor from one size to the next, if more than 1")
    flag("-n", "--iters", type=int, default=20, help="iterations that are measured, of each size")
    flag("-w", "--warmup_iters", "--warmup-iters", dest="warmup", type=int, default=1, help="iterations before those")
    flag("-m", "--agg_iters", "--agg-iters", dest="aggregate", type=int, default=1, help="operations started together in each")
    flag("-c", "--check", type=int, default=1, help="how often each result is checked, 0: not")
    flag("-a", "--average", type=int, choices=[0, 1, 2, 3], default=1, help="time: 0 rank 0's, 1 ranks' mean, 2 least, 3 most")
    flag("-d", "--datatype", default="float32", help="as torch or nccl-tests name it, or all")
    flag("-o", "--op", choices=[*_OPS, "all"], default="sum", help="of reductions; where a backend has no avg it is a sum, divided")
    flag("-r", "--root", type=int, default=0, help="of broadcasts and the like; -1: each in turn")
    flag("-C", "--report_cputime", action="store_true", help="time until a GPU's operations are queued, rather than done")
    flag("-S", "--report_timestamps", action="store_true", help="end rows with the time of day")
    flag("-t", "--nthreads", type=int, default=1, help="threads of a rank: 1")
    flag("-J", "--output_file", help="refused, as by pgbench: --json prints JSON")
    flag("-p", "--percentiles", action="store_true", help="columns for the median and the 99th percentile of all ranks' iterations")
    flag("--json", action="store_true", help="print JSON, with percentiles")
    return p


def _refused(a: argparse.Namespace) -> str:
    """What is wrong with flags, empty if nothing is; a.device and a.dtypes are set then."""
    a.device = a.device or ("cpu" if a.backend in _ON_CPU else "cuda")
    names = _ALL_DTYPES if a.datatype == "all" else [_DTYPES.get(a.datatype, a.datatype)]
    a.dtypes = [name for name in names if isinstance(getattr(torch, name, None), torch.dtype)]
    cpu_only = [b for b in (a.backend, a.compare) if b in _ON_CPU]
    for wrong, text in [
        (a.output_file is not None, "-J: pgbench has it and refuses it; --json prints JSON, to be redirected to a file"),
        (a.nthreads != 1, f"-t {a.nthreads}: a rank is a process with one thread, -g says how many there are"),
        (a.ranks < 1, f"-g {a.ranks}: 1 rank or more"),
        (not 0 <= a.minbytes <= a.maxbytes, f"sizes from {a.minbytes} to {a.maxbytes}: the least first"),
        (a.stepfactor < 1 or a.stepfactor == 1 and a.stepbytes < 1, "-i and -f are 1 or more"),
        (a.iters < 1 or a.aggregate < 1, "-n and -m are 1 or more"),
        (a.warmup < 0 or a.check < 0, "-w and -c are 0 or more"),
        (not -1 <= a.root < a.ranks, f"root {a.root} of {a.ranks} ranks"),
        (not a.dtypes, f"-d {a.datatype}: this torch has no such dtype"),
        (a.device == "cuda" and bool(cpu_only), f"--device cuda: {', '.join(cpu_only)} has tensors of the host only"),
        (a.device == "cuda" and not torch.cuda.is_available(), "--device cuda: there is no GPU here; --device cpu, or larder-cpu"),
    ]:
        if wrong:
            return text
    return ""


class _Case(NamedTuple):
    """A row, but for its backend."""

    dtype: str
    op: str
    root: int
    size: int


def _cases(a: argparse.Namespace) -> Iterator[_Case]:
    sizes, size = [], max(1, a.minbytes)
    while size <= max(1, a.maxbytes):
        sizes.append(size)
        size = size * a.stepfactor if a.stepfactor > 1 else size + a.stepbytes
    ops = ["none"]
    if a.collective in _REDUCE:
        ops = list(_OPS) if a.op == "all" else [a.op]
    roots = [-1]
    if a.collective in _ROOTED:
        roots = list(range(a.ranks)) if a.root < 0 else [a.root]
    for case in itertools.starmap(_Case, itertools.product(a.dtypes, ops, roots, sizes)):
        if case.op not in _BITWISE or not getattr(torch, case.dtype).is_floating_point:
            yield case


class _Bench:
    """One case in one group: what to run, and what must come out."""

    def __init__(self, a: argparse.Namespace, case: _Case, group: Any, averages: bool, in_place: bool) -> None:
        self.name, self.case, self.group, self.in_place = a.collective, case, group, in_place
        self.n, self.rank, self.root = dist.get_world_size(), dist.get_rank(), max(case.root, 0)
        self.divides = case.op == "avg" and not averages
        self.op = getattr(dist.ReduceOp, _OPS["sum" if self.divides or case.op == "none" else case.op])
        dtype = getattr(torch, case.dtype)
        each = torch.empty((), dtype=dtype).element_size()
        parts = self.n if self.name in _PARTS else 1
        self.count = 0 if self.name == "barrier" else max(1, case.size // each // parts)
        self.bytes = self.count * parts * each
        make = functools.partial(torch.zeros, dtype=dtype, device=a.device)
        self.src = make(self.count * (1 if self.name in ("all_gather", "all_gather_base", "gather") else parts))
        self.dst = make(self.count * (1 if self.name in ("reduce_scatter", "scatter") else parts))
        if in_place:
            mine = slice(self.rank * self.count, (self.rank + 1) * self.count)
            if self.name in ("all_gather", "all_gather_base", "gather"):
                self.src = self.dst[mine]
            elif self.name in ("reduce_scatter", "scatter"):
                self.dst = self.src[mine]
            elif self.name in ("all_reduce", "broadcast", "reduce"):
                self.dst = self.src

    def value(self, rank: int) -> int:
        """What a rank's operand consists of: few enough that every dtype has every result of some dozens of ranks."""
        return (2 if rank < 3 else 1) if self.case.op == "prod" else rank % 3 + 1

    def reset(self) -> None:
        self.dst.zero_()
        self.src.fill_(self.value(self.rank))

    def begin(self, later: bool) -> list[Any]:
        """Start the operation, and, unless it is waited for later, wait for it. Returns what is to be waited for."""
        group, name, root = self.group, self.name, self.root
        if name in ("all_reduce", "broadcast", "reduce"):
            if not self.in_place and (name != "broadcast" or self.rank == root):
                self.dst.copy_(self.src)
            if name == "all_reduce":
                return [dist.all_reduce(self.dst, self.op, group, later)]
            if name == "reduce":
                return [dist.reduce(self.dst, root, self.op, group, later)]
            return [dist.broadcast(self.dst, root, group, later)]
        if name == "sendrecv":
            ops = [
                dist.P2POp(dist.isend, self.src, (self.rank + 1) % self.n, group),
                dist.P2POp(dist.irecv, self.dst, (self.rank - 1) % self.n, group),
            ]
            works = dist.batch_isend_irecv(ops)
            return works if later else [work.wait() for work in works][:0]
        if name == "all_gather":
            return [dist.all_gather(list(self.dst.chunk(self.n)), self.src, group, later)]
        if name == "all_gather_base":
            return [dist.all_gather_into_tensor(self.dst, self.src, group, later)]
        if name == "reduce_scatter":
            return [dist.reduce_scatter_tensor(self.dst, self.src, self.op, group, later)]
        if name == "alltoall":
            return [dist.all_to_all_single(self.dst, self.src, group=group, async_op=later)]
        if name == "gather":
            return [dist.gather(self.src, list(self.dst.chunk(self.n)) if self.rank == root else None, root, group, later)]
        if name == "scatter":
            return [dist.scatter(self.dst, list(self.src.chunk(self.n)) if self.rank == root else None, root, group, later)]
        return [dist.barrier(group, later)]

    def run(self, together: int = 1) -> None:
        """Run the operation, or several that are started together."""
        works = [work for _ in range(together) for work in self.begin(together > 1)]
        if together > 1:
            for work in works:
                work.wait()
        if self.divides:
            self.dst.div_(self.n, rounding_mode=None if self.dst.is_floating_point() else "trunc")

    def wrong(self) -> int:
        """How many elements of the result of one run are not what they must be."""
        name, values = self.name, [self.value(r) for r in range(self.n)]
        if name == "barrier" or name in ("reduce", "gather") and self.rank != self.root:
            return 0
        if name in ("all_gather", "all_gather_base", "gather", "alltoall"):
            want = torch.tensor(values, dtype=torch.float64).repeat_interleave(self.count)
        else:
            one = values[self.root] if name in ("broadcast", "scatter") else values[(self.rank - 1) % self.n]
            want = torch.tensor(float(self.reduced(values) if name in _REDUCE else one), dtype=torch.float64)
        return int((self.dst.cpu().to(torch.float64) != want.to(self.dst.dtype).to(torch.float64)).sum())

    def reduced(self, values: list[int]) -> float:
        ranks = torch.tensor(values, dtype=torch.float64)
        op = self.case.op
        if op in _BITWISE:
            return functools.reduce(_BITWISE[op], values)
        return float({"sum": ranks.sum(), "avg": ranks.mean(), "min": ranks.min(), "max": ranks.max(), "prod": ranks.prod()}[op])

    @property
    def busy(self) -> float:
        """How often each byte passes a link at least, for busbw."""
        if self.name == "all_reduce":
            return 2 * (self.n - 1) / self.n
        return (self.n - 1) / self.n if self.name in _PARTS else 1.0


def _measure(bench: _Bench, a: argparse.Namespace) -> dict[str, Any]:
    """What was measured, of one of the two halves of a row."""
    wrong = 0
    for _ in range(a.check):
        bench.reset()
        bench.run()
        wrong += bench.wrong()
    if not a.check:
        bench.reset()
    for _ in range(a.warmup):
        bench.run(a.aggregate)
    each = a.device == "cuda" and not a.report_cputime and (a.percentiles or a.json)
    _synchronize(a)
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(a.iters):
        bench.run(a.aggregate)
        if each:
            _synchronize(a)
        times.append(time.perf_counter())
    if not a.report_cputime:
        _synchronize(a)
        times[-1] = time.perf_counter()
    mine = torch.tensor(times, dtype=torch.float64, device=a.device).diff() * (1e6 / a.aggregate)
    everybody = [torch.empty_like(mine) for _ in range(bench.n)]
    dist.all_gather(everybody, mine)
    mistakes = torch.tensor([wrong], device=a.device)
    dist.all_reduce(mistakes)
    means = torch.stack(everybody).mean(1)
    took = float([means[0], means.mean(), means.min(), means.max()][a.average])
    all_times = torch.cat(everybody)
    return {
        "time_us": took, "p50_us": float(all_times.quantile(0.5)), "p99_us": float(all_times.quantile(0.99)),
        "algbw_gbps": bench.bytes / took / 1e3, "busbw_gbps": bench.bytes / took / 1e3 * bench.busy,
        "wrong": int(mistakes) if a.check else -1,
    }  # fmt: skip


def _synchronize(a: argparse.Namespace) -> None:
    if a.device == "cuda":
        torch.cuda.synchronize()


# torch's stubs do not export it.
_TCPStore: Any = getattr(dist, "TCPStore")  # noqa: B009


def run_ranks(target: Callable[..., None], a: argparse.Namespace, address: str = "127.0.0.1", port: int = 0) -> int:
    """Run target(rank, a, address, port) in a process for each of a.ranks, which meet at that port. Returns how many have failed."""
    store = _TCPStore(address, port, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=target, args=(r, a, address, store.port)) for r in range(a.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)


def meet(rank: int, a: argparse.Namespace, address: str, port: int) -> dict[str, Any]:
    """The groups of all ranks, of a.backend and what it is compared with, by the backends' names."""
    store = _TCPStore(address, port, None, False, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    if a.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(a.backend, store=store, rank=rank, world_size=a.ranks)
    groups: dict[str, Any] = {a.backend: dist.group.WORLD}
    if a.compare:
        groups[a.compare] = dist.new_group(list(range(a.ranks)), backend=a.compare)
    return groups


def _heading(a: argparse.Namespace) -> str:
    columns = [("cputime" if a.report_cputime else "time", "(us)", 10)]
    if a.percentiles:
        columns += [("p50", "(us)", 10), ("p99", "(us)", 10)]
    columns += [("algbw", "(GB/s)", 9), ("busbw", "(GB/s)", 9), ("#wrong", "", 8)]
    names, units = ("".join(f"{column[i]:>{column[2]}}" for column in columns) for i in (0, 1))
    left = f"{'backend':>10}{'size':>12}{'count':>12}{'type':>10}{'redop':>6}{'root':>6}"
    when = f"{'timestamp':>21}" if a.report_timestamps else ""
    return "\n".join([
        f"# {a.collective} of {a.ranks} ranks, torch {torch.__version__}",
        "#",
        f"# {'':{len(left)}}{'out of place':^{len(names)}}{'in place':^{len(names)}}".rstrip(),
        f"# {left}{names}{names}{when}",
        f"# {'':>10}{'(B)':>12}{'(elements)':>12}{'':22}{units}{units}".rstrip(),
    ])  # fmt: skip


def _row(a: argparse.Namespace, row: dict[str, Any]) -> str:
    line = "  {backend:>10}{size:12d}{count:12d}{type:>10}{redop:>6}{root:6d}".format(**row)
    for half in (row["out_of_place"], row["in_place"]):
        line += "{time_us:10.1f}".format(**half)
        line += "{p50_us:10.1f}{p99_us:10.1f}".format(**half) if a.percentiles else ""
        line += "{algbw_gbps:9.2f}{busbw_gbps:9.2f}".format(**half) + f"{half['wrong'] if half['wrong'] >= 0 else 'N/A':>8}"
    return line + (f"  {datetime.now():%Y-%m-%d %H:%M:%S}" if a.report_timestamps else "")


def _rank(rank: int, a: argparse.Namespace, address: str, port: int) -> None:
    groups = meet(rank, a, address, port)
    if rank == 0 and not a.json:
        print(_heading(a), flush=True)
    rows: list[dict[str, Any]] = []
    for case, (name, group) in itertools.product(_cases(a), groups.items()):
        halves = [_Bench(a, case, group, name in _AVERAGES, in_place) for in_place in (False, True)]
        row = {
            "backend": name, "size": halves[0].bytes, "count": halves[0].count * (a.ranks if a.collective in _PARTS else 1),
            "type": case.dtype, "redop": case.op, "root": case.root,
            "out_of_place": _measure(halves[0], a), "in_place": _measure(halves[1], a),
        }  # fmt: skip
        rows.append(row)
        if rank == 0 and not a.json:
            print(_row(a, row), flush=True)
    if rank == 0 and a.json:
        print(json.dumps(rows, indent=2), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run the ranks. Returns how many of them have failed."""
    parser = _parser()
    a = parser.parse_args()
    if wrong := _refused(a):
        parser.error(wrong)
    return run_ranks(_rank, a)


if __name__ == "__main__":
    sys.exit(main())
