"""Fully sharded data parallelism: parameters, gradients and optimizer state are split over the ranks.

Communication, per block of layers: an all-gather of its parameters before the forward and again before the backward,
a reduce-scatter of its gradients after the backward (of a window's last micro-batch). Built on torch's `fully_shard`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.contracts.errors import UsageError
from echelon.parallel.strategy import NO_CONTEXT, Prepared, Strategy, WrapperPrepared, local
from echelon.world.init import World, ensure_group

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy

    from echelon.parallel.parallelize import Recipe

__all__ = ["FSDP1Prepared", "FSDPPrepared", "FSDPStrategy", "blocks_to_shard"]


class FSDPPrepared(Prepared[nn.Module]):
    """A module that `fully_shard` has split, by us or by the user. Its parameters are DTensors."""

    forward_is_collective = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, world.rank, world.size)
        self._sync: bool = True

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if last != self._sync:
            sharded: FSDPModule = self.module  # type: ignore[assignment]
            sharded.set_requires_gradient_sync(last)
            self._sync = last
        return NO_CONTEXT

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As the base; parameters outside the shards are counted once, those inside over all ranks."""
        # Phase 1: the norm of the shards is a DTensor, which the ranks sum up; plain parameters are whole on every rank.
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        kinds: dict[Any, list[torch.Tensor]] = {}
        for grad in grads:
            kinds.setdefault(getattr(grad, "device_mesh", None), []).append(grad)
        norms = [_whole(torch.nn.utils.get_total_norm(same, norm_type)) for same in kinds.values()]
        if not norms:
            return torch.zeros((), device=next(self.module.parameters()).device)
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
        # Phase 2: one factor for all of them.
        torch._foreach_mul_([local(g) for g in grads], torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


class FSDP1Prepared(WrapperPrepared["FullyShardedDataParallel"]):
    """A module that the user wrapped in the older FullyShardedDataParallel; echelon itself does not build on it."""

    forward_is_collective = True

    def __init__(self, module: FullyShardedDataParallel, world: World) -> None:
        super().__init__(module, world.rank, world.size)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return self.module.clip_grad_norm_(max_norm, norm_type)


def blocks_to_shard(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model: children of a ModuleList, ModuleDict or Sequential that share a class, outermost first.

    Sharding layer by layer would cost a collective each; sharding only the root would gather the whole model at once.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, parent: nn.Module) -> None:
        children = [(f"{name}.{n}" if name else n, c) for n, c in parent.named_children()]
        if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            kinds = [type(c) for _, c in children]
            for child_name, child in children:
                own = any(True for _ in child.parameters())
                if own and kinds.count(type(child)) > 1 and any(True for _ in child.children()):
                    found.append((child_name, child))
                else:
                    visit(child_name, child)
            return
        for child_name, child in children:
            visit(child_name, child)

    visit("", module)
    return found


def broadcast_from_rank0(module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, as DistributedDataParallel does: what should start equal, does."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.detach(), src=0)


@dataclass(frozen=True)
class FSDPStrategy(Strategy):
    """Shard parameters, gradients and optimizer state with `fully_shard`.

    Args:
        blocks: names or classes of the submodules to shard one by one; by default the repeated blocks of the model.
        reshard_after_forward: free a block's whole parameters after its forward and gather them again for the backward.
            False keeps them (less traffic, more memory).
        mixed_precision: torch's MixedPrecisionPolicy; by default all is computed in the parameters' own type.
        sync_module_states: start from rank 0's values on every rank.
        forward_prefetch: gather the next block's parameters while one computes.
        limit_all_gathers: accepted for scripts written for the older FSDP; `fully_shard` always limits them.
        ignored_modules: submodules whose parameters stay whole. Their gradients are not reduced, so they must be frozen.
    """

    name = "fsdp"

    blocks: Sequence[str | type[nn.Module]] | None = None
    reshard_after_forward: bool | int = True
    mixed_precision: MixedPrecisionPolicy | None = None
    sync_module_states: bool = True
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    ignored_modules: Iterable[nn.Module] | None = None

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if not self.limit_all_gathers:
            raise UsageError("FSDPStrategy(limit_all_gathers=False): fully_shard always limits them. Leave it True.")
        ensure_group(world.device)
        module = module.to(world.device)
        if self.sync_module_states and world.size > 1:
            broadcast_from_rank0(module)
        module = recipe.compile(recipe.recompute(module))
        ignored = {p for m in self.ignored_modules or () for p in m.parameters()}
        loose = [n for n, p in module.named_parameters() if p in ignored and p.requires_grad]
        if loose and world.size > 1:
            raise UsageError(
                f"FSDPStrategy(ignored_modules=...): {loose[0]} would not be reduced over the ranks. Freeze it first."
            )
        options: dict[str, Any] = {
            "mesh": init_device_mesh(world.device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.mixed_precision or MixedPrecisionPolicy(),
            "ignored_params": ignored or None,
        }
        sharded = [fully_shard(block, **options) for _, block in self._blocks(module)]
        fully_shard(module, **options)
        if self.forward_prefetch:
            for block, following in itertools.pairwise(sharded):
                block.set_modules_to_forward_prefetch([following])
        return FSDPPrepared(module, world)

    def _blocks(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.blocks is None:
            return blocks_to_shard(module)
        names = {b for b in self.blocks if isinstance(b, str)}
        classes = tuple(b for b in self.blocks if isinstance(b, type))
        found = [
            (n, m) for n, m in module.named_modules() if m is not module and (n in names or (classes and isinstance(m, classes)))
        ]
        missing = names - {n for n, _ in found}
        if missing:
            raise UsageError(f"FSDPStrategy(blocks=...): no submodule named {sorted(missing)[0]!r} in {type(module).__name__}.")
        # Innermost first: fully_shard gives each parameter to the first call that reaches it.
        return sorted(found, key=lambda pair: -pair[0].count("."))
