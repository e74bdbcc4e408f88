"""echelon: train PyTorch models on many processes, from a laptop to a cluster, with the same script.

Names are resolved when they are first used, so that `import echelon` costs nothing and the command line works without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.contracts.rank import RankInfo
    from echelon.contracts.run_dir import RunDir
    from echelon.launch.function import launch, spawn

__all__ = [
    "RankInfo",
    "RunDir",
    "launch",
    "spawn",
]

_HOMES = {
    "RankInfo": "contracts.rank",
    "RunDir": "contracts.run_dir",
    "launch": "launch.function",
    "spawn": "launch.function",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"echelon.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
