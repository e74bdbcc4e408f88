"""Parameters that `fully_shard` cannot split. They stay whole on every rank: `gradients/unreduced_params` averages theirs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from echelon.parallel.older_torch import shards_integers

__all__ = ["of_another_type", "unsplittable"]

logger = logging.getLogger(__name__)


def unsplittable(module: nn.Module) -> set[nn.Parameter]:
    """Scalars and empty tensors, which `fully_shard` refuses or breaks on; complex ones, which it would gather as real numbers
    where a precision is asked for; with an older torch, all that are no floating-point numbers.
    """
    integers = shards_integers()
    return {
        p
        for p in module.parameters()
        if p.dim() == 0 or p.numel() == 0 or p.is_complex() or not (integers or p.is_floating_point())
    }


def of_another_type(module: nn.Module, units: Iterable[Sequence[nn.Module]], ignored: set[nn.Parameter]) -> set[nn.Parameter]:
    """Trained parameters of another type than most of those they are gathered with: `fully_shard` takes one type at a time.

    Args:
        units: modules that are gathered together; what is in none of them is gathered with the root.
        ignored: parameters that stay whole already.
    """
    found: set[nn.Parameter] = set()
    done = set(ignored)
    for modules in (*units, (module,)):
        mine = dict.fromkeys(p for each in modules for p in each.parameters() if p not in done)  # in order: the same on all ranks
        done |= mine.keys()
        sizes: Counter[torch.dtype] = Counter()
        for parameter in mine:
            sizes[parameter.dtype] += parameter.numel() if parameter.requires_grad else 0
        main = max(sizes, key=sizes.__getitem__, default=None)
        found |= {p for p in mine if p.requires_grad and p.dtype is not main}
    if found:
        first = next(name for name, p in module.named_parameters() if p in found)
        logger.warning(
            "%s parameters, such as %s, are of another type than most of those around them: every rank holds them whole",
            len(found),
            first,
        )
    return found
