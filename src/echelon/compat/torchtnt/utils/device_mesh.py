"""torchtnt.utils.device_mesh: the ranks as a grid of replicas, shards and tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.common.errors import UsageError
from echelon.world.init import ensure_group
from echelon.world.mesh import ParallelDims
from echelon.world.timeout import inherit_timeout

__all__ = ["GlobalMeshCoordinator", "create_device_mesh", "get_dp_local_rank", "get_dp_mesh", "get_dp_mesh_size"]


def _layout(dp_shard: int, dp_replicate: int, tp: int | None) -> ParallelDims:
    return ParallelDims.of(
        dist.get_world_size() if dist.is_initialized() else 1,
        dp_replicate=dp_replicate,
        dp_shard=None if dp_shard == -1 else dp_shard,
        tp=1 if tp is None else tp,
    )


def create_device_mesh(
    dp_shard: int = -1, dp_replicate: int = 1, tp: int | None = None, device_type: str | None = None
) -> DeviceMesh:
    """A mesh with the axes "dp_replicate", "dp_shard" and, if it is given, "tp"; "dp" is the first two as one. Collective.

    Args:
        dp_shard: ranks that split the parameters of one copy; -1 is what the others leave.
        dp_replicate: copies.
        tp: ranks that split single layers.
        device_type: by default "cuda" if there is a GPU, else "cpu".
    Raises:
        UsageError: the sizes do not multiply to the number of ranks.
    """
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        dims = _layout(dp_shard, dp_replicate, tp)
    except UsageError as error:
        size = dist.get_world_size() if dist.is_initialized() else 1
        given = f"dp_shard={dp_shard} * dp_replicate={dp_replicate} * tp={tp}"
        raise UsageError(f"World size {size} must be divisible by {given}: {error}") from None
    ensure_group(torch.device(kind))
    sizes = {"dp_replicate": dims.dp_replicate, "dp_shard": dims.dp_shard, **({} if tp is None else {"tp": tp})}
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        inherit_timeout(mesh.get_group(name))
    # torch has no public name for it; used with torch 2.13, and tests/compat/test_torchtnt_prepare.py notices a change.
    inherit_timeout(mesh[("dp_replicate", "dp_shard")]._flatten("dp").get_group())
    return mesh


class GlobalMeshCoordinator:
    """The mesh, and its parts by what they are for. Arguments are `create_device_mesh`'s; collective."""

    def __init__(self, dp_shard: int = -1, dp_replicate: int = 1, tp: int | None = None, device_type: str | None = None) -> None:
        self.device_mesh = create_device_mesh(dp_shard, dp_replicate, tp, device_type)
        self.dims = _layout(dp_shard, dp_replicate, tp)

    @property
    def dp_mesh(self) -> DeviceMesh:
        """As `fully_shard` takes it: the shards, or with several copies the axes (replicas, shards)."""
        return self.device_mesh[("dp_replicate", "dp_shard")] if self.dims.dp_replicate > 1 else self.device_mesh["dp_shard"]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The newer name."""
        return self.dp_mesh

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        names = self.device_mesh.mesh_dim_names or ()
        return self.device_mesh["tp"] if "tp" in names else None


def get_dp_mesh(global_mesh: GlobalMeshCoordinator) -> DeviceMesh:
    return global_mesh.dp_mesh


def get_dp_mesh_size(global_mesh: GlobalMeshCoordinator) -> int:
    """Ranks, or tensor-parallel groups of them, that see different samples."""
    return global_mesh.dims.dp_size


def get_dp_local_rank(global_mesh: GlobalMeshCoordinator) -> int:
    """Which share of the samples is this rank's: between 0 and `get_dp_mesh_size`."""
    return global_mesh.dims.dp_rank(dist.get_rank())
