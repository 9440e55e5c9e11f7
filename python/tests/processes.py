"""Processes of tests: started with spawn, with a bound on each wait."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

# How long a step of another process may take, in seconds: far more than it needs on a busy machine.
PATIENCE = 60


def receive(pipe: Connection) -> object:
    """What the other process sends; an exception if it sends one, or nothing in time."""
    if not pipe.poll(PATIENCE):
        raise TimeoutError("the other process says nothing")
    message = pipe.recv()
    if isinstance(message, BaseException):
        raise message
    return message


@contextlib.contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process that runs target(pipe, *arguments), and ends when the pipe is closed here."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(there, *arguments), daemon=True)
    child.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        child.join(PATIENCE)
        if child.exitcode is None:
            child.kill()
            child.join()


def hear_interrupts(case: unittest.TestCase) -> None:
    """Have SIGINT raise KeyboardInterrupt during a test, also where it is ignored: shells have it so in the background."""
    case.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))


class Case(unittest.TestCase):
    """A test with the helpers of all of them."""

    def program(self, text: str, **environment: str) -> str:
        """The output of a Python program of its own, which must succeed."""
        import os

        done = subprocess.run(
            [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environment},
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()
