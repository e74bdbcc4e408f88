"""A loop of one's own as short as it gets, and what the library says while something runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import echelon as ech
from tests.kit.models import net

Loss = Callable[..., torch.Tensor]


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def told(room: str = "echelon") -> Iterator[list[str]]:
    """What the library, or a room of it, logs on this rank within: the list grows."""
    handler, logger = _Told(), logging.getLogger(room)
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def prepared(*loaders: Any, module: nn.Module | None = None, **options: Any) -> Any:
    """What `prepare` makes of a model, or the shared one, of SGD over it, and of loaders."""
    module = net() if module is None else module
    return ech.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), *loaders, **options)


def step(model: Any, optimizer: Any, *batch: Any, loss: Loss = squares) -> Any:
    """Trains on one batch in a window of its own, which is returned."""
    with ech.window(model) as window:
        window.backward(loss(model, *batch))
        optimizer.step()
        optimizer.zero_grad()
    return window


def own_loop(
    module: nn.Module,
    loader: Any,
    loss: Loss = squares,
    *,
    epochs: int = 1,
    lr: float = 0.1,
    optimizer: Callable[[Any], Any] | None = None,
    clip: Callable[[Any, nn.Module], object] = lambda window, model: None,
    after: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> nn.Module:
    """Trains by SGD, or what `optimizer` makes of the parameters, on `loss(model, *batch)`.

    Args:
        clip: called with window and model before the optimizer's step; `after` with the model, behind each window.
        options: of `prepare`.
    Returns:
        the model as the layout has it.
    """
    made: Any = torch.optim.SGD(module.parameters(), lr) if optimizer is None else optimizer(module.parameters())
    model, made, loader = ech.prepare(module, made, loader, **options)
    for _ in ech.epochs(loader, epochs):
        for data in loader:
            with ech.window(model) as window:
                window.backward(loss(model, *data))
                clip(window, model)
                made.step()
                made.zero_grad()
            after(model)
    return model
