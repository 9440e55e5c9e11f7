"""How tensors of a GPU are staged, without one: torch.cuda is stood in for, and says in which order it was asked for what."""

from __future__ import annotations

import contextlib
import threading
import unittest
from typing import Any
from unittest import mock

try:
    import torch
except ImportError as e:
    raise unittest.SkipTest("without torch") from e

import larder
from larder.pg import _cuda
from larder.pg._native import NOWHERE, Call, Kind


class Device:
    """torch.cuda, with a log of what streams were given."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = threading.local()
        self.capturing = False
        device = self

        class Stream:
            def __init__(self, of: Any = None, name: str = "lane") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                device.log.append(f"{self.name} waits for {event.at}")

        class Event:
            at = ""

            def record(self, stream: Stream) -> None:
                self.at = stream.name

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                device.log.append("host waits for " + self.at)

        self.main = Stream(name="main")
        self.patches = {
            "Stream": Stream, "Event": Event, "stream": self.stream, "set_device": lambda d: None,
            "current_stream": lambda d=None: getattr(self.current, "stream", self.main),
            "is_current_stream_capturing": lambda: self.capturing,
        }  # fmt: skip

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.current.stream = stream
        yield
        self.current.stream = self.main


class Native:
    """The library: an operation adds one to the host's memory, when it is let go on."""

    def __init__(self, device: Device) -> None:
        self.device, self.go, self.error = device, threading.Event(), None
        self.result, self.ended = None, False

    def start(self, call: Call) -> Native:
        self.device.log.append("start")
        return self

    def wait(self, limit: int) -> bool:
        self.ended = self.go.wait(limit / 1e9)
        return self.ended


class Group:
    closed = False

    def __init__(self, native: Native) -> None:
        self.native, self.options, self.over = native, mock.Mock(raise_on_failure=True), []
        self.ended = self.over.append

    def patience(self) -> float | None:
        return 0.05


class OnDevice(torch.Tensor):
    """A tensor that notes the streams that use it."""

    def record_stream(self, stream: Any) -> None:
        self.streams = [*getattr(self, "streams", []), stream.name]


class Staging(unittest.TestCase):
    def setUp(self) -> None:
        self.device = Device()
        for name, what in self.device.patches.items():
            patch = mock.patch.object(torch.cuda, name, what)
            patch.start()
            self.addCleanup(patch.stop)
        self.host: list[torch.Tensor] = []

        def pinned(work: Any, t: torch.Tensor) -> torch.Tensor:
            host = torch.empty(t.shape, dtype=t.dtype)
            work._host[id(t)] = host
            self.host.append(host)
            return host

        patch = mock.patch.object(_cuda.CudaWork, "_pinned", pinned)
        patch.start()
        self.addCleanup(patch.stop)
        self.native = Native(self.device)
        self.group = Group(self.native)
        self.lane = _cuda.Lane(self.group, torch.device("cpu"))
        self.addCleanup(self.lane.close)
        self.addCleanup(self.native.go.set)

    def start(self, *tensors: torch.Tensor, single: bool = False) -> _cuda.CudaWork:
        return self.lane.start(lambda src, dst: Call(Kind.ALL_REDUCE, 1, 0, 0, 0, NOWHERE, NOWHERE), tensors, tensors, single)

    def test_an_operation_is_ordered_between_streams(self):
        t = torch.zeros(3).as_subclass(OnDevice)
        work = self.start(t)
        self.assertFalse(work.is_completed())
        self.native.go.set()
        self.assertTrue(work.wait())
        self.assertTrue(work.is_completed() and work.is_success())
        self.assertEqual(self.device.log, ["lane waits for main", "host waits for lane", "start", "main waits for lane"])
        self.assertEqual(t.streams, ["lane"])
        self.assertEqual(self.group.over, [work])
        self.assertEqual(len(self.host), 1, "what is operand and result is staged once")

    def test_parameters_and_inference_tensors_get_results(self):
        with torch.inference_mode():
            inferred = torch.zeros(3).as_subclass(OnDevice)
        for t in (inferred, torch.nn.Parameter(torch.zeros(3).as_subclass(OnDevice))):
            work = self.start(t)
            while len(self.host) == 0 or "start" not in self.device.log:
                work._over.wait(0.01)
            with torch.inference_mode():
                self.host.pop().fill_(7)
            self.native.go.set()
            self.assertTrue(work.wait())
            self.assertEqual(t.tolist(), [7, 7, 7])
            self.native.go.clear()
            self.device.log.clear()

    def test_results_that_cannot_be_copied_back_are_an_error(self):
        self.native.go.set()
        with mock.patch.object(_cuda.CudaWork, "_copy_back", side_effect=RuntimeError("illegal address")):
            work = self.start(torch.zeros(3).as_subclass(OnDevice))
            with self.assertRaisesRegex(larder.LarderError, "illegal address"):
                work.wait()
        self.assertFalse(work.is_success())

    def test_a_message_is_waited_for_as_long_as_was_said(self):
        work = self.start(torch.zeros(3).as_subclass(OnDevice), single=True)
        with self.assertRaises(larder.TimedOutError):
            work.wait()
        self.lane.drain()  # it does not keep others from starting

    def test_a_group_that_was_destroyed(self):
        self.group.closed = True
        with self.assertRaises(larder.ClosedError):
            self.start(torch.zeros(3).as_subclass(OnDevice)).wait()

    def test_graphs_are_refused(self):
        self.device.capturing = True
        with self.assertRaisesRegex(larder.LarderError, "CUDA graph"):
            self.start(torch.zeros(3))


if __name__ == "__main__":
    unittest.main()
