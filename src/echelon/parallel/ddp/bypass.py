"""Forward passes that bypass a DistributedDataParallel: `self.net(x)` where `self.module(x)` was meant.

A backward pass reduces gradients only if the wrapper's forward ran before it. A hook records that. If a forward pass bypassed the
wrapper, the loss is sent through the wrapper's forward, with a module inside that computes nothing: the wrapper broadcasts
buffers and prepares its buckets as usual, and the backward pass reduces the gradients. Each rank decides for itself: one may
bypass the wrapper and another not.

If the user calls `backward`, nothing can intervene; then `watch` compares the ranks after the optimizer's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.common.errors import LayoutError
from echelon.parallel.gradients.unreduced_params import after_backward, hook_backward
from echelon.parallel.guards.guard import Guard
from echelon.parallel.patching import for_now
from echelon.parallel.state.partition import parameters_of
from echelon.world import agree

__all__ = ["Passes", "send_through", "watch"]


class Passes:
    """Records whether a wrapper's forward ran with gradients.

    Attributes:
        ran: set by each such forward; the reader clears it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.ran = False
        module.register_forward_pre_hook(self._hear)

    def _hear(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self.ran = True  # a flag, not a count: torch.compile would recompile for every new count


class _Through(nn.Module):
    """Stands in for a module: has its buffers, and returns its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def send_through(module: DistributedDataParallel, loss: torch.Tensor) -> torch.Tensor:
    """Send the loss through the wrapper's forward, with nothing inside, so that its backward pass reduces all gradients.
    Collective.

    Raises:
        UsageError: the wrapper casts to another dtype, which a call of the module inside did not do.
    """
    if module.mixed_precision is not None:
        raise LayoutError(
            "the module inside a DistributedDataParallel(mixed_precision=...) was called directly, so it computed in its own "
            "dtype. Call the wrapper: self.module(x)."
        )
    with for_now(module, module=_Through(module.module)):
        through: torch.Tensor = module.forward(loss)  # not a call: hooks on the wrapper are for the user's passes
    return through


def watch(modules: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[Guard]:
    """Check from now on, in each step of these optimizers, whether a DistributedDataParallel reduced its gradients.

    Args:
        modules: a unit's modules, by attribute name.
    """
    watches: dict[str, list[_Watch]] = {}
    for optimizer in optimizers:
        parameters = set(parameters_of(optimizer))
        watched = _watched.setdefault(optimizer, weakref.WeakKeyDictionary())
        for name, module in modules.items():
            if not isinstance(module, DistributedDataParallel) or dist.get_world_size(module.process_group) == 1:
                continue
            if module not in watched and not parameters.isdisjoint(module.parameters()):
                watched[module] = _Watch(module, optimizer)
            if module in watched:
                watches.setdefault(name, []).append(watched[module])
    return [Watches(watches)]


_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakKeyDictionary[nn.Module, _Watch]] = (
    weakref.WeakKeyDictionary()
)


class Watches(Guard):
    """The guard of a unit's wrappers, by attribute name.

    A rank in doubt sets a flag, which travels in the message that ranks exchange after a step anyway. Then all ranks compare,
    also those without a doubt.
    """

    def __init__(self, watches: Mapping[str, list[_Watch]]) -> None:
        self._watches = watches

    @property
    def in_doubt(self) -> bool:  # type: ignore[override]
        """Whether this rank has stepped with gradients that may not have been reduced."""
        return any(each.doubt for several in self._watches.values() for each in several)

    def compare(self) -> None:
        """Raise if parameters differ between ranks. Equal parameters are fine: scripts may reduce gradients by hand."""
        problem = None
        for name, several in self._watches.items():
            for each in several:
                each.doubt = False
            if (module := several[0].module()) is not None and (differs := _differing(module)) is not None:
                problem = problem or (
                    f"{name}.{differs} differs between ranks: a DistributedDataParallel reduces gradients only in the first "
                    "backward pass after its forward, and only those of parameters that were trained when it was made. Call "
                    f"self.{name}(x), not the module inside it; sum the losses and call backward once, or call the module for "
                    "each loss; wrap the module after unfreezing, or give an AutoUnit the plain module and layout='ddp', which "
                    "handles all of these; to train each rank by itself, give the unit the plain module."
                )
        agree.raise_on_all(problem)


class _Watch:
    """One optimizer's steps on one wrapper's parameters.

    Attributes:
        doubt: this rank's latest steps may differ from other ranks': the latest backward pass was not the first one after a
            forward of the wrapper, or parameters are trained that were frozen at the start.
    """

    def __init__(self, module: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.doubt = weakref.ref(module), False
        self._is_awaited = self._in_pass = self._is_reduced = False
        self._frozen = [weakref.ref(p) for p in module.parameters() if not p.requires_grad]
        self._unfrozen, self._doubtful, self._next_look = 0, 0, 1
        module.register_forward_hook(self._listen)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _listen(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._in_pass = False  # even if the last backward pass ended in an error
        self._is_awaited = self._is_awaited or bool(module.require_backward_grad_sync)
        hook_backward(output, self._hear)

    def _hear(self, gradient: torch.Tensor) -> None:
        if not self._in_pass:
            self._in_pass = True
            after_backward(self._end)

    def _end(self) -> None:
        self._in_pass, self._is_reduced, self._is_awaited = False, self._is_awaited, False

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):  # a closure runs its passes within the step
            self._look()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            self._look()

    def _look(self) -> None:
        unfrozen = sum(1 for ref in self._frozen if (p := ref()) is not None and p.requires_grad)
        is_reduced, self._is_reduced = self._is_reduced, False
        if is_reduced and not unfrozen:
            return
        if unfrozen != self._unfrozen:
            self._unfrozen, self._doubtful, self._next_look = unfrozen, 0, 1
        self._doubtful += 1
        if self._doubtful >= self._next_look:
            self._next_look *= 2
            self.doubt = True


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(callable(each) for each in (*args[1:], *kwargs.values()))  # the first is the optimizer


def _differing(module: DistributedDataParallel) -> str | None:
    """Name of a parameter that differs between the wrapper's ranks, or None. Collective over these."""
    named = (each for each in module.module.named_parameters() if each[0] not in module.parameters_to_ignore)
    everyones = agree.kinds([(name, _digest(parameter)) for name, parameter in named], module.process_group)
    pairs = (each for each in zip(*everyones, strict=False) if any(digest != each[0] for digest in each))
    return next((first[0] for first, *_ in pairs), None)


def _digest(parameter: torch.Tensor) -> str:
    """Equal for equal bits, and in practice different for different bits."""
    flat = parameter.detach()
    wide = flat.to(torch.complex128 if flat.is_complex() else torch.float64)
    return f"{float(wide.abs().sum()).hex()} {float(wide.real.sum()).hex()}"
