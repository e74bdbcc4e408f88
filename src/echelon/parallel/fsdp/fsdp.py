"""Fully sharded data parallelism: parameters, gradients and optimizer state are split over the ranks.

`FSDPStrategy` has `fully_shard`'s options, and those of the older FullyShardedDataParallel that mean something to it.
`sharding.py` says what is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.arguments import several
from echelon.common.errors import LayoutError, require
from echelon.parallel.fsdp.sharding import FSDPPrepared, Sharding, offloads, shard
from echelon.parallel.fsdp.units import check_prefetch, check_reshard
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.blocks import Blocks, blocks_by_policy, chosen_blocks
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.world.init import World, ensure_group, rank_info
from echelon.world.mesh import ParallelDims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
    from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy

__all__ = ["FSDPStrategy"]


@dataclass(frozen=True, repr=False)
class FSDPStrategy(Strategy):
    """Shard parameters, gradients and optimizer state with `fully_shard`; the older FSDP's options keep their meaning.

    Args:
        process_group: the ranks to shard over; a pair is (ranks of one copy, ranks with the same shard).
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP (whole parameters between forward and backward), HYBRID_SHARD and
            _HYBRID_SHARD_ZERO2 (the same with several copies: a machine has one, and one machine the most that leave two);
            torch's members or their names. For other numbers of copies: Layout(dp_replicate=..., fsdp=FSDPStrategy(...)).
        cpu_offload: shards and optimizer state live in host memory: True, or torch's CPUOffload or CPUOffloadPolicy.
        auto_wrap_policy: which submodules to shard one by one: a set of classes, or a policy of torch's or your own.
        mixed_precision: torch's MixedPrecision or MixedPrecisionPolicy; what it leaves open is the unit's precision. So
            MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) adds up gradients in bfloat16 whatever the precision is.
        ignored_modules, ignored_states: what stays whole. Its gradients are not reduced, so it must be frozen.
        param_init_fn: fills the own parameters of a submodule that is on the meta device.
        sync_module_states: start from rank 0's values on every rank.
        forward_prefetch: gather the next block's parameters while one computes; a number says how many blocks ahead.
        backward_prefetch: how many blocks ahead in the backward pass; by default one, as `fully_shard` does by itself.
        device_id: as scripts that wrap by hand give it; must be this rank's device.
        device_mesh: instead of a process group: 1-D, or 2-D (ranks with the same shard, ranks of one copy).
        blocks: names or classes of the submodules to shard one by one; by default the repeated blocks of the model.
        reshard_after_forward: free a block's whole parameters after its forward and gather them again for the backward.
            False keeps them (less traffic, more memory). A number frees them but for shards over so many ranks. A dict says it
            for some blocks, by patterns of their names: {"blocks.0": False, "blocks.*": True}. By default as
            `sharding_strategy` says.
        requires_gradient_sync: reduce-scatter gradients in every micro-batch of an accumulation window, so that a rank keeps its
            shards of them only. False waits for the last one: less traffic, and whole float32 gradients on every rank meanwhile.
        requires_all_reduce: with several copies, also all-reduce over these in every micro-batch. By default in the last one.
        shard_placement_fn: the `Shard` for a parameter, as in `fully_shard`; by default along the first dimension.
    """

    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    sharding_strategy: TorchShardingStrategy | str | None = None
    cpu_offload: bool | CPUOffload | CPUOffloadPolicy | None = None
    auto_wrap_policy: Callable[..., bool] | Iterable[type[nn.Module]] | None = None
    mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool = True
    forward_prefetch: bool | int = False
    backward_prefetch: int | None = None
    device_id: int | torch.device | None = None
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None
    device_mesh: DeviceMesh | None = None
    blocks: Sequence[str | type[nn.Module]] | None = None
    reshard_after_forward: bool | int | Mapping[str, bool | int] | None = None
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = False
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prefetch(self.forward_prefetch, self.backward_prefetch)
        group, mesh = self.process_group, self.device_mesh
        groups = group if isinstance(group, tuple) else (group,)
        are_groups = group is None or all(isinstance(each, dist.ProcessGroup) for each in groups)
        require(are_groups, "process_group", "a ProcessGroup, a pair of them, or None", group, kind=LayoutError)
        require(mesh is None or hasattr(mesh, "mesh_dim_names"), "device_mesh", "a DeviceMesh or None", mesh, kind=LayoutError)
        for name in ("param_init_fn", "shard_placement_fn"):
            function = getattr(self, name)
            require(function is None or callable(function), name, "a function or None", function, kind=LayoutError)
        check_reshard(self.reshard_after_forward)
        for name, what, kind in (
            ("ignored_modules", "a list of modules", nn.Module),
            ("ignored_states", "a list of modules or parameters", (nn.Module, torch.Tensor)),
        ):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, several(name, given, what, partial(_is_a, kind), kind=LayoutError))

    @property
    def name(self) -> str:  # type: ignore[override]
        reshard, replicas = sharding_named(self.sharding_strategy)
        keeps_whole = not reshard if self.reshard_after_forward is None else self.reshard_after_forward is False
        return "hsdp" if replicas else "zero2" if keeps_whole else "fsdp"

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        return shard(module, world, recipe, self.sharding(module, world), FSDPPrepared)

    def sharding(self, module: nn.Module, world: World) -> Sharding:
        """What `shard` is told. Collective: groups may be made."""
        self._check(world)
        reshard, replicas = sharding_named(self.sharding_strategy)
        if self.reshard_after_forward is not None:
            reshard = self.reshard_after_forward  # type: ignore[assignment]
        root_policy, policy = precision_policies(self.mixed_precision, module)
        offload, pin = offloads(self.cpu_offload, "FSDPStrategy(cpu_offload=...)")
        mesh, blocks = self._mesh(world, replicas), self.blocks_of(module)
        return Sharding(self, mesh, blocks, reshard, policy, root_policy, offload, pin, self._ignored())

    def _check(self, world: World) -> None:
        if self.blocks is not None and self.auto_wrap_policy is not None:
            raise LayoutError("blocks and auto_wrap_policy both choose what is sharded. Give one of them.")
        if self.process_group is not None and self.device_mesh is not None:
            raise LayoutError("process_group and device_mesh both choose the ranks. Give one of them.")
        mine = (world.device, world.device.index, torch.device(world.device.type))
        if self.device_id is not None and self.device_id not in mine:
            raise LayoutError(f"device_id must be this rank's device, {world.device}, got {self.device_id}. Leave it out.")

    def _mesh(self, world: World, replicas: bool) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        ensure_group(world.device)
        if self.device_mesh is not None:
            return self.device_mesh
        if isinstance(self.process_group, tuple):
            shards, copies = self.process_group
            grid = _grid(shards, copies)
            return DeviceMesh.from_group([copies, shards], world.device.type, grid, mesh_dim_names=("dp_replicate", "dp_shard"))
        if self.process_group is not None:
            return DeviceMesh.from_group(self.process_group, world.device.type, mesh_dim_names=("dp_shard",))
        size = replicas_default(world.size, rank_info().local_world_size) if replicas else world.size
        return ParallelDims.of(world.size, dp_replicate=world.size // size, dp_shard=size).data_mesh(world.device)

    def _ignored(self) -> set[nn.Parameter]:
        ignored = {p for m in self.ignored_modules or () for p in m.parameters()}
        for state in self.ignored_states or ():
            ignored |= set(state.parameters()) if isinstance(state, nn.Module) else {state}
        return ignored

    def blocks_of(self, module: nn.Module) -> Blocks | None:
        """What is sharded one by one, by the user's choice; None leaves it to echelon."""
        if self.auto_wrap_policy is not None:
            return blocks_by_policy(module, self.auto_wrap_policy, self._ignored())
        return None if self.blocks is None else chosen_blocks(module, self.blocks, "FSDPStrategy(blocks=...)")


def _is_a(kind: Any, value: Any) -> bool:
    return isinstance(value, kind)


def _grid(shards: dist.ProcessGroup, copies: dist.ProcessGroup) -> torch.Tensor:
    """The ranks as (replicas, shards), from the rows that the ranks with the same shard know. Collective."""
    row = torch.tensor(dist.get_process_group_ranks(shards))
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(copies))]
    dist.all_gather(rows, row, group=copies)
    return torch.stack(rows)


def replicas_default(world_size: int, local_size: int) -> int:
    """Ranks that split one copy: those of a machine, where traffic is fast; on one machine the most that leave two copies."""
    if 1 < local_size < world_size and world_size % local_size == 0:
        return local_size
    return next((d for d in range(world_size // 2, 0, -1) if world_size % d == 0), 1)


# The words of the older FullyShardedDataParallel, in those of `fully_shard`.

# (reshard after the forward, replicas of the shards)
_SHARDINGS = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}


def sharding_named(value: Any) -> tuple[bool, bool]:
    """A ShardingStrategy, or its name, as (reshard after the forward, replicas of the shards). None is FULL_SHARD.

    Raises:
        UsageError: NO_SHARD, which is "ddp"; anything unknown.
    """
    name = getattr(value, "name", value) or "FULL_SHARD"
    if name == "NO_SHARD":
        raise LayoutError("sharding_strategy must shard something, got NO_SHARD. Use layout 'ddp' instead.")
    require(name in _SHARDINGS, "sharding_strategy", f"one of {', '.join(_SHARDINGS)}", value, kind=LayoutError)
    return _SHARDINGS[name]


def precision_policies(value: Any, module: nn.Module) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The older FSDP's MixedPrecision, or `fully_shard`'s policy, as policies for (the root, the blocks).

    Raises:
        UsageError: an option without a counterpart.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if value is None or isinstance(value, MixedPrecisionPolicy):
        policy = value or MixedPrecisionPolicy()
        return policy, policy
    if not isinstance(value, MixedPrecision):
        raise LayoutError(f"mixed_precision must be torch's MixedPrecision or MixedPrecisionPolicy, got {type(value).__name__}.")
    if value.keep_low_precision_grads:
        raise LayoutError(
            "MixedPrecision(keep_low_precision_grads=True): gradients have the parameters' type. For gradients in half "
            "precision, build the module in that type."
        )
    if value.buffer_dtype is not None:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(value.buffer_dtype)
    types = {"param_dtype": value.param_dtype, "reduce_dtype": value.reduce_dtype or value.param_dtype}
    root = MixedPrecisionPolicy(**types, cast_forward_inputs=value.cast_root_forward_inputs or value.cast_forward_inputs)
    return root, MixedPrecisionPolicy(**types, cast_forward_inputs=value.cast_forward_inputs)
