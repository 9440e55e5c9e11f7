"""The client of a pool for asyncio, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import unittest

import larder
import larder.aio
from processes import PATIENCE
from servers import Server


class Aio(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.stop)

    async def asyncSetUp(self):
        self.client = larder.aio.AsyncClient([self.server.address], timeout=PATIENCE)
        await self.client.open()
        self.addAsyncCleanup(self.client.close)
        await self.client.clear()

    async def test_values(self):
        client = self.client
        self.assertTrue(await client.put("k", b"value"))
        self.assertFalse(await client.put("k", b"value"))
        self.assertEqual((await client.get("k"), await client.get("never")), (b"value", None))
        into = bytearray(5)
        self.assertEqual(await client.get_into("k", into), 5)
        self.assertEqual(into, b"value")
        self.assertEqual(await client.put_batch([("k1", b"1"), ("k2", b"22")]), [True, True])
        self.assertEqual(await client.get_batch(["k2", "never", "k1"]), [b"22", None, b"1"])
        buffers = [bytearray(2), bytearray(2)]
        self.assertEqual(await client.get_batch_into(["k1", "k2"], buffers), [1, 2])
        self.assertEqual(await client.exists_batch(["k", "never"]), [True, False])
        self.assertTrue(await client.exists("k"))
        async with client.view("k") as memory:
            self.assertEqual(bytes(memory), b"value")
        async with client.view_batch(["k", "never"]) as found:
            self.assertEqual([m and bytes(m) for m in found], [b"value", None])
        async with client.pin("k") as pin:
            self.assertTrue(pin)
            self.assertFalse(await client.delete("k"))
        self.assertFalse(await client.pin("never"))
        self.assertEqual(sorted([k async for k in client.list_keys("k")]), [b"k", b"k1", b"k2"])
        self.assertEqual(await client.delete_batch(["k", "k"]), [True, False])
        self.assertEqual((await client.stats())["stored"], 3)
        self.assertIn("pool_free", await client.usage())
        await client.clear()
        self.assertFalse(await client.exists("k1"))

    async def test_layers(self):
        async with self.client.put_layers("layers", [3, 3]) as writer:
            writer.launch(0, b"abc")
            writer.launch(1, b"def")
            await writer.wait(0)
        into = bytearray(3)
        async with self.client.get_layers("layers", [3, 3]) as reader:
            reader.launch(1, into)
            await reader.wait(1)
        self.assertEqual(into, b"def")
        async with self.client.get_layers("never", [1]) as reader:
            self.assertIsNone(reader)
        with self.assertRaisesRegex(RuntimeError, "mine"):
            async with self.client.put_layers("early", [1]) as writer:
                raise RuntimeError("mine")
        self.assertFalse(await self.client.exists("early"))

    async def test_allocations(self):
        async with self.client.alloc(5) as space:
            space.memory[:] = b"alloc"
            self.assertTrue(await space.store("alloc"))
        self.assertEqual(await self.client.get("alloc"), b"alloc")
        spaces = await self.client.alloc_batch([1, 2])
        spaces[0].memory[:] = b"1"
        self.assertEqual(await self.client.store_batch(["one"], spaces[:1]), [True])
        spaces[1].abort()
        with self.assertRaises(larder.ClosedError):
            await spaces[1].store("two")

    async def test_many_calls_at_once_need_no_threads(self):
        await self.client.put("k", b"value")
        await asyncio.gather(*(self.client.get("k") for _ in range(10)))
        before = threading.active_count()
        got = await asyncio.gather(*(self.client.get("k") for _ in range(500)))
        self.assertEqual(got, [b"value"] * 500)
        self.assertEqual(threading.active_count(), before)
        self.assertLess(len(os.listdir("/proc/self/task")), 100)

    async def test_bad_input_is_refused(self):
        await self.client.put("eight", b"12345678")
        for name, call, error in [
            ("a long key", lambda: self.client.get("k" * 2000), larder.InvalidArgumentError),
            ("a short buffer", lambda: self.client.get_into("eight", bytearray(1)), larder.InvalidArgumentError),
            ("into bytes", lambda: self.client.get_into("eight", b"12345678"), larder.ReadOnlyError),
            ("more than the pool", lambda: self.client.put("large", bytearray(80 << 20)), larder.NoSpaceError),
        ]:
            with self.subTest(name), self.assertRaises(error):
                await call()

    async def test_a_cancelled_call_lets_go_of_its_memory(self):
        await self.client.put("k", b"value")
        into = bytearray(5)
        self.server.pause()
        try:
            waiting = asyncio.create_task(self.client.get_into("k", into))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            waiting.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waiting
            self.assertLess(time.monotonic() - began, 5)
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(self.client.exists("k"), 0.2)
        finally:
            self.server.resume()
        del waiting
        into.append(1)  # it can be resized, so that nobody has it
        self.assertEqual(await self.client.get("k"), b"value")

    async def test_close_ends_calls_that_are_under_way(self):
        self.server.pause()
        try:
            waiting = [asyncio.create_task(self.client.get("k")) for _ in range(5)]
            await asyncio.sleep(0.1)
            self.assertFalse(await self.client.close(timeout=0.5), "no master has heard of it")
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                self.assertIsInstance(outcome, larder.ClosedError)
        finally:
            self.server.resume()
        with self.assertRaises(larder.ClosedError):
            await self.client.get("k")

    async def test_calls_go_on_when_the_server_comes_back(self):
        await self.client.put("before", b"value")
        self.server.kill()
        waiting = [asyncio.create_task(self.client.put(f"k{i}", bytes([i]) * 1000)) for i in range(20)]
        reading = asyncio.create_task(self.client.get("before"))
        await asyncio.sleep(0.5)
        self.server.start()
        self.assertEqual(await asyncio.gather(*waiting), [True] * 20)
        self.assertEqual(await reading, b"value")
        self.assertEqual(await self.client.get("k7"), bytes([7]) * 1000)

    async def test_what_comes_too_late_for_its_coroutine_is_undone(self):
        await self.client.put("k", b"value")
        for wait in (0, 0.0002, 0.001, 0.005):
            opening = asyncio.ensure_future(self.client.view("k"))
            await asyncio.sleep(wait)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await opening).close()
        self.assertEqual(self.client._calls, {})

    async def test_another_loop_is_refused(self):
        def elsewhere():
            return asyncio.run(self.client.get("k"))

        with self.assertRaisesRegex(larder.InvalidArgumentError, "another event loop"):
            await asyncio.get_running_loop().run_in_executor(None, elsewhere)

    async def test_nobody_answers(self):
        with self.assertRaises(larder.TimedOutError):
            async with larder.aio.AsyncClient(["unix:/nowhere/socket"], timeout=0.3):
                pass


if __name__ == "__main__":
    unittest.main()
