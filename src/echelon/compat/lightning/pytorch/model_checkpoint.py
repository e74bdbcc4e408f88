"""ModelCheckpoint: which checkpoints of a run are written and kept. Each is an echelon folder under Lightning's name."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.checkpoint import commit, manifest
from echelon.checkpoint.location import location, remove_tree
from echelon.checkpoint.policy import Keep
from echelon.common.errors import UsageError, require
from echelon.common.numbers import whole
from echelon.compat.lightning.pytorch.hooks import Callback
from echelon.compat.lightning.pytorch.loggers import version_folder
from echelon.compat.lightning.pytorch.optimizers import not_logged
from echelon.contracts.overrides import overrides
from echelon.loop.checkpointing.folder import RunFolder
from echelon.world import agree

__all__ = ["Checkpoint", "ModelCheckpoint"]

logger = logging.getLogger(__name__)


class Checkpoint(Callback):
    """Base of callbacks that save."""


class ModelCheckpoint(Checkpoint):
    """Save after epochs or steps, and keep the best, or the latest.

    Args:
        dirpath: by default "checkpoints" in the logger's save_dir/name/version, or in the Trainer's default_root_dir.
        filename: with names of logged values in it, such as "{epoch}-{val_loss:.2f}", which becomes "epoch=1-val_loss=0.31.ckpt".
        monitor, mode: the logged value that tells which are best; None keeps the latest.
        save_top_k: how many stay; -1 keeps all, 0 writes none.
        save_last: "last.ckpt" always stands for the latest.
        every_n_train_steps, every_n_epochs: when to save; by default after every evaluated epoch, or without evaluations after
            every epoch.
        save_on_train_epoch_end: save at an epoch's end, not after an evaluation.
        save_weights_only: has no effect: a checkpoint is always whole, and `load_from_checkpoint` reads only its weights.
        enable_version_counter: a name that is taken gets "-v1".
    Attributes:
        best_model_path, best_model_score, last_model_path, best_k_models: paths are "" where there is none.
    """

    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"

    meets = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        require(mode in ("min", "max"), "mode", "'min' or 'max'", mode)
        for name, value in {"save_on_exception": save_on_exception, "train_time_interval": train_time_interval}.items():
            if value:
                raise UsageError(f"ModelCheckpoint({name}={value!r}) is not supported. Use every_n_train_steps.")
        if every_n_train_steps and every_n_epochs:
            raise UsageError("ModelCheckpoint: give every_n_train_steps or every_n_epochs.")
        save_top_k = whole("save_top_k", save_top_k, at_least=-1)
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise UsageError(f"ModelCheckpoint(save_top_k={save_top_k}) needs a monitor that tells which are best.")
        if save_weights_only:
            logger.warning("ModelCheckpoint(save_weights_only=True) has no effect: the optimizer's state is saved, too")
        self.dirpath = os.path.realpath(os.path.expanduser(dirpath)) if dirpath is not None else None
        self.filename, self.monitor, self.mode, self.verbose = filename, monitor, mode, verbose
        self.save_last, self.save_top_k, self.save_weights_only = save_last, save_top_k, save_weights_only
        self.auto_insert_metric_name, self.enable_version_counter = auto_insert_metric_name, enable_version_counter
        nothing = every_n_train_steps is None and every_n_epochs is None
        self._every_n_epochs = 1 if nothing else every_n_epochs or 0
        self._every_n_train_steps, self.counts_steps = every_n_train_steps or 0, bool(every_n_train_steps)
        self._on_train_epoch_end = save_on_train_epoch_end
        self._saved_at, self._waits = (0, 0), False
        self.latest_saved = ""  # path of what this object saved last
        self._folder: RunFolder | None = None  # during training
        self.best_k_models: dict[str, torch.Tensor] = {}
        self.kth_best_model_path = self.best_model_path = self.last_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        self.current_score: torch.Tensor | None = None

    @property
    def state_key(self) -> str:
        return self._key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
        )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and not trainer.global_step:  # a new training
            self._saved_at = (0, 0)
        first, root = trainer.logger, trainer.default_root_dir
        self.dirpath = agree.from_rank0(lambda: self.dirpath or os.path.join(version_folder(first, root), "checkpoints"))

    # --- who writes here

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the folder until `fit` ends: other runs may not write into it."""
        if not trainer.fast_dev_run and (self.save_top_k or self.save_last):
            assert self.dirpath is not None
            self._folder = RunFolder(location(self.dirpath), Keep(None), restart=False)
            self._folder.take()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """With `save_last`, save at the end if nothing was saved before."""
        observed = trainer.fast_dev_run or overrides().observes
        if self.save_last and not (self.latest_saved or observed) and trainer.at_boundary and not trainer.received_sigterm:
            self._save_last(trainer)

    def _release(self, *_: Any) -> None:
        if self._folder is not None:
            self._folder.release()
            self._folder = None

    teardown = on_exception = _release

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_folder": None}

    # --- when

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every = self._every_n_train_steps
        if self._waits or (every and trainer.global_step and trainer.global_step % every == 0):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._saves_at_epoch_end(trainer):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self._saves_at_epoch_end(trainer):
            self._save_if_due(trainer)

    def _saves_at_epoch_end(self, trainer: Any) -> bool:
        if self._on_train_epoch_end is not None:
            return self._on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return not trainer.session.validates
        return not trainer.session.validates or trainer.val_check_interval == 1.0

    def _save_if_due(self, trainer: Any) -> None:
        every = self._every_n_epochs
        if self._waits or (every and (trainer.current_epoch + 1) % every == 0):
            self._save(trainer)

    def save_at_stop(self, trainer: Any) -> bool:
        """Save the last checkpoint after a signal has asked the run to end, if `save_last` is set. Collective.

        Returns:
            whether the state is saved, now or by the latest save, so that `ckpt_path="last"` continues from here.
        """
        if not self.save_last or trainer.fast_dev_run:
            return False
        if self._saved_at != trainer.trained or not self.latest_saved:
            self._saved_at = trainer.trained
            self._save_last(trainer)
        return True

    # --- what

    def _save(self, trainer: Any) -> None:
        if trainer.fast_dev_run or trainer.sanity_checking or self._saved_at == trainer.trained or overrides().observes:
            return
        values: dict[str, Any] = {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
        self._waits = not trainer.at_boundary or (self.monitor is not None and agree.any_rank(self.monitor not in values))
        if self._waits:
            if trainer.at_boundary and trainer.session.was_evaluated:
                raise not_logged("ModelCheckpoint", self.monitor, trainer.callback_metrics, " on all ranks")
            return
        self._saved_at = trainer.trained
        if self.save_top_k:
            if self.monitor is None:
                self._save_latest(trainer, values)
            else:
                self._save_best(trainer, values)
        if self.save_last:
            self._save_last(trainer)

    def _save_latest(self, trainer: Any, values: Mapping[str, Any]) -> None:
        before = self.best_model_path if self._is_inside(self.best_model_path) else ""
        self.best_model_path = self._path_for(values, but=before)
        self._put(trainer, self.best_model_path, before if self.save_top_k == 1 else "")

    def _save_best(self, trainer: Any, values: Mapping[str, Any]) -> None:
        assert self.monitor is not None
        value = float(values[self.monitor])
        worst = math.inf if self.mode == "min" else -math.inf
        self.current_score = current = torch.tensor(worst if math.isnan(value) else value)
        is_full = self.save_top_k != -1 and len(self.best_k_models) >= self.save_top_k
        better = agree.from_rank0(lambda: not is_full or self._is_better(current, self.best_k_models[self.kth_best_model_path]))
        if not better:
            return
        doomed = self.kth_best_model_path if is_full else ""
        path = self._path_for(values, but=doomed)
        models = {name: score for name, score in self.best_k_models.items() if name != doomed} | {path: current}
        ordered = sorted(models, key=lambda name: float(models[name]), reverse=self.mode == "max")
        self.best_k_models, self.kth_best_model_path = models, ordered[-1]
        self.best_model_path, self.best_model_score = ordered[0], models[ordered[0]]
        self._put(trainer, path, doomed)
        if self.verbose and agree.is_rank0():
            logger.info(
                "step %s: %s = %s is among the best %s: %s", trainer.global_step, self.monitor, value, self.save_top_k, path
            )

    def _is_inside(self, path: str) -> bool:
        """Whether the path is in this callback's folder: checkpoints elsewhere, which a run may continue from, are left alone."""
        assert self.dirpath is not None
        return Path(self.dirpath) in Path(path).parents

    def _path_for(self, values: Mapping[str, Any], but: str) -> str:
        if not self.enable_version_counter:  # a checkpoint of that name is replaced
            return self.format_checkpoint_name(values)
        return _free(lambda ver: self.format_checkpoint_name(values, ver=ver), lambda path: path == but)

    def _put(self, trainer: Any, path: str, doomed: str) -> None:
        """Save, then remove `doomed`, unless the new checkpoint has its name, or it is the one that the run goes on from."""
        trainer.save_checkpoint(path)
        self.latest_saved = path
        if doomed and os.path.abspath(doomed) not in (os.path.abspath(path), os.path.abspath(trainer.ckpt_path or "")):
            _remove(doomed)

    def _is_better(self, score: torch.Tensor, than: torch.Tensor) -> bool:
        return bool(score < than) if self.mode == "min" else bool(score > than)

    def _save_last(self, trainer: Any) -> None:
        """Save a folder and link to it, so that the link always stands for a whole checkpoint."""
        assert self.dirpath is not None
        last = self._own_last()
        name = f".last-step={trainer.global_step}"
        folder = Path(_free(lambda ver: str(last.with_name(f"{name}{_version(ver)}{self.FILE_EXTENSION}"))))
        self.last_model_path = str(last)
        trainer.save_checkpoint(folder)
        self.latest_saved = str(last)

        def link() -> None:
            older = os.readlink(last) if last.is_symlink() else None
            aside = last.with_name(f".{last.name}.new")
            aside.unlink(missing_ok=True)
            aside.symlink_to(folder.name)
            if last.is_dir() and not last.is_symlink():
                remove_tree(last)
            os.replace(aside, last)
            if older is not None and older != folder.name and older.startswith(".last-"):
                remove_tree(last.with_name(older))

        commit.on_rank0(link)

    def _own_last(self) -> Path:
        """The link's path: "last.ckpt", or "last-v1.ckpt" and so on if something else has that name. Collective."""
        before = self.last_model_path
        if commit.on_rank0(lambda: self._is_inside(before) and _is_link_of_ours(before)):
            return Path(before)
        return Path(_free(self._last_path, _is_link_of_ours) if self.enable_version_counter else self._last_path(None))

    def _last_path(self, version: int | None) -> str:
        return os.path.join(self.dirpath or "", f"{self.CHECKPOINT_NAME_LAST}{_version(version)}{self.FILE_EXTENSION}")

    def newest_last(self) -> str:
        """The newest of "last.ckpt", "last-v1.ckpt" and so on, whoever wrote them; "" if there is none."""
        paths = [Path(self.last_model_path)] if self.last_model_path else []
        if self.dirpath is not None and os.path.isdir(self.dirpath):
            pattern = re.compile(rf"{re.escape(self.CHECKPOINT_NAME_LAST)}(-v[0-9]+)?{re.escape(self.FILE_EXTENSION)}")
            paths += [path for path in Path(self.dirpath).iterdir() if pattern.fullmatch(path.name)]
        there = {path for path in paths if path.exists()}
        return str(max(there, key=lambda path: (_written_at(path), path.name))) if there else ""

    # --- names

    def format_checkpoint_name(self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None) -> str:
        """The path for these values."""

        def fill(found: re.Match[str]) -> str:
            name, spec = found[1], found[2] or ""
            value = metrics.get(name, 0)
            number = value.item() if isinstance(value, torch.Tensor) else value
            number = int(number) if spec.endswith("d") else number
            return f"{name}={format(number, spec)}" if self.auto_insert_metric_name else format(number, spec)

        name = re.sub(r"\{([^:{}]+)(?::([^{}]*))?\}", fill, filename or self.filename or "{epoch}-{step}")
        name = f"{name}{_version(ver)}{self.FILE_EXTENSION}"
        return os.path.join(self.dirpath, name) if self.dirpath else name

    # --- state

    def state_dict(self) -> dict[str, Any]:
        names = ("monitor", "best_model_score", "best_model_path", "current_score", "dirpath", "best_k_models")
        return {name: getattr(self, name) for name in (*names, "kth_best_model_path", "last_model_path")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """If the checkpoint's `dirpath` is another folder, only the best path and score are restored."""
        self.best_model_path, self.best_model_score = state_dict["best_model_path"], state_dict["best_model_score"]
        if state_dict["dirpath"] == self.dirpath:
            self.best_k_models = {path: score for path, score in state_dict["best_k_models"].items() if os.path.isdir(path)}
            self.last_model_path = state_dict["last_model_path"]
            ordered = sorted(self.best_k_models, key=lambda p: float(self.best_k_models[p]), reverse=self.mode == "max")
            self.kth_best_model_path = ordered[-1] if ordered else ""


def _version(number: int | None) -> str:
    return "" if number is None else f"-v{number}"


def _is_link_of_ours(path: str) -> bool:
    return os.path.islink(path) and os.readlink(path).startswith(".last-")


def _written_at(path: Path) -> int:
    """When a checkpoint was written, in ns. For a folder, the time of its manifest, which is written last."""
    inside = path / manifest.MANIFEST
    return (inside if inside.exists() else path).stat().st_mtime_ns


def _free(name: Callable[[int | None], str], ours: Callable[[str], bool] = lambda path: False) -> str:
    """The first of these paths, without and then with a version, that is free or `ours`. Collective."""

    def choose() -> str:
        paths = map(name, itertools.chain([None], itertools.count(1)))
        return next(path for path in paths if not os.path.lexists(path) or ours(path))

    return commit.on_rank0(choose)


def _remove(path: str) -> None:
    """Remove a checkpoint, if it is a folder. Collective."""
    commit.on_rank0(lambda: commit.retire(Path(path).parent, [os.path.basename(path)]) if os.path.isdir(path) else None)
