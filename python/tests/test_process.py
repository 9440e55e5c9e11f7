"""How the library gets along with the process that it is loaded into."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import unittest
import warnings
from pathlib import Path

import larder
from larder import _lib
from larder.errors import BY_CODE, WIRE
from processes import PATIENCE, Case, hear_interrupts

NATIVE = Path(__file__).parents[1] / "native"


class Library(Case):
    def test_a_missing_library_says_how_to_build_it(self):
        said = self.program(
            "import larder\ntry: larder.TransferEngine()\nexcept larder.LibraryError as e: print(e)", LARDER_LIBRARY="/nowhere/liblarder.so"
        )
        self.assertRegex(said, "^/nowhere/liblarder.so does not exist.*make python")

    def test_what_is_no_library_is_refused(self):
        said = self.program("import larder\ntry: larder.TransferEngine()\nexcept ImportError as e: print(e)", LARDER_LIBRARY=__file__)
        self.assertIn("cannot be loaded", said)

    def test_another_version_is_refused(self):
        said = self.program(
            "import larder\nfrom larder import _lib\n_lib.ABI = 0\ntry: larder.TransferEngine()\nexcept larder.LibraryError as e: print(e)"
        )
        self.assertIn(f"has version {_lib.ABI} of the interface, this package needs 0", said)

    def test_python_and_go_agree(self):
        if not NATIVE.exists():
            self.skipTest("without the library's source")
        codes = re.findall(r"^\tcode(\w+)\s+code = (\d+)", (NATIVE / "errors.go").read_text(), re.M)
        wire = re.findall(r"^\tCode\w+\s+Code = (\d+)", (NATIVE.parents[1] / "protocol" / "errors.go").read_text(), re.M)
        known = {int(n) for _, n in codes} | {WIRE + int(n) for n in wire}
        self.assertEqual(known - {0, _lib.AGAIN, WIRE}, set(BY_CODE))
        self.assertEqual(int(re.search(r"const abi = (\d+)", (NATIVE / "main.go").read_text())[1]), _lib.ABI)


class Fork(Case):
    def in_child(self, body):
        """What body returns in a forked child, as text."""
        r, w = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from 3.12 on Python itself warns of it
            child = os.fork()
        if child == 0:
            try:
                said = str(body())
            except BaseException as e:
                said = f"{type(e).__name__}: {e}"
            os.write(w, said.encode())
            os._exit(0)
        os.close(w)
        with os.fdopen(r) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return said

    def test_a_forked_child_is_refused_and_the_parent_goes_on(self):
        with larder.TransferEngine(listen=["127.0.0.1:0"]) as engine:
            buffer = engine.allocate(16, name="buffer")
            peer = engine.open(*engine.addresses)
            transfer = engine.batch_write(peer["buffer"], [0], [b"parent"])
            there = peer["buffer"]
            for name, body in [
                ("a new engine", larder.TransferEngine),
                ("its parent's engine", lambda: engine.write(there, 0, b"child")),
                ("a transfer", transfer.cancel),
                ("close", engine.close),
                ("unregister", buffer.unregister),
            ]:
                with self.subTest(name):
                    self.assertRegex(self.in_child(body), "^ForkError: .*spawn")
            transfer.wait(timeout=PATIENCE)
            self.assertEqual(bytes(buffer.memory[:6]), b"parent")

    def test_a_fork_before_the_first_use_is_fine(self):
        said = self.program(
            "import os, larder\n"
            "if os.fork():\n"
            "    os.wait()\n"
            "else:\n"
            "    with larder.TransferEngine(listen=['127.0.0.1:0']) as e: print(len(e.addresses), flush=True)\n"
            "    os._exit(0)"
        )
        self.assertEqual(said, "1")


class Signals(unittest.TestCase):
    def setUp(self):
        hear_interrupts(self)

    def interrupted(self, call):
        """How long call takes to be interrupted by a SIGINT that comes a moment after it has begun."""
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            call()
        timer.join()
        return time.monotonic() - began

    def test_waits_end_at_ctrl_c(self):
        with larder.TransferEngine(listen=["127.0.0.1:0"]) as engine, socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            for name, call in [
                ("receive", engine.receive),
                ("open", lambda: engine.open(address, timeout=PATIENCE)),
            ]:
                with self.subTest(name):
                    self.assertLess(self.interrupted(call), 5)

    def test_a_read_that_is_interrupted_lets_go_of_its_memory(self):
        with socket.create_server(("127.0.0.1", 0)) as silent, larder.TransferEngine(abort_timeout=1) as engine:
            rails = [f"127.0.0.1:{silent.getsockname()[1]}"]
            nobody = engine.open(descriptor={"engine": "00" * 16, "rails": rails, "buffers": []})
            into = bytearray(8)
            took = self.interrupted(lambda: engine.read(nobody.remote(1, 1, 8), 0, into, timeout=PATIENCE))
            self.assertLess(took, 20)
            into.append(1)  # it can be resized, so that nobody has it


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def threads():
    return len(os.listdir("/proc/self/task"))


class Leaks(unittest.TestCase):
    def test_nothing_is_left_of_engines_that_were_closed(self):
        def once():
            with larder.TransferEngine(listen=["127.0.0.1:0"]) as engine:
                buffer = engine.allocate(8192, name="buffer")
                engine.register(bytearray(64))
                with engine.open(*engine.addresses) as peer:
                    engine.write(peer["buffer"], 0, b"some bytes")
                    peer.notify("n")
                    engine.receive(PATIENCE)
                buffer.unregister()

        for _ in range(20):
            once()
        files, tasks = descriptors(), threads()
        for _ in range(200):
            once()
        self.assertLessEqual(descriptors(), files)
        self.assertLessEqual(threads(), tasks + 4)  # Go makes one when all others are in a system call


if __name__ == "__main__":
    unittest.main()
