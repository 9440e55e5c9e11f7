"""A pytest plugin: Maru's tests talk to larder serve in place of Maru's own server.

Whatever of these tests constructs an RpcServer or RpcAsyncServer gets a new larder process at the same address, with an empty
pool, for as long as the server would have run. Nothing else of Maru is changed: clients, handlers, serializers and the tests
are as they come. LARDER names the program, LARDER_FLAGS adds to its command line.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time

START = 20.0  # seconds for larder to listen
STOP = 10.0  # seconds for it to end after SIGTERM


class NoServer:
    """Stands for MaruServer, which tests hand to a door and do not look into."""

    def __init__(self, *args, **kwargs):
        pass

    def close(self):
        pass


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0


class Door:
    """Stands for RpcServer and RpcAsyncServer: a larder process."""

    def __init__(self, server, host: str = "127.0.0.1", port: int = 5555, num_workers: int = 4):
        self.host, self.port = host, port
        self.rm_port = free_port()
        self.stopped = threading.Event()
        # The pool is memory where there is some, as the tests fault its pages in.
        self.dir = tempfile.mkdtemp(prefix="larder-maru-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        command = [
            os.environ.get("LARDER", "larder"), "serve",
            "--maru", f"{host}:{port}", "--maru-rm", f"127.0.0.1:{self.rm_port}",
            "--data-dir", f"{self.dir}/data", "--pool", f"{self.dir}/pool,size=1GiB",
            "--listen", "none", "--socket", f"{self.dir}/socket", "--peer-listen", "none", "--admin-listen", "none",
            *shlex.split(os.environ.get("LARDER_FLAGS", "")),
        ]
        self.log = open(f"{self.dir}/log", "w+b")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        atexit.register(self.stop)
        deadline = time.monotonic() + START
        while not (listens(port) and listens(self.rm_port)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.said()
                self.stop()
                raise RuntimeError(f"larder does not listen: {shlex.join(command)}\n{said}")
            time.sleep(0.02)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def start(self) -> None:
        """Returns when the door is stopped, as the server's loop does."""
        self.stopped.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.stopped.set()
        if not self.log.closed:
            self.log.close()
        shutil.rmtree(self.dir, ignore_errors=True)
        atexit.unregister(self.stop)


def pytest_configure(config):
    """Puts the doors in place before any test is imported."""
    import maru_server
    import maru_server.rpc_async_server
    import maru_server.rpc_server
    import maru_server.server

    for module in (maru_server, maru_server.server):
        module.MaruServer = NoServer
    for module in (maru_server, maru_server.rpc_server):
        module.RpcServer = Door
    maru_server.rpc_async_server.RpcAsyncServer = Door
    if hasattr(maru_server, "RpcAsyncServer"):
        maru_server.RpcAsyncServer = Door
