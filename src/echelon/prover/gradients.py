"""Gradients as optimizers see them, by torch's own hook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from echelon.parallel.shards import local
from echelon.parallel.state.partition import Partition
from echelon.prover.micro import digest
from echelon.prover.objects import is_library, is_state, set_by
from echelon.prover.values import prepared_of, wholes

__all__ = ["GradientWatch", "rates_of"]


class GradientWatch:
    """Records gradients by name as a unit's optimizers see them: a parameter's gradient when an optimizer that holds it steps.

    The gradient of a parameter that no optimizer holds is taken at the first step of the update.

    Args:
        looks: gradients can be seen whole.
    """

    def __init__(self, unit: Any, *, looks: bool = True) -> None:
        self._unit, self._looks = unit, looks
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        self.held: set[str] = set()
        self.held_first: set[str] = set()  # by the optimizer that stepped first
        self.attributes: list[dict[str, int]] = []  # by update: checksums of what the script's optimizers keep
        self.owners: dict[str, int] = {}  # the rank that steps for a parameter, if the optimizer is partitioned
        self.strangers = 0  # parameters in an optimizer that belong to no module of the unit
        self.rates: list[list[float]] = []  # by update: those of the groups of the optimizer that stepped first
        self.loose: dict[str, torch.Tensor] = {}  # parameters with gradients in an optimizer and in no module, at the latest step
        self.loose_digests: dict[str, int] = {}  # of their gradients
        self._values: dict[str, torch.Tensor] = {}
        self._stepped = False

    def take(self) -> dict[str, torch.Tensor] | None:
        """The gradients seen since the last call; None if no optimizer stepped."""
        values = self._values if self._stepped else None
        self._values, self._stepped = {}, False
        return values

    def remove(self) -> None:
        self._handle.remove()

    def _note_loose(self, optimizer: torch.optim.Optimizer, named: set[int]) -> None:
        every = enumerate(p for group in optimizer.param_groups for p in group["params"])
        for number, parameter in every:
            gradient = parameter.grad
            if id(parameter) not in named and gradient is not None:
                name = _name(self._unit, optimizer, parameter, number)
                self.loose[name] = parameter
                self.loose_digests[name] = digest(local(gradient.to_dense() if gradient.is_sparse else gradient))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tracked = self._unit.tracked_optimizers().values()
        if any(Partition.behind(each) is optimizer is not each for each in tracked):
            return  # the inner optimizer of one that was seen
        parameters = _parameters_in([optimizer])
        others = _parameters_in(tracked) - parameters
        named = [(prefix + n, p, each) for prefix, each in prepared_of(self._unit) for n, p in each.named_parameters()]
        self.strangers = max(self.strangers, len(parameters - {id(p) for _, p, _ in named}))
        self.held |= {name for name, p, _ in named if id(p) in parameters}
        self._note_loose(optimizer, {id(p) for _, p, _ in named})
        for each in tracked:
            owners = {} if (divided := Partition.of(each)) is None else divided.owners
            self.owners.update({name: owners[p] for name, p, _ in named if p in owners})
        seen: dict[str, torch.Tensor] = {}
        for name, parameter, prepared in named if self._looks else ():
            if id(parameter) in others or not (id(parameter) in parameters or not self._stepped):
                continue
            gradient = prepared.gradient_of(parameter)
            if gradient is not None:
                seen[name] = gradient
        self._values.update(wholes(seen))
        if not self._stepped:
            self.rates.append(rates_of(optimizer))
            self.attributes.append({})
            self.held_first = self.held_first or {name for name, p, _ in named if id(p) in parameters}
        self.attributes[-1].update(_attributes_of(optimizer))
        self._stepped = True


def _name(unit: Any, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, number: int) -> str:
    held = next((n for n, each in getattr(unit, "__dict__", {}).items() if each is parameter), None)
    return held or f"{number} of {type(optimizer).__name__}"


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of its groups."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Checksums by name of what an optimizer class of the script's own keeps in attributes: slow weights, gradient averages."""
    kind = type(optimizer)
    own = {} if is_library(kind.__module__) else vars(optimizer)
    names = own.keys() - set_by(torch.optim.Optimizer)
    return {f"{kind.__name__}.{name}": digest(own[name]) for name in sorted(names) if is_state(own[name])}


def _parameters_in(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
