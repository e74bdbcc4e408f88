"""What the loop knows of a module that was made parallel: the operations whose meaning depends on how.

The loop never asks which strategy it has; it speaks to a `Prepared` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel import gradients
from echelon.parallel.fixed_order import clip_in_order_
from echelon.parallel.loose import average_, check_equal
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.registry import kind_of
from echelon.world.init import World

__all__ = ["NO_CONTEXT", "Prepared", "WrapperPrepared"]

O = TypeVar("O")  # noqa: E741
M = TypeVar("M", bound=nn.Module)


NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()  # one for all: making one takes longer than entering it


class Prepared(Generic[M]):
    """A module made parallel, and the operations whose meaning depends on how. This base is one process.

    Attributes:
        module: what the user calls; may be a wrapper.
        dp_rank, dp_size: which share of every global batch this rank works on.
        forward_is_collective: every rank must call the module equally often, also to evaluate.
        order_is_fixed: `fix_order` was called.
        divides_optimizer: `optimizer` divides what it makes over the ranks, so it must be called.
        is_replica: another rank works on the very same samples and speaks for them; what this one counts weighs nothing.
        others: what the optimizer trains besides the module, such as a learned weight of a loss.
    """

    forward_is_collective = False
    is_replica = False
    order_is_fixed = False
    divides_optimizer = False

    def __init__(self, module: M, dp_rank: int = 0, dp_size: int = 1) -> None:
        self.module = module
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.others: list[nn.Parameter] = []
        self._loose: list[nn.Parameter] = []  # whose gradients nothing else reduces
        self._reduces = True

    @staticmethod
    def of(module: nn.Module, world: World) -> Prepared[Any]:
        """Recognise what the user did to a module by hand: nothing, a wrapper, or `fully_shard`. The kinds are in `registry`."""
        kind = kind_of(module)
        made: Prepared[Any] = Prepared(module) if kind is None else kind.prepared(module, world)
        return made

    def adopt(self) -> None:
        """Take up a module that the user has made parallel by hand, before it trains. Collective."""

    @property
    def unwrapped(self) -> nn.Module:
        """The module as its author wrote it, without the wrapper."""
        return self.module

    def optimizer(self, make: Callable[[M], O]) -> O:
        """Call `make(module)`: only now do the parameters have the form that they keep."""
        return make(self.module)

    @property
    def data_groups(self) -> list[dist.ProcessGroup | None]:
        """The groups of data-parallel ranks, one for each axis; none where every process trains by itself."""
        return [None] if self.dp_size > 1 else []

    def trains_also(self, others: list[nn.Parameter]) -> None:
        """Before training: what the optimizer has besides the module. Its gradients are averaged over the ranks, too. Collective.

        Raises:
            UsageError: these parameters are not the same on all ranks.
        """
        self.others = others
        groups = self.data_groups
        if groups:
            check_equal(others, groups, "the optimizer has parameters")
        self._loose = [*self._left_alone(), *others] if groups else []

    def _left_alone(self) -> list[nn.Parameter]:
        """Trained parameters of the module whose gradients the strategy does not reduce."""
        return []

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Context of one micro-batch's forward and backward: no gradient traffic before the window's last."""
        self._reduces = last
        return NO_CONTEXT

    def forward_backward(
        self,
        micro_batch: MicroBatch[Any],
        forward: Callable[[MicroBatch[Any]], tuple[torch.Tensor, Any]],
        backward: Callable[[torch.Tensor, MicroBatch[Any]], None],
    ) -> tuple[torch.Tensor, Any]:
        """`forward(micro_batch)` gives loss and outputs, `backward(loss, micro_batch)` follows. A pipeline interleaves many."""
        loss, outputs = forward(micro_batch)
        backward(loss, micro_batch)
        if self._loose:
            self._average_loose()
        return loss, outputs

    def _average_loose(self) -> None:
        """After a backward pass. Collective after a window's last."""
        if self._reduces:
            average_(self._loose, self.data_groups, in_order=self.order_is_fixed)

    def fix_order(self) -> None:
        """From now on, add gradients over the ranks in the order of `parallel/fixed_order`, and take norms in one order.

        Raises:
            UsageError: this kind of module has no fixed order.
        """
        self.order_is_fixed = True

    def parameters_written(self) -> None:
        """Call it after writing into parameters other than by an optimizer's step: what was gathered of them is forgotten.

        Raises:
            UsageError: this kind of module cannot forget.
        """

    def before_evaluation(self) -> None:
        """The ranks are about to evaluate, in step if `forward_is_collective`: they do so with the same buffers."""

    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient in place. Per rank; `factor` is the same on all."""
        gradients.scale_((*self.module.parameters(), *self.others), factor)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that the norm of the whole model's gradient is at most `max_norm`.

        Collective over the ranks that hold different parameters: each of them must call it.

        Args:
            max_norm: > 0, in loss units per unit of weight, that is after `scale_grads`.
            norm_type: 2 is the Euclidean norm; inf the largest absolute value.
        Returns:
            The norm before clipping, a 0-dim tensor, the same number on every rank.
        Source: Pascanu et al. 2013, section 3.2, as `torch.nn.utils.clip_grad_norm_` does it.
        """
        if self.order_is_fixed:
            return clip_in_order_(self.module.parameters(), max_norm, norm_type)
        return gradients.clip_by_norm_(self.module.parameters(), max_norm, norm_type)

    def clip_grad_value_(self, max_value: float) -> None:
        """Clamp every gradient element to [-max_value, max_value]."""
        gradients.clip_by_value_(self.module.parameters(), max_value)


class WrapperPrepared(Prepared[M]):
    """A module inside a wrapper that has `module` and `no_sync`: DistributedDataParallel and the older FSDP."""

    @property
    def unwrapped(self) -> nn.Module:
        inner: nn.Module = self.module.module  # type: ignore[assignment]
        return inner

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        self._reduces = last
        return NO_CONTEXT if last else self.module.no_sync()  # type: ignore[operator]
