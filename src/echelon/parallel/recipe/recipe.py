"""Changes of a module besides its layout: activation checkpointing, compilation, and the precision of its computation."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import nn

from echelon.common.errors import CompileError
from echelon.parallel.recipe.activation import ActivationCheckpointParams, checkpoint_activations
from echelon.parallel.recipe.compilation import TorchCompileParams, compile_in_place
from echelon.parallel.recipe.precision import Precision

__all__ = ["Recipe"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """Changes of a module besides its layout.

    Args:
        precision: the precision in which a sharded layout gathers parameters (`fsdp/units.py`); None leaves that to the layout's
            own options. Under every layout the caller applies autocast.
    """

    activation_checkpoint: ActivationCheckpointParams | None = None
    torch_compile: TorchCompileParams | None = None
    precision: Precision | None = None

    def applied(self, module: nn.Module) -> nn.Module:
        """The module with recomputed activations, and compiled."""
        compiled, recomputed = self.torch_compile, self.activation_checkpoint
        if recomputed is not None and compiled is not None and compiled.backend == "eager":
            raise CompileError(
                "torch.compile's backend 'eager' draws different dropout masks when it recomputes activations (torch 2.13), so "
                "the gradients are wrong. Use backend='aot_eager' or 'inductor', or no recompute."
            )
        compiles = compiled is not None and not compiled.disable
        module = checkpoint_activations(module, recomputed, compiled=compiles)
        budget = None if recomputed is None else recomputed.memory_budget
        if compiled is not None and compiles:
            return compile_in_place(module, compiled, budget)
        if budget is not None:
            logger.warning("memory_budget=%g has no effect without compiled graphs. Set compile='blocks'", budget)
        return module
