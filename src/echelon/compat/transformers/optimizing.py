"""The optimizer and the schedule that the arguments name."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from echelon.common.errors import UsageError
from echelon.compat.transformers.absent import Part

__all__ = ["Optimizing"]


class Optimizing(Part):
    """What subclasses of a Trainer override to have an optimizer of their own."""

    optimizer: Any
    lr_scheduler: Any
    create_scheduler = transformers.Trainer.create_scheduler
    max_updates = 0

    def make_optimizer(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """For the unit, after the strategy has split the model."""
        given = self.optimizer
        if given is not None:
            here = {id(p) for p in module.parameters()}
            if not any(id(p) in here for group in given.param_groups for p in group["params"]):
                raise UsageError(
                    "optimizers=(...) holds parameters that the strategy has replaced. Give optimizer_cls_and_kwargs=(class, "
                    "{...}) instead, or override create_optimizer, which is called after the model is split."
                )
        self.create_optimizer_and_scheduler(self.max_updates)
        return self.optimizer, self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """By the arguments, without weight decay for biases and norms, as transformers chooses them."""
        if self.optimizer is None:
            module = self.model if model is None else model
            decays = set(self.get_decay_parameter_names(module))
            trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in trained if name in decays], "weight_decay": self.args.weight_decay},
                {"params": [p for name, p in trained if name not in decays], "weight_decay": 0.0},
            ]
            make, options = self.optimizer_cls_and_kwargs or transformers.Trainer.get_optimizer_cls_and_kwargs(self.args, module)
            special = {"params", "model", "optimizer_dict"} & set(options)
            if special or not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)):
                raise UsageError(
                    f"TrainingArguments(optim={str(self.args.optim)!r}) is not part of echelon.compat: it makes no optimizer of "
                    "torch's kind. Instead: override create_optimizer, or give optimizer_cls_and_kwargs=(class, {...})."
                )
            self.optimizer = make([group for group in groups if group["params"]] or groups, **options)
        return self.optimizer  # type: ignore[no-any-return]

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        return list(transformers.Trainer.get_decay_parameter_names(self, model))
