"""`echelon run --profile` and `--memory-snapshot`: write traces of chosen steps, and the history of a GPU's memory."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from echelon.common.files import private_folder, write_whole
from echelon.contracts.profile import Profile, wants_memory_snapshot
from echelon.contracts.run_dir import RunDir
from echelon.loop.callback import Callback
from echelon.loop.state import State
from echelon.loop.unit import Unit
from echelon.world import agree, memory_history

__all__ = ["asked_for"]

logger = logging.getLogger(__name__)

_ROWS = 25  # of the summary table

_traces: dict[tuple[int, Profile, Path], _Trace] = {}  # keyed by process id, too, because forks inherit it


def asked_for() -> list[Callback]:
    """Callbacks that the launch command asked for; usually none."""
    wanted, callbacks = Profile.from_env(), list[Callback]()
    run = RunDir.current()
    if run is None:
        return callbacks
    if wanted is not None and (wanted.ranks is None or agree.rank() in wanted.ranks):
        key = (os.getpid(), wanted, run.attempt_path)
        if key not in _traces:
            _traces[key] = _Trace(wanted, run)
        callbacks.append(_traces[key])
    if wants_memory_snapshot():
        callbacks.append(_Memory(run))
    return callbacks


class _Trace(Callback):
    """Traces this rank's steps (each an update), from the wait for the first step's data to the callbacks of the last.

    One object serves all trainings of a process, because a loop that counts its epochs itself has a training for each epoch.
    Steps that go on in the next training are in a second trace, without the time between the two.
    """

    may_stop = False

    def __init__(self, wanted: Profile, run: RunDir) -> None:
        self._wanted, self._run = wanted, run
        self._profile: profile | None = None
        self._first = wanted.first  # first step of the current trace
        self._step: Any = None
        self._trained = 0
        self._pid, self._done, self._has_traced = os.getpid(), False, False
        atexit.register(self._say_if_none)

    def on_train_start(self, state: State, unit: Any) -> None:
        self._trained = unit.train_progress.num_updates_completed
        if self._trained >= self._wanted.last and not self._done:
            self._done = True
            if not self._has_traced:
                logger.warning("--profile %s: training began after step %s, so nothing is traced", self._wanted, self._trained)
        self._before(self._trained + 1)

    def on_train_step_start(self, state: State, unit: Any) -> None:
        if self._profile is not None:
            self._step = record_function(f"step {unit.train_progress.num_updates_completed + 1}")
            self._step.__enter__()

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if self._done:
            return
        self._after_step()
        if not unit.at_boundary:
            return
        steps = self._trained = unit.train_progress.num_updates_completed
        if self._profile is not None and steps >= self._wanted.last:
            self._done = True
            self._write(steps)
        else:
            self._before(steps + 1)

    def on_train_end(self, state: State, unit: Any) -> None:
        self._after_step()
        if self._profile is None:
            return
        if self._trained >= self._first:
            self._write(self._trained)
        else:  # the trace began with the wait for the first step's data, and none came
            self._profile.stop()
            self._profile = None

    def _say_if_none(self) -> None:
        """Warn at the end of the process, not of a training: a later training may come to the steps."""
        if os.getpid() == self._pid and not self._done and not self._has_traced:
            logger.warning("--profile %s: training ended after step %s, so nothing is traced", self._wanted, self._trained)

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        if self._profile is not None:  # trace a failed step, too
            self._after_step()
            self._write(unit.train_progress.num_updates_completed)  # type: ignore[attr-defined]

    def _before(self, step: int) -> None:
        if self._done or step < self._wanted.first:
            return
        if self._profile is None:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._first = step
            self._profile = profile(activities=kinds, record_shapes=True, profile_memory=True)
            self._profile.start()

    def _after_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _write(self, last: int) -> None:
        """Write the trace and its table. An error is only logged; training goes on."""
        profile, self._profile, self._has_traced = self._profile, None, True
        assert profile is not None
        profile.stop()
        rank, first = agree.rank(), self._first
        name = f"steps-{first}-{max(first, last)}.rank{rank}"
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"

        def write(folder: Path) -> None:
            table = profile.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=80)
            write_whole(folder / f"{name}.txt", f"rank {rank}, steps {first} to {max(first, last)}\n{table}\n")
            _in_place(folder / f"{name}.json.gz", profile.export_chrome_trace)

        _write_into(self._run, write, "the trace")


class _Memory(Callback):
    """Records the allocator's history from the start of training; writes it at the end, or after an error (out of memory)."""

    may_stop = False

    def __init__(self, run: RunDir) -> None:
        self._run, self._records = run, False

    def on_train_start(self, state: State, unit: Any) -> None:
        self._records = torch.cuda.is_available()
        if self._records:
            memory_history.begin()
        elif agree.is_rank0():
            logger.warning(
                "--memory-snapshot: only CUDA's allocator has a history, and there is no GPU here: nothing is written. "
                "--profile tells how much of a CPU's memory each operation takes."
            )

    def on_train_end(self, state: State, unit: Any) -> None:
        self._write()

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        self._write()

    def _write(self) -> None:
        if self._records:
            self._records = False
            name = f"memory.rank{agree.rank()}.pickle"
            _write_into(self._run, lambda folder: _in_place(folder / name, memory_history.write), "the memory's history")
            memory_history.end()


def _in_place(path: Path, write: Callable[[str], object]) -> None:
    """Let a function of torch write a file, which then appears whole or not at all."""
    temporary = path.with_name(f".{os.urandom(8).hex()}.{path.name}")
    try:
        write(str(temporary))
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_into(run: RunDir, write: Callable[[Path], None], what: str) -> None:
    """Write into the run's folder. A full disk or an error of the profiler is logged, and does not end the run."""
    folder = run.profiles / run.attempt_path.name
    try:
        private_folder(run.profiles)
        private_folder(folder)
        write(folder)
    except Exception as error:
        logger.warning("%s cannot be written to %s: %s. The run continues.", what, folder, error)
