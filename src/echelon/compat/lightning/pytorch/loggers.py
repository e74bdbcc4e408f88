"""`lightning.pytorch.loggers`: the interface that a Trainer writes to, and two on echelon's loggers. Rank 0 writes."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.common.files import write_whole
from echelon.compat.lightning.pytorch.successors import LOGGERS, missing
from echelon.observe import loggers
from echelon.world import agree

__all__ = ["CSVLogger", "InFolders", "Logger", "TensorBoardLogger", "default_logger", "rank_zero_experiment"]


class _Nothing:
    """An experiment of a rank that writes nothing: whatever is called in it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...


def rank_zero_experiment(experiment: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For the property `experiment` of a Logger of your own: on other ranks than 0 an object that does nothing."""

    @functools.wraps(experiment)
    def on_rank_zero(self: Any) -> Any:
        return experiment(self) if agree.is_rank0() else _Nothing()

    return on_rank_zero


class Logger(ABC):
    """Write a subclass for another system: `log_metrics` and `log_hyperparams`, which are called on rank 0 alone."""

    @property
    @abstractmethod
    def name(self) -> str | None: ...

    @property
    @abstractmethod
    def version(self) -> int | str | None: ...

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @property
    def save_dir(self) -> str | None:
        return None

    @property
    def log_dir(self) -> str | None:
        return None

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        return None

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        return None

    def save(self) -> None:
        """After each writing."""
        return

    def finalize(self, status: str) -> None:
        """At the end of `fit`."""
        return


class InFolders(Logger):
    """Its files are in `save_dir/name/version_N`.

    Args:
        version: by default the first that is not there.
        prefix: goes before every name.
    """

    def __init__(
        self,
        save_dir: str | Path = ".",
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self._save_dir, self._name, self._version, self._prefix, self._options = (
            os.fspath(save_dir),
            name,
            version,
            prefix,
            options,
        )
        self._writer: Any = None

    @property
    def name(self) -> str:
        return self._name or ""

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self._save_dir, self.name)

    @property
    def version(self) -> int | str:
        return self._version if self._version is not None else self._next_version()

    @version.setter
    def version(self, value: int | str) -> None:
        self._version = value

    def choose_version(self) -> None:
        """Take the first number that no folder has, the same on all ranks. Collective."""
        self._version = agree.from_rank0(lambda: self.version)

    def _next_version(self) -> int:
        names = os.listdir(self.root_dir) if os.path.isdir(self.root_dir) else []
        taken = [int(n.removeprefix("version_")) for n in names if n.startswith("version_") and n[8:].isdecimal()]
        return max(taken, default=-1) + 1

    @property
    def log_dir(self) -> str:
        folder = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.join(self.root_dir, folder)

    @abstractmethod
    def _open(self) -> Any: ...

    @property
    def _opened(self) -> Any:
        if self._writer is None:
            self._version = self.version
            os.makedirs(self.log_dir, exist_ok=True)
            self._writer = self._open()
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not agree.is_rank0():
            return
        named = {f"{self._prefix}-{name}" if self._prefix else name: value for name, value in metrics.items()}
        self._opened.log_dict(named, step if step is not None else 0)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if not agree.is_rank0():
            return
        values = vars(params) if isinstance(params, Namespace) else dict(params or {})
        os.makedirs(self.log_dir, exist_ok=True)
        # JSON is YAML, and this is the name under which people look.
        write_whole(Path(self.log_dir) / "hparams.yaml", json.dumps(values, indent=1, default=str))

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": None}


class CSVLogger(InFolders):
    """`metrics.csv`, with a row for each step at which something was logged."""

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._held = flush_logs_every_n_steps

    def _open(self) -> Any:
        return loggers.CSVLogger(os.path.join(self.log_dir, "metrics.csv"), steps_before_flushing=self._held)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._opened


class TensorBoardLogger(InFolders):
    """Event files for TensorBoard; `experiment` is torch's SummaryWriter on rank 0, and does nothing on the others."""

    def _open(self) -> Any:
        return loggers.TensorBoardLogger(self.log_dir)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._opened.writer


def default_logger(save_dir: str) -> Logger:
    """TensorBoard's, if that is installed."""
    return TensorBoardLogger(save_dir) if importlib.util.find_spec("tensorboard") else CSVLogger(save_dir)


def __getattr__(name: str) -> Any:
    return missing(__name__, name, LOGGERS)
