"""torchtnt.utils.module_summary and flops: `echelon.module_summary` and its counter, under TorchTNT's names.

Operations are given as TorchTNT counts them: a multiplication and its addition are one.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from echelon.common.errors import UsageError
from echelon.planner import summary
from echelon.planner.flops import counter_of

__all__ = ["FlopTensorDispatchMode", "ModuleSummary", "get_module_summary", "get_summary_table", "prune_module_summary"]

_NAMES = {
    "module_name": "name",
    "module_type": "kind",
    "num_trainable_parameters": "num_trainable",
    "has_uninitialized_param": "is_lazy",
    "in_size": "inputs",
    "out_size": "outputs",
}


class ModuleSummary(summary.ModuleSummary):
    """The summary of one module, its submodules included. "?" stands for what only an example input would tell."""

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(name)
        value = getattr(self, _NAMES[name])
        return "?" if value is None else value

    @property
    def forward_elapsed_time_ms(self) -> float | str:
        return "?" if self.seconds is None else self.seconds * 1e3

    @property
    def submodule_summaries(self) -> dict[str, Any]:
        return {part.name: part for part in self.parts}


def get_module_summary(
    module: nn.Module, module_args: tuple[Any, ...] | None = None, module_kwargs: Mapping[str, Any] | None = None
) -> ModuleSummary:
    """As `echelon.module_summary`. The example input is `module_args` and `module_kwargs`."""
    made = summary.module_summary(module, *(module_args or ()), **(module_kwargs or {}))
    if made.is_lazy:
        warnings.warn("A layer with UninitializedParameter was found: its parameters count nothing yet.", stacklevel=2)
    return _theirs(made)


def _theirs(own: summary.ModuleSummary) -> ModuleSummary:
    flops: dict[str, Any] = {
        name: "?" if (count := getattr(own, name)) is None else count // 2 for name in ("flops_forward", "flops_backward")
    }
    return ModuleSummary(**{**vars(own), **flops, "parts": list(map(_theirs, own.parts))})


def prune_module_summary(module_summary: ModuleSummary, *, max_depth: int) -> None:
    """Remove deeper submodules; a depth of 1 leaves the module itself.

    Raises:
        UsageError: `max_depth` is less than 1.
    """
    if max_depth < 1:
        raise UsageError(f"`max_depth` must be an int greater than 0. Got {max_depth}.")
    if max_depth == 1:
        module_summary.parts = []
    for part in module_summary.submodule_summaries.values():
        prune_module_summary(part, max_depth=max_depth - 1)


def get_summary_table(module_summary: ModuleSummary, human_readable_nums: bool = True) -> str:
    """As `print` shows it; `human_readable_nums` has no effect."""
    return module_summary.table()


class FlopTensorDispatchMode:
    """Context that counts the floating-point operations of a module's passes, by submodule and operation.

    Args:
        module: whose submodules' names are used.
    """

    def __init__(self, module: nn.Module) -> None:
        self._counter = counter_of(module)

    def __enter__(self) -> FlopTensorDispatchMode:
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)

    @property
    def flop_counts(self) -> defaultdict[str, Counter[str]]:
        """Submodule -> operation -> count, as of now; the module's own name is empty."""
        by_module = defaultdict[str, Counter[str]](Counter)
        for path, counts in self._counter.get_flop_counts().items():
            for operation, count in counts.items() if path else ():  # the total takes the name of the module itself
                by_module["" if path == "Global" else path][f"{operation.__name__}.default"] += count // 2
        return by_module

    def reset(self) -> None:
        """Start counting again."""
        self._counter.flop_counts.clear()
