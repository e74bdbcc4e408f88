"""Callback: hooks beside a module's own. Those of a name run before the module's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.compat.lightning.pytorch.hooks import HOOKS, no_hook

__all__ = ["Callback", "LambdaCallback"]


class Callback:
    """Override the hooks you need, which get (trainer, pl_module, ...). `state_dict`, `load_state_dict` are part of checkpoints.

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

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


_OF_CALLBACKS = "setup teardown on_sanity_check_start on_sanity_check_end on_exception on_save_checkpoint on_load_checkpoint"
for _name in (*HOOKS, *_OF_CALLBACKS.split()):
    setattr(Callback, _name, no_hook(_name))


class LambdaCallback(Callback):
    """Hooks as functions: `LambdaCallback(on_train_end=lambda trainer, module: ...)`."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, hook in hooks.items():
            if not callable(getattr(Callback, name, None)):
                raise TypeError(f"LambdaCallback: Callback has no {name!r}.")
            setattr(self, name, hook)
