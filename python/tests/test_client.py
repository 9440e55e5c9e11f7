"""The client of a pool, against real servers."""

from __future__ import annotations

import array
import contextlib
import gc
import io
import json
import os
import signal
import threading
import time
import unittest
import warnings
from concurrent.futures import ThreadPoolExecutor

import larder
from larder import _lib, _storage, bench
from processes import PATIENCE, Case, hear_interrupts
from servers import Server, serving

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None


class Pool(Case):
    """Tests that share a server, and have a client each."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.stop)

    def setUp(self):
        self.client = self.server.client()
        self.addCleanup(self.client.close)


class Values(Pool):
    def test_a_value_is_stored_once_and_read_by_others(self):
        self.assertTrue(self.client.put("once", b"first"))
        self.assertFalse(self.client.put("once", b"again"), "keys name content")
        with self.server.client() as other:
            self.assertEqual(other.get("once"), b"first")
            self.assertEqual(other.get(b"once"), b"first", "text is UTF-8")
            self.assertIsNone(other.get("never"))

    def test_what_a_value_may_be(self):
        sources = {
            "bytes": b"\x00\x01\x02\x03",
            "bytearray": bytearray(b"\x00\x01\x02\x03"),
            "a part of a memoryview": memoryview(b"xx\x00\x01\x02\x03xx")[2:6],
            "an array": array.array("B", (0, 1, 2, 3)),
        }
        if numpy is not None:
            sources["numpy"] = numpy.arange(4, dtype=numpy.uint8).reshape(2, 2)
        if torch is not None:
            sources["torch"] = torch.arange(4, dtype=torch.uint8)
            sources["bfloat16, which numpy does not know"] = torch.tensor([2**-133, 3.9e-34]).to(torch.bfloat16)
        for name, value in sources.items():
            with self.subTest(name):
                self.assertTrue(self.client.put(f"source {name}", value))
                got = self.client.get(f"source {name}")
                self.assertEqual(len(got), 4)
                if "bfloat16" in name:
                    self.assertTrue(torch.equal(torch.frombuffer(bytearray(got), dtype=torch.bfloat16), value))
                else:
                    self.assertEqual(got, b"\x00\x01\x02\x03")

    def test_reading_into_memory(self):
        self.client.put("into", b"12345678")
        targets = {"bytearray": bytearray(8), "a part": memoryview(bytearray(16))[4:12]}
        if numpy is not None:
            targets["numpy"] = numpy.zeros((2, 4), dtype=numpy.uint8)
        if torch is not None:
            targets["bfloat16"] = torch.zeros(4, dtype=torch.bfloat16)
        for name, target in targets.items():
            with self.subTest(name):
                self.assertEqual(self.client.get_into("into", target), 8)
                raw = target.view(torch.uint8).numpy() if name == "bfloat16" and hasattr(torch, "uint16") else target
                if name != "bfloat16" or raw is not target:
                    self.assertEqual(bytes(raw), b"12345678")
                else:
                    self.assertTrue(torch.equal(target, torch.frombuffer(bytearray(b"12345678"), dtype=torch.bfloat16)))
        longer = bytearray(b"." * 10)
        self.assertEqual(self.client.get_into("into", longer), 8)
        self.assertEqual(longer, b"12345678..", "the rest is left alone")
        self.assertIsNone(self.client.get_into("never", longer))

    def test_lengths_that_nobody_expects(self):
        sizes = [1, 100_000, 3, 100_000, 1 << 20, 1, 65536, 65537]
        for i, n in enumerate(sizes):
            self.client.put(f"length {i}", bytes([i]) * n)
        for i, n in enumerate(sizes):
            self.assertEqual(self.client.get(f"length {i}"), bytes([i]) * n)
        self.assertEqual(
            self.client.get_batch([f"length {i}" for i in range(-1, len(sizes))]), [None] + [bytes([i]) * n for i, n in enumerate(sizes)]
        )

    def test_batches(self):
        items = [(f"batch {i}", bytes([i % 256]) * (i + 1)) for i in range(300)]
        self.assertEqual(self.client.put_batch(items), [True] * 300)
        self.assertEqual(self.client.put_batch([*items[:2], ("batch new", b"new")]), [False, False, True])
        keys = [key for key, _ in items]
        self.assertEqual(self.client.get_batch(["batch never", *keys]), [None, *(value for _, value in items)])
        buffers = [bytearray(300) for _ in keys]
        self.assertEqual(self.client.get_batch_into([*keys[:-1], "batch never"], buffers), [*range(1, 300), None])
        self.assertEqual(buffers[7][:8], items[7][1])
        self.assertEqual(self.client.exists_batch(["batch never", *keys]), [False] + [True] * 300)
        self.assertEqual(self.client.delete_batch([keys[0], "batch never"]), [True, False])
        for empty in (self.client.put_batch, self.client.get_batch, self.client.exists_batch, self.client.delete_batch):
            self.assertEqual(empty([]), [])

    def test_checksums(self):
        with self.server.client(checksums=True) as client:
            client.put_batch([(f"sum {i}", bytes([i]) * 5000) for i in range(3)])
            self.assertEqual(client.get("sum 1"), b"\x01" * 5000)
            self.assertEqual(client.get_batch(["sum 0", "sum 2"]), [bytes(5000), b"\x02" * 5000])

    def test_prefixes(self):
        hashes = larder.prefix_hashes(range(70), 16)
        self.assertEqual(len(hashes), 4, "a part of a block has no hash")
        self.assertEqual(hashes[:2], larder.prefix_hashes(range(32), 16))
        context = larder.PrefixContext("model", block_size=16)
        parent = 0
        for i, h in enumerate(hashes[:3]):
            self.client.put(f"prefix {i}", b"block", prefix=larder.Prefix(context, h, parent, i))
            parent = h
        self.assertEqual(self.client.prefix_match(hashes, context), 3)
        self.assertEqual(self.client.prefix_match(hashes[1:], context), 2)
        self.assertEqual(self.client.prefix_match(hashes, larder.PrefixContext("another")), 0)
        self.client.put_batch([larder.Item(f"shard {i}", b"s", prefix=larder.Prefix(context, 77, 0, 0), shard=(i, 2)) for i in range(1)])
        self.assertEqual(self.client.prefix_match([77], context, members=2), 0)
        self.client.put_batch([larder.Item("shard 1", b"s", prefix=larder.Prefix(context, 77, 0, 0), shard=(1, 2))])
        self.assertEqual(self.client.prefix_match([77], context, members=2), 1)

    def test_pins(self):
        self.client.put("pinned", b"value")
        with self.client.pin("pinned") as pin:
            self.assertTrue(pin)
            self.assertFalse(self.client.delete("pinned"))
        self.assertTrue(self.client.delete("pinned"))
        self.assertFalse(self.client.pin("pinned"))
        self.assertEqual(self.client.pin_batch(["pinned"]), [False])
        self.assertFalse(self.client.unpin("pinned"))
        self.client.put("durable", b"value")
        self.assertTrue(self.client.pin("durable", kind="durable", owner="me", ttl=60))
        with self.server.client() as other:
            self.assertFalse(other.delete("durable"))
            self.assertTrue(other.unpin("durable", kind="durable", owner="me"))
            self.assertTrue(other.delete("durable"))

    def test_keys_are_listed_and_cleared(self):
        with self.server.client(tenant="lists", page_size=4096) as client:
            client.put_batch([(f"{name}/{i}", b"v") for name in ("a", "b") for i in range(1100)])
            self.assertEqual(sorted(client.list_keys("a/")), sorted(f"a/{i}".encode() for i in range(1100)))
            client.clear("a/")
            self.assertEqual((client.exists("a/1"), client.exists("b/1")), (False, True))
            client.clear()
            self.assertEqual(list(client.list_keys()), [])

    def test_counters(self):
        self.client.put("counted", b"value")
        self.client.get("counted")
        stats = self.client.stats()
        self.assertEqual((stats["stored"], stats["hits"], stats["bytes_read"]), (1, 1, 5))
        self.assertGreaterEqual(self.client.server_stats()["total_entries"], 1)
        usage = self.client.usage()
        self.assertIn(self.client.instance, [i["instance_id"] for i in usage["instances"]])
        self.assertGreater(usage["pool_total"], usage["pool_free"])


class InPlace(Pool):
    def test_views(self):
        self.client.put("view", b"in place")
        with self.client.view("view") as memory:
            self.assertEqual(bytes(memory), b"in place")
            self.assertTrue(memory.readonly)
        with self.assertRaises(ValueError):
            memory[0]
        with self.client.view("never") as memory:
            self.assertIsNone(memory)
        with self.client.view_batch(["view", "never", "view"]) as found:
            self.assertEqual([m and bytes(m) for m in found], [b"in place", None, b"in place"])
        with self.client.view_batch(["view", "never", "view"], stop_at_miss=True) as found:
            self.assertEqual(len(found), 1)

    def test_what_still_uses_a_view_keeps_it_open(self):
        self.client.put("kept", b"in place")
        with self.assertRaisesRegex(BufferError, "copy"), self.client.view("kept") as memory:
            part = memory[3:]
        self.assertEqual(bytes(part), b"place")
        self.client.close()
        self.assertEqual(bytes(part), b"place", "it outlives the client")
        if numpy is not None:
            with self.server.client() as client:
                with self.assertRaises(BufferError), client.view("kept") as memory:
                    numbers = numpy.frombuffer(memory, dtype=numpy.uint8)
                self.assertEqual(bytes(numbers), b"in place")

    def test_a_view_is_given_back_when_nobody_uses_it(self):
        self.client.put("garbage", b"in place")
        before = self.client.stats()["hits"]
        for _ in range(3000):
            self.client.view("garbage")
        gc.collect()
        self.assertEqual(self.client.stats()["hits"], before + 3000)
        self.assertTrue(self.client.delete("garbage"))

    def test_allocations(self):
        with self.client.alloc(5) as space:
            self.assertEqual(len(space.memory), 5)
            space.memory[:] = b"alloc"
            self.assertTrue(space.store("alloc"))
        self.assertEqual(self.client.get("alloc"), b"alloc")
        with self.assertRaisesRegex(larder.ClosedError, "before"):
            space.store("twice")
        spaces = self.client.alloc_batch([3, 70_000, 1])
        for space in spaces:
            space.memory[:] = bytes(len(space))
        self.assertEqual(self.client.store_batch(["alloc 1", "alloc 2", "alloc 1"], spaces).count(True), 2)
        self.assertEqual(len(self.client.get("alloc 2")), 70_000)
        free = self.client.stats()["free_pages"]
        with self.client.alloc(1):
            self.assertEqual(self.client.stats()["free_pages"], free - 1)
        self.assertEqual(self.client.stats()["free_pages"], free)

    def test_layers(self):
        sizes = [10, 100_000, 1]
        layers = [bytes([i + 1]) * n for i, n in enumerate(sizes)]
        with self.client.put_layers("layers", sizes) as writer:
            for i in (2, 0, 1):
                writer.launch(i, layers[i])
            writer.wait(1)
            self.assertFalse(self.client.exists("layers"))
        self.assertEqual(self.client.get("layers"), b"".join(layers))
        buffers = [bytearray(n) for n in sizes]
        with self.client.get_layers("layers", sizes) as reader:
            for i, buffer in enumerate(buffers):
                reader.launch(i, buffer)
            for i, layer in enumerate(layers):
                reader.wait(i)
                self.assertEqual(buffers[i], layer)
        self.assertIsNone(self.client.get_layers("never", sizes))

    def test_layers_that_end_early(self):
        with self.assertRaisesRegex(RuntimeError, "mine"), self.client.put_layers("early", [1, 1]) as writer:
            writer.launch(0, b"a")
            raise RuntimeError("mine")
        unfinished = self.client.put_layers("early", [1, 1])
        with self.assertRaisesRegex(larder.InvalidArgumentError, "layer 1 was not launched"), unfinished as writer:
            writer.launch(0, b"a")
        self.assertFalse(self.client.exists("early"))
        with self.assertRaises(larder.ClosedError):
            writer.launch(1, b"b")


class GivenUp(Pool):
    def test_what_a_call_has_made_goes_when_it_was_given_up(self):
        self.client.put("k", b"value")
        packed = _storage.pack_one("k")
        free = self.client.stats()["free_pages"]
        for name, request in [
            ("view", self.client._view_request(packed, 1, False, None)),
            ("alloc", self.client._alloc_request([1, 1], None)),
            ("put_layers", self.client._layers_request(_storage.PUT_LAYERS, "layers", [1], None)),
            ("get_layers", self.client._layers_request(_storage.GET_LAYERS, "k", [5], None)),
        ]:
            with self.subTest(name):
                progress = _storage.new_progress()
                request.begin("larder_client_run", int(1e9), progress)
                while not _storage.has_ended(progress):
                    _lib.call("larder_client_wait", progress.buffer_info()[0], int(1e9))
                request.discard(progress)
                with self.assertRaises(larder.ClosedError):
                    request.undo()  # it was done
        self.assertEqual(self.client.stats()["free_pages"], free)


class BadInput(Pool):
    def test_what_cannot_be_right_is_refused(self):
        client = self.client
        client.put("eight", b"12345678")
        invalid, fixed = larder.InvalidArgumentError, larder.ReadOnlyError
        cases = [
            ("no key", lambda: client.put("", b"v"), invalid, "1 to 1024"),
            ("a long key", lambda: client.get("é" * 513), invalid, "1026 bytes: it has 1 to 1024, so use a hash"),
            ("a long key of many", lambda: client.exists_batch(["a", "k" * 1025]), invalid, "use a hash"),
            ("a number as a key", lambda: client.get(7), invalid, "str or bytes, not int"),
            ("a number among keys", lambda: client.exists_batch(["a", 7]), invalid, "str or bytes, not int"),
            ("one key for a list", lambda: client.get_batch("key"), invalid, r"keys are a list: \['key'\]"),
            ("no value", lambda: client.put("k", b""), invalid, "0 bytes: it has 1"),
            ("text", lambda: client.put("k", "text"), invalid, "str has no memory"),
            ("gaps", lambda: client.put("k", memoryview(b"abcd")[::2]), invalid, "not contiguous"),
            ("into bytes", lambda: client.get_into("eight", b"12345678"), fixed, "bytes cannot be written: give a bytearray"),
            ("into gaps", lambda: client.get_into("eight", memoryview(bytearray(16))[::2]), invalid, "not contiguous"),
            ("a short buffer", lambda: client.get_into("eight", bytearray(7)), invalid, "has 8 bytes and its buffer 7"),
            ("a short one of many", lambda: client.get_batch_into(["eight"] * 2, [bytearray(8), bytearray(7)]), invalid, "its buffer 7"),
            ("a buffer too few", lambda: client.get_batch_into(["a", "b"], [bytearray(1)]), invalid, "2 keys and 1 buffers"),
            ("a kind of pin", lambda: client.pin("eight", kind="firm"), invalid, "session, durable or soft"),
            ("a hash", lambda: client.prefix_match([-1]), invalid, "64 bits"),
            ("many hashes", lambda: client.prefix_match([1] * 5000), invalid, "4096"),
            ("many views", lambda: client.view_batch(["a"] * 5000), invalid, "split"),
            ("a shard", lambda: client.put("k", b"v", shard=(2, 2)), invalid, "shard 2 of 2"),
            ("no layers", lambda: client.put_layers("k", []), invalid, "layers"),
            ("layers of another size", lambda: client.get_layers("eight", [3, 3]), invalid, "8 bytes, its layers 6"),
            ("nothing to allocate", lambda: client.alloc(0), invalid, "1 to"),
            ("blocks of no tokens", lambda: larder.prefix_hashes([1], 0), invalid, "at least one"),
            ("tokens", lambda: larder.prefix_hashes([1 << 32], 1), invalid, "32 bits"),
            ("tokens that are text", lambda: larder.prefix_hashes("text", 1), invalid, "32 bits"),
            ("tokens that are bytes", lambda: larder.prefix_hashes(b"text", 1), invalid, "list"),
            ("tokens that are a bytearray", lambda: larder.prefix_hashes(bytearray(7), 1), invalid, "list"),
            ("tokens that are a view of bytes", lambda: larder.prefix_hashes(memoryview(b"text"), 1), invalid, "list"),
            ("more than the pool", lambda: client.put("k", bytearray(80 << 20)), larder.NoSpaceError, "NO_SPACE"),
        ]
        if numpy is not None:
            turned = numpy.zeros((4, 4), dtype=numpy.uint8).T[:2]
            locked = numpy.zeros(8, dtype=numpy.uint8)
            locked.flags.writeable = False
            cases += [
                ("a part of a matrix", lambda: client.put("k", turned), invalid, "ascontiguousarray"),
                ("an array for reading", lambda: client.get_into("eight", locked), fixed, "cannot be written"),
            ]
        if torch is not None:
            there = torch.empty(4, device="meta")
            cases += [
                ("a device that is not known", lambda: client.put("k", there), invalid, "only CUDA devices are known"),
                ("the same, to read into", lambda: client.get_into("eight", there), invalid, "copy it to the CPU"),
            ]
            cases.append(("a transposed tensor", lambda: client.put("k", torch.zeros(4, 2).t()), invalid, r"call contiguous\(\)"))
        for name, call, error, text in cases:
            with self.subTest(name), self.assertRaisesRegex(error, text):
                call()
        self.assertEqual(client.get("eight"), b"12345678", "nothing else suffers")

    def test_errors_have_the_codes_of_the_wire(self):
        with self.assertRaises(larder.NoSpaceError) as caught:
            self.client.put("large", bytearray(80 << 20))
        self.assertEqual(caught.exception.code, 13)

    def test_configuration(self):
        address = self.server.address
        for name, call, text in [
            ("a string for a list", lambda: larder.Client(address), r"masters is a list of strings: \['unix"),
            ("no masters", lambda: larder.Client([]), "at least one master"),
            ("an address", lambda: larder.Client(["nonsense"]), "neither host:port nor unix"),
            ("a page size", lambda: larder.Client([address], page_size=1000), "multiple of 4096"),
            ("a tier", lambda: larder.Client([address], tier="tape"), "cxl, dram, ssd"),
        ]:
            with self.subTest(name), self.assertRaisesRegex(larder.InvalidArgumentError, text):
                call()

    def test_nobody_answers(self):
        with self.assertRaisesRegex(larder.TimedOutError, "connect"):
            larder.Client(["unix:/nowhere/socket"], timeout=0.5)

    def test_after_close(self):
        self.client.put("held", b"value")
        writer = self.client.put_layers("open", [4])
        space = self.client.alloc(4)
        self.client.close()
        self.client.close()  # does nothing
        self.assertTrue(self.client.closed)
        for name, call in [
            ("get", lambda: self.client.get("held")),
            ("put", lambda: self.client.put("k", b"v")),
            ("exists_batch", lambda: self.client.exists_batch(["k"])),
            ("view", lambda: self.client.view("held")),
            ("stats", self.client.stats),
            ("store", lambda: space.store("k")),
        ]:
            with self.subTest(name), self.assertRaises(larder.ClosedError):
                call()
        writer.abort()
        with self.server.client() as client:
            self.assertEqual(client.get("held"), b"value", "what it has stored stays")

    def test_who_forgets_to_close_is_told(self):
        client = self.server.client()
        with self.assertWarns(ResourceWarning):
            del client
            gc.collect()

    def test_a_forked_child_is_refused(self):
        self.client.put("forked", b"value")
        view = self.client.view("forked")
        for name, call in [
            ("get", lambda: self.client.get("forked")),
            ("close", self.client.close),
            ("another client", lambda: larder.Client([self.server.address])),
            ("hashes", lambda: larder.prefix_hashes([1], 1)),
        ]:
            r, w = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from 3.12 on Python itself warns of it
                child = os.fork()
            if child == 0:
                try:
                    call()
                    said = "nothing"
                except BaseException as e:
                    said = f"{type(e).__name__}: {e}"
                os.write(w, said.encode())
                os._exit(0)
            os.close(w)
            with self.subTest(name), os.fdopen(r) as pipe:
                self.assertRegex(pipe.read(), "^ForkError: .*spawn")
            os.waitpid(child, 0)
        self.assertEqual(bytes(view.memory), b"value")
        view.close()
        self.assertEqual(self.client.get("forked"), b"value", "the parent goes on")


class Threads(Pool):
    def test_many_threads_share_a_client(self):
        failed = []

        def work(n):
            try:
                buffer = bytearray(20_000)
                for i in range(40):
                    key, value = f"thread {n} {i}", bytes([n, i]) * (100 * (i + 1))
                    self.client.put(key, value)
                    assert self.client.get(key) == value
                    assert self.client.get_into(key, buffer) == len(value)
                    assert self.client.get_batch([key, "never"]) == [value, None]
                    with self.client.view(key) as memory:
                        assert bytes(memory) == value
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(PATIENCE)
        self.assertEqual(failed, [])

    def test_others_run_while_one_waits(self):
        self.client.put("large", bytearray(16 << 20))
        into, turns, over = bytearray(16 << 20), 0, threading.Event()

        def read():
            for _ in range(20):
                self.client.get_into("large", into)
            over.set()

        reader = threading.Thread(target=read)
        reader.start()
        while not over.is_set():
            turns += 1
            time.sleep(0)
        reader.join()
        self.assertGreater(turns, 100)

    def test_close_ends_calls_of_other_threads(self):
        self.server.pause()
        try:
            outcome = []

            def read():
                try:
                    outcome.append(self.client.get("any"))
                except larder.LarderError as e:
                    outcome.append(e)

            reader = threading.Thread(target=read)
            reader.start()
            time.sleep(0.2)
            self.assertFalse(self.client.close(timeout=0.5), "no master has heard of it")
            reader.join(PATIENCE)
            self.assertIsInstance(outcome[0], larder.ClosedError)
        finally:
            self.server.resume()


class Failures(Case):
    """Servers that are killed, and calls that are interrupted."""

    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)
        self.client = self.server.client()
        self.addCleanup(self.client.close, 1)

    def test_calls_go_on_when_the_server_comes_back(self):
        stored, stop, failed = [], threading.Event(), []

        def store():
            try:
                i = 0
                while not stop.is_set():
                    self.client.put(f"k{i}", bytes([i % 256]) * 1000)
                    stored.append(i)
                    i += 1
            except BaseException as e:
                failed.append(e)

        writer = threading.Thread(target=store)
        writer.start()
        while len(stored) < 20 and not failed:
            time.sleep(0.01)
        self.server.kill()
        gone = len(stored)
        time.sleep(0.5)
        self.server.start()
        deadline = time.monotonic() + PATIENCE
        while len(stored) < gone + 20 and not failed and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()
        writer.join(PATIENCE)
        self.assertEqual(failed, [])
        self.assertGreaterEqual(len(stored), gone + 20)
        values = self.client.get_batch([f"k{i}" for i in stored])
        self.assertEqual(values, [bytes([i % 256]) * 1000 for i in stored], "what was stored is there")

    def test_calls_end_in_time_when_it_does_not(self):
        self.client.put("k", b"value")
        self.server.kill()
        for name, call in [
            ("get", lambda: self.client.get("k", timeout=0.5)),
            ("put", lambda: self.client.put("new", b"v", timeout=0.5)),
            ("exists_batch", lambda: self.client.exists_batch(["k"], timeout=0.5)),
        ]:
            with self.subTest(name):
                began = time.monotonic()
                with self.assertRaises((larder.TimedOutError, larder.UnavailableError)) as caught:
                    call()
                self.assertLess(time.monotonic() - began, 10)
                self.assertGreater(caught.exception.code, 0)

    def test_ctrl_c_ends_a_call_and_its_use_of_memory(self):
        hear_interrupts(self)
        into = bytearray(8)
        value = bytearray(8)
        self.client.put("k", b"12345678")
        self.server.pause()
        try:
            for name, call in [
                ("get_into", lambda: self.client.get_into("k", into)),
                ("put", lambda: self.client.put("other", value)),
                ("get", lambda: self.client.get("k")),
            ]:
                with self.subTest(name):
                    # Several, as somebody who is impatient sends them.
                    timers = [threading.Timer(0.3 + 0.001 * i, os.kill, (os.getpid(), signal.SIGINT)) for i in range(4)]
                    began = time.monotonic()
                    with self.assertRaises(KeyboardInterrupt):
                        try:
                            for timer in timers:
                                timer.start()
                            call()
                        finally:
                            while any(timer.is_alive() for timer in timers):
                                with contextlib.suppress(KeyboardInterrupt):
                                    time.sleep(0.01)
                    self.assertLess(time.monotonic() - began, 20)
            into.append(1)  # they can be resized, so that nobody has them
            value.append(1)
        finally:
            self.server.resume()
        self.assertEqual(self.client.get("k"), b"12345678")

    def test_changes_of_other_threads_end_in_time_or_with_the_client(self):
        self.server.pause()
        try:
            with ThreadPoolExecutor(1) as pool:
                for name, change in [
                    ("put", lambda: self.client.put("k", b"value", timeout=0.3)),
                    ("delete", lambda: self.client.delete("k", timeout=0.3)),
                    ("pin", lambda: self.client.pin("k", timeout=0.3)),
                ]:
                    with self.subTest(name):
                        began = time.monotonic()
                        with self.assertRaises(larder.TimedOutError):
                            pool.submit(change).result(PATIENCE)
                        self.assertLess(time.monotonic() - began, 5)
                waits = pool.submit(self.client.put, "k", b"value")
                time.sleep(0.2)
                self.client.close(0.1)
                with self.assertRaises(larder.ClosedError):
                    waits.result(5)
        finally:
            self.server.resume()

    def test_nothing_is_left_of_clients_that_were_closed(self):
        def once():
            with self.server.client() as client:
                client.put("k", b"value")
                client.get("k")
                with client.view("k"):
                    pass
                client.alloc(10).abort()

        for _ in range(5):
            once()
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            once()
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), files + 1)


class Bench(Pool):
    def test_both_clients_are_measured(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(bench.main([self.server.address, "--size=64K", "--time=0.1", "--json"]), 0)
        report = json.loads(out.getvalue())
        self.assertEqual(set(report["figures"]), {"put", "get", "get of new bytes", "exists of 1,000"})
        for what, row in report["figures"].items():
            self.assertGreater(row["ratio"], 0)
            self.assertLessEqual(row["python"]["p50_us"], row["python"]["p99_us"])
            self.assertEqual("go" in row, what != "get of new bytes")
        self.assertRegex(bench.table(report), r"(?m)^put .* us .* us .* GiB/s .*%$")
        self.assertEqual(list(self.client.list_keys("larder-bench/")), [], "it removes what it stores")

    def test_what_is_wrong_is_said(self):
        for arguments, status, says in [
            (["unix:/nowhere", "--timeout=0.5"], 1, r"(?s)^larder\.bench: .*/nowhere"),
            ([self.server.address, "--size=80M", "--time=0.1"], 1, r"larder\.bench: .*\n$"),
            ([self.server.address, "--size=0"], 2, r"--size: a value of 0 bytes: at least 1\n$"),
            ([self.server.address, "--size=1x"], 2, r"--size: invalid .* value: '1x'\n$"),
        ]:
            err = io.StringIO()
            with self.subTest(arguments=arguments), contextlib.redirect_stderr(err):
                try:
                    got = bench.main(arguments)
                except SystemExit as e:
                    got = e.code
                self.assertEqual(got, status)
                self.assertRegex(err.getvalue(), says)


class Eviction(unittest.TestCase):
    def test_regions_that_are_lost_are_told(self):
        told = []
        with (
            serving("--min-region-age=0s", "--max-regions-per-instance=1", pool="18MiB") as server,
            server.client(region_size=16 << 20, on_revoke=told.append) as loser,
            server.client(region_size=16 << 20) as winner,
        ):
            loser.put("cold", bytearray(10 << 20))
            winner.put("hot", bytearray(10 << 20))
            deadline = time.monotonic() + PATIENCE
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertEqual([(event["bytes"], event["reason"]) for event in told], [(16 << 20, "revoked")])
            self.assertEqual(loser.stats()["revoked"], 1)
            self.assertFalse(loser.exists("cold"))
            self.assertTrue(loser.put("again", bytearray(10 << 20)))


if __name__ == "__main__":
    unittest.main()
