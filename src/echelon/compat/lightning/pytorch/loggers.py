"""`lightning.pytorch.loggers`: the interface that a Trainer writes to, and loggers over echelon's own. Rank 0 writes."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import secrets
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.common.files import write_whole
from echelon.compat.lightning.pytorch.hooks import no_hook
from echelon.observe import loggers
from echelon.observe.loggers.logger import rank
from echelon.world import agree

__all__ = [
    "CSVLogger",
    "InFolders",
    "Logger",
    "MLFlowLogger",
    "Online",
    "TensorBoardLogger",
    "WandbLogger",
    "Writing",
    "chosen_loggers",
    "rank_zero_experiment",
    "version_folder",
]

_logger = logging.getLogger(__name__)


class _Nothing:
    """The experiment of a rank that writes nothing: any call of its methods does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...


class _Silent(_Nothing):
    """The logger of a run that writes nothing: a module may call any method of it or of its experiment."""

    name = version = ""
    save_dir = log_dir = None


def rank_zero_experiment(experiment: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator for the property `experiment` of a Logger: other ranks than 0 get an object that does nothing."""

    @functools.wraps(experiment)
    def on_rank_zero(self: Any) -> Any:
        return experiment(self) if rank() == 0 else _Nothing()

    return on_rank_zero


class Logger(ABC):
    """Base of loggers. A subclass for another tracker has `log_metrics` and `log_hyperparams`, which rank 0 alone calls."""

    name: Any = None
    version: Any = None
    save_dir: Any = None
    log_dir: Any = None

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    save: Any = no_hook("save")  # after each write
    finalize: Any = no_hook("finalize")  # with "success" or "failed", at the end of each call of the Trainer
    log_graph: Any = no_hook("log_graph")
    after_save_checkpoint: Any = no_hook("after_save_checkpoint")


def _values_of(params: Any) -> dict[str, Any]:
    return vars(params) if isinstance(params, Namespace) else dict(params or {})


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}-{name}" if prefix else name: value for name, value in values.items()}


class Writing(Logger):
    """A logger that writes through one of echelon's, made in the process that writes.

    Args:
        prefix: goes before every name.
    Attributes:
        own: the attribute of echelon's logger that is the tracker's own object, for `experiment`.
    """

    own = ""

    def __init__(self, save_dir: str | Path, prefix: str) -> None:
        self.save_dir, self._prefix = os.fspath(save_dir), prefix
        self._made: Any = None

    @abstractmethod
    def _open(self) -> Any: ...

    @property
    def _opened(self) -> Any:
        if self._made is None:
            self._made = self._open()
        return self._made

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        made = self._opened
        if isinstance(made, loggers.OnlineLogger):
            made.begin()
        return getattr(made, self.own, made)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if rank() == 0:
            self._opened.log_dict(_prefixed(self._prefix, metrics), step if step is not None else 0)

    def save(self) -> None:
        if self._made is not None:
            self._made.flush()

    def close(self) -> None:
        """End what is open; a later number opens it again, as in another process."""
        if self._made is not None:
            self._made.close()
            vars(self).update(self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}


class InFolders(Writing):
    """A logger with files in `save_dir/name/version_N`.

    Args:
        version: by default one above the highest that exists.
    """

    def __init__(
        self,
        save_dir: str | Path = ".",
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(save_dir, prefix)
        self.name, self._version = name or "", version
        self.root_dir = os.path.join(self.save_dir, self.name)

    @property
    def version(self) -> int | str:
        if self._version is not None:
            return self._version
        names = os.listdir(self.root_dir) if os.path.isdir(self.root_dir) else []
        taken = [int(n.removeprefix("version_")) for n in names if n.startswith("version_") and n[8:].isdecimal()]
        return max(taken, default=-1) + 1

    @version.setter
    def version(self, value: int | str) -> None:
        self._version = value

    def choose_version(self) -> None:
        """Fix the version: rank 0's, on all ranks. Collective."""
        self._version = agree.from_rank0(lambda: self.version)

    @property
    def log_dir(self) -> str:
        folder = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.join(self.root_dir, folder)

    def _folder(self) -> str:
        """`log_dir`, which exists from now on."""
        self._version = self.version
        os.makedirs(self.log_dir, exist_ok=True)
        return self.log_dir

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if rank() == 0:  # JSON is YAML, and people look for this name
            write_whole(Path(self._folder()) / "hparams.yaml", json.dumps(_values_of(params), indent=1, default=str))

    def finalize(self, status: str) -> None:
        self.close()


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
        return loggers.CSVLogger(os.path.join(self._folder(), "metrics.csv"), steps_before_flushing=self._held)


class TensorBoardLogger(InFolders):
    """Event files for TensorBoard; `experiment` is torch's SummaryWriter on rank 0, and does nothing on the others.

    Args:
        log_graph: has no effect; True logs a warning.
        default_hp_metric: has no effect: hyperparameters are only written to hparams.yaml.
        sub_dir: a folder for the files, in the version's folder.
        writer: options of the SummaryWriter.
    """

    own = "writer"

    def __init__(
        self,
        save_dir: str | Path = ".",
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | Path | None = None,
        **writer: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._sub_dir, self._options = sub_dir, writer
        if log_graph and rank() == 0:
            _logger.warning("TensorBoardLogger(log_graph=True): the graph is not written. Call self.logger.experiment.add_graph")

    @property
    def log_dir(self) -> str:
        return super().log_dir if self._sub_dir is None else os.path.join(super().log_dir, self._sub_dir)

    def _open(self) -> Any:
        return loggers.TensorBoardLogger(self._folder(), **self._options)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars, as Lightning does and programs expect. Echelon's own logger writes tensors."""
        for name, value in _prefixed(self._prefix, metrics).items():
            self.experiment.add_scalar(name, value, step if step is not None else 0)


class Online(Writing):
    """A logger to a tracker. `log_model` only logs a warning."""

    def __init__(self, save_dir: str | Path, prefix: str, log_model: Any, **without_effect: Any) -> None:
        super().__init__(save_dir, prefix)
        _ = self._opened  # raises if the tracker is not installed
        if log_model and rank() == 0:
            message = "%s(log_model=%r): checkpoints are not uploaded. They are in ModelCheckpoint's dirpath"
            _logger.warning(message, type(self).__name__, log_model)
        for name, value in without_effect.items():
            if value is not None and rank() == 0:
                _logger.warning("%s(%s=%r): has no effect here", type(self).__name__, name, value)

    def finalize(self, status: str) -> None:
        self._opened.failed = status == "failed"


class _ToWandb(loggers.WandbLogger):
    step_name = "trainer/global_step"


class WandbLogger(Online):
    """Logs to Weights & Biases. It continues a run that `wandb.init` has begun in this process. `experiment` is wandb's run.

    Args:
        save_dir: where wandb keeps files; `dir` is the same.
        id: the run's id; a run that exists continues. `version` is the same. By default a new id.
        offline: write into a folder that `wandb sync` uploads later.
        init: options of `wandb.init`: entity, group, tags, ...
    """

    own = "run"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Any = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        config: Any = None,
        **init: Any,
    ) -> None:
        self.run_name, self.version = name, version or id or getattr(experiment, "id", None) or secrets.token_hex(4)
        self.name = project or os.environ.get("WANDB_PROJECT", "lightning_logs")
        self._config, self._init = (
            config,
            {"id": self.version, "resume": "allow", **({"mode": "offline"} if offline else {}), **init},
        )
        policy = None if add_file_policy == "mutable" else add_file_policy
        of_uploads: dict[str, Any] = {"checkpoint_name": checkpoint_name, "add_file_policy": policy}
        super().__init__(save_dir if dir is None else dir, prefix, log_model, anonymous=anonymous, **of_uploads)

    def _open(self) -> Any:
        return _ToWandb(self.name, self.run_name, self.save_dir, self._config, options=self._init)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        values = json.loads(json.dumps(_values_of(params), default=str))
        self.experiment.config.update(values, allow_val_change=True)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Log arrays, tensors or files as images. `kwargs`: lists, one item per image, of `wandb.Image`'s options."""
        own = [{name: of[i] for name, of in kwargs.items()} for i in range(len(images))]
        self._log(key, lambda make: [make.Image(image, **of) for image, of in zip(images, own, strict=True)], step)

    def log_table(
        self, key: str, columns: list[str] | None = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        self._log(key, lambda make: make.Table(columns=columns, data=data, dataframe=dataframe), step)

    log_text = log_table

    def _log(self, key: str, made: Callable[[Any], Any], step: int | None) -> None:
        if rank() == 0:
            at = {} if step is None else {_ToWandb.step_name: step}
            self.experiment.log({**_prefixed(self._prefix, {key: made(importlib.import_module("wandb"))}), **at})

    def watch(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Has no effect, and logs a warning."""
        if rank() == 0:
            _logger.warning("WandbLogger.watch: has no effect here. Instead: self.logger.experiment.watch(self) in on_fit_start")


class MLFlowLogger(Online):
    """Logs to MLflow. `experiment` is an MlflowClient.

    Args:
        tracking_uri: by default `MLFLOW_TRACKING_URI`, else the folder `save_dir`, else MLflow's own default.
        run_id: the id of a run to continue.
    """

    own = "client"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | None = None,
        log_model: Any = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (f"file:{save_dir}" if save_dir else None)
        self.name, self._run_id = experiment_name, run_id
        self._options: dict[str, Any] = {"project": experiment_name, "name": run_name, "tracking_uri": uri, "tags": tags}
        without_effect = {"artifact_location": artifact_location, "synchronous": synchronous}
        super().__init__(save_dir or ".", prefix, log_model, **without_effect)

    def _open(self) -> Any:
        return loggers.MLflowLogger(**self._options, run_id=self._run_id)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run_id": self.run_id}

    @property
    def run_id(self) -> str | None:
        run_id: str | None = self._opened.run_id
        return run_id

    @property
    def version(self) -> str | None:
        """The run's id; None on other ranks than 0."""
        _ = self.experiment  # begins it
        return self.run_id

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._opened.log_params(_values_of(params))

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.close()


def version_folder(logger: Any, root: str) -> str:
    """The folder of a logger's run; `root` if it has none. Call it on rank 0."""
    if logger is None or not all(hasattr(logger, each) for each in ("name", "version")):
        return root
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(getattr(logger, "save_dir", None) or root, str(logger.name), version)


def chosen_loggers(given: Any, save_dir: str, *, silent: bool = False) -> list[Any]:
    """The loggers for `Trainer(logger=...)`: by default TensorBoard's if it is installed, else CSVLogger.

    Args:
        silent: no logger writes.
    """
    if given is False or silent:
        return [_Silent()] if given is not False else []
    if given is None:
        return [(TensorBoardLogger if importlib.util.find_spec("tensorboard") else CSVLogger)(save_dir)]
    return list(given) if isinstance(given, (list, tuple)) else [given]
