"""The unit that a Trainer trains: the model's own loss, weighted by its labels; optimizer and schedule from the arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from echelon.common.errors import UsageError
from echelon.compat.transformers.absent import Part
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.auto.unit_options import AutoOptions
from echelon.loop.state import State, step_under_way

__all__ = ["Optimizing", "TrainerUnit", "clip_of", "needs_metric", "set_mode"]

theirs = transformers.Trainer


def clip_of(args: Any) -> float:
    """The largest gradient norm; inf only measures it, for the log."""
    return args.max_grad_norm or math.inf


def needs_metric(schedule: Any) -> bool:
    """Whether a schedule advances after each evaluation, by its metric, instead of after each update."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(schedule).__name__ == "GreedyLR"


def set_mode(optimizer: Any, mode: str) -> None:
    """Set "train" or "eval" mode of an optimizer that has modes, as schedule-free ones do."""
    if callable(sets := getattr(optimizer, mode, None)):
        sets()


class TrainerUnit(AutoUnit[Any]):
    """
    Args:
        trainer: its `compute_loss`, `weight`, `create_optimizer` and `create_scheduler` are called, overrides included.
        options: AutoOptions.
    Attributes:
        history: what the trainer remembers of the run; part of the checkpoints.
    """

    weight_unit, expects_mean = "labels", False

    def __init__(self, trainer: Any, **options: Any) -> None:
        super().__init__(module=trainer.model, options=AutoOptions(**options))
        self._trainer = trainer
        self.history = trainer.history
        self._accumulate = options["accumulate"]

    def take(self, args: Any) -> None:
        """Before each call of `train`: take what the script may have changed in the arguments since the unit was built."""
        self.clip_grad_norm = clip_of(args)
        if self.gradient_accumulation_steps == self._accumulate:  # the launch command has not imposed another
            self.gradient_accumulation_steps = self._accumulate = args.gradient_accumulation_steps

    def may_divide_batches(self) -> bool:
        return False  # the Trainer's epochs are counted in batches

    def phase_started(self, state: State, phase: str) -> None:
        if phase == "train":
            self.module.train()  # the whole model, as transformers does
        super().phase_started(state, phase)

    def compute_loss(self, state: State, data: Any) -> tuple[torch.Tensor, Any]:
        made: tuple[torch.Tensor, Any] = self._trainer.loss_of(self.module, data)
        return made

    def weight(self, data: Any) -> float | torch.Tensor:
        self._trainer.samples_given = self.samples_given
        weight: float | torch.Tensor = self._trainer.weight(data)
        return weight

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        made: tuple[torch.optim.Optimizer, Any] = self._trainer.make_optimizer(module)
        return made

    def step_lr_scheduler(self) -> None:
        if self.lr_scheduler is not None and not needs_metric(self.lr_scheduler):
            self.lr_scheduler.step()

    def eval_step(self, state: State, data: Any) -> tuple[Any, Any]:
        """(loss, outputs); the loss is None if the batch has no labels."""
        self._trainer.batch_given = data
        if self._trainer.has_labels(data):
            return super().eval_step(state, data)
        self._trainer.samples_given = step_under_way(state.eval_state).samples
        outputs = None
        if not self._trainer.generates:
            with self.autocast():
                outputs = self.module(**data) if isinstance(data, Mapping) else self.module(data)
        if not step_under_way(state.eval_state).is_padding:
            self.on_eval_step_end(state, data, self.eval_progress.num_steps_completed, None, outputs)
        return None, outputs

    def on_eval_step_end(self, state: State, data: Any, step: int, loss: Any, outputs: Any) -> None:
        self._trainer.predicted(self._trainer.batch_given, outputs)  # with cp, `data` is a part of it


class Optimizing(Part):
    """What subclasses of a Trainer override to have an optimizer of their own."""

    optimizer: Any
    lr_scheduler: Any
    create_scheduler, create_optimizer_and_scheduler = theirs.create_scheduler, theirs.create_optimizer_and_scheduler
    get_decay_parameter_names = theirs.get_decay_parameter_names
    get_optimizer_cls_and_kwargs = staticmethod(theirs.get_optimizer_cls_and_kwargs)
    max_updates = 0

    def make_optimizer(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """(optimizer, schedule) for the unit. Called after the strategy has split the model."""
        given = self.optimizer
        if given is not None:
            ids = {id(p) for p in module.parameters()}
            if not any(id(p) in ids for group in given.param_groups for p in group["params"]):
                raise UsageError(
                    "optimizers=(...) holds parameters that the strategy has replaced. Give optimizer_cls_and_kwargs=(class, "
                    "{...}) instead, or override create_optimizer, which is called after the model is split."
                )
        self.create_optimizer_and_scheduler(self.max_updates)
        return self.optimizer, self.lr_scheduler

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer that the arguments name, without weight decay for biases and norms, as transformers does."""
        if self.optimizer is None:
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model or self.model)
            special = {"params", "model", "optimizer_dict"} & set(chosen[1])
            if special or not (isinstance(chosen[0], type) and issubclass(chosen[0], torch.optim.Optimizer)):
                raise UsageError(
                    f"TrainingArguments(optim={str(self.args.optim)!r}) is not part of echelon.compat: it makes no optimizer of "
                    "torch's kind. Instead: override create_optimizer, or give optimizer_cls_and_kwargs=(class, {...})."
                )
        made: torch.optim.Optimizer = theirs.create_optimizer(self, model)
        return made
