"""When to save and what to keep, as values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from echelon.common.errors import CheckpointOptionError, require
from echelon.common.numbers import whole

__all__ = ["BestCheckpointConfig", "Every", "Keep"]


@dataclass(frozen=True)
class Every:
    """Save after every n-th update, epoch or evaluation. None is never.

    Args:
        updates, epochs, eval_steps, eval_epochs: n of each kind, at least 1.
    """

    updates: int | None = None
    epochs: int | None = None
    eval_steps: int | None = None
    eval_epochs: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                n = whole(f"save_every_n_{name}", value, at_least=1, or_none="for never", kind=CheckpointOptionError)
                object.__setattr__(self, name, n)


@dataclass(frozen=True)
class BestCheckpointConfig:
    """Which number of the unit makes a checkpoint a good one.

    Args:
        monitored_metric: the unit's attribute: a number, a tensor with one, or a metric with `compute()`.
        mode: "min" if less is better, or "max".
    """

    monitored_metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        is_name = isinstance(self.monitored_metric, str) and self.monitored_metric != ""
        require(
            is_name, "monitored_metric", "the name of an attribute of the unit", self.monitored_metric, kind=CheckpointOptionError
        )
        require(self.mode in ("min", "max"), "mode", "'min' or 'max'", self.mode, kind=CheckpointOptionError)

    def best_first(self, metrics: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps whose checkpoints have the metric, best first. Of equal ones the older comes first: the newer may
        only repeat a number that was not measured again."""
        sign = 1 if self.mode == "min" else -1
        known = [(sign * values[self.monitored_metric], step) for step, values in metrics.items() if self._has(values)]
        return [step for _, step in sorted(known)]

    def _has(self, values: Mapping[str, Any]) -> bool:
        value = values.get(self.monitored_metric)
        return isinstance(value, (int, float)) and math.isfinite(value)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay. The newest always does.

    Args:
        count: the newest n, or with `best` the best n; None keeps all.
        every_updates: the checkpoints of every k-th update stay for ever.
        best: what "best" means.
        spares_kept: checkpoints of a run that removed none stay, and do not count.
        newest: the newest `count` stay in any case, and the best one besides.
    """

    count: int | None = None
    every_updates: int | None = None
    best: BestCheckpointConfig | None = None
    spares_kept: bool = False
    newest: bool = False

    def __post_init__(self) -> None:
        if self.count is not None:
            count = whole("keep_last_n_checkpoints", self.count, at_least=1, or_none="for all", kind=CheckpointOptionError)
            object.__setattr__(self, "count", count)
        if self.every_updates is not None:
            every = whole("keep_every_n_updates", self.every_updates, at_least=1, or_none="for none", kind=CheckpointOptionError)
            object.__setattr__(self, "every_updates", every)
        is_known = self.best is None or isinstance(self.best, BestCheckpointConfig)
        require(is_known, "best_checkpoint_config", "a BestCheckpointConfig", self.best, kind=CheckpointOptionError)

    def to_delete(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps of checkpoints to remove, oldest first. `steps` are those of all whole checkpoints."""
        if self.count is None:
            return []
        steps = sorted(steps)
        kept = {*steps[-1:], *(s for s in steps if self.every_updates and s % self.every_updates == 0)}
        # Checkpoints without the metric take the places that are left, newest first.
        best = self.best.best_first(metrics) if self.best else []
        if self.newest:
            kept |= {*steps[-self.count :], *best[:1]}
        else:
            kept |= set([*best, *(s for s in reversed(steps) if s not in best)][: self.count])
        return [s for s in steps if s not in kept]
