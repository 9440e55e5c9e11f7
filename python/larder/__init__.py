"""Larder for Python: memory of other processes, read and written directly.

:class:`TransferEngine` moves bytes between memory of this process and memory that other processes have registered: mapped
where both are on one host, by RDMA or TCP otherwise.

The package calls liblarder.so, a Go library. A process that was forked after it was loaded cannot use it, and every call there
raises :class:`ForkError`: start processes with ``multiprocessing.get_context("spawn")``.
"""

from ._version import __version__
from .errors import (
    CanceledError,
    ChecksumError,
    ClosedError,
    ForkError,
    FullError,
    InactiveError,
    InternalError,
    InvalidArgumentError,
    IsolatedError,
    LarderError,
    LibraryError,
    MemoryGoneError,
    MismatchError,
    MissingError,
    NoPathError,
    OutOfRangeError,
    PeerFailedError,
    ReadOnlyError,
    RefusedError,
    StaleError,
    StorageError,
    TimedOutError,
    UncertainError,
    UnknownNameError,
    UnsettledError,
)
from .transfer import Buffer, Notification, RemoteBuffer, Segment, State, Transfer, TransferEngine

__all__ = [
    "Buffer",
    "CanceledError",
    "ChecksumError",
    "ClosedError",
    "ForkError",
    "FullError",
    "InactiveError",
    "InternalError",
    "InvalidArgumentError",
    "IsolatedError",
    "LarderError",
    "LibraryError",
    "MemoryGoneError",
    "MismatchError",
    "MissingError",
    "NoPathError",
    "Notification",
    "OutOfRangeError",
    "PeerFailedError",
    "ReadOnlyError",
    "RefusedError",
    "RemoteBuffer",
    "Segment",
    "StaleError",
    "State",
    "StorageError",
    "TimedOutError",
    "Transfer",
    "TransferEngine",
    "UncertainError",
    "UnknownNameError",
    "UnsettledError",
    "__version__",
]
