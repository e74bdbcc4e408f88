"""The machine as a list of places for ranks, under Dragon's names: `System().gpu_policies()` is one `Policy` per GPU.

On Dragon's runtime the nodes are those of its inventory; elsewhere this node is the only one.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import Any

from echelon.common.arguments import several
from echelon.common.errors import ClusterError, require
from echelon.common.machine import usable_cores, visible_devices
from echelon.common.numbers import whole

__all__ = ["Policy", "System", "on_dragon"]


def on_dragon() -> bool:
    """Whether this process runs under Dragon's runtime, which sets the variable in every process that it starts."""
    return "DRAGON_MY_PUID" in os.environ and importlib.util.find_spec("dragon") is not None


class _Placement(Enum):
    LOCAL = "local"
    ANYWHERE = "anywhere"
    HOST_NAME = "host_name"
    HOST_ID = "host_id"
    DEFAULT = "default"


@dataclass(frozen=True)
class Policy:
    """Where one rank runs. `Policy()` is anywhere, which is this node if there is only one.

    Args:
        placement: Dragon's word for how the node is chosen; a `host_name` takes precedence.
        host_name: of the node; empty is any.
        cpu_affinity: the cores on which the rank may run; empty for all.
        gpu_affinity: the devices that it sees; empty for all.
        gpu_env_str: the variable that selects the GPUs, CUDA_VISIBLE_DEVICES by default.
    """

    Placement = _Placement

    placement: Any = _Placement.DEFAULT
    host_name: str = ""
    cpu_affinity: Sequence[int] = ()
    gpu_affinity: Sequence[int] = ()
    gpu_env_str: str = ""

    def __post_init__(self) -> None:
        for name in ("host_name", "gpu_env_str"):
            require(isinstance(getattr(self, name), str), name, "a string", getattr(self, name), kind=ClusterError)
        for name in ("cpu_affinity", "gpu_affinity"):
            is_number = lambda each: isinstance(each, Integral) and int(each) >= 0  # noqa: E731
            object.__setattr__(
                self, name, several(name, getattr(self, name), "a list of numbers of at least 0", is_number, kind=ClusterError)
            )


class System:
    """The nodes of this job.

    Attributes:
        hosts: their names.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[str, list[int], list[int]]]  # name, cores, GPUs
        if on_dragon():
            from dragon.native.machine import Node
            from dragon.native.machine import System as DragonSystem

            nodes = [Node(number) for number in DragonSystem().nodes]
            self._nodes = [(n.hostname, list(n.cpus), list(n.gpus or ())) for n in nodes]
        else:
            self._nodes = [(socket.gethostname(), _cores(), _gpus())]
        self.hosts = [name for name, _, _ in self._nodes]

    @property
    def nnodes(self) -> int:
        return len(self._nodes)

    def gpu_policies(self) -> list[Policy]:
        """One policy per GPU; empty without GPUs."""
        return [
            Policy(Policy.Placement.HOST_NAME, host, gpu_affinity=(device,))
            for host, _, devices in self._nodes
            for device in devices
        ]

    def cpu_policies(self, n: int | None = None) -> list[Policy]:
        """`n` ranks over all nodes, node by node, with each node's cores divided between its ranks; by default one per core.

        Raises:
            UsageError: n is less than 1.
        """
        count = sum(len(cores) for _, cores, _ in self._nodes) if n is None else whole("n", n, at_least=1, kind=ClusterError)
        policies = []
        for index, (host, cores, _) in enumerate(self._nodes):
            on_node = count // self.nnodes + (index < count % self.nnodes)
            for rank in range(on_node):
                share = cores[rank * len(cores) // on_node : (rank + 1) * len(cores) // on_node]
                # With more ranks than cores, the ranks share all cores.
                policies.append(Policy(Policy.Placement.HOST_NAME, host, tuple(share if on_node <= len(cores) else cores)))
        return policies

    def hostname_policies(self) -> list[Policy]:
        """One policy per node."""
        return [Policy(Policy.Placement.HOST_NAME, host) for host in self.hosts]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))


def _gpus() -> list[int]:
    """The devices that a rank could see, by their index among the visible ones."""
    return list(range(len(visible_devices())))
