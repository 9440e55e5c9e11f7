"""Tensors in a GPU's memory: they go through pinned memory of the host.

An operation is ordered as NCCL's are: after what the current stream has been given before it was called, and before what it is
given after wait(). A lane is a thread and a stream for each group and device. For one operation after the other it

  1. has its stream wait for the caller's (an event that was recorded in the call),
  2. copies operands into pinned memory, and waits for these copies,
  3. has the library carry the operation out,
  4. copies results back on its stream, and records an event.

Work.wait blocks until 4 and has the current stream wait for the event, so that kernels of the caller's that come later see the
result, and the host does not wait for the last copies. Tensors are marked as used by the lane's stream, so that the caching
allocator does not give their memory away under a copy; pinned memory needs no mark, since its allocator notes the streams of
copies itself. Copies are made in inference mode: the lane's thread does not have the caller's mode, in which parameters and
inference tensors may not be written. Sends and receives are begun in the lane's order too, but end in threads
of their own: a receive that waits for its peer must not keep a send from going out.
"""

# mypy: disable-error-code="no-untyped-call"
# (torch's events and streams have no types)

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .. import _lib
from ..errors import ClosedError, LarderError
from ._native import Call, Pending
from ._work import Work

if TYPE_CHECKING:
    from ._group import ProcessGroup

# MakeCall makes the call of operands and results, given the host's tensors in place of those of the device.
MakeCall = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Call]


class CudaWork(Work):
    """An operation of a lane."""

    def __init__(
        self, group: ProcessGroup, lane: Lane, make: MakeCall, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor],
        patience: float | None,
    ) -> None:  # fmt: skip
        super().__init__(group, None, list(dst) or list(src), None, patience)
        self._lane = lane
        self._make = make
        self._src, self._dst = list(src), list(dst)
        self._ready = torch.cuda.Event()  # when operands are what they are to be
        self._ready.record(torch.cuda.current_stream(lane.device))
        self._host: dict[int, torch.Tensor] = {}  # by the id of the device's tensor
        self._copied: torch.cuda.Event | None = None  # results are back
        self._over = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not super().wait(timeout):
            return False
        if self._copied is not None:
            torch.cuda.current_stream(self._lane.device).wait_event(self._copied)
        return True

    def is_completed(self) -> bool:
        return self._over.is_set() and (self._copied is None or self._copied.query())

    def _join(self, timeout: float | None) -> bool:
        return _lib.wait(lambda limit: self._over.wait(limit / 1e9), timeout)

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self._lane.device])

    def _complete(self) -> None:
        self._join(None)
        with torch.cuda.stream(self._lane.stream):  # the future records it, and has whoever waits wait for it
            super()._complete()

    # The lane's thread.

    def begin(self) -> Pending:
        """Steps 1 to 3, up to where the library is at work."""
        stream = self._lane.stream
        with torch.inference_mode(), torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            for t in (*self._src, *self._dst):  # of results, too: parts of ranks that are not active stay as they are
                if id(t) not in self._host:
                    t.record_stream(stream)
                    self._pinned(t).copy_(t, non_blocking=True)
            read = torch.cuda.Event()
            read.record(stream)
        read.synchronize()
        return self._group.native.start(self._make([self._host[id(t)] for t in self._src], [self._host[id(t)] for t in self._dst]))

    def finish(self, pending: Pending | None, error: LarderError | None) -> None:
        """Step 4."""
        try:
            if pending is not None:
                self._take(pending)
            self._error = self._error or error
            if self._error is None:
                self._copied = self._copy_back()
        except Exception as e:  # of CUDA: whoever waits must hear of it, and not take what is there for the result
            self._error = LarderError(f"copying results to {self._lane.device}: {e}")
        finally:
            self._host = {}
            self._src, self._dst = [], []
            self._ended = True
            self._over.set()
            self._group.ended(self)

    def _copy_back(self) -> torch.cuda.Event:
        stream = self._lane.stream
        with torch.inference_mode(), torch.cuda.stream(stream):
            for t in self._dst:
                t.copy_(self._host[id(t)], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        return copied

    def _pinned(self, t: torch.Tensor) -> torch.Tensor:
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
        self._host[id(t)] = host
        return host


class Lane:
    """The thread and the stream of one group on one device."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._group = group
        self._queue: queue.SimpleQueue[tuple[CudaWork, bool] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._queued = 0  # works that the thread is not through with
        self._thread = threading.Thread(target=self._run, name=f"larder-pg-{device}", daemon=True)
        self._thread.start()

    def start(self, make: MakeCall, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], single: bool) -> CudaWork:
        """Queue an operation. single says that it is a send or a receive."""
        if torch.cuda.is_current_stream_capturing():
            raise LarderError("an operation goes through the host, and cannot be part of a CUDA graph: leave it out of the capture")
        for t in (*src, *dst):
            if t.device != self.device:
                raise LarderError(f"tensors on {t.device} and {self.device} in one operation: have all of them on one device")
        work = CudaWork(self._group, self, make, src, dst, self._group.patience() if single else None)
        with self._idle:
            self._queued += 1
        self._queue.put((work, single))
        return work

    def drain(self) -> None:
        """Wait until the thread is through with what was queued."""

        def once(limit: int) -> bool:
            with self._idle:
                return self._idle.wait_for(lambda: self._queued == 0, limit / 1e9)

        _lib.wait(once, None)

    def close(self) -> None:
        """End the thread. The group was closed, so that what it waits for ends."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(10)

    def _run(self) -> None:
        torch.cuda.set_device(self.device)
        while (item := self._queue.get()) is not None:
            work, single = item
            try:
                self._carry_out(work, single)
            finally:
                with self._idle:
                    self._queued -= 1
                    self._idle.notify_all()
            del work, item  # they hold on to tensors

    def _carry_out(self, work: CudaWork, single: bool) -> None:
        try:
            if self._group.closed:
                raise ClosedError("the process group was destroyed")
            pending = work.begin()
        except LarderError as e:
            work.finish(None, e)
            return
        except Exception as e:  # of CUDA: whoever waits must hear of it
            work.finish(None, LarderError(str(e)))
            return
        if single and not pending.ended:
            threading.Thread(target=self._see_through, args=(work, pending), daemon=True).start()
        else:
            self._see_through(work, pending)

    def _see_through(self, work: CudaWork, pending: Pending) -> None:
        try:
            _lib.wait(pending.wait, None)
        except LarderError as e:
            work.finish(None, e)
        else:
            work.finish(pending, None)
