"""A summary of a module by submodule: parameters, bytes, and for an example input operations, shapes and time.

Operations are counted by torch's FlopCounterMode, and given as TorchTNT counts them: a multiplication and its addition are one.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils.flops import counter_of
from echelon.world import rng

__all__ = ["ModuleSummary", "get_module_summary", "get_summary_table", "prune_module_summary"]

_UNKNOWN = "?"


@dataclass(repr=False)
class ModuleSummary:
    """The summary of one module, its submodules included. "?" stands for what only an example input would tell.

    Attributes:
        module_name, module_type: its path from the root, which is "" for the root, and its class.
        num_parameters, num_trainable_parameters, size_bytes: a shared parameter counts once, one split over ranks as a whole.
        has_uninitialized_param: it has lazy parameters, which are not counted yet; a warning says so.
        flops_forward, flops_backward: of matrix products and convolutions; a multiplication and its addition are one.
        in_size, out_size: shape of the tensor, or a list of shapes.
        forward_elapsed_time_ms: of a single pass, until the GPU is done.
        submodule_summaries: by path.
    """

    module_name: str = ""
    module_type: str = ""
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    size_bytes: int = 0
    has_uninitialized_param: bool = False
    flops_forward: int | str = _UNKNOWN
    flops_backward: int | str = _UNKNOWN
    in_size: list[Any] | str = _UNKNOWN
    out_size: list[Any] | str = _UNKNOWN
    forward_elapsed_time_ms: float | str = _UNKNOWN
    submodule_summaries: dict[str, ModuleSummary] = field(default_factory=dict)

    def __str__(self) -> str:
        return get_summary_table(self)

    __repr__ = __str__


def get_module_summary(
    module: nn.Module, module_args: tuple[Any, ...] | None = None, module_kwargs: Mapping[str, Any] | None = None
) -> ModuleSummary:
    """Summarise a module and all its submodules.

    With an example input the module runs forward twice, and backward from the mean of its output if that is one tensor with a
    gradient. Its buffers, its gradients, its mode and the RNG states stay the same. If the module's parameters are split over
    ranks, every rank must call this.

    Args:
        module: any module.
        module_args, module_kwargs: the example input, with a tensor in it. A lazy module is not run.
    """
    observed: dict[str, ModuleSummary] = {}
    lazy = any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters())
    if lazy:
        warnings.warn("A layer with UninitializedParameter was found: its parameters count nothing yet.", stacklevel=2)
    if not lazy and (_has_tensor(module_args) or _has_tensor(module_kwargs)):
        observed = _observe(module, module_args or (), dict(module_kwargs or {}))
    return _summary("", module, observed)


def _summary(name: str, module: nn.Module, observed: Mapping[str, ModuleSummary]) -> ModuleSummary:
    summary = copy.copy(observed.get(name)) or ModuleSummary()
    summary.module_name, summary.module_type = name, type(module).__name__
    known = [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]
    buffers = [b for b in module.buffers() if not isinstance(b, UninitializedBuffer)]
    summary.num_parameters = sum(p.numel() for p in known)
    summary.num_trainable_parameters = sum(p.numel() for p in known if p.requires_grad)
    summary.size_bytes = sum(each.numel() * each.element_size() for each in (*known, *buffers))
    summary.has_uninitialized_param = len(known) < len(list(module.parameters()))
    summary.submodule_summaries = {
        path: _summary(path, child, observed)
        for path, child in ((f"{name}.{n}" if name else n, c) for n, c in module.named_children())
    }
    if observed and name not in observed:  # a list of modules, which is never called itself
        parts = list(summary.submodule_summaries.values())
        summary.flops_forward, summary.flops_backward = (
            _sum([p.flops_forward for p in parts]),
            _sum([p.flops_backward for p in parts]),
        )
    return summary


def _sum(counts: list[int | str]) -> int | str:
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if counts and len(known) == len(counts) else _UNKNOWN


# --- with an example input


def _observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, ModuleSummary]:
    """What the passes with an example input show, by path."""
    with _as_it_was(module):
        counter = counter_of(module)
        with counter, torch.enable_grad():
            output = module(*args, **kwargs)
            forward = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
            differentiable = isinstance(output, torch.Tensor) and output.requires_grad
            if differentiable:
                output.mean().backward()
            elif not isinstance(output, torch.Tensor):
                warnings.warn("Backward FLOPs are only computed if the module's forward returns a tensor.", stacklevel=3)
        total = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
        with _watching(module) as observed, torch.no_grad():  # its own pass: the counter takes longer than the work
            module(*args, **kwargs)
    for path, summary in observed.items():
        key = path or "Global"
        summary.flops_forward = forward.get(key, 0) // 2  # torch counts multiplications and additions
        if differentiable:
            summary.flops_backward = (total.get(key, 0) - forward.get(key, 0)) // 2
    return observed


@contextlib.contextmanager
def _watching(module: nn.Module) -> Iterator[dict[str, ModuleSummary]]:
    """Context in which each submodule's first pass leaves its shapes and its time."""
    observed: dict[str, ModuleSummary] = {}
    started: dict[str, float] = {}
    handles = []

    def watch(path: str, part: nn.Module) -> None:
        def before(*_: Any) -> None:
            started.setdefault(path, _now())

        def after(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if path not in observed:
                milliseconds, given = (_now() - started[path]) * 1e3, [*inputs, *named.values()]
                observed[path] = ModuleSummary(
                    in_size=_shapes(given[0] if len(given) == 1 else given),
                    out_size=_shapes(output),
                    forward_elapsed_time_ms=milliseconds,
                )

        handles.append(part.register_forward_pre_hook(before))
        handles.append(part.register_forward_hook(after, with_kwargs=True))

    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
            watch(path, part)
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Context after which buffers, gradients and RNG states are as before it."""
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    gradients = [(p, p.grad) for p in module.parameters()]
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    for parameter, _ in gradients:
        parameter.grad = None
    before_draws = rng.states()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        rng.put_back(before_draws)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _shapes(value: Any) -> list[Any] | str:
    if hasattr(value, "shape"):
        return list(value.shape)
    return [_shapes(each) for each in value] if isinstance(value, (list, tuple)) else _UNKNOWN


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_has_tensor, value)) if isinstance(value, (list, tuple)) else isinstance(value, torch.Tensor)


# --- to read


def prune_module_summary(module_summary: ModuleSummary, *, max_depth: int) -> None:
    """Remove deeper submodules; a depth of 1 leaves the module itself.

    Raises:
        UsageError: `max_depth` is less than 1.
    """
    if max_depth < 1:
        raise UsageError(f"`max_depth` must be an int greater than 0. Got {max_depth}.")
    if max_depth == 1:
        module_summary.submodule_summaries = {}
    for each in module_summary.submodule_summaries.values():
        prune_module_summary(each, max_depth=max_depth - 1)


_COLUMNS = {
    "module_name": "Name",
    "module_type": "Type",
    "num_parameters": "# Parameters",
    "num_trainable_parameters": "# Trainable Parameters",
    "size_bytes": "Size (bytes)",
    "has_uninitialized_param": "Contains Uninitialized Parameters?",
    "flops_forward": "Forward FLOPs",
    "flops_backward": "Backward FLOPs",
    "in_size": "In size",
    "out_size": "Out size",
    "forward_elapsed_time_ms": "Forward Elapsed Times (ms)",
}
_REMARK = (
    "Remark for FLOPs calculation: products and convolutions are counted, a multiplication and its addition as one; the backward "
    "pass is that of the output's mean.\n"
)


def get_summary_table(module_summary: ModuleSummary, human_readable_nums: bool = True) -> str:
    """A table with a line for the module and each submodule. Columns that are unknown for the module are left out.

    Args:
        module_summary: from `get_module_summary`.
        human_readable_nums: 1.2 M instead of 1234567.
    """
    names = [name for name in _COLUMNS if getattr(module_summary, name) != _UNKNOWN]
    rows = [[_shown(getattr(each, name), name, human_readable_nums) for name in names] for each in _walk(module_summary)]
    head = [_COLUMNS[name] for name in names]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    lines.insert(1, "-" * (sum(widths) + 3 * (len(widths) - 1)))
    counted = any(name.startswith("flops") for name in names)
    return "".join(f"{line}\n" for line in lines) + (_REMARK if counted else "")


def _walk(summary: ModuleSummary) -> Iterator[ModuleSummary]:
    yield summary
    for each in summary.submodule_summaries.values():
        yield from _walk(each)


def _shown(value: Any, name: str, short: bool) -> str:
    if isinstance(value, bool):
        return "Yes" if value else "No"
    if isinstance(value, int):
        units = " kMGTPEZY" if name.startswith("flops") else " KMBT"
        return _short(value, units) if short else str(value)
    return f"{value:.10f}" if isinstance(value, float) else str(value)


def _short(number: int, units: str) -> str:
    """Three digits and a unit of thousands: "999  ", "1.2 K", "123 M"."""
    group = min((len(str(number)) - 1) // 3, len(units) - 1)
    value = number * 10 ** (-3 * group)
    return f"{int(value):,d} {units[group]}" if not group or value >= 100 else f"{value:,.1f} {units[group]}"
