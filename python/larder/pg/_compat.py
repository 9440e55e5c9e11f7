"""Mooncake's names for larder's process groups, on request, for programs that were written for those."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

from ..errors import LarderError

# What of this package stands in the module mooncake.pg.
_NAMES = [
    "MooncakeBackendOptions", "ProposalStatus", "ProposeViewUpdateResponse", "SyncAfterFailureResponse", "ViewUpdateStatus",
    "activate_ranks", "deactivate_ranks", "extend_group_size_to", "get_active_ranks", "get_current_epoch", "get_failed_ranks_hint",
    "get_local_success", "get_num_synced_ranks", "get_peer_state", "join_group", "recover_ranks", "set_collective_timeout_us",
    "set_device_filter", "set_fault_reconciliation_window_us", "set_host_ip", "set_p2p_timeout_us", "set_transfer_engine",
    "sync_after_failure",
]  # fmt: skip


def install_compat() -> None:
    """Register the backends ``mooncake`` and ``mooncake-cpu``, and a module ``mooncake.pg`` with the functions of this package.

    Importing larder.pg does it if LARDER_PG_COMPAT=mooncake is set. It is refused where the real mooncake.pg is installed.
    Groups of these backends tell of failures as Mooncake's do: waiting does not raise, get_failed_ranks_hint and
    get_local_success tell. MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE and MOONCAKE_PG_AUTO_SYNC_ON_FAILURE are honoured. Those of
    MOONCAKE_P2P_POOL_SIZE and MOONCAKE_P2P_CHUNK_SIZE have nothing to set: Mooncake's messages go through pools of registered
    chunks that all groups share, larder's through a ring of their pair, straight from the one's buffer and into the other's.
    """
    from . import _registry

    module = sys.modules.get("mooncake.pg")
    if module is not None and getattr(module, "__larder__", False):
        return
    if module is not None or _installed():
        raise LarderError(
            "the real mooncake.pg is installed: larder does not take its names. Uninstall it, or use the backends larder and larder-cpu"
        )
    _registry.register("mooncake-cpu", "cpu", _registry.mooncake_defaults)
    _registry.register("mooncake", "cuda", _registry.mooncake_defaults)
    _install(_registry)


def _installed() -> bool:
    try:
        return importlib.util.find_spec("mooncake.pg") is not None
    except (ImportError, ValueError):
        return False


def _install(registry: Any) -> None:
    package = sys.modules[__package__]
    module = types.ModuleType("mooncake.pg", "larder.pg, under Mooncake's names.")
    for name in _NAMES:
        setattr(module, name, getattr(package, name))
    module.createMooncakeBackend = registry.create("mooncake", registry.mooncake_defaults)  # type: ignore[attr-defined]
    module.createMooncakeCpuBackend = registry.create("mooncake-cpu", registry.mooncake_defaults)  # type: ignore[attr-defined]
    module.__larder__ = True  # type: ignore[attr-defined]
    parent = sys.modules.get("mooncake")
    if parent is None:
        parent = types.ModuleType("mooncake", "What of Mooncake larder stands in for.")
        parent.__path__ = []  # a package
        sys.modules["mooncake"] = parent
    parent.pg = module  # type: ignore[attr-defined]
    sys.modules["mooncake.pg"] = module
