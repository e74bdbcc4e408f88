"""The hooks of modules and callbacks, which do nothing unless overridden; and where `self.log` may be called."""

from __future__ import annotations

from typing import Any

import torch

from echelon.world.device import copy_data_to_device

__all__ = ["HOOKS", "LOGS", "Callback", "DataHooks", "ModuleHooks", "no_hook", "overridden"]


def overridden(name: str, thing: Any, base: type) -> bool:
    """Whether an object has a method of its own in place of the base's."""
    own = getattr(thing, name, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(base, name, None)


# Hooks of modules and callbacks. A module's get the arguments named here; a callback's get the trainer and module before them.
_PHASES = ("train", "validation", "test", "predict")
HOOKS = (
    *("on_fit_start", "on_fit_end"),
    *(f"on_{phase}_{end}" for phase in _PHASES for end in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{phase}_batch_start" for phase in _PHASES),  # batch, batch_idx, dataloader_idx=0
    *(f"on_{phase}_batch_end" for phase in _PHASES),  # outputs, batch, batch_idx, dataloader_idx=0
    "on_before_zero_grad",  # optimizer
    "on_before_backward",  # loss
    "on_after_backward",
    "on_before_optimizer_step",  # optimizer; its gradients are complete and averaged over the ranks, but not clipped yet
)


def no_hook(name: str) -> Any:
    """A method of this name that does nothing, whatever it is given."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> None: ...

    hook.__name__ = hook.__qualname__ = name
    return hook


_OF_UPDATE = ("training_step", "optimizer_zero_grad", "configure_gradient_clipping", "optimizer_step")
_OF_EVALUATION = ("validation_step", "test_step")
_LOGGING = ("train", "validation", "test")
# Where `self.log` may be called -> (whether it logs the step there by default, else the epoch; whether there is a step).
LOGS = {
    **{f"on_{phase}_{at}": (False, False) for phase in _LOGGING for at in ("start", "epoch_start", "epoch_end")},
    **{f"on_{phase}_batch_{end}": (phase == "train", True) for phase in _LOGGING for end in ("start", "end")},
    **dict.fromkeys((*_OF_UPDATE, *(name for name in HOOKS if name.startswith(("on_before", "on_after")))), (True, True)),
    **dict.fromkeys(_OF_EVALUATION, (False, True)),
}


class DataHooks:
    """Hooks that both a module and a data module may override."""

    def prepare_data(self) -> None:
        """Download data. Called once on each node, before `setup`."""

    def setup(self, stage: str) -> None:
        """Called on every rank when "fit", "validate", "test" or "predict" begins."""

    def teardown(self, stage: str) -> None:
        """Called on every rank when that ends."""

    # Return a loader, or a list or dict of loaders. Called only if the Trainer's call got none.

    def train_dataloader(self) -> Any:
        raise NotImplementedError

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return copy_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class ModuleHooks(DataHooks):
    """Hooks that a module may override beside its steps. `docs/moving/lightning.md` has the order."""

    def configure_model(self) -> None:
        """Make layers that `__init__` has not made. Called after `setup`."""

    def configure_callbacks(self) -> Any:
        """The module's own callbacks. They replace the Trainer's callbacks of the same class."""
        return []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to the checkpoint: tensors, numbers, strings, and lists and dicts of these."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take what `on_save_checkpoint` has added."""


for _name in HOOKS:
    setattr(ModuleHooks, _name, no_hook(_name))


class Callback:
    """Hooks that run before a module's hooks of the same name. Override those you need; they get (trainer, pl_module, ...).

    `state_dict` and `load_state_dict` are part of checkpoints.

    Attributes:
        meets: its hooks are collective, so all ranks must have the callback.
    """

    meets = False

    log: Any  # the module's, during a run
    log_dict: Any

    @property
    def state_key(self) -> str:
        """The name of its state in a checkpoint."""
        return type(self).__qualname__

    def _key(self, **options: Any) -> str:
        return f"{type(self).__qualname__}{options!r}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


_OF_CALLBACKS = "setup teardown on_sanity_check_start on_sanity_check_end on_exception on_save_checkpoint on_load_checkpoint"
for _name in (*HOOKS, *_OF_CALLBACKS.split()):
    setattr(Callback, _name, no_hook(_name))
