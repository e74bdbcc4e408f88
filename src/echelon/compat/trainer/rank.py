"""A Trainer's call with a unit: build the unit, share the loaders between the ranks, and run the phase."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from echelon.checkpoint import commit
from echelon.checkpoint.location import location
from echelon.common.errors import TrainerError
from echelon.compat.trainer.launched import Work, state_of
from echelon.compat.trainer.rebuild import Parcel, own_attributes, pack, rebuild, unpack
from echelon.contracts.overrides import overrides
from echelon.data.loader import Loader
from echelon.data.torch_loader import as_loader, is_distributed
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.auto.unit_options import AutoOptions
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.folder import left_alone
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver, RestoreOptions
from echelon.loop.run import evaluate, predict, run_training, test
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.loop.unit import Unit
from echelon.loop.validate import accumulation_of, refuse_steps
from echelon.parallel.layouts import resolve
from echelon.parallel.recipe.precision import Precision
from echelon.world import agree
from echelon.world.device import copy_data_to_device
from echelon.world.init import World, init_from_env

__all__ = [
    "OLDER",
    "RUNS",
    "Outputs",
    "UnitWork",
    "kept",
    "kept_global_batch",
    "length_of",
    "planned",
    "shared",
]

logger = logging.getLogger(__name__)

# For sending a unit to ranks and back. No run is resumed elsewhere, so changes are expected and not shown.
BETWEEN_PROCESSES = RestoreOptions(show_changes=False)

_METRICS = {"validate": "eval_loss", "test": "test_loss"}
RUNS: dict[str, tuple[Callable[..., Any], str]] = {
    "validate": (evaluate, "val"),
    "test": (test, "test"),
    "predict": (predict, "predict"),
}
# Older names of a Trainer's arguments -> today's.
OLDER = {"max_steps": "max_updates", "evaluate_every_n_steps": "evaluate_every_n_updates"}


class Outputs(Callback):
    """Collects what `predict_step` returns, without the outputs of batches that are only padding."""

    may_stop, keeps = False, True

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_predict_step_end(self, state: State, unit: Any) -> None:
        phase = state.predict_state
        if phase is not None and not phase.step.is_padding and self.keeps:
            self.outputs.append(copy_data_to_device(phase.step_output, torch.device("cpu")))


@dataclass
class UnitWork(Work):
    """A call with a unit.

    Args:
        unit: a unit, a Parcel to build it from in this process, or a function that builds it.
        before: a checkpoint of the unit as the caller has it, if it has been trained.
        comes_back: the unit was sent, so that the caller takes it back.
        metrics: what the call has measured, by the names of the unit's attributes.
    """

    unit: Any
    before: str | None = None
    comes_back: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def sent(self, trainer: Any, folder: Path) -> Iterator[UnitWork]:
        unit, before = self.unit, None
        if not isinstance(unit, Unit):
            yield self
            return
        if not isinstance(unit, AutoUnit):
            raise TrainerError(
                f"the unit must be an AutoUnit, or a function that every rank calls to build one, got an object of "
                f"{type(unit).__name__}. If it needs no arguments: `trainer.{self.phase}({type(unit).__name__}, ...)`."
            )
        if vars(unit).get("optimizer") is not None:
            before = str(save(unit, folder / "before"))
        try:
            yield replace(self, unit=pack(unit), before=before, comes_back=True)
        finally:
            unit.prepared.unwrapped.to(unit.device)

    def here(self, trainer: Any) -> Any:
        init_from_env("cpu" if trainer.accelerator == "cpu" else None)
        if isinstance(self.unit, Parcel):
            self.unit = unpack(self.unit, **changes_for(trainer, self.unit.options))
            if self.before is not None:
                DistributedCheckpointSaver.restore(self.before, self.unit, restore_options=BETWEEN_PROCESSES)
        else:
            self._build(trainer)
        self.metrics, outputs = _run(trainer, self, self.unit)
        trainer.callback_metrics |= self.metrics
        return outputs if self.phase == "predict" else [self.metrics]

    def _build(self, trainer: Any) -> None:
        unit = self.unit if isinstance(self.unit, Unit) else self.unit()
        if not isinstance(unit, Unit):
            raise TrainerError(f"unit must be a function that returns a unit, got one that returned {type(unit).__name__}.")
        if isinstance(unit, AutoUnit):
            options = unit.auto_options
            changes = changes_for(trainer, options)
            if any(getattr(options, name) != value for name, value in changes.items()):
                rebuild(unit, **changes)
        elif trainer.unit_options:
            raise TrainerError(
                f"{', '.join(sorted(trainer.unit_options))} must be given to {type(unit).__name__} itself, which is no AutoUnit."
            )
        self.unit = unit

    def leave(self, trainer: Any, folder: Path) -> tuple[Any, Any]:
        if self.phase == "fit" and self.comes_back:
            save(self.unit, folder / "after")
        return self.unit, self.loaders[0]

    def take_back(self, trainer: Any, folder: Path) -> None:
        if self.phase == "fit" and isinstance(self.unit, AutoUnit):
            DistributedCheckpointSaver.restore_from_latest(folder / "after", self.unit, restore_options=BETWEEN_PROCESSES)

    def own(self, trainer: Any) -> list[tuple[object, Mapping[str, Any]]]:
        own = {**self.metrics, **own_attributes(self.unit, progress=self.phase != "fit")} if self.comes_back else {}
        others = [(each, state_of(each)) for each in trainer.loop_callbacks]
        return [(self.unit, own), (trainer, {"callback_metrics": trainer.callback_metrics}), *others]


def changes_for(trainer: Any, options: AutoOptions) -> dict[str, Any]:
    """The options that the Trainer changes in a unit that was built with `options`."""
    changes, own = dict(trainer.unit_options), options.layout
    if "precision" in changes:
        changes["precision"] = Precision.of(changes["precision"])
    if own is None:
        chosen = trainer.layout
        if chosen == "auto":
            chosen = "ddp" if World.current().size > 1 else None
        changes |= {"layout": chosen} if chosen is not None else {}
    elif trainer.layout not in ("auto", None) and resolve(own) != resolve(trainer.layout):
        logger.warning("layout %r of the Trainer has no effect: the unit was built with %r", trainer.layout, own)
    return changes


def _run(trainer: Any, work: UnitWork, unit: Any) -> tuple[dict[str, float], list[Any]]:
    _, data_size = unit.data_rank_and_size or (0, World.current().size)
    trains = work.phase == "fit"
    accumulation = accumulation_of(unit, work.loaders[0]) if trains else 1
    # `fit` continues from the newest checkpoint without a `ckpt_path`, too.
    anew = trains and work.ckpt_path is None and not unit.train_progress.num_updates_completed
    from_latest = work.ckpt_path == "last" or (anew and trainer.saves and trainer.resumes)
    path = _newest(trainer.checkpoints.folder) if from_latest else work.ckpt_path
    as_before = kept_global_batch(Path(path), work.loaders[0], data_size, accumulation) if trains and path is not None else None
    loader = shared(work.loaders[0], data_size, accumulation, trains=trains, global_batch=as_before)
    resumed = loader if trains else None
    if from_latest:
        folder, options = trainer.checkpoints.folder, trainer.checkpoints.restore_options
        there = DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=resumed, restore_options=options)
        if not there and not trains:
            raise TrainerError(f'ckpt_path is "last", but there is no checkpoint in {folder}.')
    elif path is not None:
        DistributedCheckpointSaver.restore(path, unit, train_dataloader=resumed)
    outputs = Outputs()
    callbacks = [*trainer.loop_callbacks, outputs]
    if trains:
        _fit(trainer, unit, loader, shared(work.loaders[1], data_size, 1), callbacks)
    else:
        run, limit = RUNS[work.phase]
        run(unit, loader, max_steps_per_epoch=trainer.limits.get(limit), callbacks=callbacks)
    name = "eval_loss" if trains and work.loaders[1] is not None else _METRICS.get(work.phase, "")
    value = getattr(unit, name, None)
    return {name: value} if isinstance(value, float) else {}, outputs.outputs


def _newest(folder: str) -> str | None:
    """The checkpoint that training continues from, as far as is known before it is read."""
    checkpoints = commit.candidates(location(folder))
    return str(checkpoints[0]) if checkpoints and not left_alone(location(folder)) else None


def _fit(trainer: Any, unit: Any, train_loader: Any, eval_loader: Any, callbacks: list[Callback]) -> None:
    if trainer.saves:
        callbacks.append(trainer.checkpoints.saver())
    refuse_steps("Trainer", {"evaluate_every_n_steps": trainer.in_steps}, OLDER, accumulation_of(unit, train_loader))
    training, evaluation = PhaseState(dataloader=train_loader, **trainer.training_limits()), None
    if eval_loader is not None:
        evaluation = PhaseState(dataloader=eval_loader, max_steps_per_epoch=trainer.limits.get("val"))
    run_training(unit, training, evaluation, callbacks, None)


def save(unit: Any, folder: Path) -> Any:
    return DistributedCheckpointSaver(folder).save(State(entry_point=EntryPoint.TRAIN), unit)


def shared(loader: Any, data_size: int, accumulation: int, *, trains: bool = False, global_batch: int | None = None) -> Any:
    """A torch DataLoader, divided between ranks: each rank has the DataLoader's batch size, as in Lightning, and its own samples.

    When fewer ranks train than were planned, global batches are as large as planned. On one rank, the order is torch's own.

    Args:
        trains: as many ranks share each batch as the run was planned for.
        global_batch: of the run that is continued; None computes it from the batch size and the number of ranks.
    Raises:
        UsageError: the samples cannot be divided.
    """
    if not isinstance(loader, DataLoader) or is_distributed(loader):
        return loader
    ranks = max(data_size, planned(data_size)) if trains else data_size
    if ranks == 1 and global_batch is None:
        return loader
    why = f"cannot be divided between {ranks} ranks: every one would see the same samples"
    batch = global_batch or (loader.batch_size or 1) * ranks * accumulation
    made = as_loader(loader, batch, accumulation, why, together=ranks)
    made.samples_of_a_rank = (loader.batch_size or 1) * accumulation
    if isinstance(made, Loader):
        made.accept_changes |= {"global_batch"}  # it follows from the ranks, as in Lightning; the table of changes shows it
    return made


def length_of(loader: Any) -> int | None:
    """Its number of batches; None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def planned(data_size: int) -> int:
    """How many ranks would have different samples if as many ranks ran as were planned."""
    return data_size * (overrides().planned_ranks or 1) // World.current(torch.device("cpu")).size


def kept_global_batch(path: Path, loader: Any, data_size: int, accumulation: int) -> int | None:
    """The global batch of a checkpoint that more ranks wrote, each with this DataLoader's batch size; else None. Collective.

    Raises:
        UsageError: these ranks cannot share it.
    """
    if not isinstance(loader, DataLoader) or is_distributed(loader) or not agree.from_rank0(path.is_dir):
        return None
    own = (loader.batch_size or 1) * accumulation
    return kept(path, commit.verify(path), own, data_size, accumulation, "batch_size of the DataLoader")


def kept(path: Any, saved: Mapping[str, Any], own: int, ranks: int, accumulation: int, argument: str) -> int | None:
    """The global batch of the run that wrote a checkpoint, if it had more ranks than now or the same global batch; else None.

    A run that continues on fewer ranks keeps its global batch, however it was launched. Otherwise it would change unnoticed.

    Args:
        saved: the checkpoint's manifest.
        own: samples of an update on a rank, as the script has it now.
        ranks: how many ranks have different samples, now.
        argument: the script's argument that sets `own`, for messages.
    Raises:
        UsageError: these ranks cannot share it.
    """
    config = saved.get("config", {})
    data = config.get("data", {})
    whole, each = data.get("global_batch"), data.get("samples_of_a_rank")
    if each is not None and whole == own * ranks:  # the script divides the same global batch in another way
        return own * ranks
    if each != own or not isinstance(whole, int) or whole <= own * ranks or whole % own:
        return None
    if whole % (ranks * accumulation):
        raise TrainerError(
            f"{path} was trained with global batches of {whole} samples, {own} on each of {whole // own} ranks, which {ranks} "
            f"ranks cannot share. Use a number of ranks that divides {whole // accumulation}; or another {argument}, which "
            "then counts."
        )
    if whole != own * max(ranks, planned(ranks)) and agree.is_rank0():
        logger.warning(
            "%s was trained with global batches of %s samples, %s on each of %s ranks. They stay so, %s on each of %s now. "
            "Another %s would count from here on",
            path,
            whole,
            own,
            whole // own,
            whole // ranks,
            ranks,
            argument,
        )
    return whole
