"""The wrapper of layouts "ddp" and "zero1"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import parallel

__all__ = ["DistributedDataParallel", "read_as_wrapped"]

_PREFIX = "module."


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, which also shows the attributes and methods of the module inside.

    So `unit.module.encode(x)`, `module.head.parameters()`, `model.config` and `unit.module.temperature = 0.5` mean the same as
    under layouts without a wrapper. Names that torch's wrapper has itself stay the wrapper's. So do names with a leading
    underscore, by which torch finds out what a module is.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.training = self.module.training
        vars(self)["_is_made"] = True  # from here on, the user sets attributes

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != "_is_made"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        vars(self)["_is_made"] = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = vars(self).get("_modules", {}).get("module")
            if inner is None or name.startswith("_"):
                raise
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_inner(name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_inner(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def will_sync_module_buffers(self) -> bool:
        """As torch's, but look again if the module had no buffer (None in its place) when the wrapper was made."""
        if not self.modules_buffers:
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        return bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load by the wrapper's names, or by the module's own names, as of a copy without a wrapper."""
        wrapped = all(name.startswith(_PREFIX) for name in state_dict)
        if wrapped:
            return super().load_state_dict(state_dict, *args, **options)
        return self.module.load_state_dict(state_dict, *args, **options)

    def _is_inner(self, name: str) -> bool:
        attributes = vars(self)
        own = name.startswith("_") or name in attributes or name == "module" or hasattr(type(self), name)
        return not own and "_is_made" in attributes


def read_as_wrapped(copy: nn.Module) -> None:
    """Let `copy.load_state_dict(model.state_dict())` work if the model has a wrapper and its copy has none."""
    copy.register_load_state_dict_pre_hook(_without_prefix)


def _without_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix or hasattr(module, "module") or not all(name.startswith(_PREFIX) for name in state_dict):
        return
    for name in list(state_dict):
        state_dict[name.removeprefix(_PREFIX)] = state_dict.pop(name)
