"""Callback: hooks beside a module's own. Those of a name run before the module's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Callback", "LambdaCallback"]


class Callback:
    """Override the hooks you need. `state_dict` and `load_state_dict` are part of checkpoints.

    Attributes:
        meets: hooks of it are collective, so that all ranks must have it.
    """

    meets = False

    log: Any  # the module's, while it runs
    log_dict: Any

    @property
    def state_key(self) -> str:
        """The name of its state in a checkpoint."""
        return type(self).__qualname__

    def _key(self, **options: Any) -> str:
        return f"{type(self).__qualname__}{options!r}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None: ...

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None: ...

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_test_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_test_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_predict_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None: ...

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None: ...

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None: ...

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None: ...

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class LambdaCallback(Callback):
    """Hooks as functions: `LambdaCallback(on_train_end=lambda trainer, module: ...)`."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, hook in hooks.items():
            if not callable(getattr(Callback, name, None)):
                raise TypeError(f"LambdaCallback: Callback has no {name!r}.")
            setattr(self, name, hook)
