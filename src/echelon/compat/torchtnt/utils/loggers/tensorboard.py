"""torchtnt.utils.loggers.tensorboard."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.common.errors import NotHereError
from echelon.observe.loggers import tensorboard
from echelon.observe.loggers.logger import Scalar

__all__ = ["TensorBoardLogger"]

logger = logging.getLogger(__name__)


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

    def log_text(self, name: str, data: str, step: int) -> None:
        self._add("add_text", name, data, global_step=step)

    def log_hparams(self, hparams: dict[str, Scalar], metrics: dict[str, Scalar]) -> None:
        """Settings of the run beside its results."""
        self._add("add_hparams", hparams, metrics)

    def log_image(self, *args: Any, **kwargs: Any) -> None:
        """As `SummaryWriter.add_image`."""
        self._add("add_image", *args, **kwargs)

    def log_images(self, *args: Any, **kwargs: Any) -> None:
        """As `SummaryWriter.add_images`."""
        self._add("add_images", *args, **kwargs)

    def log_figure(self, *args: Any, **kwargs: Any) -> None:
        """As `SummaryWriter.add_figure`."""
        self._add("add_figure", *args, **kwargs)

    def log_audio(self, *args: Any, **kwargs: Any) -> None:
        """As `SummaryWriter.add_audio`."""
        self._add("add_audio", *args, **kwargs)

    def log_histogram(self, *args: Any, **kwargs: Any) -> None:
        """As `SummaryWriter.add_histogram`."""
        self._add("add_histogram", *args, **kwargs)

    def log_histogram_raw(self, *args: Any, **kwargs: Any) -> None:
        """As `SummaryWriter.add_histogram_raw`."""
        self._add("add_histogram_raw", *args, **kwargs)

    def _add(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self.writer is not None:
            getattr(self.writer, method)(*args, **kwargs)
