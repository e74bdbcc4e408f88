"""Loader workers that die or hang: which worker it was and what it read, kept where it outlives the worker.

The workers are those of torch's DataLoader. Each notes on a board in shared memory what it is about to read.
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

# Signals that a terminal or Slurm sends to a whole process group or job, but are meant for the rank: it may want to save, and
# needs its workers for that. They end when the rank ends.
_FOR_THE_RANK = (signal.SIGINT, *SIGNALS)

# Errors in a rank that is reading from a worker when the worker dies; and how long it may take until the worker's end is known.
BROKEN = (ConnectionError, EOFError)
_UNTOLD_S = 1.0

# A row for each worker: its process id, the sample that it reads (-1: none), and how many samples it reads together.
_PID, _SAMPLE, _COUNT = range(3)


def start_method() -> str | None:
    """How a DataLoader starts its workers: None leaves the program's choice; else "fork"."""
    return method_for(multiprocessing.get_start_method(allow_none=True), sys.version_info[:2])


def method_for(chosen: str | None, version: tuple[int, ...]) -> str | None:
    """`start_method`, for the method that `multiprocessing` reports as chosen.

    Python 3.14 made "forkserver" the default, and reports it as chosen once it was used. Workers are still forked there: datasets
    then need not be picklable, and a worker's death is known at once, because only a parent is told of it.
    """
    return "fork" if version >= (3, 14) and chosen in (None, "forkserver") else None


# Longest socket name, less what `multiprocessing` adds to the temporary folder's name: "/pymp-xxxxxxxx/listener-xxxxxxxx".
_MOST_BYTES = 107 - 32


def _shorten_temporary_folder() -> None:
    """If TMPDIR's name is too long for a socket, give `multiprocessing` a folder with a shorter name. Workers pass tensors
    through sockets there; before Python 3.14, the rank would wait for ever for tensors that they cannot pass.

    Raises:
        UsageError: there is no such folder.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _MOST_BYTES:
        return
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            try:
                multiprocessing.util.get_temp_dir()  # remembers the folder
            finally:
                tempfile.tempdir = usual
            return
    raise LoaderError(f"TMPDIR must have at most {_MOST_BYTES} bytes if data workers are used, got {len(usual)}: {usual}.")


class Board:
    """For each worker its process and what it reads, in shared memory.

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
        """Pickle for workers that are not forked: without the processes' handles, which cannot be pickled."""
        return {**vars(self), "_processes": []}

    def started(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Start the workers of a loader, and remember them."""
        before = {process.pid for process in multiprocessing.active_children()}
        _shorten_temporary_folder()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)  # workers inherit the mask, until `begin`
        try:
            batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._processes = [process for process in multiprocessing.active_children() if process.pid not in before]
        for process in self._processes:
            process.terminate = _killing(process)  # type: ignore[method-assign]  # torch's last resort; workers ignore SIGTERM
        _boards.add(self)
        return batches

    def begin(self, worker: int) -> None:
        """Called first in a worker: set up signals and the worker's row."""
        _shorten_temporary_folder()  # again, for a worker that was not forked
        for number in _FOR_THE_RANK:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_RANK)
        self.row, self.worker = self._table[worker].numpy(), worker
        self.row[_PID] = os.getpid()

    def reading(self, sample: int, count: int = 1) -> None:
        """In a worker: note what it is about to read; -1 is nothing."""
        self.row[_SAMPLE], self.row[_COUNT] = sample, count

    def done(self) -> None:
        """The loader no longer needs the workers, so it no longer matters how they end."""
        _boards.discard(self)

    def kill(self) -> None:
        """End all workers now."""
        if os.getpid() != self._owner:  # a forked child of the workers' parent
            return
        for process in self._processes:
            # torch's signal handler raises as soon as a worker dies.
            with contextlib.suppress(RuntimeError):
                process.kill()
            with contextlib.suppress(RuntimeError):
                process.join(5.0)

    def _of_worker(self, pid: int | None) -> str:
        """Text that names a worker by its process, and what it was reading."""
        for worker, (owner, sample, count) in enumerate(self._table.tolist()):
            if owner == pid:
                what = "no sample" if sample < 0 else f"sample {sample}" if count == 1 else f"{count} samples from {sample} on"
                return f"loader worker {worker} (pid {pid}), which was reading {what}{self.where}"
        return f"a loader worker (pid {pid}), which had not begun to read{self.where}"

    def dead(self) -> list[str]:
        """Text for each worker that ended with an error: which it was, and how it ended."""
        ended = [(process.pid, process.exitcode) for process in self._processes]
        return [f"{self._of_worker(pid)}, {_how(code)}" for pid, code in ended if code]

    def lost(self) -> DataError | None:
        """After a connection to a worker broke: which worker ended. Waits a moment, because the kernel closes a process's sockets
        before it reports the end.
        """
        until = time.monotonic() + _UNTOLD_S
        while time.monotonic() < until:
            with contextlib.suppress(RuntimeError):  # raised by torch's signal handler
                if dead := self.dead():
                    return DataError(f"{'; '.join(dead)}.")
                time.sleep(0.01)
        return None

    def timed_out(self, worker: int, timeout_s: float) -> DataError:
        """The error for a worker that gave nothing for too long. Kills all workers: a stopped one would outlive the rank."""
        known = self._table[:, _PID].tolist()
        pid = known[worker]
        if pid < 0:  # the worker has not begun: it is one that is not on the board
            pid = next((process.pid for process in self._processes if process.pid not in known), None) or pid
        text, state = self._of_worker(pid), _state(pid)
        self.kill()
        return DataError(
            f"{text}, gave no batch for {timeout_s:g} s; its process was {state}. "
            "If samples may take so long, raise LoaderOptions(timeout_s=...).",
            worker=worker,
        )


def _killing(process: multiprocessing.process.BaseProcess) -> Callable[[], None]:
    weak = weakref.ref(process)  # a strong reference to itself would keep the process object alive

    def kill() -> None:
        if (living := weak()) is not None:
            living.kill()

    return kill


# Boards with living workers. torch reports a dead worker by an exception anywhere in the program, so `explain` searches all.
_boards: weakref.WeakSet[Board] = weakref.WeakSet()


# Registered after multiprocessing's exit function, so called before it: that would send SIGTERM and wait for ever.
@atexit.register
def _kill_all() -> None:
    living = list(_boards)
    if living:
        with contextlib.suppress(ValueError):  # not the main thread: then torch's handler is not installed either
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise while we kill
    for board in living:
        board.kill()


def explain(error: BaseException) -> DataError | None:
    """A better error for torch's "DataLoader worker (pid 7) is killed by signal"; None for any other error."""
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
    """A better error if a worker died, or if `worker`, whose turn it was, gave nothing in time; else the error itself."""
    if board is None:
        return error
    # The workers live as long as the loader's iterator, which lives as long as a frame of the traceback refers to it.
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, BROKEN):
        return board.lost() or error
    if str(error).startswith("DataLoader timed out"):
        return board.timed_out(worker, timeout_s)
    return explain(error) or error


def seed_worker(*words: Any) -> None:
    """Seed this process's RNGs by the work that follows, so that augmentation draws the same after a restart."""
    seed = _seed_of(words)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def base_generator(*words: Any) -> torch.Generator:
    """The generator from which a DataLoader draws its workers' seeds, `get_worker_info().seed`. It is not the one that dropout
    uses, and differs between ranks and epochs.
    """
    return torch.Generator().manual_seed(_seed_of(words))


def _seed_of(words: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(words).encode())


def said(error: BaseException) -> str:
    """An error's type and text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."


def _state(pid: int) -> str:
    """The state of a process, as the kernel reports it, in words."""
    fields = process_stat(pid)
    words = {
        "T": "stopped",
        "t": "stopped by a debugger",
        "D": "waiting for a disk or a network",
        "R": "computing",
        "S": "waiting",
    }
    return words.get(fields[0], f"in state {fields[0]}") if fields else "gone"
