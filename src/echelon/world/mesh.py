"""How the ranks are laid out: a grid whose axes are kinds of parallelism, and torch's DeviceMesh over it.

The axes, slowest first: `dp_replicate` x `dp_shard` x `tp`. Ranks of one tensor-parallel group are neighbours, which launchers
place on one machine; rank r works on the data of data-parallel rank `r // tp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from echelon.contracts.errors import UsageError
from echelon.world.init import ensure_group
from echelon.world.timeout import inherit_timeout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelDims"]


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the axes; their product is the world size. `ParallelDims.of` checks that and fills in what is left.

    Args:
        dp_replicate: groups of ranks that each hold the whole model between them, on different samples.
        dp_shard: ranks that split parameters among them, on different samples.
        tp: ranks that split single layers among them, on the same samples.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @classmethod
    def of(cls, world_size: int, *, dp_replicate: int = 1, dp_shard: int | None = None, tp: int = 1) -> ParallelDims:
        """The layout of `world_size` ranks; `dp_shard` defaults to what the others leave.

        Raises:
            UsageError: the sizes do not multiply to the world size; the nearest that do are named.
        """
        given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
        for name, size in given.items():
            if size is not None and size < 1:
                raise UsageError(f"{name} must be at least 1, got {size}.")
        if dp_shard is None and world_size % (dp_replicate * tp) == 0:
            dp_shard = world_size // (dp_replicate * tp)
        if dp_shard is None or dp_replicate * dp_shard * tp != world_size:
            raise UsageError(
                _misfit(world_size, {n: s for n, s in given.items() if s is not None and (s > 1 or n == "dp_shard")})
            )
        return cls(dp_replicate, dp_shard, tp)

    @property
    def size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp_size(self) -> int:
        """Ranks, or groups of them, that see different samples."""
        return self.dp_replicate * self.dp_shard

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def data_mesh(self, device: torch.device) -> DeviceMesh:
        """The data-parallel axes as `fully_shard` takes them: 1-D, or 2-D (dp_replicate, dp_shard) if there are replicas.

        Collective when it is first called for these sizes.
        """
        return self._root(device)[("dp_replicate", "dp_shard") if self.dp_replicate > 1 else ("dp_shard",)]

    def tp_mesh(self, device: torch.device) -> DeviceMesh:
        """The tensor-parallel axis, 1-D. Collective when it is first called for these sizes."""
        return self._root(device)["tp"]

    def _root(self, device: torch.device) -> DeviceMesh:
        """The mesh over all axes that are used; each costs a process group, so it is made once per default group."""
        from torch.distributed.device_mesh import init_device_mesh

        ensure_group(device)
        if self.size != dist.get_world_size():
            raise UsageError(_misfit(dist.get_world_size(), {f.name: getattr(self, f.name) for f in fields(self)}))
        global _made_under
        if _made_under is not dist.group.WORLD:
            _meshes.clear()  # of default groups that are gone
            _made_under = dist.group.WORLD
        key = (device.type, self)
        if key not in _meshes:
            sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
            # `fully_shard` wants an axis to shard over, even of one rank; the others are left out if they have no peers.
            names = tuple(n for n, s in sizes.items() if s > 1 or n == "dp_shard")
            mesh = _meshes[key] = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)
            for name in names:
                inherit_timeout(mesh.get_group(name))
        return _meshes[key]


# By device type and layout, for the default group of now.
_meshes: dict[tuple[str, ParallelDims], DeviceMesh] = {}
_made_under: dist.ProcessGroup | None = None


def _misfit(world_size: int, given: dict[str, int]) -> str:
    product = math.prod(given.values())
    asked = " x ".join(f"{name} {size}" for name, size in given.items())
    said = f"{asked}{f' = {product}' if len(given) > 1 else ''}, but {world_size} ranks run."
    # What the user may change in one place: the first axis that is not one, or the number of ranks.
    remedies = []
    for name, size in given.items():
        rest = product // size
        if world_size % rest == 0 and size != world_size // rest:
            remedies.append(f"set {name} to {world_size // rest}")
    multiple = max(1, round(world_size / product)) * product
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    if len(given) == 1 and product not in divisors:
        name, size = next(iter(given.items()))
        near = sorted(divisors, key=lambda d: (abs(d - size), d))[:2]
        remedies = [f"set {name} to {' or '.join(str(d) for d in sorted(near))}"]
    if multiple != world_size:
        remedies.append(f"start {multiple} ranks")
    return f"{said} {', or '.join(remedies).capitalize()}."
