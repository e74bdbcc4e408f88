"""Collectives of the user's own that other stages would have to call, too, and do not: found in trial passes, before they hang.

The loss, and what comes after a stage, is computed on some ranks of a pipeline alone. A collective there over all ranks, such as
the gather of a contrastive loss, waits for ever or meets another one.

torch 2.13 has no public name for TorchDispatchMode; patched functions of torch.distributed would not be seen by who has imported
them by name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.common.errors import PipelineError

__all__ = ["RefuseCollectives"]


class RefuseCollectives(TorchDispatchMode):
    """Context in which a collective with a rank of another stage is an error.

    Args:
        kind: the module's class.
        group: the ranks of the pipeline.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind, self._others = kind, {*dist.get_process_group_ranks(group or dist.group.WORLD)} - {dist.get_rank()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (ranks := _ranks(args)) & self._others:
            name = func.__name__.partition(".")[0].strip("_")
            raise PipelineError(
                f"compute_loss, or the forward of {self._kind}, must leave out collectives with ranks of other stages, which do "
                f"not come to them, got {name} over ranks {', '.join(map(str, sorted(ranks)[:8]))}. Exchange among ranks that "
                "have other samples only, or train without pp; sums for a log belong in on_train_step_end."
            )
        return func(*args, **(kwargs or {}))


def _ranks(args: Any) -> set[int]:
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return set(dist.get_process_group_ranks(dist.ProcessGroup.unbox(each)))
            except RuntimeError:  # a ReduceOp
                continue
    return set()
