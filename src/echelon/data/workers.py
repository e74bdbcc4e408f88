"""Loader workers that die or stop: who they were and what they read, kept where it outlives them.

Workers are torch's DataLoader's. Each writes on a board in shared memory what it is about to read.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.process
import multiprocessing.util  # registers its own atexit function
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from echelon.common.errors import DataError, LoaderError
from echelon.common.machine import process_stat
from echelon.contracts.stopping import SIGNALS, signal_name

__all__ = ["BROKEN", "Board", "base_generator", "explain", "method_for", "named", "said", "seed_worker", "start_method"]

# Sent to a whole process group or job, by a terminal or Slurm, and meant for the rank: it may want to save, for which it needs
# its workers. They end when it does.
_FOR_THE_RANK = (signal.SIGINT, *SIGNALS)

# What a rank gets while it reads what a worker that dies was sending, and for how long nobody may yet have heard of that end.
BROKEN = (ConnectionError, EOFError)
_UNTOLD_S = 1.0

# A row for each worker: its process id, the sample that it reads (-1: none), and how many it reads at once.
_PID, _SAMPLE, _COUNT = range(3)


def start_method() -> str | None:
    """How a DataLoader starts its workers: as the program has chosen, which is None, else by forking."""
    return method_for(multiprocessing.get_start_method(allow_none=True), sys.version_info[:2])


def method_for(chosen: str | None, version: tuple[int, ...]) -> str | None:
    """`start_method` for what `multiprocessing` says is chosen.

    Python 3.14 made "forkserver" the default, and says that it is chosen as soon as it was used. Workers are forked there, too:
    datasets need not be picklable, and who dies is heard of at once, as only a parent hears it.
    """
    return "fork" if version >= (3, 14) and chosen in (None, "forkserver") else None


# Of the name of a socket, less what `multiprocessing` adds to the temporary folder's: "/pymp-xxxxxxxx/listener-xxxxxxxx".
_MOST_BYTES = 107 - 32


def _shorten_temporary_folder() -> None:
    """Give `multiprocessing` a folder for its sockets whose name is short enough, where TMPDIR is longer: workers hand tensors
    over there, and before Python 3.14 the rank would wait without an end for what they cannot hand over.

    Raises:
        UsageError: there is none.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _MOST_BYTES:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            try:
                multiprocessing.util.get_temp_dir()  # which it remembers
            finally:
                tempfile.tempdir = usual
            return
    raise LoaderError(f"TMPDIR must have at most {_MOST_BYTES} bytes where data workers are used, got {len(usual)}: {usual}.")


class Board:
    """Which worker is which process, and what it reads.

    Args:
        where: epoch and data rank, for messages.
    Attributes:
        row: in a worker, its own row; None in the process that made the board.
        worker: in a worker, its number.
    """

    def __init__(self, workers: int, where: str) -> None:
        self.where, self.row, self.worker = where, None, -1
        self._table = torch.full((workers, 3), -1, dtype=torch.int64).share_memory_()
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._owner = os.getpid()

    row: Any

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked: they have no use for each other's handles, which cannot be sent."""
        return {**vars(self), "_processes": []}

    def started(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Start the workers of a loader, and remember them."""
        before = {process.pid for process in multiprocessing.active_children()}
        _shorten_temporary_folder()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)  # which workers inherit, until `begin`
        try:
            batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._processes = [process for process in multiprocessing.active_children() if process.pid not in before]
        for process in self._processes:
            process.terminate = _killing(process)  # type: ignore[method-assign]  # torch's last resort: they ignore SIGTERM
        _boards.add(self)
        return batches

    def begin(self, worker: int) -> None:
        """A worker's first call."""
        _shorten_temporary_folder()  # again, where it was not forked
        for number in _FOR_THE_RANK:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_RANK)
        self.row, self.worker = self._table[worker].numpy(), worker
        self.row[_PID] = os.getpid()

    def reading(self, sample: int, count: int = 1) -> None:
        """In a worker: what it is about to read; -1 is nothing."""
        self.row[_SAMPLE], self.row[_COUNT] = sample, count

    def done(self) -> None:
        """The loader has no more use for the workers: how they end is no matter."""
        _boards.discard(self)

    def kill(self) -> None:
        """End all workers now."""
        if os.getpid() != self._owner:  # a child that was forked from their parent
            return
        for process in self._processes:
            # torch raises from its signal handler as soon as a worker dies
            with contextlib.suppress(RuntimeError):
                process.kill()
            with contextlib.suppress(RuntimeError):
                process.join(5.0)

    def _of_worker(self, pid: int | None) -> str:
        """Which worker this process is, and what it was reading."""
        for worker, (owner, sample, count) in enumerate(self._table.tolist()):
            if owner == pid:
                what = "no sample" if sample < 0 else f"sample {sample}" if count == 1 else f"{count} samples from {sample} on"
                return f"loader worker {worker} (pid {pid}), which was reading {what}{self.where}"
        return f"a loader worker (pid {pid}), which had not begun to read{self.where}"

    def dead(self) -> list[str]:
        """Each worker that ended by itself: who it was, and how it ended."""
        ended = [(process.pid, process.exitcode) for process in self._processes]
        return [f"{self._of_worker(pid)}, {_how(code)}" for pid, code in ended if code]

    def lost(self) -> DataError | None:
        """Who ended, where a connection to a worker broke: the kernel closes its sockets a moment before it tells of its end."""
        until = time.monotonic() + _UNTOLD_S
        while time.monotonic() < until:
            with contextlib.suppress(RuntimeError):  # torch's, from its signal handler
                if dead := self.dead():
                    return DataError(f"{'; '.join(dead)}.")
                time.sleep(0.01)
        return None

    def timed_out(self, worker: int, timeout_s: float) -> DataError:
        """A worker gave nothing for too long: name it, and kill all, because one that is stopped would outlive the rank."""
        known = self._table[:, _PID].tolist()
        pid = known[worker]
        if pid < 0:  # it is none of those that have begun
            pid = next((process.pid for process in self._processes if process.pid not in known), None) or pid
        text, state = self._of_worker(pid), _state(pid)
        self.kill()
        return DataError(
            f"{text}, gave no batch for {timeout_s:g} s; its process was {state}. "
            "If samples may take so long, raise LoaderOptions(timeout_s=...).",
            worker=worker,
        )


def _killing(process: multiprocessing.process.BaseProcess) -> Callable[[], None]:
    weak = weakref.ref(process)  # a process that knew its own method would outlive its last user

    def kill() -> None:
        if (living := weak()) is not None:
            living.kill()

    return kill


# Those with living workers: torch tells of a dead one wherever the program happens to be.
_boards: weakref.WeakSet[Board] = weakref.WeakSet()


@atexit.register  # after multiprocessing's own, and so called before it, which would ask with SIGTERM and wait for ever
def _kill_all() -> None:
    living = list(_boards)
    if living:
        with contextlib.suppress(ValueError):  # not the main thread, and then torch's handler is not there either
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises while we kill
    for board in living:
        board.kill()


def explain(error: BaseException) -> DataError | None:
    """What torch's "DataLoader worker (pid 7) is killed by signal" was about; None for any other error."""
    if not isinstance(error, RuntimeError) or not str(error).startswith("DataLoader worker (pid"):
        return None
    named = [text for board in list(_boards) for text in board.dead()]
    return DataError(f"{'; '.join(named)}.") if named else None


def _how(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    name = signal_name(-code)
    hint = ": often the kernel, out of memory; try fewer workers or smaller batches" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def named(error: Exception, board: Board | None, worker: int, timeout_s: float) -> BaseException:
    """What a loader's error was about, if a worker died or `worker`, whose turn it was, gave nothing in time; else the error."""
    if board is None:
        return error
    # The workers live as long as the loader's iterator, and it as long as a frame of the traceback knows it.
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, BROKEN):
        return board.lost() or error
    if str(error).startswith("DataLoader timed out"):
        return board.timed_out(worker, timeout_s)
    return explain(error) or error


def seed_worker(*words: Any) -> None:
    """Seed this worker's streams by what it is about to do, so that augmentation draws the same after a restart."""
    seed = _seed_of(words)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def base_generator(*words: Any) -> torch.Generator:
    """What a DataLoader draws its workers' seeds from, `get_worker_info().seed`: not the stream that dropout uses, and not one
    that is alike on all ranks and in all epochs.
    """
    return torch.Generator().manual_seed(_seed_of(words))


def _seed_of(words: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(words).encode())


def said(error: BaseException) -> str:
    """An error's type and text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."


def _state(pid: int) -> str:
    """What the kernel says of a process."""
    fields = process_stat(pid)
    words = {
        "T": "stopped",
        "t": "stopped by a debugger",
        "D": "waiting for a disk or a network",
        "R": "computing",
        "S": "waiting",
    }
    return words.get(fields[0], f"in state {fields[0]}") if fields else "gone"
