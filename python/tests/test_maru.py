"""Maru's handler on a session of larder's: its interface, and what eviction must do for it."""

from __future__ import annotations

import threading
import time
import unittest

import larder
from larder.maru import AllocHandle, MaruConfig, MaruHandler
from processes import PATIENCE, Case
from servers import serving

CHUNK = 64 << 10
POOL = 4 << 20  # 64 pages


def handler(server, **options):
    """A handler that is connected."""
    h = MaruHandler(MaruConfig(**{
        "server_url": server.address, "pool_size": POOL, "chunk_size_bytes": CHUNK, "timeout_ms": PATIENCE * 1000, **options,
    }))  # fmt: skip
    if not h.connect():
        raise AssertionError("not connected")
    return h


def fill(h, key, byte=1):
    """Store a page the way that needs no copy."""
    page = h.alloc(CHUNK)
    page.buf[:] = bytes([byte]) * CHUNK
    return h.store(key, page)


class Interface(Case):
    @classmethod
    def setUpClass(cls):
        opened = serving()
        cls.server = opened.__enter__()
        cls.addClassCleanup(opened.__exit__, None, None, None)

    def setUp(self):
        self.h = handler(self.server)
        self.addCleanup(self.h.close)

    def test_a_page_is_filled_stored_and_retrieved(self):
        page = self.h.alloc(5)
        self.assertIsInstance(page, AllocHandle)
        page.buf[:] = b"hello"
        self.assertTrue(self.h.store("page", page))
        with handler(self.server) as other:
            info = other.retrieve("page")
            self.assertEqual(bytes(info.view), b"hello")
            self.assertEqual((info.region_id, info.page_index), (page.region_id, page.page_index))
            self.assertTrue(other.exists("page"))
            info.release()
        self.assertIsNone(self.h.retrieve("never"))

    def test_a_key_that_is_held_gives_the_page_back(self):
        self.assertTrue(fill(self.h, "twice", 1))
        free = self.h.get_stats()["store_regions"]["total_free"]
        self.assertTrue(fill(self.h, "twice", 2))
        self.assertEqual(self.h.get_stats()["store_regions"]["total_free"], free)
        self.assertEqual(self.h.retrieve("twice").view[0], 1)

    def test_copies_are_stored_too(self):
        self.assertTrue(self.h.store("copy", b"bytes"))
        self.assertEqual(bytes(self.h.retrieve("copy").view), b"bytes")

    def test_pages_are_given_back(self):
        page = self.h.alloc(10)
        self.h.free(page)
        with self.assertRaisesRegex(ValueError, "before"):
            self.h.free(page)
        with self.assertRaisesRegex(ValueError, "before"):
            self.h.store("freed", page)
        page = self.h.alloc(10)
        self.assertTrue(self.h.store("freed", page))
        self.h.free(page)
        self.assertFalse(self.h.exists("freed"))

    def test_batches(self):
        pages = self.h.batch_alloc([3, 4])
        pages[0].buf[:], pages[1].buf[:] = b"abc", b"defg"
        self.assertEqual(self.h.batch_store(["b1", "b2"], pages), [True, True])
        self.assertEqual([i and bytes(i.view) for i in self.h.batch_retrieve(["b1", "no", "b2"])], [b"abc", None, b"defg"])
        self.assertEqual(self.h.batch_exists(["b1", "no", "b2"]), [True, False, True])
        self.assertEqual(self.h.batch_pin(["b1", "no", "b2"]), [True, False, False], "it stops at the first that is not held")
        self.assertEqual(self.h.batch_unpin(["b1", "no", "b2"]), [True, False, False])
        self.assertEqual(self.h.batch_delete(["b1", "no", "b2"]), [True, False, True])
        with self.assertRaisesRegex(ValueError, "a handle for each"):
            self.h.batch_store(["b1"], [])

    def test_pins(self):
        fill(self.h, "pinned")
        self.assertTrue(self.h.pin("pinned"))
        self.assertFalse(self.h.delete("pinned"))
        self.assertTrue(self.h.unpin("pinned"))
        self.assertTrue(self.h.delete("pinned"))
        self.assertFalse(self.h.pin("pinned"))

    def test_regions(self):
        added = []
        self.h.set_on_region_added(lambda region, pages: added.append((region, pages)))
        (region,) = self.h.get_owned_region_ids()
        self.assertEqual(added, [(region, self.h.get_region_page_count(region))])
        self.assertGreaterEqual(self.h.get_region_page_count(region), POOL // CHUNK)
        page = self.h.alloc(CHUNK)
        page.buf[:4] = b"page"
        self.assertEqual(bytes(self.h.get_buffer_view(page.region_id, page.page_index * CHUNK, 4)), b"page")
        self.assertIsNone(self.h.get_buffer_view(page.region_id + 99, 0, 4))
        self.h.free(page)

    def test_bad_use(self):
        with self.assertRaisesRegex(ValueError, "chunk_size_bytes"):
            self.h.alloc(CHUNK + 1)
        self.h.close()
        self.assertFalse(self.h.connected)
        self.assertFalse(self.h.healthcheck())
        for call in (lambda: self.h.alloc(1), lambda: self.h.retrieve("k"), lambda: self.h.exists("k"), self.h.get_stats):
            with self.assertRaisesRegex(RuntimeError, "not connected"):
                call()
        with self.assertRaises(ValueError):
            MaruConfig(pool_size=1, chunk_size_bytes=2)
        with self.assertLogs("larder.maru", "ERROR"):
            self.assertFalse(MaruHandler(MaruConfig(server_url="unix:/nowhere", timeout_ms=300)).connect())

    def test_health(self):
        self.assertTrue(self.h.healthcheck())
        self.server.kill()
        try:
            with self.assertLogs("larder.maru", "WARNING"):
                self.assertFalse(self.h.healthcheck())
        finally:
            self.server.start()
        self.assertTrue(fill(self.h, "after a restart"))


class OwnEntries(unittest.TestCase):
    """Phase 1: pages of a client's own, within one exchange."""

    def test_store_succeeds_when_something_can_be_evicted(self):
        with serving("--max-regions-per-instance=1") as server, handler(server) as h:
            (region,) = h.get_owned_region_ids()
            pages = h.get_region_page_count(region)
            for i in range(3 * pages):
                self.assertTrue(fill(h, f"k{i}", i % 256))
            self.assertEqual(h.get_owned_region_ids(), [region], "it has what it had")
            last = h.retrieve(f"k{3 * pages - 1}")
            self.assertEqual(last.view[0], (3 * pages - 1) % 256)
            self.assertFalse(h.exists("k0"))
            eviction = h.get_stats()["eviction"]
            self.assertGreaterEqual(eviction["own_entries"], 2 * pages)
            self.assertEqual(eviction["regions_lost"], 0)

    def test_a_batch_has_what_it_lacks_evicted_in_one_exchange(self):
        with serving("--max-regions-per-instance=1") as server, handler(server) as h:
            pages = h.get_region_page_count(h.get_owned_region_ids()[0])
            self.assertEqual(h.batch_store([f"k{i}" for i in range(pages)], [bytes([1]) * CHUNK] * pages), [True] * pages)
            time.sleep(1.5)  # leases of what was stored and asked for are over
            for name, store in [
                ("copies", lambda keys: h.batch_store(keys, [bytes([2]) * CHUNK] * len(keys))),
                ("pages", lambda keys: h.batch_store(keys, h.batch_alloc([CHUNK] * len(keys)))),
            ]:
                with self.subTest(name):
                    before = h.get_stats()["eviction"]
                    self.assertEqual(store([f"{name} {i}" for i in range(20)]), [True] * 20)
                    after = h.get_stats()["eviction"]
                    self.assertEqual(after["requests"] - before["requests"], 1)
                    self.assertGreaterEqual(after["own_entries"] - before["own_entries"], 20)

    def test_what_is_pinned_stays_and_what_is_read_is_told(self):
        with serving("--max-regions-per-instance=1") as server, handler(server) as h:
            pages = h.get_region_page_count(h.get_owned_region_ids()[0])
            fill(h, "pinned", 7)
            fill(h, "read", 8)
            self.assertTrue(h.pin("pinned"))
            info = h.retrieve("read")
            for i in range(2 * pages):
                self.assertTrue(fill(h, f"k{i}", 1))
                read = bytes(info.view)
                if info.valid:
                    self.assertEqual(read, bytes([8]) * CHUNK)
            self.assertTrue(h.exists("pinned"))
            self.assertEqual(h.retrieve("pinned").view[0], 7)

    def test_nothing_can_be_evicted(self):
        with serving("--max-regions-per-instance=1", "--eviction-policy=none") as server, handler(server, timeout_ms=3000) as h:
            pages = h.get_region_page_count(h.get_owned_region_ids()[0])
            kept = h.batch_alloc([CHUNK] * pages)
            with self.assertRaisesRegex(ValueError, "cannot allocate"):
                h.alloc(CHUNK)
            h.free(kept[0])
            self.assertTrue(fill(h, "fits"))


class Policies(unittest.TestCase):
    """Phase 2: which entries go is for the policy to say that the server was started with."""

    def test_the_policy_decides(self):
        for policy, survives in [("lru", True), ("lfu", True), ("fifo", False)]:
            with (
                self.subTest(policy),
                serving("--max-regions-per-instance=1", f"--eviction-policy={policy}") as server,
                handler(server) as h,
            ):
                pages = h.get_region_page_count(h.get_owned_region_ids()[0])
                h.batch_store([f"k{i}" for i in range(pages)], [bytes(CHUNK)] * pages)
                for _ in range(3):
                    info = h.retrieve("k0")  # the oldest, and the one that is used
                    info.release()
                for i in range(pages // 2):
                    self.assertTrue(fill(h, f"new {i}"))
                    if i % 8 == 0 and survives:
                        info = h.retrieve("k0")
                        self.assertIsNotNone(info)
                        info.release()
                self.assertEqual(h.exists("k0"), survives)
                self.assertFalse(h.exists("k1"))


class OtherClients(unittest.TestCase):
    """Phase 3: regions of other clients, who are told."""

    def test_a_client_that_loses_a_region_is_told_and_goes_on(self):
        with serving("--min-region-age=0s", pool="20MiB") as server, handler(server) as a:
            lost, had, told = [], set(), threading.Event()
            a.set_on_region_added(lambda region, pages: had.add(region))
            a.set_on_region_removed(lambda region: (lost.append(region), told.set()))
            for i in range(4 * POOL // CHUNK):
                self.assertTrue(fill(a, f"a{i}"))
            page = a.alloc(CHUNK)
            with handler(server) as b:
                for i in range(2 * POOL // CHUNK):
                    self.assertTrue(fill(b, f"b{i}"))
                self.assertTrue(told.wait(PATIENCE), "the client whose region was taken is told")
                self.assertLessEqual(set(lost), had)
                self.assertFalse(set(lost) & set(a.get_owned_region_ids()), "it has forgotten the region")
                self.assertGreater(a.get_stats()["eviction"]["regions_lost"], 0)
                page.buf[:] = bytes(CHUNK)  # it may still be written to, wherever that goes
                a.store("open", page)  # True or False, as its region stayed or went
                self.assertTrue(fill(a, "after"), "it goes on")
                self.assertEqual(bytes(b.retrieve("after").view), bytes([1]) * CHUNK)

    def test_other_clients_are_spared_while_own_entries_will_do(self):
        options = ("--max-regions-per-instance=1", "--min-region-age=0s")
        with serving(*options, pool="10MiB") as server, handler(server) as a, handler(server) as b:
            for i in range(8):
                self.assertTrue(fill(a, f"a{i}"))
            for i in range(5 * POOL // CHUNK):
                self.assertTrue(fill(b, f"b{i}"))
            self.assertEqual(a.get_stats()["eviction"]["regions_lost"], 0)
            self.assertEqual(a.batch_exists([f"a{i}" for i in range(8)]), [True] * 8)
            self.assertGreater(b.get_stats()["eviction"]["own_entries"], 0)

    def test_the_region_with_the_fewest_entries_goes(self):
        with serving("--min-region-age=0s", pool="10MiB") as server, handler(server) as many, handler(server) as few:
            for i in range(30):
                self.assertTrue(fill(many, f"many{i}"))
            for i in range(3):
                self.assertTrue(fill(few, f"few{i}"))
            with handler(server) as third:
                self.assertTrue(fill(third, "third"))
                self.assertEqual(many.get_stats()["eviction"]["regions_lost"], 0)
                self.assertEqual(few.get_stats()["eviction"]["regions_lost"], 1)
                self.assertEqual(many.batch_exists([f"many{i}" for i in range(30)]), [True] * 30)

    def test_readers_are_told_and_pins_hold(self):
        options = ("--min-region-age=0s", "--max-regions-per-instance=1")
        with serving(*options, pool="6MiB") as server, handler(server) as owner:
            self.assertTrue(fill(owner, "read", 9))
            self.assertTrue(owner.pin("read"))
            info = owner.retrieve("read")
            with self.assertLogs("larder.maru", "ERROR"), self.assertRaisesRegex(AssertionError, "not connected"):
                handler(server, timeout_ms=2500)
            self.assertEqual(bytes(info.view), bytes([9]) * CHUNK)
            self.assertTrue(info.valid, "a region that has a pinned entry stays")
            self.assertTrue(owner.unpin("read"))
            with handler(server) as other:
                self.assertTrue(fill(other, "other"))
                self.assertFalse(info.valid, "its memory is another's now")
                with self.assertRaises(larder.LeaseError):
                    info.release()

    def test_memory_of_who_has_left_goes_first(self):
        with serving("--min-region-age=0s", pool="10MiB") as server, handler(server) as stays:
            for i in range(10):
                self.assertTrue(fill(stays, f"stays{i}"))
            with handler(server) as leaves:
                for i in range(10):
                    self.assertTrue(fill(leaves, f"left{i}"))
            self.assertTrue(stays.exists("left0"), "what it has stored stays")
            with handler(server) as third:
                self.assertTrue(fill(third, "third"))
            self.assertEqual(stays.get_stats()["eviction"]["regions_lost"], 0)
            self.assertEqual(stays.batch_exists([f"stays{i}" for i in range(10)]), [True] * 10)


if __name__ == "__main__":
    unittest.main()
