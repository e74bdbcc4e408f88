"""`dragon.infrastructure.policy`: where a rank runs, with Dragon's arguments in Dragon's order."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from echelon.compat.dragon.native.machine import Node
from echelon.launcher.dragon import system

__all__ = ["Policy"]


class _Distribution(enum.Enum):
    ROUNDROBIN = "roundrobin"
    BLOCK = "block"
    DEFAULT = "default"


class _WaitMode(enum.Enum):
    IDLE = "idle"
    SPIN = "spin"
    DEFAULT = "default"


class Policy(system.Policy):
    """`echelon.launching.Policy`.

    Args:
        host_id: the node's number in System().nodes; -1 is none.
        distribution, wait_mode, refcounted: no effect on a rank, which has a policy of its own.
    """

    Distribution = _Distribution
    WaitMode = _WaitMode

    def __init__(
        self,
        placement: Any = system.Policy.Placement.DEFAULT,
        host_name: str = "",
        host_id: int = -1,
        distribution: Any = _Distribution.DEFAULT,
        cpu_affinity: Sequence[int] = (),
        gpu_env_str: str = "",
        gpu_affinity: Sequence[int] = (),
        wait_mode: Any = _WaitMode.DEFAULT,
        refcounted: bool = True,
    ) -> None:
        if host_id >= 0 and not host_name:
            host_name = Node(host_id).hostname
        super().__init__(placement, host_name, cpu_affinity, gpu_affinity, gpu_env_str)
