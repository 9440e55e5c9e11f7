"""What torch.distributed gets for each operation, to wait for."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch._C._distributed_c10d import Work as TorchWork

from .. import _lib
from ..errors import InvalidArgumentError, LarderError, PeerFailedError, TimedOutError
from ._native import Pending, Result

if TYPE_CHECKING:
    from ._group import ProcessGroup

# What runs when an operation has ended, in the thread that notices it: it copies results to where they belong.
Finish = Callable[[], None]


class Work(TorchWork):
    """One operation that was started.

    Nobody runs it but who waits for it, or the library's own thread when nobody does. Tensors are kept until it has ended.
    """

    def __init__(
        self, group: ProcessGroup, pending: Pending | None, tensors: list[torch.Tensor], finish: Finish | None = None,
        patience: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._patience = patience  # how long to wait if nobody says it, in seconds
        self._group = group
        self._pending: Pending | None = pending
        self._tensors: list[torch.Tensor] = tensors
        self.kept: Any = None  # what else must live until it has ended
        self._finish = finish
        self._lock = threading.Lock()
        self._ended = False
        self._error: LarderError | None = None
        self._failed: list[int] = []  # ranks that were lost while it ran
        self._from = -1  # the rank that a message came from
        self._future: torch.futures.Future[Any] | None = None

    @classmethod
    def done(cls, group: ProcessGroup) -> Work:
        """A work that has ended as it should, and that nobody asks anything else."""
        work = cls(group, None, [])
        work._ended = True
        return work

    # What torch calls.

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has ended, and raise what it has failed with."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        limit = seconds if seconds > 0 else self._patience
        if not self._join(limit):
            if self._group.options.raise_on_failure:
                raise TimedOutError(f"the operation has not ended after {limit} s and goes on: wait for it again")
            return False
        self._settle()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._join(0.0)

    def is_success(self) -> bool:
        return self._join(0.0) and self._error is None and not self._failed

    def exception(self) -> BaseException | None:
        return self._error if self._join(0.0) else None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._from

    def _source_rank(self) -> int:
        return self._from

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of its tensors, which another thread completes: DistributedDataParallel waits for those."""
        with self._lock:
            if self._future is None:
                self._future = self._new_future()
                self._group.completer.watch(self)
            return self._future

    # What larder.pg calls.

    def failed_ranks(self) -> list[int]:
        """The ranks whose failure it has noticed."""
        self._join(self._patience)
        return self._failed

    def succeeded(self) -> bool:
        """Whether it has ended without any failure at all."""
        return self._join(self._patience) and self._error is None and not self._failed

    def capacity(self) -> int:
        """How many ranks the group has room for."""
        return self._group.native.capacity()

    def _settle(self) -> None:
        """Raise the error, unless the group is one that tells of failures in another way."""
        error = self._error
        if error is None:
            return
        if isinstance(error, PeerFailedError) and not self._group.options.raise_on_failure:
            return
        raise error

    def _join(self, timeout: float | None) -> bool:
        """Wait for its end, and see to what is left to do then."""
        if self._ended:
            return True
        pending = self._pending
        if pending is None:
            return self._ended
        try:
            if not _lib.wait(pending.wait, timeout):
                pending.leave()
                return self._ended
        except LarderError:
            raise
        except BaseException:  # a signal's
            pending.leave()
            raise
        self._end(pending)
        return True

    def _end(self, pending: Pending) -> None:
        with self._lock:
            if self._ended:
                return
            self._take(pending)
            self._pending = None
            self._ended = True
        self._group.ended(self)

    def _take(self, pending: Pending) -> None:
        """Note how it has ended."""
        self._error = pending.error
        result = pending.result or Result()
        self._failed = list(result.failed)
        self._from = result.source
        if isinstance(self._error, PeerFailedError) and not self._failed:
            self._failed = list(self._error.ranks)
        try:
            if self._error is None and self._finish is not None:
                self._finish()
        finally:
            self._finish = None

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _complete(self) -> None:
        """Wait for it and complete the future."""
        self._join(None)
        future = self._future
        if future is None:
            return
        try:
            self._settle()
        except LarderError as e:
            future.set_exception(e)
        else:
            future.set_result(self._tensors)


class Gathered(TorchWork):
    """Several operations as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([w.wait(timeout) for w in self._works])

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all([w.is_completed() for w in self._works])

    def is_success(self) -> bool:
        return all(w.is_success() for w in self._works)

    def exception(self) -> BaseException | None:
        return next((e for w in self._works if (e := w.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return [t for w in self._works for t in w.result()]

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            tensors = self.result()
            self._future = torch.futures.collect_all([w.get_future() for w in self._works]).then(lambda _: tensors)
        return self._future

    def capacity(self) -> int:
        return self._works[0].capacity() if self._works else 0

    def failed_ranks(self) -> list[int]:
        return sorted({r for w in self._works for r in w.failed_ranks()})

    def succeeded(self) -> bool:
        return all([w.succeeded() for w in self._works])


class Completer:
    """A thread that waits for works whose futures somebody wants. There is one for each group that needs it, and it is a
    daemon: a future that never comes keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def watch(self, work: Work) -> None:
        with self._lock:
            if self._closed:
                raise InvalidArgumentError("the process group was destroyed: its works have no futures any more")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"larder-pg-{self._name}", daemon=True)
                self._thread.start()
        self._queue.put(work)

    def close(self) -> None:
        """End the thread when it is through with what it has, which ends since the group was closed."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(10)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work._complete()
            del work  # it holds on to tensors
