"""Ranks of process groups for tests: processes that do what they are told, and may be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from processes import PATIENCE


class RankFailed(AssertionError):
    """What a rank was told to do has raised."""


def _obey(pipe: Any, environment: dict[str, str]) -> None:
    """A rank's process: it calls the functions that come through the pipe."""
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)  # the ranks share a few cores
    import larder.pg

    del larder
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # the test is over
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as e:
            pipe.send((False, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"))


class Ranks:
    """Some processes, by number. Their torch store is in this process, so that any of them may die."""

    def __init__(self, size: int, **environment: str) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=PATIENCE), wait_for_workers=False)
        self.environment = {
            "LARDER_PG_STORE": f"file://{self.directory.name}", "TEST_STORE_PORT": str(self.store.port), **environment,
        }  # fmt: skip
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Any] = {}
        for rank in range(size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """A process for a rank, in place of one that has died or was not there yet."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_obey, args=(there, self.environment), daemon=True)
        process.start()
        there.close()
        self.processes[rank], self.pipes[rank] = process, here

    def tell(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a rank call a function. Its result is taken by hear."""
        self.pipes[rank].send((function, arguments))

    def hear(self, rank: int) -> Any:
        """What came of it."""
        pipe = self.pipes[rank]
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"rank {rank} does not answer")
        done, result = pipe.recv()
        if not done:
            raise RankFailed(f"at rank {rank}: {result}")
        return result

    def on(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have one rank call a function."""
        self.tell(rank, function, *arguments)
        return self.hear(rank)

    def each(self, function: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None) -> list[Any]:
        """Have ranks, all of them as a rule, call a function at the same time. Their results, by rank."""
        called = sorted(self.pipes) if ranks is None else ranks
        for rank in called:
            self.tell(rank, function, *arguments)
        results, failures = [], []
        for rank in called:  # all are heard, so that the next call finds none in the middle of this one
            try:
                results.append(self.hear(rank))
            except (RankFailed, TimeoutError, EOFError) as e:
                failures.append(str(e))
        if failures:
            raise RankFailed("\n".join(failures))
        return results

    def kill(self, rank: int) -> None:
        """Kill -9."""
        self.processes[rank].kill()
        self.gone(rank)

    def gone(self, rank: int) -> None:
        """A rank has ended, or is about to."""
        self.processes[rank].join(PATIENCE)
        self.pipes[rank].close()
        del self.processes[rank], self.pipes[rank]

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.join(5)
            process.kill()
            process.join()
        self.directory.cleanup()


@contextlib.contextmanager
def ranks(size: int, **environment: str) -> Iterator[Ranks]:
    """Some processes for as long as a block takes."""
    r = Ranks(size, **environment)
    try:
        yield r
    finally:
        r.close()


class RanksCase(unittest.TestCase):
    """Tests that share one set of processes, which have made a world."""

    size = 4
    backend = "larder-cpu"
    ranks: Ranks

    @classmethod
    def setUpClass(cls) -> None:
        import pg_cases

        cls.ranks = Ranks(cls.size)
        cls.addClassCleanup(cls.ranks.close)
        for rank in range(cls.size):
            cls.ranks.tell(rank, pg_cases.init, rank, cls.size, cls.__name__, cls.backend)
        for rank in range(cls.size):
            cls.ranks.hear(rank)


def eventually(what: Callable[[], bool], message: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so after {PATIENCE} s: {message}")
        time.sleep(0.02)
