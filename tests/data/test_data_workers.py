"""What fails while data is read is named: the sample, the epoch, the rank, the worker; and nothing hangs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

import echelon as ech
from echelon.common.errors import DataError
from echelon.data.workers import Board, method_for, named
from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.refusals import refused


class Trap:
    """Sample i is i, until `at`, where `what` happens, in a worker only if `in_worker`."""

    def __init__(self, at: int, what: Any) -> None:
        self.at, self.what = at, what

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.what()
        return index


def _wrong() -> None:
    raise ValueError("the picture is torn")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit() -> None:
    os._exit(3)


def _loader(dataset: Any, workers: int, *, timeout_s: float = 300.0) -> ech.Loader:
    options = ech.data.LoaderOptions(dp=(1, 2), timeout_s=timeout_s)
    loader = ech.Loader(dataset, 8, shuffle=False, num_workers=workers, options=options)
    loader.set_epoch(3)
    return loader


# A worker's end is told by a signal, whose handler, torch's, raises wherever this process is: also where multiprocessing has just
# made a socket, which nobody closes then.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture
def collected() -> Iterator[None]:
    """Such a socket goes with its test, and not in whichever later one Python collects garbage."""
    yield
    gc.collect()


# Rank 1 of two is given samples 4 .. 7, 12 .. 15, 20 .. 23, ...; with two workers 12 .. 15 are worker 1's.


class AtOnce(Trap):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[i] for i in indices]


class TooFew(Trap):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices[1:]


@pytest.mark.parametrize("kind", [Trap, AtOnce])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_sample_epoch_and_rank_and_keeps_its_traceback(kind: type[Trap], workers: int) -> None:
    with pytest.raises(DataError) as caught:
        list(_loader(kind(13, _wrong), workers))
    text = str(caught.value)
    assert text.startswith("sample 13 (epoch 3, data rank 1) could not be read: ValueError: the picture is torn")
    assert caught.value.fields == ({"sample": 13, "worker": 1} if workers else {"sample": 13})
    if workers:
        assert "In worker 1 (pid " in text and "in _wrong" in text
    else:
        assert isinstance(caught.value.__cause__, ValueError)
    with refused(DataError):  # too few at once
        list(_loader(TooFew(-1, None), workers))
    with pytest.raises(DataError, match=r"sample 13 is float32\[2\], sample \d+ is float32\[1\]") as unlike:
        list(_loader([torch.zeros(2 if i == 13 else 1) for i in range(40)], workers))
    assert unlike.value.fields == ({"sample": 13, "worker": 1} if workers else {"sample": 13})


@pytest.mark.full(but=("killed", "exited"))
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    ("what", "ended", "timeout_s"),
    [
        pytest.param(_kill, "was killed by SIGKILL", 300.0, id="killed"),
        pytest.param(_exit, "exited with code 3", 300.0, id="exited"),
        pytest.param(_stop, "gave no batch for 2 s; its process was stopped", 2.0, id="stopped"),
    ],
)
def test_a_worker_that_dies_or_stops_is_named_within_seconds_and_is_gone(what: Any, ended: str, timeout_s: float) -> None:
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        list(_loader(Trap(13, what), 2, timeout_s=timeout_s))
    text = str(caught.value)
    assert "loader worker 1 (pid " in text and "which was reading sample 13 (epoch 3, data rank 1)" in text and ended in text
    assert ("out of memory" in text) == (what is _kill)
    assert time.monotonic() - began < 60
    assert not psutil.pid_exists(int(text.partition("(pid ")[2].partition(")")[0]))


@pytest.mark.usefixtures("collected")
def test_a_worker_that_stands_before_its_first_line_is_told_of_by_its_own_process() -> None:
    """It was "pid -1, gone": a fork may leave a lock behind that nobody opens any more."""
    board = Board(1, " (epoch 3, data rank 1)")
    batches = board.started(DataLoader(list(range(4)), num_workers=1, worker_init_fn=lambda worker: time.sleep(60)))
    (process,) = multiprocessing.active_children()
    text = str(board.timed_out(0, 2.0))
    assert f"a loader worker (pid {process.pid}), which had not begun to read (epoch 3, data rank 1)" in text
    assert "gone" not in text
    del batches


@pytest.mark.usefixtures("collected")
def test_a_worker_that_dies_during_a_step_is_named_by_the_loop() -> None:
    """torch's signal handler raises wherever the program is; here, in the unit's step."""

    class Slow(ech.TrainUnit[torch.Tensor]):
        def __init__(self) -> None:
            super().__init__()
            self.seen: BaseException | None = None

        def train_step(self, state: ech.State, data: torch.Tensor) -> None:
            time.sleep(5)

        def on_exception(self, state: ech.State, exc: BaseException) -> None:
            self.seen = exc

    unit, loader = Slow(), ech.Loader(Trap(5, _kill), 4, shuffle=False, num_workers=1)
    with refused(DataError):
        ech.train(unit, loader, max_epochs=1)
    assert isinstance(unit.seen, DataError)


@pytest.mark.usefixtures("collected")
def test_a_worker_that_dies_during_a_window_of_a_loop_of_ones_own_is_named_too() -> None:
    model = torch.nn.Linear(1, 1)
    data: Any = Trap(5, _kill)
    model, _, loader = ech.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4, num_workers=1), layout="none"
    )
    with refused(DataError) as caught:
        for _ in loader:
            with ech.window(model):
                time.sleep(5)
    assert "which was reading sample 5" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.full
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_connection_that_breaks_before_its_worker_is_known_to_be_dead_names_the_worker(error: Exception) -> None:
    """The kernel closes a process's sockets first and tells its parent afterwards."""
    board, before = Board(1, " (here)"), set(multiprocessing.active_children())
    batches = board.started(DataLoader(range(40), num_workers=1))
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid is not None
    killing = threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL))
    killing.start()
    better = named(error, board, 0, 300.0)
    killing.join()
    board.done()
    del batches
    assert isinstance(better, DataError) and "was killed by SIGKILL" in str(better)
    board = Board(1, "")  # one of somebody else that breaks is told as it is
    batches = board.started(DataLoader(range(40), num_workers=1))
    assert named(error, board, 0, 300.0) is error
    board.done()
    del batches


class Noise(Trap):
    """Samples with noise from all three streams."""

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def test_augmentation_in_workers_draws_the_same_after_a_restart() -> None:
    def batches(at: int = 0) -> list[torch.Tensor]:
        options = ech.data.LoaderOptions(dp=(0, 1), fingerprint="none")
        loader = ech.Loader(Noise(-1, None), 4, num_workers=2, options=options)
        loader.seek(at)
        return list(loader)

    whole = batches()
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], batches(3), strict=True))
    assert len(torch.cat(whole)[:, 1:].flatten().unique()) == 120  # and no two samples alike


@pytest.mark.parametrize(
    ("chosen", "version", "method"),
    [(None, (3, 11), None), ("forkserver", (3, 13), None), ("spawn", (3, 14), None), ("fork", (3, 15), None)]
    + [(chosen, version, "fork") for chosen in (None, "forkserver") for version in ((3, 14), (3, 15))],
)
def test_workers_are_forked_unless_the_program_says_otherwise(
    chosen: str | None, version: tuple[int, int], method: str | None
) -> None:
    assert method_for(chosen, version) == method


FORKSERVER = """
import multiprocessing, sys
multiprocessing.set_start_method("forkserver")
sys.version_info = (3, 14)  # what it has by default
import echelon as ech

class Squares:  # of a script that has no `if __name__ == "__main__"`
    def __len__(self): return 8
    def __getitem__(self, i): return float(i * i)

loader = ech.Loader(Squares(), global_batch=4, num_workers=2, shuffle=False)
print([batch.tolist() for batch in loader], loader.state_dict()["samples"])
"""


def test_a_plain_scripts_workers_start_where_python_forks_no_more(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORKSERVER)
    done = forked.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stdout) == (0, "[[0.0, 1.0, 4.0, 9.0], [16.0, 25.0, 36.0, 49.0]] 8\n"), done.stderr


LONG = """
import torch, echelon as ech
if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for method in (None, "spawn"):
        if method:
            torch.multiprocessing.set_start_method(method, force=True)
        for batch in ech.Loader(data, global_batch=4, num_workers=1, shuffle=False):
            print(batch[0].sum().item(), flush=True)
    import tempfile
    print(len(tempfile.gettempdir()) > 100)
"""


@pytest.mark.full
def test_workers_hand_over_tensors_whatever_the_length_of_tmpdir(started: Any) -> None:
    folder = started.folder / ("x" * 100)
    folder.mkdir()
    program = started.python(started.script(LONG), fresh=True, env={"TMPDIR": str(folder)})
    out, err = program.communicate(timeout=180)
    assert sorted(out.decode().split()) == sorted(["6.0", "22.0"] * 2 + ["True"]), err.decode()
