"""Memory of Python objects: where it lies, and what may be done with it."""

from __future__ import annotations

import ctypes
from typing import Any

from .errors import InvalidArgumentError


class _PyBuffer(ctypes.Structure):
    """Py_buffer, as CPython's limited API has it."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_PyBUF_SIMPLE = 0
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None


class Memory:
    """A run of bytes of this process, and what keeps it where it is."""

    __slots__ = ("address", "keep", "length", "readonly")

    def __init__(self, address: int, length: int, readonly: bool, keep: Any) -> None:
        self.address = address
        self.length = length
        self.readonly = readonly
        self.keep = keep


def memory_of(thing: Any) -> Memory:
    """The memory of an object with the buffer protocol, or of a torch tensor in CPU memory.

    An object with the buffer protocol cannot be resized or freed while the result lives. A tensor is kept, but nobody keeps
    its owner from resizing it.
    """
    if isinstance(thing, Memory):
        return thing
    if hasattr(thing, "data_ptr") and hasattr(thing, "is_contiguous"):
        return _tensor(thing)
    try:
        view = memoryview(thing)
    except TypeError:
        raise InvalidArgumentError(
            f"{type(thing).__name__} has no memory to use: give bytes, bytearray, memoryview, a numpy array or a torch tensor"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgumentError(
            f"the {type(thing).__name__} is not contiguous (shape {view.shape}, strides {view.strides}): copy it, "
            "with numpy.ascontiguousarray say, or give its parts"
        )
    return Memory(_address(view), view.nbytes, view.readonly, view)


def _address(view: memoryview) -> int:
    if view.nbytes == 0:
        return 0
    buffer = _PyBuffer()
    if _get_buffer(view, buffer, _PyBUF_SIMPLE) != 0:
        raise InvalidArgumentError("the object does not give its memory away")
    try:
        return int(buffer.buf)
    finally:
        _release_buffer(buffer)  # the view keeps it


def _tensor(tensor: Any) -> Memory:
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(
            f"the tensor is on {tensor.device}: copy it to memory of the CPU first, pinned memory if it goes often"
        )
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"the tensor is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): call contiguous() on it, "
            "or give its parts"
        )
    return Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), False, tensor)
