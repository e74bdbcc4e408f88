"""What scripts ask of `trainer.accelerator` around a training: where they are, and to wait for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.compat.transformers.absent import not_of_accelerator
from echelon.world import agree

__all__ = ["Accelerator"]

_ASKED: dict[str, Callable[[Any], Any]] = {
    "process_index": lambda args: args.process_index,
    "local_process_index": lambda args: args.local_process_index,
    "num_processes": lambda args: args.world_size,
    "device": lambda args: args.device,
    "is_main_process": lambda args: args.process_index == 0,
    "is_local_main_process": lambda args: args.local_process_index == 0,
    "is_last_process": lambda args: args.process_index == args.world_size - 1,
}


class Accelerator:
    """
    Args:
        trainer: that it belongs to.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED:
            return _ASKED[name](self._trainer.args)
        raise not_of_accelerator(name)

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
