"""Servers of tests: real `larder serve` processes, in memory of their own, which are gone when the test is."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import larder
from processes import PATIENCE

ROOT = Path(__file__).parents[2]


def binary() -> str:
    """The server's program: LARDER_BINARY, or what `make build` has made."""
    chosen = os.environ.get("LARDER_BINARY") or ROOT / "bin" / "larder"
    if not Path(chosen).exists():
        raise FileNotFoundError(f"{chosen} does not exist: make build, or name the program in LARDER_BINARY")
    return str(chosen)


class Server:
    """One server, with a pool of its own. It can be killed and started again."""

    def __init__(self, *options: str, pool: str = "64MiB") -> None:
        self.directory = tempfile.mkdtemp(prefix="larder-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.address = f"unix:{self.directory}/socket"
        self._options = [
            f"--data-dir={self.directory}/data", f"--socket={self.directory}/socket", "--listen=none", "--peer-listen=none",
            "--admin-listen=none", f"--pool={self.directory}/pool,size={pool}", *options,
        ]  # fmt: skip
        self._log = open(f"{self.directory}/log", "ab")  # noqa: SIM115 # until stop
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it; clients wait until it answers."""
        self._process = subprocess.Popen([binary(), "serve", *self._options], stdout=self._log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE)
            self._process = None

    def pause(self) -> None:
        """Have it do nothing, from when this returns on."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Have it go on."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, and remove all that it had."""
        self.kill()
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def client(self, **options: object) -> larder.Client:
        """A client of it."""
        return larder.Client([self.address], **{"timeout": PATIENCE, **options})


@contextlib.contextmanager
def serving(*options: str, pool: str = "64MiB") -> Iterator[Server]:
    """A server for the length of a block."""
    server = Server(*options, pool=pool)
    try:
        with server.client():
            pass  # it answers
        yield server
    finally:
        server.stop()
