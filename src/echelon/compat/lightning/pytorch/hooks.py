"""The hooks of a LightningModule, none of which does anything until it is overridden; and where `self.log` may be called."""

from __future__ import annotations

from typing import Any

import torch

from echelon.world.device import copy_data_to_device

__all__ = ["DataHooks", "ModuleHooks", "log_defaults", "overridden"]


def overridden(name: str, thing: Any, base: type) -> bool:
    """Whether an object has a method of its own in place of the base's."""
    own = getattr(thing, name, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(base, name, None)


_STEPS = {
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
}
_EVALUATION_STEPS = {f"{phase}_step" for phase in ("validation", "test")} | {
    f"on_{phase}_batch_{end}" for phase in ("validation", "test") for end in ("start", "end")
}
_EPOCHS = {f"on_{phase}_{name}" for phase in ("train", "validation", "test") for name in ("start", "epoch_start", "epoch_end")}


def log_defaults(hook: str | None) -> tuple[bool, bool] | None:
    """(on_step, on_epoch) of what is logged in a hook; None where nothing can be."""
    if hook in _STEPS:
        return True, False
    return (False, True) if hook in _EVALUATION_STEPS or hook in _EPOCHS else None


class DataHooks:
    """What a module and a datamodule may both override."""

    def prepare_data(self) -> None:
        """Once on each node, before `setup`: downloads."""

    def setup(self, stage: str) -> None:
        """On every rank, as "fit", "validate", "test" or "predict" begins."""

    def teardown(self, stage: str) -> None:
        """As it ends."""

    # A loader, a list or a dict of them; asked for only where the call was given none.

    def train_dataloader(self) -> Any:
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return copy_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class ModuleHooks(DataHooks):
    """What a module may override beside its steps. `docs/migrating.md` has the order."""

    def configure_model(self) -> None:
        """After `setup`: layers that `__init__` has not made."""

    def configure_callbacks(self) -> Any:
        """Callbacks of the module's own, which take the place of the Trainer's of the same class."""
        return []

    def on_fit_start(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any: ...

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_validation_start(self) -> None: ...

    def on_validation_end(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_start(self) -> None: ...

    def on_test_end(self) -> None: ...

    def on_test_epoch_start(self) -> None: ...

    def on_test_epoch_end(self) -> None: ...

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_start(self) -> None: ...

    def on_predict_end(self) -> None: ...

    def on_predict_epoch_start(self) -> None: ...

    def on_predict_epoch_end(self) -> None: ...

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_before_zero_grad(self, optimizer: Any) -> None: ...

    def on_before_backward(self, loss: torch.Tensor) -> None: ...

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Gradients are whole and averaged over the ranks, and not clipped yet."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to what is saved: tensors, numbers, strings, and lists and dicts of these."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What `on_save_checkpoint` has added is there."""
