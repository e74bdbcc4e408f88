"""What both kinds of units share: the steps of evaluations and predictions, and how a module's state gets into checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.hooks import ModuleHooks, overridden
from echelon.compat.lightning.pytorch.stepping import arguments, places, through
from echelon.data.parts import Padding, Pieces, joined
from echelon.loop.loss import rows
from echelon.loop.state import step_under_way
from echelon.world.device import copy_data_to_device

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["Kept", "Moves", "StepCaller", "StepPieces"]

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Kept:
    """What a checkpoint has beside tensors of modules and optimizers: hyperparameters, callbacks, what hooks add."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._trainer.dump_checkpoint()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Callbacks and hooks have taken theirs before there were optimizers: see `saving.restore_module`."""
        self._trainer.count_from(state_dict)


class Moves:
    """A batch's way to the device, with the hooks of the module or of its data module."""

    def __init__(self, module: Any, datamodule: LightningDataModule | None, device: torch.device) -> None:
        self.device = device
        self._hooks: list[Any] = []
        for name in _TRANSFERS:
            if datamodule is not None and overridden(name, datamodule, LightningDataModule):
                self._hooks.append(getattr(datamodule, name))
            else:
                self._hooks.append(getattr(module, name) if overridden(name, module, ModuleHooks) else None)

    def __bool__(self) -> bool:
        return any(self._hooks)

    def __call__(self, batch: Any, non_blocking: bool, dataloader_idx: int) -> Any:
        before, move, after = self._hooks
        batch = before(batch, dataloader_idx) if before else batch
        if move:
            batch = move(batch, self.device, dataloader_idx)
        else:
            batch = copy_data_to_device(batch, self.device, non_blocking=non_blocking)
        return after(batch, dataloader_idx) if after else batch


@dataclass
class StepPieces:
    """Of a training step's batch, one piece.

    Attributes:
        whole: all pieces together.
        samples: of the present piece; 0 of padding.
    """

    whole: Any
    is_first: bool
    samples: float
    given: Any = None

    @classmethod
    def of(cls, state: Any, data: Any, before: StepPieces | None) -> StepPieces | None:
        """None of a batch that is computed at once, and counts.

        Args:
            before: of the latest call.
        """
        batch, weight = step_under_way(state.train_state).batch, state.logged.weight
        if not isinstance(batch, Pieces):
            return cls(data, True, 0) if isinstance(weight, (int, float)) and weight == 0 else None
        if before is not None and before.given is batch:
            return cls(before.whole, False, weight, batch)
        real = [each for each in batch if not isinstance(each, Padding)] or [batch[0].batch]
        return cls(joined(real, [rows(each) for each in real]), True, weight, batch)


class StepCaller:
    """Calls the steps of a module that take no part in training, with their hooks.

    Args:
        autocast: makes the context of a forward pass.
    """

    def __init__(self, trainer: Any, module: Any, wrapper: Callable[[], Any], autocast: Callable[[], Any]) -> None:
        self._trainer, self.module, self._wrapper, self._autocast = trainer, module, wrapper, autocast
        self._places: dict[str, int] = {}  # by a step's name, how many arguments it takes

    def _arguments(self, name: str, step: Any, batch: Any, batch_idx: int, dataloader_idx: int | None) -> tuple[Any, ...]:
        if name not in self._places:
            self._places[name] = places(step)
        return arguments(name, self._places[name], batch, batch_idx, dataloader_idx)

    def evaluate(self, phase: str, here: Any, progress: Any, batch: Any) -> Any:
        """Args:
        phase: "validation", "test" or "predict".
        here: the phase's state.
        """
        trainer, module = self._trainer, self.module
        batch_idx, dataloader_idx = trainer.place_of(phase, progress.num_steps_completed_in_epoch)
        step = getattr(module, f"{phase}_step")
        taken = self._arguments(f"{phase}_step", step, batch, batch_idx, dataloader_idx)
        if step_under_way(here).is_padding:  # a rank that has fewer batches takes part in collectives alone
            with self._autocast(), trainer.silence():
                return through(self._wrapper(), module, step, *taken)
        trainer.begin_batch(phase, lambda: rows(batch, step_under_way(here).samples), dataloader_idx)
        place = (batch, batch_idx) if dataloader_idx is None else (batch, batch_idx, dataloader_idx)
        trainer.call(f"on_{phase}_batch_start", *place)
        with self._autocast(), trainer.hook(f"{phase}_step"):
            output = through(self._wrapper(), module, step, *taken)
        trainer.call(f"on_{phase}_batch_end", output, *place)
        trainer.end_evaluation_batch(phase)
        return output

    def train(self, state: State, progress: Any, batch: Any, pieces: StepPieces | None = None) -> Any:
        """`training_step`, with the hook before it, which sees the whole batch.

        Args:
            pieces: where `batch` is one of several pieces, or stands for none.
        """
        trainer, module = self._trainer, self.module
        batch_idx = progress.num_steps_completed_in_epoch
        if pieces is None:
            samples = step_under_way(state.train_state).samples
            trainer.begin_batch("train", lambda: rows(batch, samples), None)
            trainer.call("on_train_batch_start", batch, batch_idx)
        elif pieces.is_first:
            trainer.begin_batch("train", lambda: pieces.samples, None, in_pieces=True)
            trainer.call("on_train_batch_start", pieces.whole, batch_idx)
        elif "train" in trainer.results:
            trainer.results["train"].go_on(lambda: pieces.samples)
        taken = self._arguments("training_step", module.training_step, batch, batch_idx, None)
        silent = trainer.silence() if pieces is not None and not pieces.samples else nullcontext()
        with trainer.hook("training_step"), silent:
            return through(self._wrapper(), module, module.training_step, *taken)
