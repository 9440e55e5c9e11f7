"""Tensors in a GPU's memory, as values of a pool: they go through pinned memory of the host, by copies that do not block its thread
but for the wait at their end. torch is needed only by whoever has such tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ._memory import Memory, memory_of
from .errors import InvalidArgumentError


def is_on_device(value: Any) -> bool:
    """Whether value is a tensor that is not in memory of the CPU."""
    device = getattr(value, "device", None)
    return device is not None and hasattr(value, "data_ptr") and getattr(device, "type", "cpu") != "cpu"


def pinned_like(tensor: Any) -> Any:
    """A tensor of the same shape in pinned memory of the host."""
    torch = sys.modules["torch"]  # whose tensor it is
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def source(tensor: Any) -> Memory:
    """Memory of the host with what the tensor has when the current stream has done what it has been given so far."""
    _check(tensor)
    host = pinned_like(tensor)
    host.copy_(tensor, non_blocking=True)
    _wait(tensor)
    return memory_of(host)


def target(tensor: Any) -> tuple[Memory, Callable[[], None]]:
    """Memory of the host for what the tensor is to have, and a function that copies it there, in the order of the current stream."""
    _check(tensor)
    host = pinned_like(tensor)
    memory = memory_of(host)

    def copy() -> None:
        tensor.copy_(host, non_blocking=True)  # the pinned memory is not used again before that is done: torch sees to it

    return memory, copy


def _check(tensor: Any) -> None:
    if tensor.device.type != "cuda":
        raise InvalidArgumentError(f"the tensor is on {tensor.device}: only CUDA devices are known, so copy it to the CPU first")
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"the tensor is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): call contiguous() on it"
        )


def _wait(tensor: Any) -> None:
    torch = sys.modules["torch"]
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
