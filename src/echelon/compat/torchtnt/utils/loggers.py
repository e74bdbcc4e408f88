"""torchtnt.utils.loggers: loggers of numbers, under TorchTNT's names."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.common.errors import NotHereError, require
from echelon.observe.loggers.file import CSVLogger as OwnCSVLogger
from echelon.observe.loggers.logger import MetricLogger, Scalar, rank, scalar_to_float
from echelon.observe.loggers.tensorboard import TensorBoardLogger as OwnTensorBoardLogger

__all__ = ["CSVLogger", "InMemoryLogger", "MetricLogger", "Scalar", "StdoutLogger", "TensorBoardLogger", "scalar_to_float"]

_log = logging.getLogger(__name__)


class CSVLogger(OwnCSVLogger):
    """As `echelon.loggers.CSVLogger`.

    Args:
        async_write: no effect: a write appends a few lines and needs no thread.
    """

    def __init__(
        self, path: str | Path, steps_before_flushing: int = 100, log_all_ranks: bool = False, async_write: bool = False
    ) -> None:
        super().__init__(path, steps_before_flushing, log_all_ranks)


class InMemoryLogger:
    """Keeps the numbers of this rank by step.

    Attributes:
        log_buffer: {step: {each name: number, "step", "time"}}, in the order in which steps came.
    """

    def __init__(self) -> None:
        self.log_buffer: OrderedDict[int, dict[str, float]] = OrderedDict()
        _log.info("Logging metrics in-memory")

    def log(self, name: str, data: Scalar, step: int) -> None:
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        for name, data in payload.items():
            self.log_buffer.setdefault(step, {}).update({name: scalar_to_float(data), "step": step, "time": time.time()})

    def flush(self) -> None:
        """Print the kept numbers."""
        print(self.log_buffer)

    def close(self) -> None:
        """Forget everything."""
        self.log_buffer.clear()


class StdoutLogger:
    """Rank 0 prints "[Step 3] loss=0.1234 accuracy=0.9000": one line per step, however many calls give its numbers.

    Args:
        precision: digits after the point.
    """

    def __init__(self, precision: int = 4) -> None:
        require(precision >= 0, "precision", "at least 0 digits", precision)
        self._precision = precision
        self._step: int | None = None
        _log.info("Logging metrics to stdout")

    def log(self, name: str, data: Scalar, step: int) -> None:
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        if rank() != 0:
            return
        numbers = "".join(f" {name}={scalar_to_float(data):.{self._precision}f}" for name, data in payload.items())
        begin = f"\n[Step {step}]" if step != self._step else ""
        self._step = step
        print(begin + numbers, end="", flush=True)  # at once: other programs' lines could cut it in two

    def close(self) -> None:
        """End the line, and print an empty one."""
        if rank() == 0:
            print("\n", flush=True)


def _as(method: str) -> Callable[..., None]:
    """A method that calls this method of SummaryWriter."""

    def log(self: TensorBoardLogger, *args: Any, **kwargs: Any) -> None:
        self._add(method, *args, **kwargs)

    return log


class TensorBoardLogger(OwnTensorBoardLogger):
    """As `echelon.observe.loggers.TensorBoardLogger`.

    Args:
        tracked_metrics: must be None: metrics are not checked.
    """

    def __init__(self, path: str | Path, tracked_metrics: None = None, *args: Any, **kwargs: Any) -> None:
        if tracked_metrics:
            raise NotHereError(
                "TensorBoardLogger(tracked_metrics=...) is not part of echelon.compat. Instead: a comparison where the number is "
                "logged; a loss that is nan or grows is looked at by echelon itself."
            )
        super().__init__(path, *args, **kwargs)
        if self.writer is not None:
            _log.info("TensorBoard SummaryWriter instantiated. Files will be stored in: %s", path)

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
