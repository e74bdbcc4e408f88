"""The mesh of the data-parallel ranks that a layout shards over: all on one axis, or copies of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.world.init import World, ensure_group
from echelon.world.mesh import ParallelDims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["flat_mesh", "replica_mesh", "replicas_default"]


def flat_mesh(world: World) -> DeviceMesh:
    """All ranks on one axis."""
    ensure_group(world.device)
    return ParallelDims.of(world.size).data_mesh(world.device)


def replica_mesh(
    world: World, replicate_size: int | None = None, shard_size: int | None = None, *, local_size: int
) -> DeviceMesh:
    """Ranks as (replicas, shards); what is not given follows from the other, or is `replicas_default`.

    Raises:
        UsageError: the sizes do not multiply to the world size.
    """
    ensure_group(world.device)
    if replicate_size is None:
        size = shard_size if shard_size is not None else replicas_default(world.size, local_size)
        replicate_size = max(1, world.size // max(1, size))
        shard_size = size
    dims = ParallelDims.of(world.size, dp_replicate=replicate_size, dp_shard=shard_size)
    return dims.data_mesh(world.device)


def replicas_default(world_size: int, local_size: int) -> int:
    """Ranks that split one copy: those of a machine, where traffic is fast; on one machine the most that leave two copies."""
    if 1 < local_size < world_size and world_size % local_size == 0:
        return local_size
    return next((d for d in range(world_size // 2, 0, -1) if world_size % d == 0), 1)
