"""`fully_shard` by its own names, and TorchTNT's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from echelon.contracts.arguments import several
from echelon.contracts.errors import UsageError, require
from echelon.parallel.blocks import Blocks, chosen_blocks, innermost_first
from echelon.parallel.data_mesh import flat_mesh
from echelon.parallel.precision import Precision
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe import Recipe
from echelon.parallel.sharding import Reduction, Sharding, offloads, shard
from echelon.parallel.strategy import Strategy
from echelon.parallel.units import check_prefetch
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["FSDP2Strategy"]


@dataclass(frozen=True, repr=False)
class FSDP2Strategy(Strategy):
    """Shard parameters, gradients and optimizer state: `fully_shard` of chosen submodules, then of the root.

    Args:
        modules_to_shard: names or classes of the submodules to shard one by one, or "all" that have parameters; by default
            the repeated blocks of the model.
        shard_predicates: functions of (name, submodule); what one of them accepts is sharded, too.
        reshard_after_forward: as in `fully_shard`.
        mp_policy: torch's MixedPrecisionPolicy; or a precision, in which parameters are gathered and blocks compute,
            while gradients are reduced in float32.
        cpu_offload: shards and optimizer state live in host memory: True, or torch's CPUOffloadPolicy.
        shard_on_largest_dim: split each parameter along its largest dimension instead of its first.
        shard_placement_fn: the `Shard` for a parameter, as in `fully_shard`.
        mesh: the ranks, as in `fully_shard`: 1-D, or 2-D (replicas, shards); by default all of them on one axis.
        sync_module_states: start from rank 0's values on every rank.
        forward_prefetch: gather the next block's parameters while one computes; a number says how many blocks ahead.
        backward_prefetch: how many blocks ahead in the backward pass; by default one, as `fully_shard` does by itself.
        param_init_fn: fills the own parameters of a submodule that is on the meta device.
        requires_gradient_sync, requires_all_reduce: as in FSDPStrategy.
    """

    name = "fsdp2"

    modules_to_shard: Literal["all"] | Iterable[str | type[nn.Module]] | None = None
    shard_predicates: Sequence[Callable[[str, nn.Module], bool]] = ()
    reshard_after_forward: bool | int = True
    mp_policy: str | torch.dtype | MixedPrecisionPolicy | None = None
    cpu_offload: bool | OffloadPolicy = False
    shard_on_largest_dim: bool = False
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    mesh: DeviceMesh | None = None
    sync_module_states: bool = True
    forward_prefetch: bool | int = False
    backward_prefetch: int | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prefetch(self.forward_prefetch, self.backward_prefetch)
        predicates = several("shard_predicates", self.shard_predicates, "a list of functions of (name, submodule)", callable)
        object.__setattr__(self, "shard_predicates", predicates)
        chosen = self.modules_to_shard
        if chosen is not None and not isinstance(chosen, str):
            chosen = several("modules_to_shard", chosen, "'all', or a list of names or classes")
            object.__setattr__(self, "modules_to_shard", chosen)
        for name in ("shard_placement_fn", "param_init_fn"):
            function = getattr(self, name)
            require(function is None or callable(function), name, "a function or None", function)
        kept = isinstance(self.reshard_after_forward, int)
        require(kept, "reshard_after_forward", "True, False or a number of ranks", self.reshard_after_forward)
        require(self.mesh is None or hasattr(self.mesh, "mesh_dim_names"), "mesh", "a DeviceMesh or None", self.mesh)

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        return shard(module, world, recipe, self.sharding(module, world))

    def sharding(self, module: nn.Module, world: World) -> Sharding:
        """What `shard` is told. Collective: groups may be made."""
        if self.shard_on_largest_dim and self.shard_placement_fn is not None:
            raise UsageError("shard_on_largest_dim and shard_placement_fn both choose the sharded dim. Give one of them.")
        offload, pin = offloads(self.cpu_offload, "FSDP2Strategy(cpu_offload=...)")
        return Sharding(
            self.mesh or flat_mesh(world),
            self.blocks_of(module),
            reshard_after_forward=self.reshard_after_forward,
            policy=_policy(self.mp_policy),
            offload=offload,
            pin_memory=pin,
            placement=_largest if self.shard_on_largest_dim else self.shard_placement_fn,
            from_rank0=self.sync_module_states,
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
            init=self.param_init_fn,
            reduction=Reduction(self.requires_gradient_sync, self.requires_all_reduce),
        )

    def blocks_of(self, module: nn.Module) -> Blocks | None:
        """What is sharded one by one, by the user's choice; None leaves it to echelon."""
        if self.modules_to_shard is None and not self.shard_predicates:
            return None
        named = [(n, m) for n, m in module.named_modules() if n]
        if self.modules_to_shard == "all":
            containers = (nn.ModuleList, nn.ModuleDict)  # they have no forward that could gather
            own = [(n, m) for n, m in named if any(True for _ in m.parameters(recurse=False))]
            return innermost_first([(n, m) for n, m in own if not isinstance(m, containers)])
        chosen = chosen_blocks(module, self.modules_to_shard or (), "FSDP2Strategy(modules_to_shard=...)")
        accepted = [(n, m) for n, m in named if (n, m) not in chosen and any(p(n, m) for p in self.shard_predicates)]
        if not chosen and not accepted:
            raise UsageError(f"shard_predicates must accept a submodule of {type(module).__name__}, got none.")
        return innermost_first([*chosen, *accepted])


def _policy(value: str | torch.dtype | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if value is None or isinstance(value, MixedPrecisionPolicy):
        return value
    dtype = Precision.of(value).dtype
    return MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _largest(parameter: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(max(range(parameter.dim()), key=lambda d: parameter.shape[d]) if parameter.dim() else 0)
