"""With fewer ranks than planned, each computes its larger micro-batch in pieces: the steps stay the same, and so does the memory.

`echelon run --ranks 2:4` plans for four ranks. With two, each rank's share of every global batch is twice as large, and the
unit computes it as two, the one after the other, within one `train_step`. What a step is for progress, hooks, limits and
checkpoints does not change with the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from echelon.contracts.overrides import overrides
from echelon.data.loader import Loader
from echelon.data.parts import Padding, Pieces, joined, share
from echelon.loop.samples import weighted
from echelon.parallel.prepared import MicroBatch
from echelon.world import agree

__all__ = ["in_order", "of_all", "pieces_for", "together"]

logger = logging.getLogger(__name__)


def pieces_for(loader: Any, own_step: bool) -> int:
    """In how many pieces a micro-batch of this loader is computed; the same on all ranks.

    Args:
        own_step: the unit fetches or computes micro-batches in a way of its own.
    """
    planned = overrides().planned_ranks or 1
    ranks = dist.get_world_size() if agree.is_joined() else 1
    if planned <= ranks:
        return 1
    why = "the unit has a step of its own, or several optimizers" if own_step else "the loader is no echelon.Loader"
    if own_step or not isinstance(loader, Loader):
        if not agree.is_joined() or dist.get_rank() == 0:
            logger.warning(
                "%s of %s planned ranks run, and micro-batches are computed whole, since %s: each takes %.3g times the memory",
                ranks,
                planned,
                why,
                planned / ranks,
            )
        return 1
    return -(-planned // ranks)


def in_order(pieces: Pieces, all_padding: bool, samples: int | None) -> list[tuple[Any, bool, int | None]]:
    """The pieces, whether each is padding, and its samples; padding first, so that a hook which is shown the last sees samples.

    Args:
        samples: of all pieces, where the loader says how many.
    """
    made: list[tuple[Any, bool, int | None]] = []
    for number, piece in enumerate(pieces):
        low, high = share(samples or 0, number, len(pieces))
        is_padding = all_padding or isinstance(piece, Padding)
        made.append((piece.batch if isinstance(piece, Padding) else piece, is_padding, None if samples is None else high - low))
    return sorted(made, key=lambda piece: not piece[1])


def together(losses: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch[Any]]) -> torch.Tensor:
    """The mean loss of a step, from those of its pieces; the last one's if they weigh nothing."""
    if len(losses) == 1:
        return losses[0]
    weights = [each.weight for each in micro_batches]
    total = sum(weights)
    if not isinstance(total, torch.Tensor) and total <= 0:
        return losses[-1]
    whole = sum(weighted(loss, weight) for loss, weight in zip(losses, weights, strict=True)) / total
    return torch.as_tensor(whole).to(losses[-1])


def of_all(values: Sequence[Any], micro_batches: Sequence[MicroBatch[Any]]) -> Any:
    """A step's batch or outputs, of those of its pieces; what padding made does not count."""
    if len(values) == 1:
        return values[0]
    counts = [(value, float(each.weight)) for value, each in zip(values, micro_batches, strict=True)]
    counts = [each for each in counts if each[1]] or [(values[-1], 1.0)]
    return joined(*zip(*counts, strict=True))
