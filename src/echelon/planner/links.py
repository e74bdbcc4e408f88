"""The time of a collective: by NCCL's own model of its rings and trees, or as measured on a machine.

In each round a ring sends (ranks - 1) / ranks of a tensor, over as many channels as a node has adapters; a tree sends it up and
down again. Each has three protocols, from low latency to high bandwidth. NCCL chooses by the same estimate, so the least time is
taken. In-network reduction (NVLS, SHARP) is left out.

Source: NVIDIA/nccl, src/graph/tuning.cc, 2.19.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from echelon.planner.devices import Device

__all__ = ["Links"]

# Seconds by protocol (LL, LL128, Simple): for any collective, and for each step within a node and between nodes.
_RING = ((6.6e-6, 14.0e-6, 8.4e-6), (0.6e-6, 1.9e-6, 3.4e-6), (2.7e-6, 4.0e-6, 14.0e-6))
_TREE = ((6.8e-6, 14.0e-6, 0.0), (0.6e-6, 1.25e-6, 28e-6), (5.0e-6, 8.5e-6, 28e-6))
_SHARES = (1 / 4, 0.92, 1.0)  # of the bandwidth, by protocol
_TREE_SHARE = 0.92 * 0.85
_OF_TREE = (1 / 3.8, 120 / 128, 1.0)
_ROUNDS = {"all-reduce": 2}  # of a ring


@dataclass(frozen=True)
class Links:
    """The links between the ranks of a cluster, which are numbered node by node.

    Args:
        per_node: number of ranks of a node.
    """

    device: Device
    per_node: int

    def seconds(self, kind: str, size: int, ranks: Sequence[int]) -> float:
        """Seconds of one collective of these ranks, with no other traffic.

        Args:
            size: bytes of the whole tensor for all-gathers, reduce-scatters and all-reduces; otherwise bytes that a rank sends.
        """
        count = len(ranks)
        if count <= 1:
            return 0.0
        if self.device.collectives:
            return self._as_measured(kind, size, count)
        domain = self.device.domain or self.per_node
        together = [len(list(those)) for _, those in groupby(sorted(ranks), key=lambda rank: rank // domain)]
        nodes = len(together)
        # All devices of a node send to other nodes at the same time, each through its own adapter.
        out = min(together) * self.device.network
        bandwidth = self.device.node if nodes == 1 else min(self.device.node, out) if min(together) > 1 else out
        if not bandwidth:
            return 0.0
        if kind in ("send", "receive"):
            return _RING[0][0] + _RING[1 if nodes == 1 else 2][0] + size / bandwidth
        if kind == "all-to-all":
            outside = size * (count - max(together)) / count
            inside = size * (max(together) - 1) / count
            within = inside / self.device.node if self.device.node else 0.0
            return _RING[0][0] + max(within, outside / self.device.network if outside else 0.0)
        times = [self._ring(kind, size, count, nodes, bandwidth, protocol) for protocol in range(3)]
        if kind == "all-reduce":
            times += [self._tree(size, count, nodes, bandwidth, protocol) for protocol in range(3)]
        return min(times)

    def _ring(self, kind: str, size: int, count: int, nodes: int, bandwidth: float, protocol: int) -> float:
        base, inside, between = (each[protocol] for each in _RING)
        rounds = _ROUNDS.get(kind, 1)
        steps, outer = rounds * (count - 1), rounds * (nodes - 1)
        return base + (steps - outer) * inside + outer * between + size * steps / count / (bandwidth * _SHARES[protocol])

    def _tree(self, size: int, count: int, nodes: int, bandwidth: float, protocol: int) -> float:
        base, inside, between = (each[protocol] for each in _TREE)
        latency = base + 2 * ((count / nodes - 1) * inside + (nodes.bit_length() - 1) * between)
        return latency + 2 * size / (bandwidth * _TREE_SHARE * _OF_TREE[protocol])

    def _as_measured(self, kind: str, size: int, count: int) -> float:
        """The measurement with the nearest number of ranks, scaled by the number of steps of a ring."""
        rows = [each for each in self.device.collectives if each.kind == kind] or list(self.device.collectives)
        near = min(rows, key=lambda each: abs(each.ranks - count))
        more = (count - 1) / (near.ranks - 1)
        return near.latency * more + size / near.bandwidth * more * near.ranks / count
