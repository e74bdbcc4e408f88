"""One process that drives several GPUs: torch's DataParallel.

Communication, inside the process: before each forward the batch is scattered and the parameters are copied to every device;
outputs and gradients are gathered on the first device. DistributedDataParallel is faster; this is for scripts with DataParallel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.common.arguments import several
from echelon.common.errors import LayoutError
from echelon.common.numbers import whole
from echelon.parallel.axes import DataAxes
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.names import Kind, register
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.world.init import World

__all__ = ["DPStrategy"]

logger = logging.getLogger(__name__)


class DPPrepared(Prepared["nn.DataParallel[Any]"]):
    """A module in DataParallel, ours or the user's: one process with one share of the data. Autograd sums the gradients."""

    def __init__(self, module: nn.DataParallel[Any], world: World) -> None:
        super().__init__(module)
        self.data = DataAxes(is_divided=True)
        self.data.is_replica = False  # also if a script has several processes: none counts another's samples


register(Kind("dp", lambda module: isinstance(module, nn.DataParallel), DPPrepared, inner="module"))


@dataclass(frozen=True, repr=False)
class DPStrategy(Strategy):
    """DataParallel's options, under its names. With one CUDA device, or on the CPU, the module stays plain.

    Args:
        device_ids: CUDA devices of this process; by default all visible ones. The first holds the parameters.
        output_device: where outputs are gathered; by default the first device.
        dim: the dimension along which a batch is scattered.
    """

    name = "dp"

    device_ids: Sequence[int | torch.device] | None = None
    output_device: int | torch.device | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_ids is not None:
            is_device = lambda each: isinstance(each, int | torch.device)  # noqa: E731
            object.__setattr__(
                self, "device_ids", several("device_ids", self.device_ids, "a list of CUDA devices", is_device, kind=LayoutError)
            )
        whole("dim", self.dim, kind=LayoutError)

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        if world.size > 1:
            raise LayoutError(
                f"layout 'dp' is one process that drives several devices, but {world.size} ranks run: each would train a "
                "model of its own. Use layout 'ddp', or start one rank."
            )
        materialize(module, world.device)
        devices = list(self.device_ids if self.device_ids is not None else range(torch.cuda.device_count()))
        if world.device.type != "cuda" or len(devices) < 2:
            there = f"{len(devices)} CUDA device(s) chosen" if world.device.type == "cuda" else "there are no CUDA devices to use"
            logger.warning("layout 'dp': %s, so this is the plain module on %s", there, world.device)
            return Prepared(recipe.applied(module.to(world.device)))
        if recipe.activation_checkpoint is not None:
            raise LayoutError(
                "layout 'dp' copies the module to each device in every step, and the copies would recompute with the weights of "
                "the first device. Use layout 'ddp', or leave out recompute."
            )
        module = recipe.applied(module.to(_first(devices)))
        return DPPrepared(nn.DataParallel(module, devices, self.output_device, self.dim), world)


def _first(devices: Sequence[int | torch.device]) -> torch.device:
    first = devices[0]
    return first if isinstance(first, torch.device) else torch.device("cuda", first)
