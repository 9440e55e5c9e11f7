"""What cannot be right is refused, with an exception that says what to do; and nothing else suffers from it."""

from __future__ import annotations

import unittest

import larder


class BadInput(unittest.TestCase):
    def setUp(self):
        self.engine = larder.TransferEngine(listen=["127.0.0.1:0"])
        self.addCleanup(self.engine.close)
        self.buffer = self.engine.allocate(64, name="buffer")
        self.engine.register(b"fixed", name="fixed")
        self.peer = self.engine.open(*self.engine.addresses)
        self.there = self.peer["buffer"]

    def test_requests(self):
        read, write, there = self.engine.batch_read, self.engine.batch_write, self.there
        for name, call, error, text in [
            ("a read into bytes", lambda: read(there, [0], [b"abc"]), larder.ReadOnlyError, "request 0: a bytes cannot be read into"),
            ("a write to what is fixed", lambda: write(self.peer["fixed"], [0], [b"a"]), larder.ReadOnlyError, "reading only"),
            ("beyond the end", lambda: write(there, [0, 60], [b"a", b"12345"]), larder.OutOfRangeError, "request 1: 5 bytes at 60"),
            ("before the beginning", lambda: write(there, [-1], [b"a"]), larder.OutOfRangeError, "at -1"),
            ("an offset too few", lambda: write(there, [0], [b"a", b"b"]), larder.InvalidArgumentError, "1 offsets for 2 pieces"),
            ("one piece in place of a list", lambda: write(there, [0] * 3, b"abc"), larder.InvalidArgumentError, "give a list"),
            ("no memory", lambda: write(there, [0], ["text"]), larder.InvalidArgumentError, "str has no memory"),
            ("a view with gaps", lambda: write(there, [0], [memoryview(b"abcd")[::2]]), larder.InvalidArgumentError, "not contiguous"),
            ("no remote buffer", lambda: write(self.buffer, [0], [b"a"]), larder.InvalidArgumentError, r"take segment\['name'\]"),
            ("an address that is not registered", lambda: read(there, [0], [(4096, 8)]), larder.InvalidArgumentError, "register it"),
            ("a part beyond its buffer", lambda: self.buffer.range(60, 5), larder.OutOfRangeError, "5 bytes at 60"),
            ("too many", lambda: write(there, [0] * 65537, [b""] * 65537), larder.InvalidArgumentError, "split it"),
            ("no such buffer", lambda: self.peer["none"], larder.UnknownNameError, "'none', but buffer, fixed"),
        ]:
            with self.subTest(name), self.assertRaisesRegex(error, text):
                call()
        self.engine.write(there, 0, b"goes on")
        self.assertEqual(bytes(self.buffer.memory[:7]), b"goes on")

    def test_a_stale_or_forged_handle_moves_nothing(self):
        forged = self.peer.remote(self.buffer.id, self.buffer.generation ^ 2, 64)
        with self.assertRaises(larder.StaleError):
            self.engine.write(forged, 0, b"no")
        longer = self.peer.remote(self.buffer.id, self.buffer.generation, 1 << 20)
        with self.assertRaises(larder.OutOfRangeError):
            self.engine.write(longer, 60, b"12345")
        self.assertEqual(bytes(self.buffer.memory), bytes(64))

    def test_registering(self):
        for name, call, error, text in [
            ("nothing", lambda: self.engine.register(b""), larder.InvalidArgumentError, "0 bytes"),
            ("for writing, what is fixed", lambda: self.engine.register(b"abc", read_only=False), larder.ReadOnlyError, "read_only=True"),
            ("a null address", lambda: self.engine.register_address(0, 8), larder.InvalidArgumentError, "no memory"),
            ("a file that is none", lambda: self.engine.register(bytearray(8), file=9999), larder.InvalidArgumentError, "9999"),
            ("a long name", lambda: self.engine.register(bytearray(8), name="n" * 129), larder.LarderError, "at most 128"),
            ("no bytes", lambda: self.engine.allocate(0), larder.InvalidArgumentError, "at least one"),
        ]:
            with self.subTest(name), self.assertRaisesRegex(error, text):
                call()

    def test_configuration(self):
        for name, call, text in [
            ("a string for a list", lambda: larder.TransferEngine(listen="127.0.0.1:0"), r"list of strings: \['127"),
            ("a transport", lambda: larder.TransferEngine(transports=["pigeon"]), "shm, rdma, tcp"),
            ("a slice size", lambda: larder.TransferEngine(slice_size=7), "from 4096"),
            ("a NIC", lambda: larder.TransferEngine(nics=["no_such_nic"]), "no_such_nic"),
            ("two ways to open", lambda: self.engine.open("127.0.0.1:1", name="x"), "one of them"),
            ("a name without masters", lambda: self.engine.open(name="x"), "masters"),
            ("a descriptor", lambda: self.engine.open(descriptor={"engine": 7}), "descriptor"),
        ]:
            with self.subTest(name), self.assertRaisesRegex(larder.InvalidArgumentError, text):
                call()

    def test_nobody_listens(self):
        with self.assertRaises(larder.LarderError):
            self.engine.open("127.0.0.1:1", timeout=5)

    def test_another_token(self):
        with larder.TransferEngine(token="other") as other, self.assertRaisesRegex(larder.RefusedError, "token"):
            other.open(*self.engine.addresses, timeout=5)

    def test_after_close(self):
        self.engine.close()
        self.engine.close()  # does nothing
        for name, call in [
            ("register", lambda: self.engine.register(bytearray(8))),
            ("open", lambda: self.engine.open("127.0.0.1:1")),
            ("write", lambda: self.engine.write(self.there, 0, b"a")),
            ("receive", lambda: self.engine.receive(1)),
            ("notify", lambda: self.peer.notify("x")),
            ("memory", lambda: self.buffer.memory),
        ]:
            with self.subTest(name), self.assertRaises(larder.ClosedError):
                call()
        self.peer.close()
        self.buffer.unregister()

    def test_a_segment_of_another_engine(self):
        with larder.TransferEngine() as other, self.assertRaisesRegex(larder.InvalidArgumentError, "another engine"):
            other.write(self.there, 0, b"a")

    def test_a_full_inbox(self):
        with self.assertRaises(larder.FullError):
            for _ in range(10_000):
                self.peer.notify("again")
        self.assertEqual(self.engine.receive(1).name, "again")

    def test_waits_have_ends(self):
        with self.assertRaisesRegex(TimeoutError, "0.05 s"):
            self.engine.receive(timeout=0.05)


if __name__ == "__main__":
    unittest.main()
