"""Goodput: the share of a run's wall time spent in steps that count, and the causes of the rest, over all restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from echelon.contracts.run_dir import RunDir, read_json
from echelon.contracts.times import TimeRecord
from echelon.observe.attempt_times import AttemptTimes, times_of
from echelon.observe.columns import moment
from echelon.observe.facts import get

__all__ = ["LOST", "Goodput", "goodput"]

# Causes of lost time, in the order shown.
LOST = {
    "startup": "from the start of an attempt to its training loop",
    "redone": "steps after the checkpoint from which a later attempt resumed",
    "data": "waiting for batches",
    "evaluation": "evaluations",
    "checkpoint": "training stopped for a checkpoint",
    "hang": "from the last step to the end of an attempt that hung",
    "ending": "from the last recorded step to the end of any other attempt",
    "down": "between two attempts",
    "outside": "between two training loops of an attempt",
}

_SHOWN = 0.005  # smallest share of the wall time that is shown


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run; `wall_s` is the sum of `productive_s` and of all in `lost`.

    Args:
        wall_s: from its first start to its end, or to its last record.
        productive_s: in steps that were not trained again, without waits for data.
        wait_s: the part of `productive_s` in which the rank that waited least waited for others: the price of training in
        parallel.
        lost: seconds by the keys of `LOST`, the largest first; without zeros.
    """

    wall_s: float
    productive_s: float
    wait_s: float = 0.0
    lost: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def __str__(self) -> str:
        shares = {cause: seconds / self.wall_s for cause, seconds in self.lost.items()}
        lost = ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share >= _SHOWN)
        return f"{self.share:.0%} productive{f'; lost: {lost}' if lost else ''}"


@dataclass(frozen=True)
class _Attempt:
    """The times of one attempt, from the rank that held up the others."""

    started: float
    ended: float
    hung: bool
    records: Sequence[TimeRecord]

    @classmethod
    def read(cls, times: AttemptTimes, commanded: float | None) -> _Attempt | None:
        """Read an attempt; None if its time is unknown.

        Args:
            commanded: time of the run's latest command, for this attempt or another.
        """
        exit_json, records = read_json(times.run.exit_json), times.critical
        began = records[0].time - records[0].wall_s - records[0].startup_s if records else None
        started, ended = moment(get(exit_json, "started")), moment(get(exit_json, "ended"))
        started = started if started is not None else began if began is not None else commanded
        last = records[-1].time if records else started
        ended = ended if ended is not None else last
        if started is None or ended is None or not 0 <= started <= ended < 1e12:
            return None
        return cls(started, ended, isinstance(get(exit_json, "hang"), Mapping), records)


def goodput(run: RunDir, times: Sequence[AttemptTimes] | None = None) -> Goodput | None:
    """The goodput over all attempts in a run's folder; None if their times are unknown. Never raises.

    An attempt's start and end are by its launcher's clock, its loop's times by the ranks' clocks; only durations are added.

    Args:
        times: the result of `times_of` for this run, if already read.
    """
    commanded = moment(get(read_json(run.run_json), "started"))
    parts = (_Attempt.read(each, commanded) for each in (times_of(run) if times is None else times))
    attempts = _from_command([each for each in parts if each is not None], commanded)
    if not attempts:
        return None
    lost = dict.fromkeys(LOST, 0.0)
    productive = wait = 0.0
    for i, attempt in enumerate(attempts):
        if i and attempt.started > attempts[i - 1].ended:
            lost["down"] += attempt.started - attempts[i - 1].ended
        begun = [later.records[0].steps[0] for later in attempts[i + 1 :] if later.records]
        done, waited = _of_loop(attempt.records, min(begun, default=None), lost)
        productive, wait = productive + done, wait + waited
        _around_loop(attempt, lost)
    wall = productive + sum(lost.values())
    ordered = sorted(((cause, seconds) for cause, seconds in lost.items() if seconds > 0), key=lambda item: -item[1])
    return Goodput(wall, productive, wait, dict(ordered))


def _from_command(attempts: list[_Attempt], commanded: float | None) -> list[_Attempt]:
    """Let the attempt of the latest command begin with the command, not with its first rank."""
    before = 0.0
    for i, attempt in enumerate(attempts):
        if commanded is not None and before <= commanded < attempt.started:
            attempts[i] = replace(attempt, started=commanded)
            break
        before = attempt.ended
    return attempts


def _of_loop(records: Sequence[TimeRecord], kept: int | None, lost: dict[str, float]) -> tuple[float, float]:
    """Productive seconds and waits of a loop whose steps up to `kept` count; adds to `lost`."""
    productive = wait = 0.0
    for record in records:
        first, last = record.steps
        if kept is None or last <= kept:
            counts = 1.0
        else:
            counts = max(0, kept - first) / (last - first) if last > first else 0.0
        lost["redone"] += record.wall_s * (1 - counts)
        lost["data"] += record.data_s * counts
        lost["evaluation"] += record.eval_s * counts
        lost["checkpoint"] += record.checkpoint_s * counts
        productive += max(0.0, record.wall_s - record.data_s - record.eval_s - record.checkpoint_s) * counts
        wait += record.wait_s * counts
    return productive, wait


def _around_loop(attempt: _Attempt, lost: dict[str, float]) -> None:
    """Add the time of an attempt outside its records to `lost`."""
    records, span = attempt.records, attempt.ended - attempt.started
    if not records:
        lost["hang" if attempt.hung else "startup"] += span
        return
    rest = max(0.0, span - sum(record.wall_s for record in records))
    startup = min(rest, max(0.0, records[0].time - records[0].wall_s - attempt.started))
    ending = min(rest - startup, max(0.0, attempt.ended - records[-1].time))
    lost["startup"] += startup
    lost["hang" if attempt.hung else "ending"] += ending
    lost["outside"] += rest - startup - ending
