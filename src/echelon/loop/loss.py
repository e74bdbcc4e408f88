"""What `compute_loss` and `weight` give: is it a loss, how much does a batch count, and what if it counts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.common.errors import LoopError
from echelon.loop.samples import samples_of

__all__ = ["count_tokens", "problem_with", "rows", "summable", "weighted"]


def problem_with(made: Any, module: torch.nn.Module) -> str | None:
    """What is wrong with the value of `compute_loss` of this module; None if nothing is."""
    if not isinstance(made, tuple) or len(made) != 2:
        return f"{type(made).__name__}; return the pair (loss, outputs)."
    loss = made[0]
    if not isinstance(loss, torch.Tensor):
        return f"a loss of type {type(loss).__name__}; it must be a scalar tensor."
    if loss.dim():
        return f"a loss of shape {tuple(loss.shape)}; it must be a scalar: take its mean."
    if not loss.requires_grad and not any(p.requires_grad for p in module.parameters()):
        return (
            "a loss without a gradient, since no parameter of the module has one: all are frozen (requires_grad=False), or there "
            "are none. Unfreeze what is to be trained before the unit is built."
        )
    if not loss.requires_grad:
        return "a loss without a gradient: was it detached, or computed under no_grad?"
    return None


def rows(data: Any, given: int | None = None) -> int:
    """The samples of a batch; see `samples`."""
    return samples_of(data, given)[0]


def count_tokens(data: Any, *, next_token: bool, ignore_index: int = -100, key: str = "labels") -> torch.Tensor:
    """The labels over which a model's own mean loss is taken: the weight of a micro-batch, as models of transformers compute it.

        def weight(self, data):
            return echelon.count_tokens(data, next_token=True)

    Args:
        data: a batch with `key`, as a mapping or an attribute, or the labels themselves, (..., T) whole numbers.
        next_token: True for causal language models, which predict each token from those before it: nobody predicts a row's
            first label. False for masked language models, encoder-decoders, and classification of tokens or rows.
        ignore_index: labels that do not count.
    Returns:
        a 0-dim tensor on the labels' device, for which nothing waits. A micro-batch without such labels, whose loss is nan,
        counts nothing.
    Raises:
        UsageError: there are no labels.
    """
    labels = data
    if not isinstance(data, torch.Tensor):
        shifted = data.get("shift_labels") if isinstance(data, Mapping) and next_token and key == "labels" else None
        if isinstance(shifted, torch.Tensor):  # as context parallelism has them
            return (shifted != ignore_index).sum()
        labels = data.get(key) if isinstance(data, Mapping) else getattr(data, key, None)
    if not isinstance(labels, torch.Tensor):
        raise LoopError(
            f"the batch of count_tokens must have a tensor {key!r}, or be the labels themselves, got {type(data).__name__}."
        )
    if next_token:
        labels = labels[..., 1:]
    return (labels != ignore_index).sum()


def weighted(loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """loss * weight; of a weight of zero nothing, not even a nan."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, torch.zeros_like(loss), loss) * weight
    return loss * weight if weight else torch.zeros_like(loss)


def summable(weight: torch.Tensor) -> float | torch.Tensor:
    """A weight as windows add them up. Whole numbers in float32 end at 16 million; waiting for a CPU costs nothing."""
    return float(weight) if weight.device.type == "cpu" else weight.double()
