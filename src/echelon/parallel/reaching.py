"""The wrapper of `ddp` and the ZeROs."""

from __future__ import annotations

from typing import Any

from torch.nn import parallel

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Torch's, by its name; and the attributes and methods of the module within are its own, too.

    So that `unit.module.encode(x)`, `module.head.parameters()` and `model.config` mean the same as under strategies that have no
    wrapper. Names with an underscore are those of the wrapper alone, as torch looks by these for what a module is.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = vars(self).get("_modules", {}).get("module")
            if inner is None or name.startswith("_"):
                raise
            return getattr(inner, name)
