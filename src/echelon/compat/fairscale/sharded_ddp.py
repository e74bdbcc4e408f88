"""Data parallelism whose gradients live on the ranks that own them: ZeRO stage 2 with whole parameters.

Like `fully_shard` without resharding, but parameters and gradients stay ordinary tensors, and none is ever split. So optimizers
that need whole matrices (Adafactor, Muon) or do not run on DTensors (Rprop) compute the same as on one rank.
Source: Rajbhandari et al. 2020, and FairScale's class of this name for the vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError
from echelon.compat.fairscale.groups import clip_owned_
from echelon.compat.fairscale.oss import OSS
from echelon.compat.fairscale.to_owners import ToOwners
from echelon.parallel.axes import Axis
from echelon.parallel.names import Kind, register
from echelon.parallel.prepared import WrapperPrepared
from echelon.parallel.state.partition import Partition
from echelon.world.init import World

__all__ = ["ShardedDDPPrepared", "ShardedDataParallel"]

logger = logging.getLogger(__name__)


class ShardedDataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks and kept only where the optimizer's state is.

    The gradient is the mean over the ranks of each rank's gradient, as in DistributedDataParallel: with a mean loss every rank
    should have equally many rows. After a backward pass `.grad` is None on ranks that do not own the parameter. The next backward
    pass is right however gradients are cleared, also by `optimizer.zero_grad()`. Other attributes are the module's.

    Args:
        module: on its device already; the same on all ranks.
        sharded_optimizer: divided optimizers (FairScale's OSS, or any with a `Partition`), together over all trained parameters.
        process_group: the optimizers' group, which is the default.
        broadcast_buffers: send rank 0's buffers (batch-norm statistics) to all before each forward, outside `no_sync`.
        sync_models_at_startup: start from rank 0's parameters and buffers.
        reduce_buffer_size: elements per bucket; 0 reduces every gradient by itself.
        auto_refresh_trainable: notice, at a forward, that parameters were frozen, unfrozen or cast since.
        reduce_fp16: send gradients in half precision: half the traffic, and their rounding.
        warn_on_trainable_params_changed: log a warning when that is noticed.
    Raises:
        LayoutError: an optimizer is not divided, or has another process group.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        optimizers = [sharded_optimizer] if isinstance(sharded_optimizer, torch.optim.Optimizer) else list(sharded_optimizer)
        self.sharded_optimizers = optimizers
        self.partitions = _partitions(optimizers, process_group)
        self.process_group = process_group if process_group is not None else self.partitions[0].group
        self.enable_broadcast_buffers = broadcast_buffers
        self.auto_refresh_trainable = auto_refresh_trainable
        self.reduce_fp16 = reduce_fp16
        self.warn_on_trainable_params_changed = warn_on_trainable_params_changed
        self.buffer_max_size = reduce_buffer_size
        self._form: list[torch.dtype | None] = []
        self._accumulated = False  # inside no_sync, since the last step
        if sync_models_at_startup:
            self._send(*(p.detach() for p in module.parameters()), *module.buffers())
        self._gradients = self._laid_out()
        settle = WeakMethod(self._settle)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: method() if (method := settle()) is not None else None)
            if isinstance(optimizer, OSS):
                optimizer.before_clipping.append(settle)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._gradients.restart()
        if self.auto_refresh_trainable and torch.is_grad_enabled() and self._form_now() != self._form:
            if self.warn_on_trainable_params_changed:
                logger.warning(
                    "parameters of %s were frozen, unfrozen or cast: the reduction follows", type(self.module).__name__
                )
            self.refresh_trainable()
        if self.enable_broadcast_buffers and self._gradients.enabled:
            self.sync_buffers()
        if torch.is_grad_enabled():
            self._gradients.is_pending = True
        return self.module(*args, **kwargs)

    def refresh_trainable(self) -> None:
        """Adapt to parameters that were frozen, unfrozen, added to the optimizers or moved since. Collective."""
        for partition in self.partitions:
            partition.refresh()
        before, self._gradients = self._gradients, self._laid_out()
        self._gradients.succeed(before)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate, on each rank. The next one after it, or the step, reduces the sum."""
        before, self._gradients.enabled = self._gradients.enabled, False
        self._accumulated = True
        try:
            yield
        finally:
            self._gradients.enabled = before

    def reduce(self) -> None:
        """Reduce what `no_sync` has accumulated, without another backward pass. Collective.

        Raises:
            AssertionError: there was no forward pass since the last reduction.
        """
        if not self._gradients.is_pending:
            raise AssertionError("No grads waiting to be reduced, maybe that this was called twice or there was no BW pass ?")
        self._gradients.finish()

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient is reduced to an owner."""
        return any(parameter in partition.owners for partition in self.partitions)

    @torch.no_grad()
    def whole_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient that the owner has, or None if it has none. Collective."""
        owner = next(partition.owners[parameter] for partition in self.partitions if parameter in partition.owners)
        exists = torch.tensor([parameter.grad is not None], dtype=torch.int32, device=parameter.device)
        dist.broadcast(exists, group_src=owner, group=self.process_group)
        if not exists.item():
            return None
        is_mine = dist.get_rank(self.process_group) == owner and parameter.grad is not None
        gradient = parameter.grad.clone() if is_mine else torch.empty_like(parameter)  # type: ignore[union-attr]
        dist.broadcast(gradient, group_src=owner, group=self.process_group)
        return gradient

    def sync_buffers(self, blocking: bool = False) -> None:
        """Send rank 0's buffers to all ranks. Collective; it always waits."""
        self._send(*self.module.buffers())

    def to(self, *args: Any, **kwargs: Any) -> ShardedDataParallel:
        """As `nn.Module.to`. Collective."""
        super().to(*args, **kwargs)
        self.refresh_trainable()
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _laid_out(self) -> ToOwners:
        owners = {p: owner for partition in self.partitions for p, owner in partition.owners.items()}
        loose = [n for n, p in self.module.named_parameters() if p.requires_grad and p not in owners]
        if loose and dist.get_rank() == 0:
            logger.warning("in no optimizer of this ShardedDataParallel, so never reduced: %s", ", ".join(loose))
        self._form = self._form_now()
        dtype = torch.float16 if self.reduce_fp16 else None
        return ToOwners(self.module.parameters(), owners, self.process_group, bucket_size=self.buffer_max_size, dtype=dtype)

    def _form_now(self) -> list[torch.dtype | None]:
        return [p.dtype if p.requires_grad else None for p in self.module.parameters()]

    @torch.no_grad()
    def _send(self, *tensors: torch.Tensor) -> None:
        if dist.get_world_size(self.process_group) == 1:
            return
        works = [dist.broadcast(t, group_src=0, group=self.process_group, async_op=True) for t in tensors]
        for work in works:
            assert work is not None
            work.wait()

    def _settle(self) -> None:
        """Before a step or clipping, reduce what only accumulated. It depends on no gradient, so all ranks do it or none."""
        if self._accumulated and self._gradients.is_pending:
            self._gradients.finish()
        self._accumulated = False


class ShardedDDPPrepared(WrapperPrepared[ShardedDataParallel]):
    """A module that the user put in ShardedDataParallel."""

    def __init__(self, module: ShardedDataParallel, world: World) -> None:
        super().__init__(module, [Axis.of(module.process_group)])

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self.module.whole_gradient(parameter) if self.module.owns(parameter) else parameter.grad

    @property
    def forward_is_collective(self) -> bool:  # type: ignore[override]
        """Rank 0's buffers are sent to all before a forward pass, in evaluations too."""
        return self.module.enable_broadcast_buffers and any(True for _ in self.module.buffers())

    def fix_order(self) -> None:
        raise LayoutError(
            "bit-equal training has no order for ShardedDataParallel's sums: pass the plain module, strategy 'zero1'."
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        own = [p for o in self.module.partitions for p in o.parameters if o.owns(p)]
        return clip_owned_(self.module.parameters(), own, max_norm, norm_type, self.module.process_group)


register(
    Kind(
        "sharded_ddp",
        lambda module: isinstance(module, ShardedDataParallel),
        ShardedDDPPrepared,
        inner="module",
    )
)


def _partitions(optimizers: Sequence[torch.optim.Optimizer], group: dist.ProcessGroup | None) -> list[Partition]:
    if not optimizers:
        raise LayoutError("ShardedDataParallel: no optimizer.")
    partitions = []
    for optimizer in optimizers:
        partition = Partition.of(optimizer)
        if partition is None:
            raise LayoutError(
                f"ShardedDataParallel: {type(optimizer).__name__} is not divided over the ranks. Build it as "
                f"OSS(params, {type(optimizer).__name__}, ...)."
            )
        partitions.append(partition)
    groups = [group or dist.group.WORLD] if group is not None else []
    groups += [partition.group or dist.group.WORLD for partition in partitions]
    if any(each is not groups[0] for each in groups):
        raise LayoutError("ShardedDataParallel: the optimizers have another process group. Give all of them the same.")
    return partitions
