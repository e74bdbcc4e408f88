"""Modules of which other ranks hold other parameters altogether, as the stages of a pipeline do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["ranks_apart", "set_apart"]


@dataclass(frozen=True)
class _Apart:
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: Any) -> _Apart:  # a copy of the module has the same peers
        return self


def set_apart(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Remember the ranks among which the module is divided."""
    vars(module)["_ranks_apart"] = _Apart(group)


def ranks_apart(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold all of the module between them; None if each has all of its names."""
    found = vars(module).get("_ranks_apart")
    return found.group if isinstance(found, _Apart) else None
