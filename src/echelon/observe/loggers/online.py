"""Loggers to online trackers: Weights & Biases, MLflow, trackio.

Rank 0 logs; on other ranks every method does nothing. A logger begins with its first number, so an unused one leaves no empty
run. Each tracker reads its own variables: `WANDB_MODE`, `MLFLOW_TRACKING_URI`, `TRACKIO_DIR`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import logging
import math
import os
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from echelon.common.arguments import is_path
from echelon.common.errors import EchelonError, LoggerError, require
from echelon.observe.loggers.logger import Scalar, hold, rank, scalar_to_float

__all__ = ["MLflowLogger", "OnlineLogger", "TrackioLogger", "WandbLogger"]

logger = logging.getLogger(__name__)

# Steps held in memory, and for how long: numbers on a GPU are read when they are sent, all at once.
_PORTION = 100
_PORTION_S = 5.0
_TAG = "echelon.id"  # tag for our id of a run, since MLflow assigns ids of its own


class OnlineLogger(ABC):
    """Collects the numbers of a step, and sends many steps to the tracker at once.

    Args:
        project: the tracker's project.
        name: the run's name in the tracker.
        folder: folder for the tracker's files.
        config: settings to show with the numbers, as plain values.
        id: the tracker's id of the run; an existing run is continued. At most 100 letters, digits, - and _; None makes a new run
            each time.
    Attributes:
        failed: whether `close` ends the run as failed.
    """

    package = ""
    failed = False

    def __init__(
        self,
        project: str,
        name: str | None = None,
        folder: str | Path = ".",
        config: Mapping[str, Any] | None = None,
        id: str | None = None,
    ) -> None:
        require(isinstance(project, str) and bool(project), "project", "a name", project, kind=LoggerError)
        require(is_path(folder), "folder", "a folder", folder, kind=LoggerError)
        is_id = id is None or (isinstance(id, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,100}", id) is not None)
        require(is_id, "id", "at most 100 letters, digits, - and _", id, kind=LoggerError)
        self.project, self.name, self.folder, self.config, self.id = project, name, Path(folder), dict(config or {}), id
        self._rows: dict[int, dict[str, Scalar]] = {}
        self._flushed_at, self._begun = time.monotonic(), False
        self._tracker: Any = self._import() if rank() == 0 else None

    def _import(self) -> Any:
        """Import the tracker's package.

        Raises:
            UsageError: it is not installed.
        """
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            raise LoggerError(
                f"{type(self).__name__} needs {self.package}: pip install 'echelon[{self.package}]' ({error})."
            ) from None

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one number."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several numbers of a step."""
        if self._tracker is None:
            return
        self.begin()
        row = self._rows.get(step)
        if row is None:
            if len(self._rows) >= _PORTION or time.monotonic() - self._flushed_at >= _PORTION_S:
                self.flush()
            row = self._rows[step] = {}
        row |= {name: hold(data) for name, data in payload.items()}

    def begin(self) -> None:
        """Begin the tracker's run, as the first number does. Does nothing on ranks other than 0, or if it has begun."""
        if self._tracker is not None and not self._begun:
            self._begin()
            self._begun = True
            atexit.register(self.close)

    def flush(self) -> None:
        """Send all held rows to the tracker."""
        rows, self._rows, self._flushed_at = self._rows, {}, time.monotonic()
        if rows:
            self._send({step: {name: scalar_to_float(value) for name, value in row.items()} for step, row in rows.items()})

    def close(self) -> None:
        """Send all held rows, and end the tracker's run. Also done at an ordinary end of the process."""
        if self._begun:
            self.flush()
            self._end()
            self._begun = False
            atexit.unregister(self.close)

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _send(self, rows: Mapping[int, Mapping[str, float]]) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


class WandbLogger(OnlineLogger):
    """A logger to Weights & Biases. Without a login, or with `WANDB_MODE=offline`, into a folder for a later `wandb sync`.

    Args:
        options: for `wandb.init`, such as entity, group and tags.
    Attributes:
        run: wandb's run, once it has begun; None on ranks other than 0.
    """

    package = "wandb"
    step_name = "step"

    def __init__(self, project: str, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(project, *args, **kwargs)
        self._options = dict(options or {})
        self.run: Any = None

    def _begin(self) -> None:
        options: dict[str, Any] = {} if self.id is None else {"id": self.id, "resume": "allow"}
        options |= self._options
        if "WANDB_MODE" not in os.environ and "mode" not in options and not self._has_login():
            options["mode"] = "offline"
            logger.warning("no login for Weights & Biases was found: the run is kept offline in %s/wandb", self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        options.setdefault("settings", self._tracker.Settings(console="off", silent=True))  # ranks' output is in the run's folder
        run = self._tracker.init(project=self.project, name=self.name, dir=str(self.folder), config=self.config, **options)
        # Log our step as a number: wandb's own steps may only grow, and a resumed run repeats some.
        run.define_metric("*", step_metric=self.step_name)
        self.run = run

    def _has_login(self) -> bool:
        if os.environ.get("WANDB_API_KEY"):
            return True
        login = self._tracker.login
        if "prompt" in inspect.signature(login).parameters:
            return bool(login(prompt=False, verify=False))
        return bool(self._tracker.api.api_key)  # before wandb 0.24

    def _send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        for step, row in rows.items():
            self.run.log({**row, self.step_name: step})

    def _end(self) -> None:
        self.run.finish(exit_code=int(self.failed))


class MLflowLogger(OnlineLogger):
    """A logger to MLflow, at `MLFLOW_TRACKING_URI` or MLflow's default place. The project is the experiment.

    Args:
        tracking_uri: instead of the variable.
        tags: of a new run.
        run_id: MLflow's id of a run to continue.
    Attributes:
        client: an MlflowClient, once it has begun; None on ranks other than 0.
    """

    package = "mlflow"

    def __init__(
        self,
        project: str,
        *args: Any,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(project, *args, **kwargs)
        self.tracking_uri, self.tags, self.run_id = tracking_uri, dict(tags or {}), run_id
        self.client: Any = None

    def _begin(self) -> None:
        try:
            self.client = self._tracker.MlflowClient(self.tracking_uri)
            if self.run_id is not None:
                self.client.update_run(self.run_id, status="RUNNING")
                return
            known = self.client.get_experiment_by_name(self.project)
            experiment = known.experiment_id if known is not None else self.client.create_experiment(self.project)
            if self._goes_on(experiment):
                return
            tags = self.tags if self.id is None else {**self.tags, _TAG: self.id}
            self.run_id = self.client.create_run(experiment, run_name=self.name, tags=tags).info.run_id
        except self._tracker.exceptions.MlflowException as error:
            raise EchelonError(
                f"MLflow cannot begin a run: {str(error)[:300]}. Set MLFLOW_TRACKING_URI to your server, or install mlflow as a "
                "whole for a database in a file."
            ) from error
        self._send_params(dict([*self.config.items()][:100]))

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log settings of the run, which MLflow does not let anybody change later."""
        if self._tracker is not None:
            self.begin()
            self._send_params(params)

    def _send_params(self, params: Mapping[str, Any]) -> None:
        entries = [self._tracker.entities.Param(_mlflow_name(k), str(v)[:6000]) for k, v in params.items()]
        for at in range(0, len(entries), 100):  # MLflow's limit
            self.client.log_batch(self.run_id, params=entries[at : at + 100])

    def _goes_on(self, experiment: str) -> bool:
        """Continue the run with this id, if there is one. Its settings stay, since MLflow refuses changes."""
        if self.id is None:
            return False
        runs = self.client.search_runs([experiment], f"tags.`{_TAG}` = '{self.id}'", max_results=1)
        for run in runs:
            self.run_id = run.info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
        return bool(runs)

    def _send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        now = int(1000 * time.time())
        metric = self._tracker.entities.Metric
        entries = [metric(_mlflow_name(name), value, now, step) for step, row in rows.items() for name, value in row.items()]
        for at in range(0, len(entries), 1000):  # MLflow's limit
            self.client.log_batch(self.run_id, metrics=entries[at : at + 1000])

    def _end(self) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if self.failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)[:250]


class TrackioLogger(OnlineLogger):
    """A logger to trackio, which keeps runs on this machine and shows them with `trackio show`."""

    package = "trackio"

    def _begin(self) -> None:
        with _printing_to_stderr():
            self._run = self._tracker.init(
                project=re.sub(r"[^\w\-]", "_", self.project), name=self.name, config=self.config, resume="allow"
            )

    def _send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        for step, row in rows.items():
            self._run.log({k: v if math.isfinite(v) else str(v) for k, v in row.items()}, step=step)

    def _end(self) -> None:
        with _printing_to_stderr():
            self._run.finish()


class _Printed:
    """Replaces `sys.stdout`: for the thread that made it, it is stderr."""

    def __init__(self, usual: Any) -> None:
        self.usual, self._thread = usual, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if threading.get_ident() == self._thread else self.usual, name)


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Send a tracker's own messages to stderr, since they are not the script's output; other threads print as usual."""
    printed = sys.stdout = _Printed(sys.stdout)
    try:
        yield
    finally:
        if sys.stdout is printed:  # otherwise another thread has replaced it and will restore this pass-through
            sys.stdout = printed.usual
