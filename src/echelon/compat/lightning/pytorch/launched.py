"""Ranks that a Trainer starts for a LightningModule: what is sent to them, and what comes back."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.loggers import Online
from echelon.compat.lightning.pytorch.session import Session, Work
from echelon.compat.trainer.rank import Done, in_order
from echelon.compat.trainer.rebuild import recall, remembered
from echelon.launcher.functions.launch import launch
from echelon.parallel.shards import whole
from echelon.world import rng
from echelon.world.init import World, init_from_env

__all__ = ["in_ranks"]

_LEFT = "weights.pt"

# What the caller's Trainer gets from rank 0's Trainer after a run.
_KNOWN = (
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
    "current_epoch",
    "log_step",
    "should_stop",
    "steps_before",
    "progress_before",
    "num_training_batches",
    "num_val_batches",
    "num_test_batches",
    "num_predict_batches",
    "ckpt_path",
)
# A module's attributes that are torch's or belong to one run: they do not come back.
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {"_trainer", "_hook", "_within_step", "_toggled", "_wanted"}


@dataclass(frozen=True)
class ModuleDone(Done):
    """What a rank returns for a LightningModule. Only rank 0's has the fields below.

    Args:
        numbers: what `validate` or `test` returns.
        trainer, loggers: their attributes, pickled one by one.
        kinds: the types of the callbacks in `callbacks`.
    """

    numbers: Any = None
    trainer: dict[str, bytes] | None = None
    loggers: tuple[dict[str, bytes], ...] = ()
    kinds: tuple[str, ...] = ()


def in_ranks(trainer: Any, ranks: int, work: Work) -> Any:
    """Run the call in new ranks on this machine; return what it returns."""
    module, folder = work.module, Path(tempfile.mkdtemp(prefix="echelon-fit-"))
    try:
        work, device = replace(work, seeds=rng.draw()), module.device
        module.cpu()
        trainer.lightning_module = trainer.datamodule = trainer.session = None
        trainer.state.status = "interrupted"  # unless it finishes
        _close_trackers(trainer)  # rank 0 continues their runs
        try:
            done = launch(
                trainer_run,
                ranks=ranks,
                args=(trainer, work, str(folder)),
                env=trainer.environment_of_ranks(),
                run_dir=trainer.run_dir,
            )
        finally:
            module.to(device)
        if work.call == "fit":
            _bring_back(trainer, module, work.datamodule, folder / "after.pt")
        trainer.lightning_module, trainer.datamodule, trainer.state.fn = module, work.datamodule, work.call
        trainer.state.status = "finished"
        module.trainer = trainer
        recall(module, done[0].unit)
        recall(trainer, done[0].trainer or {})
        left = list(zip(done[0].kinds, done[0].callbacks, strict=True))  # in another order, and with the module's own callbacks
        for own in trainer.lightning_callbacks:
            if (same := next((i for i, (kind, _) in enumerate(left) if kind == _kind(own)), None)) is not None:
                recall(own, left.pop(same)[1])
        for own, theirs in zip(trainer.loggers, done[0].loggers, strict=False):
            recall(own, theirs)
        return in_order(done) if work.call == "predict" else done[0].numbers
    finally:
        if not (folder / _LEFT).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _close_trackers(trainer: Any) -> None:
    for each in trainer.loggers:
        if isinstance(each, Online):
            each.close()


def trainer_run(trainer: Any, work: Work, folder: str) -> ModuleDone:
    """Run the call in a rank that the Trainer started."""
    rng.start(work.seeds)
    init_from_env("cpu" if trainer.accelerator == "cpu" else None)
    session = Session(trainer, work)
    made = session.run()
    _close_trackers(trainer)
    unit = session.unit
    world = World.current(torch.device("cpu"))
    if work.call == "fit":
        (prepared,) = unit.prepared_modules().values()
        state = {name: whole(t).detach().cpu() for name, t in prepared.state().state_dict().items()}
        if world.rank == 0:
            torch.save(state, Path(folder) / "after.pt")
    data_rank, _ = unit.data_rank_and_size or (world.rank, world.size)
    outputs = made if work.call == "predict" else []
    if world.rank:
        return ModuleDone({}, data_rank, outputs)
    own = {name: value for name, value in vars(work.module).items() if name not in _OF_TORCH | session.added_to_module}
    known = {name: getattr(trainer, name) for name in _KNOWN}
    return ModuleDone(
        {},
        data_rank,
        outputs,
        remembered(work.module, own),
        [remembered(each, _state_of(each)) for each in trainer.lightning_callbacks],
        numbers=made if work.call != "predict" else None,
        kinds=tuple(_kind(each) for each in trainer.lightning_callbacks),
        trainer=remembered(trainer, known),
        loggers=tuple(remembered(each, _state_of(each)) for each in trainer.loggers),
    )


def _kind(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _state_of(thing: Any) -> dict[str, Any]:
    state = thing.__getstate__()
    return state if isinstance(state, dict) else {}


def _bring_back(trainer: Any, module: Any, datamodule: Any, path: Path) -> None:
    """Load the weights at `path`. Layers that the ranks made in `configure_model` or `setup` are made here by the same hooks.

    Raises:
        UsageError: the module still has other parameters. The error names the file, which stays so that no training is lost.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    hooks = [] if datamodule is None else [lambda: datamodule.setup("fit")]  # in the same order as on the ranks
    module.trainer = trainer
    try:
        for hook in (*hooks, lambda: module.setup("fit"), module.configure_model):
            if not _differs(module, saved):
                break
            hook()
        module.load_state_dict(saved)
    except Exception as error:
        left = path.rename(path.with_name(_LEFT))
        raise UsageError(
            f"{type(module).__name__} has been trained, but here it has not the layers that its ranks had ({error}). Their "
            f"weights are in {left}: torch.load gives a state_dict. Make all layers in __init__ or configure_model; or start the "
            "script by `echelon run`, whose ranks keep their module."
        ) from error


def _differs(module: nn.Module, saved: dict[str, Any]) -> bool:
    return module.state_dict().keys() != saved.keys()
