"""Measures the client of a pool, beside the Go client that it is built on, against the same server in the same run.

    python -m larder.bench 10.0.0.5:7400
    python -m larder.bench unix:/var/lib/larder/larder.sock --size 1M --json

The two take turns, so that what else the machine does hurts both alike, and figures are medians over the rounds; the last column is that
of the rounds' ratios of throughput. Calls come from another thread than the main one, as most of an engine's do, unless --main-thread
is given. Values are written to keys that nobody else has, and removed again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from . import _storage
from .aio import AsyncClient
from .client import Client
from .errors import LarderError

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# How many bytes of values a round puts into the pool at most.
_ROUND = 8 << 20

# How many seconds a client reads for in a round, the same values again and again, and how many seconds writing may take.
_TURN, _ENOUGH = 0.05, 60.0

# How many calls are under way at a time where asyncio and threads are compared.
_AT_ONCE = 64


class Figure:
    """How long calls of one kind took, by round: in seconds."""

    def __init__(self) -> None:
        self.calls = 0
        self.medians: list[float] = []
        self.tails: list[float] = []
        self.rates: list[float] = []  # calls in a second

    def round(self, calls: int, seconds: float, p50: float, p99: float) -> None:
        """Take in a round."""
        self.calls += calls
        self.medians.append(p50)
        self.tails.append(p99)
        self.rates.append(calls / seconds)

    def timed(self, took: list[float]) -> None:
        """Take in a round that was measured here."""
        ordered = sorted(took)
        self.round(len(took), sum(took), ordered[len(took) // 2], ordered[len(took) * 99 // 100])

    def row(self, each: int) -> dict[str, float]:
        """Medians over the rounds, of calls that move each bytes."""
        rate = median(self.rates)
        row = {
            "calls": self.calls,
            "p50_us": median(self.medians) * 1e6,
            "p99_us": median(self.tails) * 1e6,
            "calls_per_s": rate,
        }
        if each:
            row["bytes_per_s"] = each * rate
        return row


def size_of(text: str) -> int:
    """A number of bytes, such as 64K or 1M."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    size = int(text if unit == 1 else text[:-1]) * unit
    if size <= 0:
        raise argparse.ArgumentTypeError(f"a value of {size} bytes: at least 1")
    return size


def _timed(calls: Iterable[Callable[[], Any]], seconds: float) -> list[float]:
    """How long each call takes, of those that begin within some time."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    for call in calls:
        began = time.perf_counter()
        if took and began >= until:
            break
        call()
        took.append(time.perf_counter() - began)
    return took


class Bench:
    """A run of the benchmark."""

    def __init__(self, client: Client, size: int, seconds: float) -> None:
        self.client = client
        self.size = size
        self.seconds = seconds
        self.keys = max(4, min(256, _ROUND // size))
        self.tag = f"larder-bench/{os.getpid()}/{time.monotonic_ns()}"
        self.rounds = 0
        self.figures: dict[str, dict[str, Figure]] = {}

    def _go(self, what: str, prefix: str, keys: int, seconds: float) -> None:
        """Have the library measure its own client."""
        size = self.size if what != "exists" else 0
        options: dict[str, Any] = {"what": what, "size": size, "keys": keys, "prefix": prefix, "time": seconds}
        r = _storage.run(self.client._control_request("bench", 60 + 2 * seconds, bench=options))
        self._figure("exists of 1,000" if what == "exists" else what, "go").round(r["calls"], r["seconds"], r["p50"], r["p99"])

    def _figure(self, what: str, who: str) -> Figure:
        return self.figures.setdefault(what, {}).setdefault(who, Figure())

    def _python(self, what: str, calls: Iterable[Callable[[], Any]], seconds: float = _TURN) -> None:
        self._figure(what, "python").timed(_timed(calls, seconds))

    def _in_turns(self, *turns: Callable[[], None]) -> None:
        """Take turns, another one first in each round: the first ones find other caches, and less to reuse."""
        at = self.rounds % len(turns)
        for turn in turns[at:] + turns[:at]:
            turn()

    def values(self) -> None:
        """A round of put and get, of both clients."""
        self.rounds += 1
        ours = [f"{self.tag}/python/{self.rounds}/{i}" for i in range(self.keys)]
        theirs = f"{self.tag}/go/{self.rounds}/"
        written = ours + [f"{theirs}{i}" for i in range(self.keys)]
        try:
            self._values(ours, theirs)
        except LarderError:
            with contextlib.suppress(LarderError):  # which says less than the first
                self.client.delete_batch(written)
            raise
        self.client.delete_batch(written)

    def _values(self, ours: list[str], theirs: str) -> None:
        client, n = self.client, self.keys
        value, into = bytearray(self.size), bytearray(self.size)
        put = [functools.partial(client.put, key, value) for key in ours]
        get_into = [functools.partial(client.get_into, key, into) for key in ours]
        get = [functools.partial(client.get, key) for key in ours]
        self._in_turns(
            lambda: self._python("put", put, _ENOUGH),
            lambda: self._go("put", theirs, n, _ENOUGH),
        )
        self._in_turns(
            lambda: self._go("get", theirs, n, _TURN),
            lambda: self._python("get", itertools.cycle(get_into)),
            lambda: self._python("get of new bytes", itertools.cycle(get)),
        )

    def exists(self) -> None:
        """A round of batched EXISTS."""
        keys = [f"{self.tag}/{i}" for i in range(1000)]
        self._go("exists", f"{self.tag}/", 1000, _TURN)
        self._python("exists of 1,000", itertools.repeat(lambda: self.client.exists_batch(keys)))

    def run(self) -> None:
        """All rounds."""
        until = time.monotonic() + self.seconds
        while time.monotonic() < until or self.rounds < 3:
            self.values()
            self.exists()

    def at_once(self, masters: Sequence[str], tenant: str) -> dict[str, float]:
        """Calls per second of many small calls at once: through an event loop, and through threads."""
        key, calls = f"{self.tag}/none", 4000

        async def loop() -> float:
            async with AsyncClient(masters, tenant=tenant) as client:
                gate = asyncio.Semaphore(_AT_ONCE)

                async def once() -> None:
                    async with gate:
                        await client.exists(key)

                began = time.perf_counter()
                await asyncio.gather(*(once() for _ in range(calls)))
                return calls / (time.perf_counter() - began)

        async def threads() -> float:
            running = asyncio.get_running_loop()
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                began = time.perf_counter()
                await asyncio.gather(*(running.run_in_executor(pool, self.client.exists, key) for _ in range(calls)))
                return calls / (time.perf_counter() - began)

        return {"aio_calls_per_s": asyncio.run(loop()), "threads_calls_per_s": asyncio.run(threads())}

    def report(self) -> dict[str, Any]:
        """What was measured."""
        rows = {}
        for what, sides in self.figures.items():
            each = 0 if what.startswith("exists") else self.size
            row: dict[str, Any] = {who: f.row(each) for who, f in sides.items()}
            base = sides.get("go") or self.figures["get"]["go"]
            row["ratio"] = median([ours / theirs for ours, theirs in zip(sides["python"].rates, base.rates, strict=True)])
            rows[what] = row
        return {"size": self.size, "rounds": self.rounds, "figures": rows}


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"values of {report['size']:,} bytes, {report['rounds']} rounds",
        f"{'':18}{'Go p50':>10}{'p99':>10}{'':>9}  {'Python p50':>10}{'p99':>10}{'':>9}  {'Python/Go':>9}",
    ]
    for what, row in report["figures"].items():
        cells = f"{what:18}"
        for side in ("go", "python"):
            r = row.get(side)
            if r is None:
                cells += f"{'':>29}  "
                continue
            rate = f"{r['bytes_per_s'] / (1 << 30):.2f} GiB/s" if "bytes_per_s" in r else f"{r['calls_per_s']:,.0f}/s"
            cells += f"{r['p50_us']:>7.0f} us{r['p99_us']:>7.0f} us{rate:>11}"
        lines.append(f"{cells}  {row['ratio']:>8.0%}")
    if "at_once" in report:
        r = report["at_once"]
        aio, threads = r["aio_calls_per_s"], r["threads_calls_per_s"]
        lines.append(f"{_AT_ONCE} small calls at once: asyncio {aio:,.0f}/s, threads {threads:,.0f}/s")
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A run of the benchmark as the command line has it."""
    with Client(options.masters, tenant=options.tenant, checksums=options.checksums, timeout=options.timeout) as client:
        bench = Bench(client, options.size, options.time)
        if options.main_thread:
            bench.run()
        else:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(bench.run).result()
        report = bench.report()
        report["at_once"] = bench.at_once(options.masters, options.tenant)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m larder.bench", description="Measure the client of a pool, beside the Go client.")
    parser.add_argument("masters", nargs="+", help="addresses of masters, host:port or unix:/path")
    parser.add_argument("--size", type=size_of, default=1 << 20, help="of a value, such as 64K (default 1M)")
    parser.add_argument("--time", type=float, default=5, help="seconds to measure for (default 5)")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for a master, and for each of Python's calls (default 30)")
    parser.add_argument("--tenant", default="default", help="whose entries to write (default: default)")
    parser.add_argument("--checksums", action="store_true", help="store checksums, and verify them")
    parser.add_argument("--main-thread", action="store_true", help="call from the main thread, which looks for signals, not from another")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        report = measure(options)
    except LarderError as e:
        print(f"larder.bench: {e}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if options.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
