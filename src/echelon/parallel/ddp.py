"""Data parallelism with whole models: torch's DistributedDataParallel.

Communication: one broadcast of parameters and buffers at the start; then, in the backward pass of a window's last
micro-batch, all-reduces of gradient buckets, overlapped with the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.contracts.errors import UsageError
from echelon.parallel.strategy import Prepared, Strategy, WrapperPrepared
from echelon.world.init import World, ensure_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from echelon.parallel.parallelize import Recipe

__all__ = ["DDPPrepared", "DDPStrategy"]


class DDPPrepared(WrapperPrepared[DistributedDataParallel]):
    """A module in DistributedDataParallel, ours or the user's own."""

    def __init__(self, module: DistributedDataParallel, world: World) -> None:
        group = module.process_group
        super().__init__(module, dist.get_rank(group), dist.get_world_size(group))

    @property
    def forward_is_collective(self) -> bool:  # type: ignore[override]
        """Before a forward, rank 0's buffers go to all, in evaluations too."""
        return bool(self.module.broadcast_buffers) and any(True for _ in self.module.buffers())


@dataclass(frozen=True)
class DDPStrategy(Strategy):
    """DistributedDataParallel's options, under its names; defaults are torch's, except for `gradient_as_bucket_view`.

    Args:
        broadcast_buffers: send rank 0's buffers (batch-norm statistics) to all before each forward.
        bucket_cap_mb: size of a gradient bucket in MiB; None is torch's 25.
        gradient_as_bucket_view: gradients share memory with the buckets, which saves a copy; the values are the same.
        comm_hook, comm_state: replaces the all-reduce of a bucket, as `register_comm_hook` describes.
        check_reduction: torch accepts it and has not used it for years.
        sync_batchnorm: batch norm over the global batch; torch has it for GPUs only.
    """

    name = "ddp"

    output_device: int | None = None
    dim: int = 0
    broadcast_buffers: bool = True
    process_group: dist.ProcessGroup | None = None
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_state: object | None = None
    comm_hook: Callable[[Any, Any], Any] | None = None
    sync_batchnorm: bool = False

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        ensure_group(world.device)
        module = module.to(world.device)
        if not any(p.requires_grad for p in module.parameters()):
            return Prepared(recipe.compile(recipe.recompute(module)), world.rank, world.size)  # nothing to reduce
        if self.sync_batchnorm:
            if world.device.type == "cpu":
                raise UsageError("DDPStrategy(sync_batchnorm=True): torch's SyncBatchNorm works on GPUs only.")
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module, self.process_group)
        module = recipe.compile(recipe.recompute(module))
        # torch 2.13 warns of the argument; its default says the same without it.
        buffers: dict[str, Any] = {} if self.broadcast_buffers else {"broadcast_buffers": False}
        wrapped = DistributedDataParallel(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            output_device=self.output_device,
            dim=self.dim,
            **buffers,
            process_group=self.process_group,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            check_reduction=self.check_reduction,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        if self.comm_hook is not None:
            wrapped.register_comm_hook(self.comm_state, self.comm_hook)
        return DDPPrepared(wrapped, world)
