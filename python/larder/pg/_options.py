"""What a process group can be told when it is made: pg_options of init_process_group and new_group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidArgumentError

# The most ranks a group may have room for: member.MaxCap of the Go package.
MAX_RANKS = 1024


@dataclass
class BackendOptions:
    """Options of a process group of larder's.

    Attributes:
        max_group_size: how many ranks the group has room for, its own and those that come later; 0 for as many as it has.
        is_extension: this process was not there from the beginning: it is alone in the group until join_group.
        active_ranks: int32 memory, of max_group_size elements at least, that shows which ranks are active.
        auto_deactivate_on_failure: ranks that fail are taken out of the group. If not, they stay for deactivate_ranks.
        auto_sync_on_failure: that is done before the operation that noticed it ends. If not, sync_after_failure does it.
        retry: a collective that a failure has interrupted is run again by those that are left, and ends without an error.
        raise_on_failure: Work.wait raises PeerFailedError when ranks were lost. If not, it returns as if nothing had
            happened, and get_failed_ranks_hint and get_local_success tell.
    """

    max_group_size: int = 0
    is_extension: bool = False
    active_ranks: torch.Tensor | None = None
    auto_deactivate_on_failure: bool = True
    auto_sync_on_failure: bool = True
    retry: bool = False
    raise_on_failure: bool = True

    def capacity(self, group_size: int) -> int:
        """How many ranks a group has room for that begins with group_size, checked."""
        capacity = self.max_group_size if self.max_group_size > 0 else group_size
        if not group_size <= capacity <= MAX_RANKS:
            raise InvalidArgumentError(
                f"max_group_size is {capacity}: from {group_size}, which the group has already, to {MAX_RANKS}"
            )
        if self.auto_sync_on_failure and not self.auto_deactivate_on_failure:
            raise InvalidArgumentError("auto_sync_on_failure requires auto_deactivate_on_failure=True")
        mirror = self.active_ranks
        if mirror is not None and (mirror.dtype is not torch.int32 or not mirror.is_contiguous() or mirror.numel() < capacity):
            raise InvalidArgumentError(
                f"active_ranks is {mirror.dtype} with {mirror.numel()} elements: it must be contiguous int32, with at least {capacity}"
            )
        return capacity

    @property
    def failures(self) -> str:
        """What the library is to do about ranks that fail: pg.Policy."""
        if not self.auto_deactivate_on_failure:
            return "manual"
        return "automatic" if self.auto_sync_on_failure else "deferred"


_CONSTRUCTORS = """\
        (active_ranks), (active_ranks, is_extension), (active_ranks, is_extension, max_group_size)
        (max_group_size), (max_group_size, is_extension)
        (max_group_size, is_extension, auto_deactivate_on_failure, auto_sync_on_failure)"""


class MooncakeBackendOptions(BackendOptions):
    """The same, as programs for Mooncake's process groups write it::

        (active_ranks), (active_ranks, is_extension), (active_ranks, is_extension, max_group_size)
        (max_group_size), (max_group_size, is_extension)
        (max_group_size, is_extension, auto_deactivate_on_failure, auto_sync_on_failure)

    Positional or by name. max_world_size is another name of max_group_size. Without any argument it is what the backends
    mooncake and mooncake-cpu use when they are given nothing: failures do not raise, and collectives are run again.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        if "max_world_size" in named:
            named["max_group_size"] = named.pop("max_world_size")
        names = ["max_group_size", "is_extension", "auto_deactivate_on_failure", "auto_sync_on_failure"]
        if "active_ranks" in named or arguments and isinstance(arguments[0], torch.Tensor):
            names = ["active_ranks", "is_extension", "max_group_size"]
        wrong = len(arguments) > len(names) or bool(set(names[: len(arguments)]) & set(named) or set(named) - set(names))
        given = {**dict(zip(names, arguments)), **named}
        if wrong or len({"auto_deactivate_on_failure", "auto_sync_on_failure"} & set(given)) == 1:
            raise TypeError(f"MooncakeBackendOptions: incompatible arguments. It takes one of\n{_CONSTRUCTORS}")
        super().__init__(retry=True, raise_on_failure=False, **given)
