"""A pass over a batch that only stands in, on a rank without samples, so that all ranks take part: nothing counts its rows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from echelon.common.errors import LoopError
from echelon.loop.records.metrics import load_share, share_of
from echelon.parallel.ddp.sync_batchnorm import without_rows
from echelon.parallel.over_ranks import without_samples

__all__ = ["explain_one_sample", "standing_in", "uncounted"]

_METRIC = ("update", "compute", "reset")
_STATE = (torch.Tensor, list, dict, int, float, type(None))


@contextlib.contextmanager
def standing_in(unit: Any) -> Iterator[None]:
    """Around its forward and backward pass: neither the statistics of batch norm nor metrics take it in."""
    with uncounted(unit), without_rows(unit.prepared.module), without_samples():
        yield


@contextlib.contextmanager
def uncounted(unit: Any) -> Iterator[None]:
    """What is counted in metrics of the unit's or of its module's is forgotten."""
    roots = [*unit.tracked_metrics().values(), unit.prepared.unwrapped]
    inner = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
    counting = [m for m in inner if all(callable(getattr(m, name, None)) for name in _METRIC)]
    # Not by their state_dict: of torchmetrics within a module that would begin to be saved.
    before = [(m, {k: copy.deepcopy(v) for k, v in vars(m).items() if isinstance(v, _STATE)}) for m in counting]
    others = [metric for metric in unit.tracked_metrics().values() if not isinstance(metric, nn.Module)]
    shares = [(metric, copy.deepcopy(share_of(metric))) for metric in others]
    try:
        yield
    finally:
        for metric, state in before:
            vars(metric).update(state)
        for metric, share in shares:
            load_share(metric, share)


def explain_one_sample(error: BaseException) -> None:
    """
    Raises:
        UsageError: in the place of torch's error, which is its cause: batch norm over one value.
    """
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        raise LoopError(
            "batch norm must have more than one value per channel in training, got a batch of one sample on this rank, as at the "
            'short end of an epoch. Leave that out by echelon.Loader(..., tail="drop") or a DataLoader\'s drop_last=True, choose '
            "another global batch, or take statistics over all ranks: echelon.DDPStrategy(sync_batchnorm=True). torch says: "
            f"{error}"
        ) from error
