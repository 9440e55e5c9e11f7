"""The exceptions of the package. All are :class:`LarderError`, and what fits is a built-in exception besides."""

from __future__ import annotations


class LarderError(Exception):
    """Whatever fails in larder. Its text says what to do, where something can be done.

    Attributes:
        code: the code of the wire (docs/WIRE.md), if a pool's master has answered with one, or would have; else 0.
    """

    code: int = 0


class LibraryError(LarderError, ImportError):
    """liblarder.so is missing, or is of another version than the package."""


class ForkError(LarderError, RuntimeError):
    """The process was forked after liblarder.so was loaded: start it with spawn instead."""


class InternalError(LarderError, RuntimeError):
    """A defect of larder. The text has what a report of it needs."""


class InvalidArgumentError(LarderError, ValueError):
    """An argument is wrong."""


class ClosedError(LarderError, ValueError):
    """The object was closed, as files say it."""


class TimedOutError(LarderError, TimeoutError):
    """It was not done in time. What was asked for does not happen later, unless it is a wait that has timed out."""


class CanceledError(LarderError):
    """It was given up before it was carried out."""


class StaleError(LarderError):
    """The remote buffer is not registered any more: refresh the segment. Nothing was read or written."""


class OutOfRangeError(LarderError, IndexError):
    """A request does not lie within its buffer."""


class ReadOnlyError(LarderError, ValueError):
    """Memory that may only be read was to be written, here or there."""


class NoPathError(LarderError, ConnectionError):
    """No way to the peer is left."""


class ChecksumError(LarderError):
    """Bytes arrived which are not those that were sent."""


class MemoryGoneError(LarderError):
    """Memory behind a buffer is gone: its file was truncated, or the memory failed."""


class StorageError(LarderError, OSError):
    """The storage under a remote buffer failed."""


class MissingError(LarderError):
    """Nothing is stored where a read asked."""


class FullError(LarderError):
    """The receiver has not taken its notifications: try later."""


class UncertainError(LarderError, ConnectionError):
    """The peer has not answered: it may have been told or not."""


class RefusedError(LarderError, ConnectionError):
    """The peer does not take this process: a wrong token, or another protocol."""


class UnsettledError(LarderError, ConnectionError):
    """The peer does not answer: bytes of a write may still land there, until :meth:`larder.Transfer.settled` returns True."""


class UnknownNameError(LarderError, LookupError):
    """No segment of that name is published, or it has no buffer of that name."""


class NoSpaceError(LarderError):
    """Nothing can be evicted, or the value is larger than the pool: unpin entries, close views, or enlarge the pool."""


class UnavailableError(LarderError, ConnectionError):
    """No master answers, or they have no leader. The call has been repeated until its time was over."""


class SessionExpiredError(LarderError):
    """The session ended while the call ran, and its memory went with it. There is another one by now: repeat the call."""


class RevokedError(LarderError):
    """The memory that a value was being written to was taken away: begin it again."""


class LeaseError(LarderError):
    """A lease ended before the bytes had been used: what was read may be wrong, so read it again."""


class PinnedError(LarderError):
    """A pin holds the entry."""


class LimitError(LarderError):
    """A limit is reached: of the protocol, the instance or the tenant."""


class ForbiddenError(LarderError, PermissionError):
    """It is not this tenant's, or this session's, to do."""


class ConflictError(LarderError):
    """Somebody else was first."""


class UnsupportedError(LarderError):
    """The server does not know this: it is older than the package."""


class PeerFailedError(LarderError, RuntimeError):
    """Ranks were lost while a collective ran, or before it could. What its memory holds is undefined; the group goes on
    without them.

    Attributes:
        ranks: those that were lost, by their ranks in the group.
    """

    ranks: tuple[int, ...] = ()


class MismatchError(LarderError, RuntimeError):
    """Another rank has called something else where this one has called this. The text names both."""


class InactiveError(LarderError, RuntimeError):
    """This rank is not active in the group: others have gone on without it. Join, and have an active rank activate it."""


class IsolatedError(LarderError, RuntimeError):
    """The store does not confirm this process any more: others may have gone on without it."""


# What the library adds to codes of the wire.
WIRE = 100

# By the codes of the library, which are those of python/native/errors.go. 5 is LarderError itself.
BY_CODE: dict[int, type[LarderError]] = {
    2: InternalError,
    3: InvalidArgumentError,
    4: ClosedError,
    5: LarderError,
    6: TimedOutError,
    7: CanceledError,
    8: StaleError,
    9: OutOfRangeError,
    10: ReadOnlyError,
    11: NoPathError,
    12: ChecksumError,
    13: MemoryGoneError,
    14: StorageError,
    15: MissingError,
    16: FullError,
    17: UncertainError,
    18: RefusedError,
    19: UnsettledError,
    20: UnknownNameError,
    21: PeerFailedError,
    22: MismatchError,
    23: InactiveError,
    24: IsolatedError,
    25: LeaseError,
    # Those of the wire, which are package protocol's.
    WIRE + 1: InvalidArgumentError,
    WIRE + 2: UnavailableError,
    WIRE + 3: UnavailableError,
    WIRE + 4: LarderError,
    WIRE + 5: CanceledError,
    WIRE + 6: SessionExpiredError,
    WIRE + 7: RevokedError,
    WIRE + 8: StaleError,
    WIRE + 9: OutOfRangeError,
    WIRE + 10: LarderError,
    WIRE + 11: InvalidArgumentError,
    WIRE + 12: InvalidArgumentError,
    WIRE + 13: NoSpaceError,
    WIRE + 14: UnavailableError,
    WIRE + 15: TimedOutError,
    WIRE + 16: LimitError,
    WIRE + 17: PinnedError,
    WIRE + 18: MissingError,
    WIRE + 19: ForbiddenError,
    WIRE + 20: UnsupportedError,
    WIRE + 21: UnavailableError,
    WIRE + 22: InternalError,
    WIRE + 23: TimedOutError,
    WIRE + 24: RevokedError,
    WIRE + 25: LarderError,
    WIRE + 26: UnavailableError,
    WIRE + 27: ForbiddenError,
    WIRE + 28: RefusedError,
    WIRE + 29: ConflictError,
}
