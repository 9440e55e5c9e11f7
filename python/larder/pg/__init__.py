"""Process groups for torch.distributed that go on when ranks die.

Importing it registers two backends: ``larder-cpu`` for tensors in the host's memory, and ``larder`` for those in a GPU's, which
go through pinned memory of the host::

    import torch.distributed as dist
    import larder.pg

    dist.init_process_group("larder-cpu", rank=rank, world_size=4)
    dist.all_reduce(tensor)

Everything that torch.distributed does with a group works as with any other backend. Ranks that die are taken out of the group:
the collective that was under way raises :class:`larder.PeerFailedError` at the others, or is run again by them if
``BackendOptions(retry=True)`` says so, and those after it have the ranks that are left. A new process takes the place of one
that has died, or a place that was kept free, while the others go on::

    # the new process, under the rank that has died
    dist.init_process_group("larder-cpu", rank=2, world_size=4, pg_options=larder.pg.BackendOptions(is_extension=True))
    larder.pg.join_group(dist.group.WORLD)
    # the others
    if all(larder.pg.get_peer_state(dist.group.WORLD, [2])):
        larder.pg.recover_ranks(dist.group.WORLD, [2])

Processes are started with spawn, or by a launcher: see :class:`larder.ForkError`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..transfer import TransferEngine
from . import _registry
from ._compat import install_compat
from ._group import ProcessGroup
from ._options import BackendOptions, MooncakeBackendOptions
from ._registry import InvalidStateError, settings
from ._work import Gathered, Work

__all__ = [
    "BackendOptions",
    "InvalidStateError",
    "MooncakeBackendOptions",
    "ProcessGroup",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncStatus",
    "ViewUpdateStatus",
    "activate_ranks",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_current_epoch",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "install_compat",
    "join_group",
    "recover_ranks",
    "set_collective_timeout_us",
    "set_device_filter",
    "set_fault_reconciliation_window_us",
    "set_host_ip",
    "set_p2p_timeout_us",
    "set_transfer_engine",
    "sync_after_failure",
]

# How long members may take to agree on something, in seconds; and how long join_group waits for somebody to activate.
_AGREE_TIMEOUT = 60.0
_JOIN_TIMEOUT = 300.0


class ProposalStatus(enum.IntEnum):
    """What became of a change of the active ranks."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2  # some of them failed meanwhile


ViewUpdateStatus = ProposalStatus


class SyncStatus(enum.IntEnum):
    """What sync_after_failure has found."""

    Rejected = 0
    Reconciled = 1
    NoPending = 2


@dataclass(frozen=True)
class ProposeViewUpdateResponse:
    """The answer of activate_ranks and deactivate_ranks."""

    status: ProposalStatus
    new_epoch: int
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


@dataclass(frozen=True)
class SyncAfterFailureResponse:
    """The answer of sync_after_failure."""

    status: SyncStatus
    reject_reason: str = ""


def _group(pg: Any) -> ProcessGroup:
    if not isinstance(pg, ProcessGroup):
        raise InvalidArgumentError(
            f"{type(pg).__name__} is no process group of larder's: give dist.group.WORLD or what new_group has returned, of backend "
            "larder or larder-cpu"
        )
    return pg


def _too_late(what: str, changed: bool) -> None:
    if changed and _registry.started():
        raise InvalidStateError(f"{what} comes before the first init_process_group, and stays as it was then")


# Before the first group.


def set_host_ip(host: str) -> None:
    """The address at which other hosts reach this process. Otherwise it is the one from which the way leads to MASTER_ADDR."""
    if not host:
        raise InvalidArgumentError("set_host_ip: an empty address")
    _too_late("set_host_ip", host != settings.host)
    settings.host = host


def set_device_filter(devices: Sequence[str]) -> None:
    """The NICs to use for RDMA, as mlx5_0."""
    nics = sorted(set(devices))
    _too_late("set_device_filter", nics != settings.nics)
    settings.nics = nics


def set_transfer_engine(engine: TransferEngine | None) -> None:
    """The engine by which other hosts are reached over RDMA. It stays the caller's, who closes it after all groups."""
    if engine is not None and not isinstance(engine, TransferEngine):
        raise InvalidArgumentError(f"{type(engine).__name__} is no larder.TransferEngine")
    _too_late("set_transfer_engine", engine is not settings.engine)
    settings.engine = engine


def _seconds(microseconds: int, what: str) -> float:
    if microseconds < 0:
        raise InvalidArgumentError(f"{what}: {microseconds} us")
    return microseconds / 1e6


def set_collective_timeout_us(microseconds: int) -> None:
    """How long a collective may make no progress until its ranks are asked whether they live, 10 s if nothing is said. Ranks that
    are only late are waited for. It holds from the next init_process_group on."""
    settings.collective_timeout = _seconds(microseconds, "set_collective_timeout_us")


def set_p2p_timeout_us(microseconds: int) -> None:
    """How long waiting for a send or receive that begins later may take if wait is not told: then wait raises TimedOutError, or
    returns False in Mooncake's groups, get_local_success is False, and the message goes on. If nothing is said it waits for as long
    as the peer lives. It ends at once when the peer is known to be dead, as it does in any case."""
    settings.p2p_timeout = _seconds(microseconds, "set_p2p_timeout_us")


def set_fault_reconciliation_window_us(microseconds: int) -> None:
    """Accepted for programs that set it, and without an effect: there is no window of a fixed length here. Failures are reconciled
    when all that are left have reported, 500 ms after the last report at most."""
    settings.reconciliation_window = _seconds(microseconds, "set_fault_reconciliation_window_us")


# A group's ranks.


def get_active_ranks(pg: Any) -> torch.Tensor:
    """int32[max_group_size], 1 for ranks that are active. It is the same tensor each time, and is brought up to date by this
    call and by each operation that has noticed a failure."""
    group = _group(pg)
    group.refresh()
    return group.active_ranks


def get_num_synced_ranks(pg: Any) -> int:
    """How many ranks are active, or may be activated."""
    return sum(get_peer_state(pg, range(_group(pg).native.capacity())))


def get_peer_state(pg: Any, ranks: Sequence[int]) -> list[bool]:
    """Of each rank whether it may be activated, or is active and well, as far as this process knows. It asks nobody."""
    group = _group(pg)
    capacity = group.native.capacity()
    for rank in ranks:
        if not 0 <= rank < capacity:
            raise InvalidArgumentError(f"rank {rank} of a group with room for {capacity}")
    return group.native.peer_state(list(ranks))


def activate_ranks(pg: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Have ranks take part that have called join_group. All active ranks may call it, or one. A rejection does not raise."""
    return _changed(pg, "activate", ranks)


recover_ranks = activate_ranks


def deactivate_ranks(pg: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Have ranks take part no more, whether they have failed or not."""
    return _changed(pg, "deactivate", ranks)


def _changed(pg: Any, what: str, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    group = _group(pg)
    answer = group.native.change(what, list(ranks), _AGREE_TIMEOUT)
    group.refresh()
    status = {"applied": ProposalStatus.Applied, "applied with dropped ranks": ProposalStatus.AppliedWithDroppedRanks}
    return ProposeViewUpdateResponse(
        status.get(answer["status"], ProposalStatus.Rejected), answer["epoch"], answer["dropped"] or [], answer["reason"]
    )


def join_group(pg: Any) -> None:
    """Take part from when an active rank activates this one. Operations of the group may not be called meanwhile."""
    group = _group(pg)
    group.native.join(_JOIN_TIMEOUT)
    group.refresh()


def sync_after_failure(pg: Any) -> SyncAfterFailureResponse:
    """Return when failures that this rank knows of have led to a group without those who failed."""
    group = _group(pg)
    answer = group.native.change("sync", [], _AGREE_TIMEOUT)
    group.refresh()
    status = {"reconciled": SyncStatus.Reconciled, "no pending": SyncStatus.NoPending}
    return SyncAfterFailureResponse(status.get(answer["status"], SyncStatus.Rejected), answer["reason"])


def get_current_epoch(pg: Any) -> int:
    """The number of the view in force: it grows with each change of the active ranks."""
    return _group(pg).native.epoch()


def extend_group_size_to(pg: Any, size: int) -> None:
    """Give the group room for more ranks. Their places are inactive until processes take them and are activated."""
    group = _group(pg)
    group.native.extend(size, _AGREE_TIMEOUT)
    if len(group.active_ranks) < size:
        group.active_ranks = torch.zeros(size, dtype=torch.int32)
    group.refresh()


# An operation's end.


def get_failed_ranks_hint(work: Any) -> torch.Tensor | None:
    """int32[max_group_size], 1 for ranks whose failure this operation has noticed. It waits for the operation. None for works of
    other backends."""
    if not isinstance(work, (Work, Gathered)):
        return None
    hint = torch.zeros(work.capacity(), dtype=torch.int32)
    for rank in work.failed_ranks():
        hint[rank] = 1
    return hint


def get_local_success(work: Any) -> bool:
    """Whether the operation has ended, and noticed no failure. It waits for it. False for works of other backends."""
    return isinstance(work, (Work, Gathered)) and work.succeeded()


_registry.register("larder-cpu", "cpu", BackendOptions)
_registry.register("larder", "cuda", BackendOptions)
if os.environ.get("LARDER_PG_COMPAT") == "mooncake":
    install_compat()
