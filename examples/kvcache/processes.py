"""What the examples run: a server of their own, and engines, which are processes that answer one question after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# How long an engine may take to load its model, and for a step, in seconds: far more than it needs.
LOADING = 300
PATIENCE = 60


def program() -> str:
    """The larder program: LARDER_BINARY, what `make build` has made, or that of PATH."""
    built = Path(__file__).parents[2] / "bin" / "larder"
    found = os.environ.get("LARDER_BINARY") or (str(built) if built.exists() else shutil.which("larder"))
    if not found:
        raise SystemExit("there is no larder program: make build, or name it in LARDER_BINARY")
    return found


@contextlib.contextmanager
def serving(pool: str = "64MiB") -> Iterator[str]:
    """A server with a pool of its own, which ends with the block. Gives its address."""
    directory = tempfile.mkdtemp(prefix="larder-example-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    options = [
        f"--data-dir={directory}/data", f"--pool={directory}/pool,size={pool}", f"--socket={directory}/socket",
        "--listen=none", "--peer-listen=none", "--admin-listen=none",
    ]  # fmt: skip
    try:
        with open(f"{directory}/log", "wb") as log:
            server = subprocess.Popen([program(), "serve", *options], stdout=log, stderr=log)
        try:
            yield f"unix:{directory}/socket"  # clients wait until it answers
        finally:
            server.kill()
            server.wait()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Engine:
    """A process that runs serve(*arguments), which gives a function, and calls that with each question."""

    def __init__(self, serve: Callable[..., contextlib.AbstractContextManager[Callable[..., Any]]], *arguments: Any) -> None:
        # Not fork: threads of the library, and of numpy, would not come along.
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_answer, args=(there, serve, arguments), daemon=True)
        self._process.start()
        there.close()
        self._loading = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()

    def ask(self, *question: Any) -> Any:
        """The answer. Raises what the engine raises."""
        if self._loading:
            self._receive(LOADING)
            self._loading = False
        self._pipe.send(question)
        return self._receive(PATIENCE)

    def _receive(self, patience: float) -> Any:
        if not self._pipe.poll(patience):
            raise TimeoutError(f"an engine has not answered within {patience} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _answer(pipe: Connection, serve: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError), serve(*arguments) as function:
        pipe.send("ready")
        while True:
            question = pipe.recv()
            try:
                pipe.send(function(*question))
            except Exception as e:
                pipe.send(e)
