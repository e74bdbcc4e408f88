"""What happens to a module besides being made parallel: activation checkpointing, compilation, the precision it computes in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from echelon.contracts.arguments import flags_of, several
from echelon.contracts.errors import UsageError, require
from echelon.parallel.activation import ActivationCheckpointParams, checkpoint_activations
from echelon.parallel.precision import Precision

__all__ = ["Recipe", "TorchCompileParams"]


@dataclass(frozen=True)
class TorchCompileParams:
    """`torch.compile`'s options. The module is compiled in place, so its parameter names stay.

    Args:
        recursive_module_types: compile the submodules of these classes, or class names, one by one instead of the whole;
            faster to compile when a block is repeated.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    recursive_module_types: Collection[str | type[nn.Module]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        flags_of(self)
        require(isinstance(self.backend, str) or callable(self.backend), "backend", "a name or a function", self.backend)
        require(isinstance(self.mode, str | None), "mode", "a name or None", self.mode)
        require(isinstance(self.options, dict | None), "options", "a dict or None", self.options)
        kinds, what = self.recursive_module_types, "a list of classes or their names"
        kinds = several("recursive_module_types", kinds, what, lambda kind: isinstance(kind, str | type))
        object.__setattr__(self, "recursive_module_types", kinds)


@dataclass(frozen=True)
class Recipe:
    """What happens to a module besides being made parallel.

    Args:
        precision: a strategy that gathers parameters gathers them in it (`compute_type`); autocast is the caller's, under every
            strategy. None: the strategy's own options decide.
    """

    activation_checkpoint: ActivationCheckpointParams | None = None
    torch_compile: TorchCompileParams | None = None
    precision: Precision | None = None

    def checkpoint_activations(self, module: nn.Module) -> nn.Module:
        compiled = self.torch_compile
        if self.activation_checkpoint is not None and compiled is not None and compiled.backend == "eager":
            raise UsageError(
                "torch.compile's backend 'eager' draws other dropout masks when it recomputes activations (torch 2.13), and the "
                "gradients are wrong. Use backend='aot_eager' or 'inductor', or no activation_checkpoint_params."
            )
        return checkpoint_activations(module, self.activation_checkpoint)

    def compile(self, module: nn.Module) -> nn.Module:
        params = self.torch_compile
        if params is None or params.disable:
            return module
        kinds = params.recursive_module_types
        names = {k for k in kinds if isinstance(k, str)}
        classes = tuple(k for k in kinds if isinstance(k, type))
        targets = [m for m in module.modules() if type(m).__name__ in names or isinstance(m, classes)] if kinds else [module]
        for target in targets:
            target.compile(
                fullgraph=params.fullgraph,
                dynamic=params.dynamic,
                backend=params.backend,
                mode=params.mode,
                options=params.options,
            )
        return module
