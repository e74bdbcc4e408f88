"""What a checkpoint says about its run, and what is different in the run that takes it up."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import torch

from echelon.checkpoint.store import table
from echelon.contracts.errors import CheckpointMismatchError
from echelon.loop.unit import Unit
from echelon.world.init import World

__all__ = ["check", "facts"]

# Of a loader's state: where it stands is no change.
_POSITION = {"epoch", "position"}
_HARMLESS = {"world_size", "dp_size", "strategy", "torch", "echelon", "python", "accumulation", "workers", "num_workers"}


def facts(unit: Unit, loader: Any) -> dict[str, Any]:
    """What is compared when the checkpoint is restored, all of it plain numbers and text."""
    strategy = getattr(unit, "_given_strategy", None)
    prepared = getattr(unit, "prepared", None)
    return {
        "world_size": World.current(torch.device("cpu")).size,
        "dp_size": getattr(prepared, "dp_size", None),
        "strategy": strategy if isinstance(strategy, str) or strategy is None else type(strategy).__name__,
        "torch": torch.__version__,
        "echelon": version("echelon"),
        "python": platform.python_version(),
        "modules": {name: type(getattr(m, "module", m)).__name__ for name, m in unit.tracked_modules().items()},
        "optimizers": {name: type(o).__name__ for name, o in unit.tracked_optimizers().items()},
        "data": _of_loader(loader),
    }


def _of_loader(loader: Any) -> dict[str, Any]:
    if loader is None or not hasattr(loader, "load_state_dict"):
        return {}
    state = loader.state_dict()
    plain = {k: v for k, v in state.items() if isinstance(v, (int, str, float, bool))} if isinstance(state, Mapping) else {}
    return {k: v for k, v in plain.items() if k not in _POSITION}


def check(saved: Mapping[str, Any], unit: Unit, loader: Any, *, optimizers: bool, allowed: Iterable[str]) -> tuple[str, set[str]]:
    """Compare a checkpoint's facts with this run.

    Returns:
        a table of what changed, "" if nothing did, and the names of what is not harmless but allowed.
    Raises:
        CheckpointMismatchError: a change that is neither harmless nor allowed, with the table.
    """
    now, allowed = facts(unit, loader), set(allowed)
    changes: list[tuple[str, Any, Any, bool]] = []
    for name in ("world_size", "dp_size", "strategy", "torch", "echelon", "python"):
        if name in saved and saved[name] != now[name]:
            changes.append((name, saved[name], now[name], True))
    if optimizers:
        before = saved.get("optimizers", {})
        for name in before.keys() & now["optimizers"].keys():
            if before[name] != now["optimizers"][name]:
                changes.append((name, before[name], now["optimizers"][name], False))
    before = saved.get("data", {})
    for name in before.keys() & now["data"].keys():
        if before[name] != now["data"][name]:
            changes.append((name, before[name], now["data"][name], name in _HARMLESS))
    if not changes:
        return "", set()
    rows = [
        (name, str(a), str(b), "harmless" if harmless else "allowed" if name in allowed else "NOT harmless")
        for name, a, b, harmless in sorted(changes, key=lambda each: (each[3], each[0]))
    ]
    shown = table(("what", "saved", "now", ""), rows)
    refused = sorted(name for name, _, _, harmless in changes if not harmless and name not in allowed)
    if refused:
        raise CheckpointMismatchError(
            f"this run is not the one that was saved:\n{shown}"
            f"If it is meant, pass RestoreOptions(allow_changes={tuple(refused)!r})."
        )
    return shown, {name for name, _, _, harmless in changes if not harmless}
