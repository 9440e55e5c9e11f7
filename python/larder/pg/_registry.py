"""How groups come to be: what torch.distributed calls for the backends, and what all groups of the process share.

The first group that torch makes is the world: it says which rank this process has. The process joins its job then, through a
store: one that LARDER_PG_STORE names (masters://host:port,host:port of a pool of larder's, file:///directory shared by all, or
tcp://host:port), so that no rank is special; or, without one, a store that rank 0 serves beside torch's own, which does not
survive rank 0. Under which name is agreed on through torch's store.
"""

from __future__ import annotations

import atexit
import ipaddress
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from .. import _lib
from ..errors import InvalidArgumentError, LarderError
from ..transfer import TransferEngine
from . import _native, _torch1
from ._group import ProcessGroup, open_groups
from ._options import BackendOptions, MooncakeBackendOptions

# Under which key of torch's store the ranks agree on theirs.
_KEY = "larder/world"


class InvalidStateError(LarderError, RuntimeError):
    """It comes too late, or too early: the text says when it may be done."""


@dataclass
class Settings:
    """What was said before the first group was made."""

    host: str = ""
    nics: list[str] = field(default_factory=list)
    engine: TransferEngine | None = None
    collective_timeout: float = 10.0  # without progress, until ranks are asked whether they live
    p2p_timeout: float | None = None  # of a send or receive whose peer is late; None waits for it
    reconciliation_window: float = 0.5


settings = Settings()


class _Process:
    """What all groups of this process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.world: _native.World | None = None
        self.rank = -1
        self.engine: TransferEngine | None = None  # its own, for the NICs that were chosen
        self.served = ""  # where this process serves a store, which it does until it ends


process = _Process()


def started() -> bool:
    """Whether this process is part of a job."""
    return process.world is not None


def join_job(opts: Any, rank: int) -> _native.World:
    """The world of this process, which joins the job with its first group."""
    with process.lock:
        if process.world is None:
            store, job = _agree(opts.store, rank)
            engine = settings.engine
            if engine is None and settings.nics:
                engine = process.engine = TransferEngine(nics=settings.nics, listen=[f"{own_host()}:0"])
            config = {
                "job": job, "rank": rank, "store": store, "deadline": settings.collective_timeout,
                "timeout": opts.timeout.total_seconds(), "listen": _listen(), "token": os.environ.get("LARDER_PG_TOKEN", ""),
                "transports": [t for t in os.environ.get("LARDER_PG_TRANSPORTS", "").split(",") if t],
            }  # fmt: skip
            process.world = _native.World(config, engine._open() if engine is not None else 0)
            process.rank = rank
        return process.world


def leave_job() -> None:
    """Leave the job, if the last group was destroyed. The next group that is made begins another life in it."""
    with process.lock:
        if open_groups():
            return
        world, process.world = process.world, None
        engine, process.engine = process.engine, None
    if world is not None:
        world.close()
    if engine is not None:
        engine.close()


def _agree(store: Any, rank: int) -> tuple[str, str]:
    """The job's store and its name, as whoever comes first has said in torch's store."""
    url = os.environ.get("LARDER_PG_STORE", "")
    if url or rank == 0:
        if not url:
            if not process.served:
                process.served = _native.serve_store(f"{own_host()}:0")
            url = "tcp://" + process.served
        said = store.compare_set(_KEY, "", json.dumps({"store": url, "job": secrets.token_hex(8)}))
        store.set(_KEY, said)  # torch 1 wakes those who wait only when a key is set
    else:
        store.wait([_KEY])
        said = store.get(_KEY)
    agreed = json.loads(said)
    return agreed["store"], agreed["job"]


def own_host() -> str:
    """The address of this process for others: what set_host_ip said, or the one from which the way leads to MASTER_ADDR."""
    if settings.host:
        return settings.host
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((master, 9))  # sends nothing
            return str(s.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _listen() -> list[str]:
    """Where processes of other hosts reach this one: nowhere, if all are on this host."""
    host = own_host()
    try:
        if ipaddress.ip_address(host).is_loopback:
            return []
    except ValueError:
        pass  # a name
    return [f"{host}:0"]


def create(backend: str, defaults: Callable[[], BackendOptions]) -> Callable[[Any, Any], ProcessGroup]:
    """What torch calls to make a group of a backend."""

    def creator(opts: Any, pg_options: Any) -> ProcessGroup:
        options = pg_options if pg_options is not None else defaults()
        if not isinstance(options, BackendOptions):
            raise InvalidArgumentError(
                f"pg_options is {type(options).__name__}: give larder.pg.BackendOptions, or MooncakeBackendOptions"
            )
        rank, size, ranks = opts.group_rank, opts.group_size, list(opts.global_ranks_in_group)
        capacity = options.capacity(size)
        if not ranks:
            ranks = list(range(size))
        if len(ranks) != size or len(set(ranks)) != size:
            raise InvalidArgumentError(f"the group's ranks are {ranks}: {size} different ones")
        world = join_job(opts, ranks[rank])
        if ranks[rank] != process.rank:
            raise InvalidArgumentError(f"rank {rank} of the group is process {ranks[rank]}, and this is {process.rank}")
        name = str(opts.group_id)
        group = world.group(
            {
                "id": f"{backend}:{name}", "ranks": ranks, "capacity": capacity, "extension": options.is_extension,
                "failures": options.failures, "retry": options.retry, "timeout": opts.timeout.total_seconds(),
            }  # fmt: skip
        )
        return ProcessGroup(group, rank, size, options, backend, name, leave_job, lambda: settings.p2p_timeout)

    return creator


def register(name: str, device: str, defaults: Callable[[], BackendOptions]) -> None:
    """Make a backend known to torch.distributed, once."""
    if hasattr(dist.Backend, name.upper()):
        return
    _torch1.adapt(open_groups)
    if _torch1.PRESENT:
        dist.Backend.register_backend(name, create(name, defaults), extended_api=True)
    else:
        dist.Backend.register_backend(name, create(name, defaults), extended_api=True, devices=[device])


def mooncake_defaults() -> BackendOptions:
    """What the backends mooncake and mooncake-cpu do when they are told nothing."""
    flags = [
        os.environ.get(f"MOONCAKE_PG_AUTO_{what}_ON_FAILURE", "1").strip().lower() not in ("0", "false", "off", "no")
        for what in ("DEACTIVATE", "SYNC")
    ]
    return MooncakeBackendOptions(0, False, *flags)


@atexit.register
def _close() -> None:
    """Leave orderly what nobody has destroyed: torch 1 destroys nothing, and others should not have to find out."""
    if _lib.forked():
        return
    for group in open_groups():
        group.shutdown()
    leave_job()

