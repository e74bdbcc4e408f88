"""A module by its submodules: parameters and bytes, and for an example input FLOPs, shapes and times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from echelon.common.terminal import columns
from echelon.observe.amounts import milliseconds, quantity
from echelon.parallel.patching import Snapshot
from echelon.planner.flops import Parts, counter_of
from echelon.world import rng
from echelon.world.device import map_tensors

__all__ = ["ModuleSummary", "module_summary"]


@dataclass(repr=False)
class ModuleSummary:
    """A module with its submodules; `print` it, or its `table(depth)`. None stands for what only an example input tells.

    Attributes:
        name, kind: its path, which is "" for the module itself, and its class.
        num_parameters, num_trainable: a shared parameter counts once, one split over ranks as a whole.
        size_bytes: of parameters and buffers.
        is_lazy: it has parameters without a shape, which do not count yet.
        flops_forward, flops_backward: of matrix products, convolutions and attention; a multiplication and its addition are two.
        inputs, outputs: shape of the tensor, or a list of shapes.
        seconds: of one forward pass, until the GPU is done.
        parts: its submodules.
    """

    name: str = ""
    kind: str = ""
    num_parameters: int = 0
    num_trainable: int = 0
    size_bytes: int = 0
    is_lazy: bool = False
    flops_forward: int | None = None
    flops_backward: int | None = None
    inputs: Any = None
    outputs: Any = None
    seconds: float | None = None
    parts: list[ModuleSummary] = field(default_factory=list)

    def table(self, depth: int | None = None) -> str:
        """A line for the module and each submodule down to a depth; 0 is the module alone. Unknown columns are left out."""
        rows = [[_cell(getattr(each, name)) for name in _COLUMNS] for each in self._down_to(depth)]
        shown = [i for i, name in enumerate(_COLUMNS) if getattr(self, name) not in (None, "?")]  # "?" is TorchTNT's None
        return "\n".join(columns([[row[i] for i in shown] for row in (list(_COLUMNS.values()), *rows)]))

    def _down_to(self, depth: int | None) -> Iterator[ModuleSummary]:
        yield self
        for part in self.parts if depth != 0 else ():
            yield from part._down_to(None if depth is None else depth - 1)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


_COLUMNS = {
    "name": "name",
    "kind": "class",
    "num_parameters": "parameters",
    "num_trainable": "trainable",
    "size_bytes": "bytes",
    "flops_forward": "FLOPs forward",
    "flops_backward": "backward",
    "inputs": "inputs",
    "outputs": "outputs",
    "seconds": "time",
}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return milliseconds(value)
    return "-" if value is None else quantity(value) if isinstance(value, int) else str(value)


def module_summary(module: nn.Module, *inputs: Any, **named: Any) -> ModuleSummary:
    """What a module consists of, by submodule, and what a pass with example inputs takes. `print` shows a table.

    With inputs, the module runs forward twice, and backward from the mean of each output that has gradients. Its buffers, its
    counters, its gradients and the RNG states are the same afterwards. A lazy module is not run. If its parameters are split over
    ranks, every rank must call this.

    Args:
        module: any module.
        inputs, named: an example input, as its forward takes it.
    """
    is_lazy = any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters())
    return _summary("", module, _seen(module, inputs, named) if (inputs or named) and not is_lazy else {})


def _summary(name: str, module: nn.Module, seen: dict[str, dict[str, Any]]) -> ModuleSummary:
    every = list(module.parameters())
    known = [p for p in every if not isinstance(p, UninitializedParameter)]
    buffers = [b for b in module.buffers() if not isinstance(b, UninitializedBuffer)]
    parts = [_summary(f"{name}.{n}" if name else n, child, seen) for n, child in module.named_children()]
    found = seen.get(name, {})
    if seen and parts and name not in seen:  # a list of modules, which is never called itself
        found = {flops: _sum([getattr(part, flops) for part in parts]) for flops in ("flops_forward", "flops_backward")}
    return ModuleSummary(
        name,
        type(module).__name__,
        sum(p.numel() for p in known),
        sum(p.numel() for p in known if p.requires_grad),
        sum(each.numel() * each.element_size() for each in (*known, *buffers)),
        len(known) < len(every),
        parts=parts,
        **found,
    )


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _seen(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What passes with an example input show, by path."""
    with _as_it_was(module):
        counter = counter_of(module)
        with counter, torch.enable_grad():
            means = _means(module(*inputs, **named))
            forward = {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
            if means:
                torch.stack(means).sum().backward()
        total = {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
        with Parts(module) as parts, torch.no_grad():  # its own pass: the counter takes longer than the work
            module(*inputs, **named)
    return {
        path: {
            "flops_forward": forward.get(path, 0),
            "flops_backward": total.get(path, 0) - forward.get(path, 0) if means else None,
            "inputs": given,
            "outputs": made,
            "seconds": seconds,
        }
        for path, (given, made, seconds) in parts.first.items()
    }


def _means(output: Any) -> list[torch.Tensor]:
    means: list[torch.Tensor] = []

    def look(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            means.append(value.mean().float())
        return value

    map_tensors(output, look)
    return means


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Context after which buffers, counters, gradients and RNG states are as before it."""
    before = Snapshot(module)
    gradients = [(p, p.grad) for p in module.parameters()]
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with rng.unchanged(), torch.random.fork_rng(devices):
            yield
    finally:
        before.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
