"""Find the largest micro-batch that fits by trial: a script trains a few updates in fresh processes, with more and more
micro-batches of the same global batch, until no rank runs out of memory. The global batch, and so the numbers, do not change.
"""

from __future__ import annotations

import json
import resource
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import PlanError, RankFailedError
from echelon.common.files import parse_object, write_whole
from echelon.common.terminal import columns
from echelon.contracts.overrides import Overrides
from echelon.diagnosis.kinds import kind_of_words
from echelon.launcher.functions.launch import launch
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.callback import Callback
from echelon.loop.state import State
from echelon.loop.target import Enough, Target
from echelon.planner.memory import size
from echelon.world.init import rank_info

__all__ = ["Trial", "largest_batch", "trial_lines"]

_KILLED = 128 + 9
_KEPT_FREE = 1 / 20


@dataclass(frozen=True)
class Trial:
    """A training of a few updates.

    Args:
        micro_batches: number of micro-batches of an update, on each rank.
        samples: number of samples of a micro-batch.
        peak: bytes of the fullest rank: on a GPU those that torch's allocator reserved, else the process's resident memory.
        why: what a rank ran out of; "" if all ranks finished.
    """

    micro_batches: int
    samples: int
    peak: int = 0
    why: str = ""

    @property
    def fits(self) -> bool:
        return not self.why

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def largest_batch(
    target: Target,
    ranks: int,
    *,
    layout: str | None = None,
    updates: int = 3,
    timeout_s: float | None = 600.0,
    on_trial: Callable[[Trial], None] | None = None,
) -> list[Trial]:
    """Train with more and more micro-batches until they fit; the last one that fits has the largest micro-batch.

    A trial keeps a twentieth of the device's memory, or of the process's limit, free: after hours an allocator has gaps.

    Args:
        ranks: number of processes on this machine.
        layout: replaces the script's own.
        updates: of each trial. From the second, the optimizer's state exists at the start; batches of varying length need more.
        timeout_s: for each trial.
        on_trial: called with each trial when it ends.
    Raises:
        PlanError: the script has no global batch, or runs out of memory before its first batch, or with one sample.
        RankFailedError: the script fails for another reason.
    """
    trials: list[Trial] = []

    with tempfile.TemporaryDirectory(prefix="echelon-batch-") as folder:

        def fits(many: int) -> bool:
            trials.append(_tried(target, ranks, layout, many, updates, timeout_s, Path(folder)))
            if on_trial is not None:
                on_trial(trials[-1])
            return trials[-1].fits

        if not fits(1):
            rows = trials[0].samples
            ways = [many for many in range(1, rows + 1) if rows % many == 0]
            at, failed = 0, 0
            while True:
                if ways[at] == rows:
                    raise PlanError(
                        f"a micro-batch must fit, got {trials[-1].why} with one sample on a rank. Take a layout that shards, or "
                        "recompute='blocks'; `echelon plan --search` tries both."
                    )
                at = min(bisect_left(ways, 2 * ways[at]), len(ways) - 1)
                if fits(ways[at]):
                    break
                failed = at
            while at - failed > 1:
                middle = (at + failed) // 2
                at, failed = (middle, failed) if fits(ways[middle]) else (at, middle)
    return trials


def _tried(
    target: Target, ranks: int, layout: str | None, many: int, updates: int, timeout_s: float | None, folder: Path
) -> Trial:
    file = folder / f"{many}.json"
    logs = folder / f"logs-{many}"
    arguments = (target, layout, many, updates, str(file))
    try:
        peaks = launch(_train, ranks=ranks, args=arguments, quiet=True, timeout_s=timeout_s, run_dir=logs)
    except RankFailedError as error:
        why = _out_of_memory(error)
        if why is None:
            raise
        if not file.exists():
            raise PlanError(f"the first batch must be reached, got {why} before it. A layout that shards holds less.") from error
        return Trial(many, _samples(file, many), why=f"{why} on rank {error.rank}")
    return Trial(many, _samples(file, many), max(peaks))


def _samples(file: Path, many: int) -> int:
    record = parse_object(file.read_text()) or {}
    return int(record["samples"]) // many


def _out_of_memory(error: RankFailedError) -> str | None:
    cause = error.__cause__
    kind = kind_of_words(f"{type(cause).__name__}: {cause}") if cause is not None else None
    if kind is not None and kind.cause in ("device out of memory", "host out of memory"):
        return kind.cause
    return "killed, as the kernel does where memory is short" if error.exit_code == _KILLED else None


def _train(target: Target, layout: str | None, many: int, updates: int, file: str) -> int:
    """The program of each rank: train a few updates; returns the peak in bytes."""
    trial = _Trial(updates, Path(file))
    target.run_until_enough(Overrides(layout, accumulation=many, observes=True), trial.look_at)
    if trial.kept_free is None:
        raise PlanError(f"{target.script} must call echelon's train, fit or prepare, and it did not.")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _filled_memory(device: torch.device) -> torch.Tensor:
    """A tensor that holds the memory that a trial must not use; empty on a CPU without a limit, whose memory others use, too."""
    if device.type == "cuda":
        most = torch.cuda.mem_get_info(device)[1]
    else:
        limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        most = min((each for each in limits if each != resource.RLIM_INFINITY), default=0)
    return torch.zeros(int(most * _KEPT_FREE), dtype=torch.uint8, device=device)


class _Trial(Callback):
    """Ends a training after a few updates. First writes down how many samples of a global batch each rank has."""

    def __init__(self, updates: int, file: Path) -> None:
        self._updates, self._file = updates, file
        self.kept_free: torch.Tensor | None = None  # set when training begins

    def look_at(self, unit: Any, dataloader: Iterable[Any], callbacks: list[Callback]) -> list[Callback]:
        samples = getattr(dataloader, "global_batch", None)
        if not isinstance(unit, OptimizedUnit) or samples is None:
            raise PlanError(
                "the largest micro-batch is a part of a global batch, and the script has none: echelon.Loader or StreamLoader, "
                "with an AutoUnit or in a loop with echelon.prepare, say it by global_batch=."
            )
        if rank_info().rank == 0:
            write_whole(self._file, json.dumps({"samples": samples // unit.prepared.data.size}))
        self.kept_free = _filled_memory(unit.device)
        return [*(each for each in callbacks if getattr(each, "saves", False) is not True), self]

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if unit.train_progress.num_updates_completed >= self._updates:
            raise Enough


def trial_lines(trials: list[Trial]) -> list[str]:
    """The trials as a table."""
    rows = [["micro-batches", "samples of one", "peak", ""]]
    for each in sorted(trials, key=lambda trial: trial.micro_batches):
        peak = size(each.peak) if each.peak else "-"
        rows.append([str(each.micro_batches), str(each.samples), peak, "fits" if each.fits else each.why])
    return columns(rows)
