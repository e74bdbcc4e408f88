"""Forward passes that go around a DistributedDataParallel: `self.net(x)` where `self.module(x)` was meant.

Its gradients are reduced in a backward pass only if its own forward came before. So that is noted, by a hook on it; and where a
forward pass went around it, the loss is sent through its forward instead, with a module that computes nothing in the place
of its own: buffers are sent, buckets are laid out and awaited as ever, and the backward pass reduces what it makes. Rank by rank:
one may go around it and another not.

Where the backward pass is the user's own, nothing can come between; then `watch` compares the ranks after the optimizer's step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

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
    """Whether a wrapper's forward ran, for a backward pass to follow.

    Attributes:
        ran: set by each such forward; the reader clears it.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[nn.Module, list[Passes]]] = weakref.WeakKeyDictionary()

    def __init__(self, module: nn.Module) -> None:
        self.ran = False
        if module not in Passes._all:
            Passes._all[module] = []
            module.register_forward_pre_hook(functools.partial(_hear, Passes._all[module]))
        Passes._all[module].append(self)

    @classmethod
    def of(cls, module: nn.Module) -> list[Passes]:
        """All that listen to it."""
        return cls._all.get(module, [])


def _hear(listeners: list[Passes], module: nn.Module, args: Any) -> None:
    # Flags, not counts: torch.compile would compile this again for every number.
    if torch.is_grad_enabled():
        for passes in listeners:
            passes.ran = True


class _Backwards:
    """Whether the latest backward pass through a wrapper was reduced: only the first after its forward is.

    Attributes:
        unreduced: it was not; gradients of every rank's own were added to what was reduced before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.unreduced = self._is_awaited = self._in_pass = False
        module.register_forward_hook(self._listen)

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
        self._in_pass, self.unreduced, self._is_awaited = False, not self._is_awaited, False


class _Through(nn.Module):
    """Stands in for a module, whose buffers it shows, and gives back what it gets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def send_through(module: DistributedDataParallel, loss: torch.Tensor) -> torch.Tensor:
    """The loss, after a forward of the wrapper around nothing: its backward pass reduces all gradients. Collective.

    Raises:
        UsageError: the wrapper computes in another type than its module, which then did not.
    """
    if module.mixed_precision is not None:
        raise LayoutError(
            "the module inside a DistributedDataParallel(mixed_precision=...) was called, which then computes in its own type. "
            "Call the wrapper: self.module(x)."
        )
    for passes in Passes.of(module):
        passes.ran = True
    with for_now(module, module=_Through(module.module)):
        through: torch.Tensor = module.forward(loss)  # not a call: hooks on the wrapper are for the user's passes
    return through


def watch(modules: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[Guard]:
    """Look, from now on, at each step with gradients of a DistributedDataParallel, whether it reduced them.

    Args:
        modules: a unit's, by the attributes' names.
    """
    watches: dict[str, list[_Watch]] = {}
    for optimizer in optimizers:
        parameters = set(parameters_of(optimizer))
        watched = _watched.setdefault(optimizer, weakref.WeakKeyDictionary())
        for name, module in modules.items():
            if not isinstance(module, DistributedDataParallel) or dist.get_world_size(module.process_group) == 1:
                continue
            if module not in watched and not parameters.isdisjoint(module.parameters()):
                watched[module] = _Watch(name, module, optimizer)
            if module in watched:
                watches.setdefault(name, []).append(watched[module])
    return [Watches(watches)]


_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakKeyDictionary[nn.Module, _Watch]] = (
    weakref.WeakKeyDictionary()
)


class Watches(Guard):
    """Of a unit, by the attributes' names of its wrappers.

    A rank that doubts says so by a flag, which all ranks learn with what else they tell each other after a step: the others, on
    which all went well, compare as well then.
    """

    def __init__(self, watches: Mapping[str, list[_Watch]]) -> None:
        self._watches = watches
        self._all = [each for several in watches.values() for each in several]

    @property
    def in_doubt(self) -> bool:  # type: ignore[override]
        """Whether this rank has stepped with what may not have been reduced."""
        return any(each.doubt for each in self._all)

    def compare(self) -> None:
        """Parameters must be equal all the same: reducing by hand is allowed."""
        doubts = [(name, each.doubt) for name, several in self._watches.items() for each in several if each.doubt]
        for each in self._all:
            each.doubt = ""
        doubts_of_all = agree.kinds(doubts)
        problem = None
        for name, why in dict.fromkeys((name, why) for each in doubts_of_all for name, why in each):
            if (differs := self._differs(name)) is not None and problem is None:
                problem = f"{differs} differs between ranks: {why}"
        agree.raise_on_all(problem)

    def _differs(self, name: str) -> str | None:
        """A parameter of a wrapper that is not the same on its ranks. Collective over these."""
        modules = [module for each in self._watches.get(name, ()) if (module := each.module()) is not None]
        if not modules:
            return None
        named = list(modules[0].module.named_parameters())
        digests = [(n, _digest(p)) for n, p in named if n not in modules[0].parameters_to_ignore]
        everyones = agree.kinds(digests, modules[0].process_group)
        for each in zip(*everyones, strict=False):
            if any(digest != each[0] for digest in each):
                return f"{name}.{each[0][0]}"
        return None


class _Watch:
    """One optimizer's steps on one wrapper's parameters.

    Attributes:
        doubt: why this rank's latest steps may not be those of the others.
    """

    def __init__(self, name: str, module: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self._name, self.module, self.doubt = name, weakref.ref(module), ""
        self._passes, self._backwards = Passes(module), _Backwards(module)
        self._frozen = [weakref.ref(p) for p in module.parameters() if not p.requires_grad]
        self._unfrozen, self._doubtful, self._next_look = 0, 0, 1
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):  # which makes its passes within the step
            self._look()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            self._look()
        self._passes.ran = False

    def _look(self) -> None:
        unfrozen = sum(1 for ref in self._frozen if (p := ref()) is not None and p.requires_grad)
        if self._passes.ran and not unfrozen and not self._backwards.unreduced:
            return
        if unfrozen != self._unfrozen:
            self._unfrozen, self._doubtful, self._next_look = unfrozen, 0, 1
        self._doubtful += 1
        if self._doubtful < self._next_look:
            return
        self._next_look *= 2
        if self._passes.ran and self._backwards.unreduced:
            self.doubt = (
                "a DistributedDataParallel reduces in the first backward pass after its forward, and another followed. Add the "
                "losses up and call backward once, or call the module for each."
            )
        elif self._passes.ran:
            self.doubt = (
                "it was frozen when training began, and a DistributedDataParallel leaves out what is frozen while it is made. "
                "Wrap the module after unfreezing, or give an AutoUnit the plain module and layout='ddp', which averages it."
            )
        else:
            self.doubt = (
                "the forward pass did not go through the DistributedDataParallel, so nothing was reduced. Call "
                f"self.{self._name}(x), not the module inside it; to train each rank by itself, give the unit the plain module."
            )


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(callable(each) for each in (*args[1:], *kwargs.values()))  # the first is the optimizer


def _digest(parameter: torch.Tensor) -> str:
    """The same for the same bits, and, for all that happens, other bits for others."""
    flat = parameter.detach()
    wide = flat.to(torch.complex128 if flat.is_complex() else torch.float64)
    return f"{float(wide.abs().sum()).hex()} {float(wide.real.sum()).hex()}"
