"""Blocks of a paged KV cache, layer by layer, to and from memory of the host.

Nothing but the engine's own thread touches the paged cache: a load that comes too late ends in memory of ours.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

import larder
from larder._memory import memory_of

from ._link import Link

# Layers that a load has read, and the engine has not taken. With two, one is read while the other is copied to the device.
AHEAD = 2

# Elements are moved as integers of their size, whatever they are: not all operations know all types.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LayeredCache:
    """A paged cache: a tensor a layer, one of whose dimensions counts blocks."""

    def __init__(self, tensors: dict[str, torch.Tensor], blocks: int) -> None:
        self.layers: dict[str, torch.Tensor] = {}  # integers, with blocks as the first dimension
        self.ranges: dict[str, tuple[int, int]] = {}  # where each layer lies in a block's value, in bytes
        end = 0
        for name, tensor in tensors.items():
            counts = [d for d in (0, 1) if tensor.dim() > d and tensor.shape[d] == blocks]
            if not counts:
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}: none of its first dimensions counts {blocks} blocks")
            layer = tensor.view(_INTEGERS[tensor.element_size()]).transpose(0, counts[0])
            self.layers[name] = layer
            begin, end = end, end + layer[0].numel() * layer.element_size()
            self.ranges[name] = (begin, end)
        self.block_bytes = end
        self.device = next(iter(self.layers.values())).device

    @property
    def on_device(self) -> bool:
        """Whether it is in a GPU's memory."""
        return self.device.type != "cpu"

    def host(self, rows: int, columns: int) -> torch.Tensor:
        """Memory of the host for copies, of bytes: pinned if the cache is in a GPU's."""
        return torch.empty((rows, columns), dtype=torch.uint8, pin_memory=self.on_device)

    def shaped(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of bytes, as blocks of a layer."""
        layer = self.layers[name]
        return rows.view(layer.dtype).view(rows.shape[0], *layer.shape[1:])


class Staged:
    """Copies of blocks in memory of the host. With a GPU they are made behind the computation, by a stream of their own."""

    def __init__(self, cache: LayeredCache, places: Sequence[int]) -> None:
        self._cache = cache
        self.values = cache.host(len(places), cache.block_bytes)  # a row is a block's value
        self._places = torch.tensor(places, dtype=torch.int64, device=cache.device)
        self._left = dict.fromkeys(cache.layers)
        self._stream = torch.cuda.Stream(cache.device) if cache.on_device else None

    @property
    def bytes(self) -> int:
        """That the copies take."""
        return self.values.numel()

    def copy(self, name: str) -> None:
        """Begin to copy a layer, which the current stream has computed so far."""
        if name not in self._left:
            return
        del self._left[name]
        if self._stream is None:
            self._copy(name)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            self._copy(name)

    def _copy(self, name: str) -> None:
        begin, end = self._cache.ranges[name]
        rows = self._cache.shaped(name, self.values[:, begin:end])
        rows.copy_(self._cache.layers[name].index_select(0, self._places), non_blocking=True)

    def finish(self) -> None:
        """Copy the layers that are left, and wait until all are there: the blocks may be written then."""
        for name in list(self._left):
            self.copy(name)
        if self._stream is not None:
            self._stream.synchronize()


class _Lot:
    """A layer of the blocks of a load, in memory of the host."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.name = ""
        self.rows = memory
        self.taken: Any = None  # the event that the device has copied it

    def begin(self, name: str, blocks: int, size: int) -> int:
        """Make it a layer's, of so many bytes a block. Returns its address."""
        self.name = name
        self.rows = self._memory[: blocks * size].view(blocks, size)
        return self.rows.data_ptr()

    def wait(self) -> None:
        if self.taken is not None:
            self.taken.synchronize()
            self.taken = None


class Load:
    """Blocks on their way into a paged cache: read by a thread, taken by the engine's, layer by layer, until a common deadline."""

    def __init__(self, link: Link, cache: LayeredCache, keys: Sequence[bytes], places: Sequence[int], step: int) -> None:
        self.step = step
        self._link = link
        self._cache = cache
        self._keys = keys
        self._places = list(places)
        self._deadline = time.monotonic() + link.settings.load_timeout
        self._missing = set(places)  # of which nothing is read
        self._rows = torch.empty(0)  # places of those that are
        self._left = set(cache.layers)
        self._intact = False
        self._free: queue.Queue[_Lot | None] = queue.Queue()  # at most AHEAD, and one None
        self._read: queue.Queue[_Lot | None] = queue.Queue()  # likewise; None is the end
        self._asked = False  # for a layer
        self._ended = False
        threading.Thread(target=self._run, name="larder-load", daemon=True).start()

    # The engine's thread.

    def inject(self, name: str) -> None:
        """Copy layers into the cache until it has name's, or it cannot be had in time."""
        self._asked = True
        while name in self._left and not self._ended:
            self._take()

    def finish(self, late: bool) -> set[int]:
        """Copy what is left, and return the places of blocks that were not read. late says that the model has been computed, with what
        was there: if it has not asked for any layer, none is right. If it has, those that are left are of a model that comes after."""
        if late and not self._asked:
            self._link.say("layers", "no layer of a load was asked for: set layerwise to false")
            self.abandon()
            return set(self._places)
        while not self._ended:
            self._take()
        self.abandon()
        return self._missing if self._intact and not self._left else set(self._places)

    def abandon(self) -> None:
        """Copy no more."""
        self._ended = True
        self._free.put(None)

    def _take(self) -> None:
        try:
            lot = self._read.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            self._link.say("load", "%d blocks are not here within %g s", len(self._keys), self._link.settings.load_timeout)
            lot = None
        if lot is None:
            self._ended = True
            return
        layer = self._cache.layers[lot.name]
        if len(self._rows):
            values = self._cache.shaped(lot.name, lot.rows)
            layer.index_copy_(0, self._rows, values.to(self._cache.device, non_blocking=True))
        if self._cache.on_device:
            lot.taken = torch.cuda.Event()
            lot.taken.record(torch.cuda.current_stream(self._cache.device))
        self._left.discard(lot.name)
        self._free.put(lot)

    # The load's thread.

    def _run(self) -> None:
        try:
            left = max(0.001, self._deadline - time.monotonic())
            self._intact = self._link.ask("load blocks", self._copy, False, left)
        finally:
            self._read.put(None)

    def _copy(self, client: larder.Client, timeout: float) -> bool:
        """Read the blocks' layers, one after the other. The result says that they are what was stored."""
        with client.view_batch(self._keys, timeout=timeout) as values:
            held = [i for i, v in enumerate(values) if v is not None and len(v) == self._cache.block_bytes]
            addresses = [memory_of(values[i]).address for i in held]
            self._rows = torch.tensor([self._places[i] for i in held], dtype=torch.int64, device=self._cache.device)
            self._missing -= {self._places[i] for i in held}
            if held:
                self._copy_layers(addresses)
        return True  # leaving the block has found the lease to be good

    def _copy_layers(self, addresses: list[int]) -> None:
        widest = max(end - begin for begin, end in self._cache.ranges.values())
        for _ in range(AHEAD):
            self._free.put(_Lot(self._cache.host(1, len(addresses) * widest)[0]))
        for name, (begin, end) in self._cache.ranges.items():
            lot = self._free.get()
            if lot is None:  # the engine has given it up
                return
            lot.wait()
            size = end - begin
            target = lot.begin(name, len(addresses), size)
            for i, address in enumerate(addresses):
                ctypes.memmove(target + i * size, address + begin, size)
            self._read.put(lot)
