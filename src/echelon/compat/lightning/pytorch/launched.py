"""A Trainer's call with a LightningModule: what ranks are sent, and what comes back from those that the Trainer starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.loggers import Online
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.session import Session
from echelon.compat.trainer.launched import Work, state_of
from echelon.parallel.shards import whole
from echelon.world import agree

__all__ = ["ModuleWork"]

_WEIGHTS = "weights.pt"

# What the caller's Trainer gets from rank 0's Trainer after a run.
_KNOWN = (
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
    "current_epoch",
    "should_stop",
    "state",
    "progress_before",
    "num_training_batches",
    "num_val_batches",
    "num_test_batches",
    "num_predict_batches",
    "ckpt_path",
)
# A module's attributes that are torch's or belong to one run: they do not come back.
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {"_trainer", "_hook", "_within_step", "_toggled", "_wanted"}


@dataclass
class ModuleWork(Work):
    """A call with a LightningModule."""

    module: LightningModule
    datamodule: Any = None

    def here(self, trainer: Any) -> Any:
        return Session(trainer, self).run()

    @contextmanager
    def sent(self, trainer: Any, folder: Path) -> Iterator[ModuleWork]:
        device = self.module.device
        self.module.cpu()
        trainer.lightning_module, trainer.datamodule, trainer.session = self.module, self.datamodule, None
        trainer.state.fn, trainer.state.status = self.call, "interrupted"  # unless it finishes
        _close_trackers(trainer)  # rank 0 continues their runs
        try:
            yield self
        finally:
            self.module.to(device)

    def leave(self, trainer: Any, folder: Path) -> tuple[Any, Any]:
        _close_trackers(trainer)
        if self.call == "fit":
            (prepared,) = trainer.unit.prepared_modules().values()
            state = {name: whole(t).detach().cpu() for name, t in prepared.state().state_dict().items()}
            if agree.is_rank0():
                torch.save(state, folder / _WEIGHTS)
        return trainer.unit, trainer.predict_dataloaders

    def take_back(self, trainer: Any, folder: Path) -> None:
        """Load the weights. Layers that the ranks made in `configure_model` or `setup` are made here by the same hooks.

        Raises:
            UsageError: the module still has other parameters. The error names the file, so that no training is lost.
        """
        module, path = self.module, folder / _WEIGHTS
        module.trainer = trainer
        if self.call != "fit":
            return
        saved = torch.load(path, map_location="cpu", weights_only=True)
        hooks = [] if self.datamodule is None else [lambda: self.datamodule.setup("fit")]  # in the same order as on the ranks
        try:
            for hook in (*hooks, lambda: module.setup("fit"), module.configure_model):
                if module.state_dict().keys() != saved.keys():
                    hook()
            module.load_state_dict(saved)
        except Exception as error:
            raise UsageError(
                f"{type(module).__name__} has been trained, but here it has not the layers that its ranks had ({error}). Their "
                f"weights are in {path}: torch.load gives a state_dict. Make all layers in __init__ or configure_model; or start "
                "the script by `echelon run`, whose ranks keep their module."
            ) from error

    def own(self, trainer: Any) -> list[tuple[object, Mapping[str, Any]]]:
        left_out = _OF_TORCH | (trainer.session.added_to_module if trainer.session is not None else set())
        own = {name: value for name, value in vars(self.module).items() if name not in left_out}
        others = [(each, state_of(each)) for each in (*trainer.lightning_callbacks, *trainer.loop_callbacks, *trainer.loggers)]
        return [(self.module, own), (trainer, {name: getattr(trainer, name) for name in _KNOWN}), *others]


def _close_trackers(trainer: Any) -> None:
    for each in trainer.loggers:
        if isinstance(each, Online):
            each.close()
