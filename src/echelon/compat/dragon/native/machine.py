"""`dragon.native.machine`: the nodes, their cores and GPUs. Without Dragon's runtime there is one node, this machine."""

from __future__ import annotations

import os
import socket

from echelon.common.errors import UsageError
from echelon.launcher.dragon import system

__all__ = ["Node", "System", "cpu_count", "current"]


class System(system.System):
    """All nodes. `nodes` are the numbers that `Node` takes."""

    @property
    def nodes(self) -> list[int]:
        return list(range(self.nnodes))

    @property
    def primary_node(self) -> Node:
        return Node(0)

    @property
    def restarted(self) -> bool:
        """Whether Dragon's runtime has been started again after a fault."""
        return bool(os.environ.get("DRAGON_RESILIENT_RESTART"))

    def cpu_count(self) -> int:
        return sum(len(cores) for _, cores, _ in self._nodes)


class Node:
    """One node, by its number among System().nodes or its name."""

    def __init__(self, ident: int | str) -> None:
        nodes = System()._nodes
        numbers = [n for n, (name, _, _) in enumerate(nodes) if ident in (n, name)]
        if not numbers:
            raise UsageError(f"Node({ident!r}): the nodes are {', '.join(f'{n} ({node[0]})' for n, node in enumerate(nodes))}.")
        self.h_uid = numbers[0]
        self.hostname, self.cpus, self.gpus = nodes[self.h_uid]
        self.name = self.hostname

    @property
    def num_cpus(self) -> int:
        return len(self.cpus)

    @property
    def num_gpus(self) -> int:
        return len(self.gpus)

    @property
    def is_primary(self) -> bool:
        return self.h_uid == 0


def current() -> Node:
    """The node of this process."""
    return Node(socket.gethostname())


def cpu_count() -> int:
    """The number of cores of all nodes."""
    return System().cpu_count()
