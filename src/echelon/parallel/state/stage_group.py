"""Modules of which other ranks hold other parameters altogether, as the stages of a pipeline do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.shards import is_fully_sharded

__all__ = ["ranks_apart", "refuse_copies", "refuse_own_saving", "set_apart"]


@dataclass(frozen=True)
class _Apart:
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: Any) -> _Apart:  # a copy of the module has the same peers
        return self


def set_apart(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Remember the ranks among which the module is divided."""
    vars(module)["_ranks_apart"] = _Apart(group)
    refuse_own_saving(module)


def ranks_apart(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold all of the module between them; None if each has all of its names."""
    found = vars(module).get("_ranks_apart")
    return found.group if isinstance(found, _Apart) else None


def refuse_copies(module: nn.Module) -> None:
    """Make operations that need whole modules, such as `copy.deepcopy`, raise with the remedy."""

    def deepcopy(memo: Any) -> NoReturn:
        raise LayoutError(
            "a module that is split over the ranks cannot be copied, as timm's ModelEmaV3 and others do to average weights. For "
            "averages pass ema=0.999 to the unit: they are split like the module. For a target network, or in a loop of your "
            "own, copy it before the unit or prepare() has it, and give prepare() the copy, too. get_model_state_dict(module) "
            "of torch.distributed.checkpoint.state_dict has the values."
        )

    for part in module.modules():
        if is_fully_sharded(part):
            vars(part)["__deepcopy__"] = deepcopy
    refuse_own_saving(module)


def refuse_own_saving(module: nn.Module) -> None:
    """Make a `save_pretrained` of the module's own, which would write what this rank holds, raise with the remedy."""
    own = getattr(type(module), "save_pretrained", None)
    if not callable(own):
        return

    def save_pretrained(*args: Any, **options: Any) -> Any:
        if options.get("state_dict") is None:
            raise LayoutError(
                f"{type(module).__name__}.save_pretrained: this rank holds a part of the weights only. Let what trains it gather "
                "them, on every rank, and rank 0 write: echelon.save_pretrained(unit, folder) with a unit, "
                "trainer.save_model(folder) with transformers' Trainer, trainer.save_checkpoint(path) with Lightning's, of which "
                "load_from_checkpoint makes a whole model."
            )
        return own(module, *args, **options)

    vars(module)["save_pretrained"] = save_pretrained
