"""Measures point-to-point messages in a regular pattern: each rank sends to the k ranks after it, and receives from the k before it::

    python -m larder.pg.p2p_bench --backend larder-cpu -g 4 -k 2 --tensor-bytes 1M --compare gloo

Ranks are processes of this host. It prints how long a round takes, in percentiles over all ranks, and how many bytes a rank and all
ranks together send and receive a second. The flags are those of Mooncake's p2p_regular_k_bench.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import larder.pg  # noqa: F401 - registers the backends

from .bench import _DTYPES, _ON_CPU, _bytes, _synchronize, meet, run_ranks


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m larder.pg.p2p_bench", description=(__doc__ or "").split("::")[0])
    p.add_argument("--backend", default="larder-cpu")
    p.add_argument("--compare", help="another backend to measure beside it: gloo")
    p.add_argument("--device", choices=["cpu", "cuda"], help="where tensors are (default: where the backend has them)")
    p.add_argument("-g", "--ngpus", "--ranks", dest="ranks", type=int, default=2, help="processes (default 2)")
    p.add_argument("--dtype", "--datatype", default="float32", help="as torch or nccl-tests name it (default float32)")
    p.add_argument("--tensor-bytes", "--tensor_bytes", type=_bytes, default=32 << 20, help="bytes of a message (default 32M)")
    p.add_argument("-k", type=int, default=1, help="ranks that each sends to (default 1)")
    p.add_argument("-w", "--warmup", type=int, default=10, help="rounds before those that are measured (default 10)")
    p.add_argument("-n", "--iters", type=int, default=50, help="rounds (default 50)")
    p.add_argument("-c", "--check", action="store_true", help="compare what was received")
    p.add_argument("--master-addr", default="127.0.0.1", help="where ranks meet (default 127.0.0.1)")
    p.add_argument("--master-port", type=int, default=0, help="the port there (default: a free one)")
    return p


class _Round:
    """What a rank sends and receives."""

    def __init__(self, a: argparse.Namespace, group: Any) -> None:
        self.group, self.k = group, a.k
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        dtype, device = getattr(torch, a.dtype), a.device
        count = max(1, a.tensor_bytes // torch.empty((), dtype=dtype).element_size())
        self.out = [torch.full((count,), self.rank + 1, dtype=dtype, device=device) for _ in range(a.k)]
        self.into = [torch.zeros(count, dtype=dtype, device=device) for _ in range(a.k)]
        self.bytes = count * self.out[0].element_size()

    def run(self) -> None:
        ops = []
        for i in range(self.k):
            ops.append(dist.P2POp(dist.isend, self.out[i], (self.rank + i + 1) % self.n, self.group))
            ops.append(dist.P2POp(dist.irecv, self.into[i], (self.rank - i - 1) % self.n, self.group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def wrong(self) -> int:
        return sum(int((t != (self.rank - i - 1) % self.n + 1).sum()) for i, t in enumerate(self.into))


def _measure(a: argparse.Namespace, group: Any) -> str:
    r = _Round(a, group)
    r.run()
    wrong = torch.tensor([r.wrong() if a.check else 0], device=a.device)
    dist.all_reduce(wrong)
    for _ in range(a.warmup):
        r.run()
    dist.barrier()
    times = torch.empty(a.iters, dtype=torch.float64, device=a.device)
    for i in range(a.iters):
        began = time.perf_counter()
        r.run()
        _synchronize(a)
        times[i] = time.perf_counter() - began
    everybody = [torch.empty_like(times) for _ in range(r.n)]
    dist.all_gather(everybody, times)
    took = torch.cat(everybody)
    p50, p95, p99 = (float(took.quantile(q)) * 1e6 for q in (0.5, 0.95, 0.99))
    rate = 2 * r.k * r.bytes / float(took.mean()) / 1e9  # both directions
    checked = f"{int(wrong)}" if a.check else "N/A"
    return f"{float(took.mean()) * 1e6:10.1f}{p50:10.1f}{p95:10.1f}{p99:10.1f}{rate:10.2f}{rate * r.n:10.2f}{checked:>8}"


def _rank(rank: int, a: argparse.Namespace, address: str, port: int) -> None:
    groups = meet(rank, a, address, port)
    if rank == 0:
        print(f"# {a.ranks} ranks, each to the {a.k} after it, {a.tensor_bytes} bytes of {a.dtype}; times in us, both directions in GB/s")
        print(f"# {'backend':>10}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'rank':>10}{'all':>10}{'#wrong':>8}", flush=True)
    for name, group in groups.items():
        row = _measure(a, group)
        if rank == 0:
            print(f"  {name:>10}{row}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run the ranks. Returns how many of them have failed."""
    parser = _parser()
    a = parser.parse_args()
    a.dtype = _DTYPES.get(a.dtype, a.dtype)
    a.device = a.device or ("cpu" if a.backend in _ON_CPU else "cuda")
    if not isinstance(getattr(torch, a.dtype, None), torch.dtype):
        parser.error(f"--dtype {a.dtype}: this torch has no such dtype")
    if a.device == "cuda" and (a.backend in _ON_CPU or a.compare in _ON_CPU or not torch.cuda.is_available()):
        parser.error("--device cuda: it takes a GPU, and backends for it, as larder and nccl")
    if not 1 <= a.k < a.ranks:
        parser.error(f"-k {a.k} of {a.ranks} ranks: 1 to {a.ranks - 1}")
    if a.iters < 1 or a.warmup < 0:
        parser.error("-n is 1 or more, -w 0 or more")
    return run_ranks(_rank, a, a.master_addr, a.master_port)


if __name__ == "__main__":
    sys.exit(main())
