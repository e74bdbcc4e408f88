"""What happens to a module besides being made parallel: activation checkpointing, compilation, the precision it computes in."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from echelon.common.arguments import flags_of, several
from echelon.common.errors import CompileError, require
from echelon.parallel.recipe.activation import ActivationCheckpointParams, checkpoint_activations
from echelon.parallel.recipe.blocks import blocks_to_shard
from echelon.parallel.recipe.compilation import check_backend, compile_forward, within_budget
from echelon.parallel.recipe.precision import Precision

__all__ = ["Compile", "Recipe", "TorchCompileParams"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchCompileParams:
    """`torch.compile`'s options. The module is compiled in place, so its parameter names stay.

    Args:
        recursive_module_types: compile the submodules of these classes, or class names, one by one instead of the whole;
            faster to compile when a block is repeated.
        blocks: compile the repeated blocks of the model, each by its forward; the whole if none repeat.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    recursive_module_types: Collection[str | type[nn.Module]] = field(default_factory=tuple)
    blocks: bool = False

    def __post_init__(self) -> None:
        flags_of(self, kind=CompileError)
        require(
            isinstance(self.backend, str) or callable(self.backend),
            "backend",
            "a name or a function",
            self.backend,
            kind=CompileError,
        )
        require(isinstance(self.mode, str | None), "mode", "a name or None", self.mode, kind=CompileError)
        require(isinstance(self.options, dict | None), "options", "a dict or None", self.options, kind=CompileError)
        kinds, what = self.recursive_module_types, "a list of classes or their names"
        kinds = several("recursive_module_types", kinds, what, lambda one: isinstance(one, str | type), kind=CompileError)
        object.__setattr__(self, "recursive_module_types", kinds)
        if self.blocks and kinds:
            raise CompileError("blocks and recursive_module_types both choose what is compiled. Give one of them.")

    @classmethod
    def of(cls, value: Any, option: str) -> TorchCompileParams | None:
        """From "blocks", True (the whole module), False or None (nothing), or itself.

        Raises:
            UsageError: anything else. `option` is named.
        """
        if isinstance(value, cls) or value is None or value is False:
            return value or None
        require(
            value is True or value == "blocks",
            option,
            "'blocks', True, False or TorchCompileParams(...)",
            value,
            kind=CompileError,
        )
        return cls(blocks=value == "blocks")


Compile = TorchCompileParams | bool | Literal["blocks"] | None


@dataclass(frozen=True)
class Recipe:
    """What happens to a module besides being made parallel.

    Args:
        precision: a layout that gathers parameters gathers them in it (`fsdp/units.py`); autocast is the caller's, under every
            layout. None: the layout's own options decide.
    """

    activation_checkpoint: ActivationCheckpointParams | None = None
    torch_compile: TorchCompileParams | None = None
    precision: Precision | None = None

    def checkpoint_activations(self, module: nn.Module) -> nn.Module:
        compiled = self.torch_compile
        if self.activation_checkpoint is not None and compiled is not None and compiled.backend == "eager":
            raise CompileError(
                "torch.compile's backend 'eager' draws other dropout masks when it recomputes activations (torch 2.13), and the "
                "gradients are wrong. Use backend='aot_eager' or 'inductor', or no recompute."
            )
        return checkpoint_activations(module, self.activation_checkpoint)

    def check(self, device: torch.device) -> None:
        """
        Raises:
            UsageError: what is asked for is not installed, or has no effect.
        """
        compiled, recomputed = self.torch_compile, self.activation_checkpoint
        if compiled is not None and not compiled.disable:
            check_backend(compiled.backend, device)
        elif recomputed is not None and recomputed.memory_budget is not None:
            logger.warning(
                "memory_budget=%g has no effect: it is about compiled graphs. Give compile='blocks'", recomputed.memory_budget
            )

    def compile(self, module: nn.Module) -> nn.Module:
        params = self.torch_compile
        if params is None or params.disable:
            return module
        options: dict[str, Any] = {name: getattr(params, name) for name in ("fullgraph", "dynamic", "backend", "mode", "options")}
        recomputed = self.activation_checkpoint
        options = within_budget(options, None if recomputed is None else recomputed.memory_budget)
        blocks = [block for _, block in blocks_to_shard(module)] if params.blocks else []
        if blocks:
            counted = Counter(type(block).__name__ for block in blocks).items()
            logger.info("compiling %s, one by one", ", ".join(f"{n} {kind}" for kind, n in counted))
            compile_forward(blocks, options)
            return module
        kinds = params.recursive_module_types
        names = {k for k in kinds if isinstance(k, str)}
        classes = tuple(k for k in kinds if isinstance(k, type))
        targets = [m for m in module.modules() if type(m).__name__ in names or isinstance(m, classes)] if kinds else [module]
        for target in targets:
            target.compile(**options)
        return module
