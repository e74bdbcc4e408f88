"""TorchTNT's FSDP2Strategy: `echelon.FSDPStrategy` with `fully_shard`'s own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from echelon.common.arguments import several
from echelon.common.errors import UsageError, require
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from echelon.parallel.recipe.blocks import Blocks, chosen_blocks, innermost_first
from echelon.parallel.recipe.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = ["FSDP2Strategy"]


@dataclass(frozen=True, repr=False, init=False)
class FSDP2Strategy(FSDPStrategy):
    """Shard parameters, gradients and optimizer state: `fully_shard` of chosen submodules, then of the root.

    Args:
        modules_to_shard: names or classes of the submodules to shard one by one, or "all" that have parameters; by default
            the repeated blocks of the model.
        shard_predicates: functions of (name, submodule); a submodule that one of them accepts is sharded, too.
        mp_policy: torch's MixedPrecisionPolicy; or a precision, in which parameters are gathered and blocks compute,
            while gradients are reduced in float32.
        shard_on_largest_dim: split each parameter along its largest dimension instead of its first.
        mesh: the ranks, as in `fully_shard`: 1-D, or 2-D (replicas, shards); by default all of them on one axis.
        options: `echelon.FSDPStrategy`'s.
    """

    name = "fsdp2"

    modules_to_shard: Literal["all"] | Iterable[str | type[nn.Module]] | None = None
    shard_predicates: Sequence[Callable[[str, nn.Module], bool]] = ()

    def __init__(
        self,
        modules_to_shard: Literal["all"] | Iterable[str | type[nn.Module]] | None = None,
        shard_predicates: Sequence[Callable[[str, nn.Module], bool]] = (),
        reshard_after_forward: bool | int = True,
        mp_policy: str | torch.dtype | MixedPrecisionPolicy | None = None,
        cpu_offload: bool | CPUOffloadPolicy = False,
        shard_on_largest_dim: bool = False,
        shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        if shard_on_largest_dim and shard_placement_fn is not None:
            raise UsageError("shard_on_largest_dim and shard_placement_fn both choose the sharded dim. Give one of them.")
        require(mesh is None or hasattr(mesh, "mesh_dim_names"), "mesh", "a DeviceMesh or None", mesh)
        kept = isinstance(reshard_after_forward, int)
        require(kept, "reshard_after_forward", "True, False or a number of ranks", reshard_after_forward)
        super().__init__(
            reshard_after_forward=reshard_after_forward,
            mixed_precision=_policy(mp_policy),
            cpu_offload=cpu_offload,
            shard_placement_fn=_largest if shard_on_largest_dim else shard_placement_fn,
            device_mesh=mesh,
            **options,
        )
        predicates = several("shard_predicates", shard_predicates, "a list of functions of (name, submodule)", callable)
        object.__setattr__(self, "shard_predicates", predicates)
        if modules_to_shard is not None and not isinstance(modules_to_shard, str):
            modules_to_shard = several("modules_to_shard", modules_to_shard, "'all', or a list of names or classes")
        object.__setattr__(self, "modules_to_shard", modules_to_shard)

    def blocks_of(self, module: nn.Module) -> Blocks | None:
        """The submodules that the user chose to shard one by one; None leaves the choice to echelon."""
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
