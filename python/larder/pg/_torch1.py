"""What torch 1 lacks: it tells a group of nothing when it is destroyed, and it counts processes where torch 2 does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Whether this is torch 1.
PRESENT = torch.__version__.startswith("1.")


def adapt(groups: Callable[[], list[Any]]) -> None:
    """Make torch 1 behave as torch 2 does, once. groups are the process's groups of larder's that were not destroyed."""
    c10d = dist.distributed_c10d
    if not PRESENT or hasattr(c10d.destroy_process_group, "larder"):
        return
    destroy, barrier = c10d.destroy_process_group, c10d._store_based_barrier

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        going = [g for g in groups() if group is None or group is dist.GroupMember.WORLD or g is group]
        destroy(group)
        for g in going:
            g.shutdown()

    # After it has made a group torch 1 waits at a barrier on its store until as many processes have come as the group has.
    # One that replaces another one is one too many, and would wait for ever.
    @functools.wraps(barrier)
    def store_based_barrier(*arguments: Any, **named: Any) -> None:
        if not any(g.options.is_extension for g in groups()):
            barrier(*arguments, **named)

    destroy_process_group.larder = True  # type: ignore[attr-defined]
    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group
    c10d._store_based_barrier = store_based_barrier
