"""torchtnt.utils.flops, on torch's FlopCounterMode."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["FlopTensorDispatchMode"]


class FlopTensorDispatchMode:
    """Context that counts the floating-point operations of a module's passes, by submodule; products and convolutions, a
    multiplication and its addition as one, as there. (torch's own counter says two.)

    Args:
        module: whose submodules' names are used.
    """

    def __init__(self, module: nn.Module) -> None:
        self._root = type(module).__name__
        self._counter = FlopCounterMode(display=False)

    def __enter__(self) -> FlopTensorDispatchMode:
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)

    @property
    def flop_counts(self) -> defaultdict[str, defaultdict[str, int]]:
        """Submodule -> operation -> count, as of now; the module's own name is empty."""
        found: defaultdict[str, defaultdict[str, int]] = defaultdict(_of_none)
        for name, counts in self._counter.get_flop_counts().items():
            if name == "Global":
                name = ""
            elif name.startswith(f"{self._root}."):
                name = name.removeprefix(f"{self._root}.")
            else:  # the module itself, which "" is; or another
                continue
            for operation, count in counts.items():
                found[name][f"{operation.__name__}.default"] += count // 2
        return found

    def reset(self) -> None:
        """Start counting again."""
        self._counter.flop_counts.clear()


def _of_none() -> defaultdict[str, int]:
    return defaultdict(int)
