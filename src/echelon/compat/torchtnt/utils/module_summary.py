"""What a module consists of: parameters, bytes, and for an example input operations, shapes and time, by submodule.

Operations are counted by torch's FlopCounterMode.
"""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode

from echelon.contracts.errors import UsageError
from echelon.world import rng

__all__ = ["ModuleSummary", "get_module_summary", "get_summary_table", "prune_module_summary"]

_UNKNOWN = "?"


@dataclass
class ModuleSummary:
    """Of one module, its submodules included. "?" is what only an example input would tell.

    Attributes:
        module_name, module_type: its path from the root, whose own is empty, and its class.
        num_parameters, num_trainable_parameters, size_bytes: a shared parameter counts once; of one split over ranks, all.
        has_uninitialized_param: lazy parameters, which count nothing yet.
        flops_forward, flops_backward: floating-point operations of products and convolutions; a multiplication and an addition
            are two.
        in_size, out_size: shape of the tensor, or a list of shapes.
        forward_elapsed_time_ms: of a single pass; on a GPU until it is done.
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


def get_module_summary(
    module: nn.Module, module_args: tuple[Any, ...] | None = None, module_kwargs: Mapping[str, Any] | None = None
) -> ModuleSummary:
    """Look at a module and all its submodules.

    With an example input the module runs forward twice, and backward from the mean of its output if that is one tensor with a
    gradient. Its buffers and gradients, its mode and the RNGs are afterwards as before. If the module's parameters are
    split over ranks, every rank must call this.

    Args:
        module: any module.
        module_args, module_kwargs: the example input.
    """
    observed: dict[str, ModuleSummary] = {}
    if module_args is not None or module_kwargs is not None:
        observed = _observe(module, module_args or (), dict(module_kwargs or {}))
    return _summary("", module, observed)


def _summary(name: str, module: nn.Module, observed: Mapping[str, ModuleSummary]) -> ModuleSummary:
    found = copy.copy(observed.get(name)) or ModuleSummary()
    found.module_name, found.module_type = name, type(module).__name__
    for parameter in module.parameters():
        if isinstance(parameter, UninitializedParameter):
            found.has_uninitialized_param = True
            continue
        count = parameter.numel()
        found.num_parameters += count
        found.num_trainable_parameters += count if parameter.requires_grad else 0
        found.size_bytes += count * parameter.element_size()
    found.size_bytes += sum(b.numel() * b.element_size() for b in module.buffers() if not isinstance(b, UninitializedParameter))
    found.submodule_summaries = {
        path: _summary(path, child, observed)
        for path, child in ((f"{name}.{n}" if name else n, c) for n, c in module.named_children())
    }
    if observed and name not in observed:  # a list of modules, which is never called itself
        parts = list(found.submodule_summaries.values())
        found.flops_forward, found.flops_backward = (
            _sum([p.flops_forward for p in parts]),
            _sum([p.flops_backward for p in parts]),
        )
    return found


def _sum(counts: list[int | str]) -> int | str:
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if counts and len(known) == len(counts) else _UNKNOWN


# --- with an example input


def _observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, ModuleSummary]:
    """What one pass tells, by path."""
    with _as_it_was(module):
        counter = FlopCounterMode(display=False)
        with counter, torch.enable_grad():
            output = module(*args, **kwargs)
            forward = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
            differentiable = isinstance(output, torch.Tensor) and output.requires_grad
            if differentiable:
                output.mean().backward()
        total = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
        with _watching(module) as found, torch.no_grad():  # a pass of its own: the counter takes longer than the work
            module(*args, **kwargs)
    root = type(module).__name__
    for path, summary in found.items():
        # The counter's name of the root is its class's.
        key = f"{root}.{path}" if path else "Global"
        summary.flops_forward = forward.get(key, 0)
        if differentiable:
            # The counter gives a part that returns its own input, such as a dropout of 0, the operations of what follows it.
            summary.flops_backward = total.get(key, 0) - forward.get(key, 0) if summary.flops_forward else 0
    return found


@contextlib.contextmanager
def _watching(module: nn.Module) -> Iterator[dict[str, ModuleSummary]]:
    """Context in which each submodule's first pass leaves its shapes and its time."""
    found: dict[str, ModuleSummary] = {}
    started: dict[str, float] = {}
    handles = []

    def watch(path: str, part: nn.Module) -> None:
        def before(*_: Any) -> None:
            started.setdefault(path, _now())

        def after(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if path not in found:
                milliseconds = (_now() - started[path]) * 1e3
                found[path] = ModuleSummary(
                    in_size=_shapes([*inputs, *named.values()]), out_size=_shapes(output), forward_elapsed_time_ms=milliseconds
                )

        handles.append(part.register_forward_pre_hook(before))
        handles.append(part.register_forward_hook(after, with_kwargs=True))

    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
            watch(path, part)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Context after which buffers, gradients and RNGs are as before it."""
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
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        shapes = [shape for shape in map(_shapes, value) if shape != _UNKNOWN]
        return _UNKNOWN if not shapes else shapes[0] if len(shapes) == 1 else shapes
    return _UNKNOWN


# --- to read


def prune_module_summary(module_summary: ModuleSummary, *, max_depth: int) -> None:
    """Leave out what lies deeper; a depth of 1 is the module itself.

    Raises:
        UsageError: `max_depth` is less than 1.
    """
    if max_depth < 1:
        raise UsageError(f"max_depth {max_depth}: at least 1, which is the module itself.")
    if max_depth == 1:
        module_summary.submodule_summaries = {}
    for each in module_summary.submodule_summaries.values():
        prune_module_summary(each, max_depth=max_depth - 1)


def get_summary_table(module_summary: ModuleSummary, human_readable_nums: bool = True) -> str:
    """A table, one line for the module and each submodule, with the columns of which something is known.

    Args:
        module_summary: of `get_module_summary`.
        human_readable_nums: 1.2 M instead of 1234567.
    """
    from rich.console import Console
    from rich.table import Table

    rows = list(_walk(module_summary))
    exact: Callable[[Any], str] = lambda n: f"{n:,}" if isinstance(n, int) else str(n)  # noqa: E731
    number = _short if human_readable_nums else exact
    columns: dict[str, Callable[[ModuleSummary], str]] = {
        "Name": lambda s: s.module_name,
        "Type": lambda s: s.module_type,
        "# Parameters": lambda s: number(s.num_parameters),
        "# Trainable Parameters": lambda s: number(s.num_trainable_parameters),
        "Size (bytes)": lambda s: number(s.size_bytes),
        "Contains Uninitialized Parameters?": lambda s: "Yes" if s.has_uninitialized_param else "No",
    }
    if any(s.in_size != _UNKNOWN or s.flops_forward != _UNKNOWN for s in rows):
        columns |= {
            "Forward FLOPs": lambda s: number(s.flops_forward),
            "Backward FLOPs": lambda s: number(s.flops_backward),
            "In size": lambda s: str(s.in_size),
            "Out size": lambda s: str(s.out_size),
            "Forward Elapsed Times (ms)": lambda s: (
                f"{s.forward_elapsed_time_ms:.3f}" if isinstance(s.forward_elapsed_time_ms, float) else _UNKNOWN
            ),
        }
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if "#" in column or "(" in column or "FLOPs" in column else "left")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    text = io.StringIO()
    Console(file=text, width=1000, color_system=None, markup=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _walk(summary: ModuleSummary) -> Iterator[ModuleSummary]:
    yield summary
    for each in summary.submodule_summaries.values():
        yield from _walk(each)


def _short(number: Any) -> str:
    if not isinstance(number, (int, float)):
        return str(number)
    value = float(number)
    for unit in ("", " k", " M", " G", " T", " P"):
        if value < 1000:
            return f"{value:.1f}{unit}" if unit else f"{number}"
        value /= 1000
    return f"{value:.1f} E"
