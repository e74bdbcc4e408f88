"""What a rank does for a Trainer: build the unit, run the phase, and return what the caller cannot see."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from echelon.checkpoint import commit
from echelon.checkpoint.location import location
from echelon.common.errors import TrainerError
from echelon.compat.trainer.rebuild import Parcel, own_attributes, rebuild, remembered, unpack
from echelon.contracts.overrides import overrides
from echelon.data.base import BaseLoader
from echelon.data.replayed import Replayed
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
from echelon.world import agree, rng
from echelon.world.device import copy_data_to_device
from echelon.world.init import World, init_from_env

__all__ = [
    "BETWEEN_PROCESSES",
    "OLDER",
    "Work",
    "in_order",
    "kept",
    "kept_global_batch",
    "length_of",
    "planned",
    "save",
    "shared",
    "work_here",
    "work_in_rank",
]

logger = logging.getLogger(__name__)

# For sending a unit to ranks and back. No run is resumed elsewhere, so changes are expected and not shown.
BETWEEN_PROCESSES = RestoreOptions(show_changes=False)

_METRICS = {"validate": "eval_loss", "test": "test_loss"}
_NONE = object()
# Older names of a Trainer's arguments -> today's.
OLDER = {"max_steps": "max_updates", "evaluate_every_n_steps": "evaluate_every_n_updates"}


@dataclass(frozen=True)
class Work:
    """What a rank is to do.

    Args:
        phase: "fit", "validate", "test" or "predict".
        unit: the unit, a Parcel to build it from in this process, or a function that builds it.
        loaders: for training and evaluation; in other phases than "fit", the phase's loader and None.
        ckpt_path: where to resume from; "last" is the newest below the Trainer's folder.
        before: a checkpoint of the unit as the caller has it, if it has been trained.
        after: the folder for the checkpoint that the caller takes back.
        seeds: of the ranks' RNGs.
    """

    phase: str
    unit: Parcel | Unit | Callable[[], Any]
    loaders: tuple[Any, Any]
    ckpt_path: str | None
    before: str | None = None
    after: str = ""
    seeds: list[int] = field(default_factory=lambda: [0, 0, 0])


@dataclass(frozen=True)
class Done:
    """What a rank gives back. Only rank 0's has the attributes of the unit and of each callback, pickled one by one."""

    metrics: dict[str, float]
    data_rank: int
    outputs: list[Any]
    unit: dict[str, bytes] = field(default_factory=dict)
    callbacks: list[dict[str, bytes]] = field(default_factory=list)


class _Outputs(Callback):
    """Collects what `predict_step` returns, without the outputs of batches that are only padding."""

    may_stop = False

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_predict_step_end(self, state: State, unit: Any) -> None:
        phase = state.predict_state
        if phase is not None and not phase.step.is_padding:
            self.outputs.append(copy_data_to_device(phase.step_output, torch.device("cpu")))


def work_in_rank(trainer: Any, work: Work) -> Done:
    """Do the work in a rank that the Trainer started."""
    rng.start(work.seeds)
    init_from_env("cpu" if trainer.accelerator == "cpu" else None)
    unit: Any = work.unit
    if isinstance(work.unit, Parcel):
        unit = unpack(work.unit, **changes_for(trainer, work.unit.options))
        if work.before is not None:
            DistributedCheckpointSaver.restore(work.before, unit, restore_options=BETWEEN_PROCESSES)
        metrics, outputs = _run(trainer, work, unit)
        if work.phase == "fit":
            save(unit, Path(work.after))
    else:
        metrics, outputs = work_here(trainer, work)
    world = World.current(torch.device("cpu"))
    rank_and_size = unit.data_rank_and_size if isinstance(unit, Unit) else None  # a class may be the function that builds one
    data_rank, _ = rank_and_size or (world.rank, world.size)
    if world.rank:
        divided = isinstance(work.loaders[0], (BaseLoader, DataLoader))  # other iterables give every rank the same
        return Done(metrics, data_rank, outputs if divided else [])
    attributes = {**metrics, **own_attributes(unit, progress=work.phase != "fit")} if isinstance(unit, AutoUnit) else {}
    savers = DistributedCheckpointSaver  # not sent, also as attributes of callbacks: their folder and lease are the rank's
    own = [(c, {} if isinstance(c, savers) else vars(c)) for c in trainer.unit_callbacks]
    callbacks = [remembered(c, {k: v for k, v in each.items() if not isinstance(v, savers)}) for c, each in own]
    return Done(metrics, data_rank, outputs, remembered(unit, attributes), callbacks)


def work_here(trainer: Any, work: Work) -> tuple[dict[str, float], list[Any]]:
    """Do the work in a process that runs already: (metrics, predictions)."""
    init_from_env("cpu" if trainer.accelerator == "cpu" else None)
    given: Any = work.unit
    unit = given if isinstance(given, Unit) else given()
    if not isinstance(unit, Unit):
        raise TrainerError(f"unit must be a function that returns a unit, got one that returned {type(unit).__name__}.")
    if isinstance(unit, AutoUnit):
        options = unit.auto_options
        changes = changes_for(trainer, options)
        if any(getattr(options, name) != value for name, value in changes.items()):
            rebuild(unit, **changes)
    elif trainer.unit_options:
        raise TrainerError(
            f"{', '.join(sorted(trainer.unit_options))} must be given to {type(unit).__name__} itself, which is not an AutoUnit."
        )
    return _run(trainer, work, unit)


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


def _run(trainer: Any, work: Work, unit: Any) -> tuple[dict[str, float], list[Any]]:
    _, data_size = unit.data_rank_and_size or (0, World.current().size)
    accumulation = accumulation_of(unit, work.loaders[0]) if work.phase == "fit" else 1
    as_before = None
    if work.phase == "fit" and (path := _checkpoint(trainer, work, unit)) is not None:
        as_before = kept_global_batch(path, work.loaders[0], data_size, accumulation)
    loader = shared(work.loaders[0], data_size, accumulation, trains=work.phase == "fit", global_batch=as_before)
    _restore(trainer, work, unit, loader if work.phase == "fit" else None)
    callbacks, outputs = list(trainer.unit_callbacks), _Outputs()
    if work.phase == "fit":
        _fit(trainer, unit, loader, shared(work.loaders[1], data_size, 1), callbacks)
    elif work.phase == "validate":
        evaluate(unit, loader, max_steps_per_epoch=trainer.limits.get("val"), callbacks=callbacks)
    elif work.phase == "test":
        test(unit, loader, max_steps_per_epoch=trainer.limits.get("test"), callbacks=callbacks)
    else:
        predict(unit, loader, max_steps_per_epoch=trainer.limits.get("predict"), callbacks=[*callbacks, outputs])
    name = "eval_loss" if work.phase == "fit" and work.loaders[1] is not None else _METRICS.get(work.phase, "")
    value = getattr(unit, name, None)
    return {name: value} if isinstance(value, float) else {}, outputs.outputs


def _checkpoint(trainer: Any, work: Work, unit: Any) -> Path | None:
    """The checkpoint that training continues from, as far as is known before it is read."""
    if work.ckpt_path not in (None, "last"):
        return Path(work.ckpt_path)
    if trainer.checkpoints is None or (work.ckpt_path is None and not _takes_up(trainer, work, unit)):
        return None
    folder = location(trainer.checkpoints.folder)
    checkpoints = commit.candidates(folder)
    return Path(str(checkpoints[0])) if checkpoints and not left_alone(folder) else None


def _takes_up(trainer: Any, work: Work, unit: Any) -> bool:
    """Whether `fit` continues from the newest checkpoint without a `ckpt_path`."""
    return (
        work.phase == "fit"
        and work.ckpt_path is None
        and trainer.saves
        and trainer.resumes
        and not unit.train_progress.num_updates_completed
    )


def _restore(trainer: Any, work: Work, unit: Any, loader: Any) -> None:
    if work.ckpt_path == "last" or _takes_up(trainer, work, unit):
        assert trainer.checkpoints is not None
        folder = trainer.checkpoints.folder
        if (
            not DistributedCheckpointSaver.restore_from_latest(
                folder, unit, train_dataloader=loader, restore_options=trainer.checkpoints.restore_options
            )
            and work.phase != "fit"
        ):
            raise TrainerError(f'ckpt_path is "last", but there is no checkpoint in {folder}.')
    elif work.ckpt_path is not None:
        DistributedCheckpointSaver.restore(work.ckpt_path, unit, train_dataloader=loader)


def _fit(trainer: Any, unit: Any, train_loader: Any, eval_loader: Any, callbacks: list[Callback]) -> None:
    if trainer.saves and trainer.checkpoints is not None:
        callbacks.append(trainer.checkpoints.saver())
    refuse_steps("Trainer", {"evaluate_every_n_steps": trainer.in_steps}, OLDER, accumulation_of(unit, train_loader))
    training, evaluation = PhaseState(dataloader=train_loader, **trainer.training_limits()), None
    if eval_loader is not None:
        evaluation = PhaseState(dataloader=eval_loader, max_steps_per_epoch=trainer.limits.get("val"))
    run_training(unit, training, evaluation, callbacks, None)


def save(unit: Any, folder: Path) -> Any:
    return DistributedCheckpointSaver(folder).save(State(entry_point=EntryPoint.TRAIN), unit)


def in_order(done: Sequence[Done]) -> list[Any]:
    """The outputs batch by batch; of ranks that have the same samples, the first counts."""
    outputs = {d.data_rank: d.outputs for d in reversed(done)}
    parts = zip_longest(*(outputs[rank] for rank in sorted(outputs)), fillvalue=_NONE)
    return [output for of_batch in parts for output in of_batch if output is not _NONE]


def shared(loader: Any, data_size: int, accumulation: int, *, trains: bool = False, global_batch: int | None = None) -> Any:
    """A torch DataLoader, divided between ranks: each rank has the DataLoader's batch size, as in Lightning, and its own samples.

    When fewer ranks train than were planned, global batches are as large as planned. On one rank, the order is torch's own.

    Args:
        trains: the loader's position is saved and restored.
        global_batch: of the run that is continued; None computes it from the batch size and the number of ranks.
    Raises:
        UsageError: the samples cannot be divided.
    """
    if not isinstance(loader, DataLoader) or is_distributed(loader):
        return loader
    ranks = max(data_size, planned(data_size)) if trains else data_size
    if ranks == 1 and global_batch is None:
        return Replayed(loader) if trains and not hasattr(loader, "state_dict") else loader
    why = f"cannot be divided between {ranks} ranks: every one would see the same samples"
    made = as_loader(loader, global_batch or (loader.batch_size or 1) * ranks * accumulation, accumulation, why)
    made.samples_of_a_rank = (loader.batch_size or 1) * accumulation
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
    data, saved_by = config.get("data", {}), config.get("dp_size") or config.get("world_size")
    whole, each = data.get("global_batch"), data.get("samples_of_a_rank")
    if each is not None and whole == own * ranks:  # the script divides the same global batch in another way
        return own * ranks
    if each is None and isinstance(whole, int) and isinstance(saved_by, int):  # written before samples_of_a_rank was recorded
        each = whole / saved_by
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
