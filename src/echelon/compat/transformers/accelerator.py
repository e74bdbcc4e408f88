"""What scripts ask of `trainer.accelerator` around a training: where they are, and to wait for the others."""

from __future__ import annotations

from typing import Any

import torch

from echelon.compat.transformers.refused import NotHereError
from echelon.world import agree

__all__ = ["Accelerator"]

_INSTEAD = {
    "prepare": "the trainer prepares its model, optimizer and data",
    "backward": "override compute_loss; the trainer does the rest",
    "gather": "compute_metrics sees the predictions of all ranks",
    "gather_for_metrics": "compute_metrics sees the predictions of all ranks",
    "save_state": "TrainingArguments(save_strategy=...), or a callback that sets control.should_save",
    "load_state": "train(resume_from_checkpoint=...)",
    "get_state_dict": "trainer.save_model(folder), called on every rank",
    "save_model": "trainer.save_model(folder), called on every rank",
    "clip_grad_norm_": "TrainingArguments(max_grad_norm=...)",
    "log": "trainer.log(...)",
}


class Accelerator:
    """
    Args:
        trainer: that it belongs to.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        instead = _INSTEAD.get(name, "trainer.unit(), and echelon.world.agree for what ranks tell one another")
        raise NotHereError(f"Trainer.accelerator.{name} is not part of echelon.compat. Instead: {instead}.")

    @property
    def process_index(self) -> int:
        return int(self._trainer.args.process_index)

    @property
    def local_process_index(self) -> int:
        return int(self._trainer.args.local_process_index)

    @property
    def num_processes(self) -> int:
        return int(self._trainer.args.world_size)

    @property
    def device(self) -> torch.device:
        found: torch.device = self._trainer.args.device
        return found

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    def print(self, *args: Any, **options: Any) -> None:
        """On each node's first rank, as Accelerate's own."""
        if self.is_local_main_process:
            print(*args, **options)

    def wait_for_everyone(self) -> None:
        agree.any_rank(False)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The module as its author wrote it; split over the ranks, it is still split."""
        unit = self._trainer.unit()
        return unit.prepared.unwrapped if model is unit.module else model

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        return (None,) * len(objects)

    def end_training(self) -> None:
        """Nothing: the trackers belong to the trainer's callbacks, which ended them."""
