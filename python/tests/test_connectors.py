"""What the connectors have in common: options, a link that answers in time, stores behind the engine's back."""

from __future__ import annotations

import threading
import time
import unittest

import larder
from larder.connectors._link import MAX_KEY, Link, Settings, Writer, key_of, scope
from processes import PATIENCE, Case
from servers import Server


class Options(Case):
    def test_they_are_read_from_an_engines_own(self):
        for extra, masters, timeout in (
            ({"larder.masters": "a:1,b:2", "other.option": 1}, ["a:1", "b:2"], 0.2),
            ({"larder.masters": ["a:1"], "larder.lookup_timeout": "0.5"}, ["a:1"], 0.5),
        ):
            with self.subTest(extra):
                settings = Settings.of(extra)
                self.assertEqual((settings.masters, settings.lookup_timeout), (masters, timeout))

    def test_what_is_wrong_is_said(self):
        for extra, says in (
            (None, "larder.masters is missing"),
            ({"larder.masters": "a:1", "larder.color": "red"}, "larder.color is no option"),
            ({"larder.masters": "a:1", "larder.load_timeout": "soon"}, "larder.load_timeout is a number"),
            ({"larder.masters": "a:1", "larder.queue_bytes": 0}, "larder.queue_bytes is more than 0"),
            ({"larder.masters": "a:1", "larder.checksums": "yes"}, "larder.checksums is true or false"),
        ):
            with self.subTest(extra), self.assertRaisesRegex(ValueError, says):
                Settings.of(extra)


class Keys(Case):
    def test_scopes_differ_in_whatever_they_depend_on(self):
        scopes = {scope("e", "", "model", 1), scope("e", "n", "model", 1), scope("e", "", "model", 2), scope("f", "", "model", 1)}
        self.assertEqual(len(scopes), 4)

    def test_names_that_are_too_long_are_hashed(self):
        s = scope("e", "", 1)
        self.assertEqual(key_of(s, "a"), (s + "a").encode())
        long = [key_of(s, "x" * MAX_KEY + end) for end in "ab"]
        self.assertNotEqual(*long)
        self.assertLessEqual(max(map(len, long)), MAX_KEY)


class Links(Case):
    def setUp(self):
        self.server = Server()
        self.addCleanup(self.server.stop)
        self.link = Link(Settings([self.server.address], retry_interval=0.3))
        self.addCleanup(self.link.close)

    def test_the_client_is_as_the_options_say(self):
        extra = {
            "larder.masters": self.server.address, "larder.page_size": "4096", "larder.region_size": 1 << 20, "larder.checksums": "True",
            "larder.near": "here,there",
        }  # fmt: skip
        settings = Settings.of(extra)
        self.assertEqual((settings.checksums, settings.near), (True, ["here", "there"]))
        link = Link(settings)
        self.addCleanup(link.close)
        self.assertTrue(link.store("store", lambda c, t: c.put("key", b"value", timeout=t), False))
        self.assertEqual(link.ask("count", lambda c, _: c.usage()["instances"][0]["allocated"], 0, 1), 1 << 20)

    def test_an_option_that_the_client_refuses_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "PageSize 5 is not a multiple"):
            Link(Settings([self.server.address], page_size=5))

    def ask(self, timeout=0.2):
        return self.link.ask("look", lambda c, t: c.exists("key", timeout=t), "nothing", timeout)

    def test_a_silent_pool_is_asked_once_in_a_while_and_found_again(self):
        self.assertIs(self.ask(), False)
        self.server.kill()
        with self.assertLogs("larder.connectors", "WARNING") as log:
            self.assertEqual(self.ask(), "nothing")
            begun = time.monotonic()
            for _ in range(1000):
                self.assertEqual(self.ask(), "nothing")
            self.assertLess(time.monotonic() - begun, 0.5, "they wait, each for itself")
            self.server.start()
            deadline = time.monotonic() + PATIENCE
            while self.ask(1) == "nothing" and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertIs(self.ask(), False)
        self.assertEqual(len(log.output), 2, log.output)

    def test_an_error_that_is_an_answer_silences_nobody(self):
        with self.assertLogs("larder.connectors", "WARNING"):
            self.assertEqual(self.link.ask("ask too much", lambda c, t: c.get(b""), "nothing", 1), "nothing")
        self.assertIs(self.ask(), False)

    def test_a_closed_link_answers_nothing(self):
        self.link.close()
        self.assertEqual(self.ask(), "nothing")
        self.assertEqual(self.link.store("store", lambda c, t: True, "nothing"), "nothing")


class Writers(Case):
    def setUp(self):
        server = Server()
        self.addCleanup(server.stop)
        self.link = Link(Settings([server.address], queue_bytes=100, store_timeout=0.5))
        self.addCleanup(self.link.close)
        self.writer = Writer(self.link)
        self.addCleanup(self.writer.close)
        self.released: list[str] = []

    def offer(self, name, size, store=lambda: None):
        return self.writer.offer(size, store, lambda: self.released.append(name))

    def test_what_there_is_no_room_for_is_refused_and_released(self):
        gate = threading.Event()
        self.addCleanup(gate.set)
        self.assertTrue(self.offer("a", 60, gate.wait))
        self.assertTrue(self.offer("b", 40))
        with self.assertLogs("larder.connectors", "WARNING"):
            self.assertFalse(self.offer("c", 1))
        self.assertEqual(self.released, ["c"])
        self.assertFalse(self.writer.flush(0.01))
        gate.set()
        self.assertTrue(self.writer.flush(PATIENCE))
        self.assertEqual((self.released, self.writer.bytes), (["c", "a", "b"], 0))
        self.assertTrue(self.offer("d", 100))

    def test_a_store_that_fails_is_released_and_does_not_end_the_others(self):
        def fail():
            raise RuntimeError("a defect")

        with self.assertLogs("larder.connectors", "ERROR"):
            self.offer("a", 1, fail)
            self.offer("b", 1)
            self.assertTrue(self.writer.flush(PATIENCE))
        self.assertEqual(self.released, ["a", "b"])

    def test_close_gives_up_what_waits(self):
        gate, begun = threading.Event(), threading.Event()
        self.addCleanup(gate.set)
        self.offer("a", 1, lambda: (begun.set(), gate.wait()))
        begun.wait(PATIENCE)
        self.offer("b", 1)
        closing = threading.Thread(target=self.writer.close)
        closing.start()
        while "b" not in self.released:
            time.sleep(0.001)
        gate.set()
        closing.join(PATIENCE)
        self.assertEqual(self.released, ["b", "a"])
        with self.assertLogs("larder.connectors", "WARNING"):
            self.assertFalse(self.offer("c", 1))


class Import(Case):
    def test_the_package_needs_no_engine(self):
        self.assertEqual(self.program("import larder.connectors, sys; print('torch' in sys.modules)"), "False")
        self.assertTrue(larder.connectors)


if __name__ == "__main__":
    unittest.main()
