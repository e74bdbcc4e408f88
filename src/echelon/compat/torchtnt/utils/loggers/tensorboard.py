"""torchtnt.utils.loggers.tensorboard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.common.errors import NotHereError
from echelon.observe.loggers import tensorboard
from echelon.observe.loggers.logger import Scalar

__all__ = ["TensorBoardLogger"]

logger = logging.getLogger(__name__)


def _as(method: str) -> Callable[..., None]:
    """As this method of SummaryWriter."""

    def log(self: TensorBoardLogger, *args: Any, **kwargs: Any) -> None:
        self._add(method, *args, **kwargs)

    return log


class TensorBoardLogger(tensorboard.TensorBoardLogger):
    """As `echelon.observe.loggers.TensorBoardLogger`.

    Args:
        tracked_metrics: None: metrics are not looked at.
    """

    def __init__(self, path: str | Path, tracked_metrics: None = None, *args: Any, **kwargs: Any) -> None:
        if tracked_metrics:
            raise NotHereError(
                "TensorBoardLogger(tracked_metrics=...) is not part of echelon.compat. Instead: a comparison where the number is "
                "logged; a loss that is nan or grows is looked at by echelon itself."
            )
        super().__init__(path, *args, **kwargs)
        if self.writer is not None:
            logger.info("TensorBoard SummaryWriter instantiated. Files will be stored in: %s", path)

    def close(self) -> None:
        super().close()
        self.writer = None

    def log_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Scalar], step: int | None = None, **kwargs: Any) -> None:
        """Several numbers in one chart."""
        self._add("add_scalars", main_tag, dict(tag_scalar_dict), global_step=step, **kwargs)

    log_image, log_images, log_figure, log_audio = _as("add_image"), _as("add_images"), _as("add_figure"), _as("add_audio")
    log_histogram, log_histogram_raw = _as("add_histogram"), _as("add_histogram_raw")

    def log_text(self, name: str, data: str, step: int) -> None:
        self._add("add_text", name, data, global_step=step)

    def log_hparams(self, hparams: dict[str, Scalar], metrics: dict[str, Scalar]) -> None:
        """Settings of the run beside its results."""
        self._add("add_hparams", hparams, metrics)

    def _add(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self.writer is not None:
            getattr(self.writer, method)(*args, **kwargs)
