"""Embeddings that compute something else where a rank sees a part of the batch only."""

from __future__ import annotations

import logging

from torch import nn

from echelon.contracts.errors import LayoutError

__all__ = ["check_embeddings"]

logger = logging.getLogger(__name__)


def check_embeddings(module: nn.Module) -> None:
    """Before data-parallel ranks train it.

    Raises:
        UsageError: an embedding with max_norm, which writes into the rows that a rank looks up: other ones on each rank.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or not part.weight.requires_grad:
            continue
        if part.max_norm is not None:
            raise LayoutError(
                f"{name or type(part).__name__}: max_norm must be None on several ranks, got {part.max_norm:g}. torch writes it "
                "into the rows that are looked up, which are others on each rank, so that the ranks would train different "
                "models. Bound what was looked up, in forward: "
                "rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1); or train on one rank."
            )
        if part.scale_grad_by_freq:
            logger.warning(
                "%s: scale_grad_by_freq counts how often a row occurs on each rank, not in the global batch: the gradient is "
                "another one than on one rank",
                name or type(part).__name__,
            )
