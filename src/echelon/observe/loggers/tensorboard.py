"""A logger to TensorBoard, through torch's SummaryWriter."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.common.arguments import is_path
from echelon.common.errors import LoggerError, require
from echelon.observe.loggers.logger import Scalar, hold, rank, scalar_to_float

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLogger"]


# Numbers on a GPU are read in batches of this size, since each read waits for the device.
_PORTION = 100


class TensorBoardLogger:
    """Rank 0 writes event files; on other ranks every method does nothing. Use `writer` for texts, images and more.

    Args:
        path: the folder for TensorBoard's files.
        args, kwargs: passed to SummaryWriter.
    Attributes:
        writer: the SummaryWriter; None on other ranks.
    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        require(is_path(path), "path", "a folder", path, kind=LoggerError)
        self._path = str(path)
        self.writer: SummaryWriter | None = None
        self._on_gpu: list[tuple[str, Scalar, int, float]] = []
        if rank() == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise LoggerError("TensorBoardLogger needs tensorboard: pip install 'echelon[tensorboard]'.") from None
            self.writer = SummaryWriter(self._path, *args, **kwargs)
            atexit.register(self.close)

    @property
    def path(self) -> str:
        return self._path

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one number."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several numbers, each as a chart."""
        if self.writer is not None:
            for name, data in payload.items():
                held = hold(data)
                if isinstance(held, float):
                    self.writer.add_scalar(name, held, global_step=step, new_style=True)
                else:
                    self._on_gpu.append((name, held, step, time.time()))
            if len(self._on_gpu) >= _PORTION:
                self._read()

    def flush(self) -> None:
        """Write all held numbers; TensorBoard does so every two minutes itself."""
        if self.writer is not None:
            self._read()
            self.writer.flush()

    def close(self) -> None:
        """Write all held numbers and close the file."""
        if self.writer is not None:
            self._read()
            self.writer.close()
            atexit.unregister(self.close)

    def _read(self) -> None:
        held, self._on_gpu = self._on_gpu, []
        for name, data, step, at in held:
            assert self.writer is not None  # nothing is held otherwise
            self.writer.add_scalar(name, scalar_to_float(data), global_step=step, walltime=at, new_style=True)
