"""Memory that one process registers is read and written by another."""

from __future__ import annotations

import array
import gc
import mmap
import time
import unittest
import weakref

import larder
from owner import PAGE, PAGES, owner
from processes import PATIENCE, Case, process, receive

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None



class TwoProcesses(Case):
    """Each transport carries the same: memory that both have mapped, and TCP."""

    def each(self):
        for transports in (["shm"], ["tcp"], []):
            with self.subTest(transports=transports), process(owner, transports) as other:
                addresses = receive(other)
                with larder.TransferEngine(transports=transports) as engine, engine.open(*addresses) as peer:
                    yield engine, peer, other

    def test_batches_are_read_and_written(self):
        for engine, peer, other in self.each():
            into = [bytearray(PAGE) for _ in range(PAGES)]
            transfer = engine.batch_read(peer["cache"], [i * PAGE for i in range(PAGES)], into)
            transfer.wait(timeout=30)
            self.assertTrue(transfer.done)
            self.assertEqual(transfer.status(), [larder.State.DONE] * PAGES)
            for i, page in enumerate(into):
                self.assertEqual(page, bytes([i]) * PAGE)
            engine.batch_write(peer["cache"], [0, 3 * PAGE], [b"first", b"fourth"]).wait(timeout=30)
            other.send(("show", "cache", 0, 6))
            self.assertEqual(receive(other), b"first\x00")
            other.send(("show", "cache", 3 * PAGE, 7))
            self.assertEqual(receive(other), b"fourth\x03")

    def test_a_notification_follows_the_bytes(self):
        for engine, peer, other in self.each():
            with engine.batch_write(peer["cache"], [5], [b"payload"]):
                pass
            peer.notify("stored", b"5")
            other.send(("receive",))
            self.assertEqual(receive(other), larder.Notification(engine.id, "stored", b"5"))
            other.send(("show", "cache", 5, 7))
            self.assertEqual(receive(other), b"payload")

    def test_a_buffer_that_was_unregistered_is_stale(self):
        # TCP alone: memory that is not from allocate() is not mapped.
        with process(owner, ["tcp"]) as other, larder.TransferEngine() as engine:
            peer = engine.open(*receive(other))
            words = peer["words"]
            other.send(("unregister",))
            receive(other)
            into = [bytearray(4), bytearray(4)]
            transfer = engine.batch_read(words, [0, 4], into)
            with self.assertRaisesRegex(larder.StaleError, "request 0 of 2"):
                transfer.wait(timeout=30)
            self.assertEqual(transfer.status(), [larder.State.FAILED] * 2)
            self.assertIsInstance(transfer.error(1), larder.StaleError)
            self.assertTrue(transfer.settled())
            self.assertEqual(into, [bytearray(4), bytearray(4)])
            peer.refresh()
            self.assertNotIn("words", peer)
            self.assertIn("cache", peer)

    def test_a_peer_that_ends_fails_what_is_asked_of_it(self):
        with larder.TransferEngine(retries=1, stall_timeout=1, abort_timeout=1) as engine:
            with process(owner, []) as other:
                peer = engine.open(*receive(other))
                engine.read(peer["cache"], 0, bytearray(8))
            with self.assertRaises(larder.LarderError):
                engine.read(peer["cache"], 0, bytearray(8), timeout=5)


class OneProcess(Case):
    """What an engine does with memory, for which it may be its own peer."""

    def setUp(self):
        self.engine = self.enter(larder.TransferEngine(listen=["127.0.0.1:0"]))
        self.buffer = self.engine.allocate(4096, name="buffer")
        self.peer = self.engine.open(descriptor=self.engine.describe())

    def enter(self, manager):  # unittest has it from 3.11 on
        self.addCleanup(manager.__exit__, None, None, None)
        return manager.__enter__()

    def there_and_back(self, source, target):
        there = self.peer["buffer"]
        self.engine.write(there, 8, source)
        self.engine.read(there, 8, target)

    def test_any_contiguous_memory_will_do(self):
        for source, target in [
            (b"bytes", bytearray(5)),
            (memoryview(b"xx view")[3:], memoryview(bytearray(4))),
            (array.array("d", [1.5, 2.5]), array.array("d", [0, 0])),
            (bytearray(mmap.PAGESIZE - 8), mmap.mmap(-1, mmap.PAGESIZE - 8)),
            (b"", bytearray(0)),
        ]:
            with self.subTest(type=type(target).__name__):
                self.there_and_back(source, target)
                self.assertEqual(bytes(memoryview(target)), bytes(memoryview(source)))

    @unittest.skipUnless(numpy, "without numpy")
    def test_numpy(self):
        source = numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4)
        target = numpy.zeros_like(source)
        self.there_and_back(source, target)
        self.assertTrue((source == target).all())
        with self.assertRaisesRegex(larder.InvalidArgumentError, "not contiguous"):
            self.engine.write(self.peer["buffer"], 0, source.T)

    @unittest.skipUnless(torch, "without torch")
    def test_torch(self):
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool):
            with self.subTest(dtype=dtype):
                source = torch.arange(24).reshape(4, 6).to(dtype)
                target = torch.zeros(4, 6, dtype=dtype)
                self.there_and_back(source, target)
                self.assertTrue(torch.equal(source, target))
        with self.assertRaisesRegex(larder.InvalidArgumentError, "not contiguous"):
            self.engine.write(self.peer["buffer"], 0, torch.zeros(4, 6).t())
        whole = self.engine.register(torch.zeros(8, 8), name="tensor")
        self.assertEqual(whole.size, 256)
        seen = torch.frombuffer(self.buffer.memory, dtype=torch.int16)
        self.engine.write(self.peer["buffer"], 0, torch.full((3,), 7, dtype=torch.int16))
        self.assertEqual(seen[:4].tolist(), [7, 7, 7, 0])

    def test_parts_of_registered_memory(self):
        pool = bytearray(range(256))
        local = self.engine.register(pool, name="pool")
        there = self.peer["buffer"]
        self.engine.batch_write(there, [0, 16], [local.range(32, 4), (local.address + 64, 2)]).wait()
        self.assertEqual(bytes(self.buffer.memory[:5]), bytes([32, 33, 34, 35, 0]))
        self.assertEqual(bytes(self.buffer.memory[16:19]), bytes([64, 65, 0]))
        self.engine.read(there, 0, (local.address, 4))
        self.assertEqual(pool[:5], bytes([32, 33, 34, 35, 4]))

    def test_memory_of_an_allocator_is_registered_by_its_address(self):
        arena = bytearray(b"arena of pages")
        address = self.engine.register(arena).address
        by_address = self.engine.register_address(address + 9, 5, name="pages", keep=arena)
        peer = self.engine.open(*self.engine.addresses)
        self.engine.write(peer["pages"], 0, b"PAGES")
        self.assertEqual(arena, b"arena of PAGES")
        by_address.unregister()

    def test_buffers_that_are_not_listed_are_told_of_in_another_way(self):
        secret = self.engine.allocate(16, name="secret", listed=False)
        peer = self.engine.open(*self.engine.addresses)
        self.assertNotIn("secret", peer)
        self.engine.write(peer.remote(secret.id, secret.generation, secret.size), 4, b"told")
        self.assertEqual(bytes(secret.memory), b"\0\0\0\0told" + bytes(8))

    def test_memory_is_kept_while_it_is_registered_and_no_longer(self):
        class Pages(bytearray):
            pass

        pages = Pages(64)
        alive = weakref.ref(pages)
        buffer = self.engine.register(pages, name="pages")
        del pages
        gc.collect()
        self.assertIsNotNone(alive())
        buffer.unregister()
        gc.collect()
        self.assertIsNone(alive())
        self.assertFalse(buffer.registered)

    def test_memory_that_is_registered_cannot_be_resized(self):
        pages = bytearray(64)
        with self.engine.register(pages), self.assertRaises(BufferError):
            pages.append(1)
        pages.append(1)

    def test_allocated_memory_outlives_its_registration(self):
        memory = self.buffer.memory
        self.buffer.unregister()
        memory[:4] = b"mine"
        self.assertEqual(bytes(memory[:4]), b"mine")

    def test_a_transfer_that_nobody_keeps_goes_on(self):
        memory = self.buffer.memory
        for i in range(100):
            self.engine.batch_write(self.peer["buffer"], [i * 8], [(i + 1).to_bytes(8, "little")])
            gc.collect(0)
        deadline = time.monotonic() + PATIENCE
        while memory[:800].cast("Q").tolist() != list(range(1, 101)):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def test_close_ends_what_is_under_way(self):
        into = bytearray(4096)
        transfer = self.engine.batch_read(self.peer["buffer"], [0] * 1000, [into] * 1000)
        self.engine.close()
        self.assertTrue(transfer.done)
        self.assertLessEqual(set(transfer.status()), {larder.State.DONE, larder.State.FAILED})
        into.append(1)  # nobody has its memory any more


if __name__ == "__main__":
    unittest.main()
