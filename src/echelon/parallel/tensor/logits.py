"""Logits that stay split by words, style "colwise_logits": `cross_entropy` takes them so, in torch's `loss_parallel`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from echelon.parallel.shards import is_split, local
from echelon.parallel.tensor.layers import splits_logits

__all__ = ["around_losses", "plain_loss"]


def around_losses(module: nn.Module) -> AbstractContextManager[Any] | None:
    """The context of forward and backward passes; None for a module that gives whole logits."""
    if not any(splits_logits(layer) for layer in module.modules()):
        return None
    from torch.distributed.tensor.parallel import loss_parallel

    return _Again(loss_parallel)


class _Again(AbstractContextManager[Any]):
    """A context that can be entered more than once, also while it is: the outermost counts."""

    def __init__(self, make: Any) -> None:
        self._make, self._depth = make, 0
        self._entered: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._entered = self._make()
            self._entered.__enter__()

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._entered is not None:
            # Without the error: torch's would leave its operations in place.
            self._entered.__exit__(None, None, None)
            self._entered = None


def plain_loss(made: Any) -> Any:
    """The value of `compute_loss` with a loss that is no DTensor: all ranks have it whole."""
    if isinstance(made, tuple) and made and is_split(made[0]) and made[0].dim() == 0:
        return (local(made[0]), *made[1:])
    return made
