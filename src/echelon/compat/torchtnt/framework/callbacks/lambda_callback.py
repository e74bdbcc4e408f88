"""torchtnt.framework.callbacks.lambda_callback: functions as a callback, without a class of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.common.errors import UsageError
from echelon.loop.callback import Callback

__all__ = ["Lambda"]

_HOOKS = frozenset(name for name in vars(Callback) if name.startswith("on_"))


class NoSuchHookError(UsageError, TypeError):
    """An argument that is no hook's name."""


class Lambda(Callback):
    """`Lambda(on_train_step_end=lambda state, unit: ...)`: any of Callback's hooks, by name.

    Args:
        hooks: each a function of (state, unit), `on_exception` of (state, unit, exception); None is none.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        if unknown := sorted(hooks.keys() - _HOOKS):
            raise NoSuchHookError(f"Lambda: no such hook: {', '.join(unknown)}. Hooks are named as in echelon.Callback.")
        for name, hook in hooks.items():
            if hook is not None:
                setattr(self, name, hook)
