"""One launcher to a run's folder, one run to a folder of checkpoints: who has it, and what does not take it away."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from echelon.checkpoint.lease import Lease
from echelon.common.errors import CheckpointInUseError, UsageError
from echelon.common.lock import Lock
from echelon.contracts.run_dir import RunDir
from echelon.launcher.local.end_record import record_end
from tests.kit.refusals import refused
from tests.kit.started import wait_until

fork = multiprocessing.get_context("fork")


def no_locks(*_: Any) -> None:
    raise OSError(38, "Function not implemented")


def take_run(folder: Path) -> None:
    RunDir(folder).hold(patience_s=0.0)


def take_lease(folder: Path) -> None:
    Lease(folder).acquire()


TAKE = {"run": take_run, "lease": take_lease}
REFUSED = (UsageError, CheckpointInUseError)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.checkpoint.lease._PATIENCE_S", 0.0)


@contextlib.contextmanager
def holding(folder: Path, take: Callable[[Path], object], then: Callable[[Path], object]) -> Iterator[int]:
    """Another process that has the folder and has done `then`; its number. It is killed at the end."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_hold, args=(folder, take, then, theirs))
    process.start()
    try:
        assert ours.recv() == "held"
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def _hold(folder: Path, take: Callable[[Path], object], then: Callable[[Path], object], theirs: Connection) -> None:
    try:
        take(folder)
        then(folder)
    except BaseException as error:
        theirs.send(repr(error))
    else:
        theirs.send("held")
    time.sleep(100)


def is_free(folder: Path, take: Callable[[Path], object]) -> bool:
    """Whether another process could take it now."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_try, args=(folder, take, theirs))
    process.start()
    found = ours.recv()
    process.join()
    ours.close()
    theirs.close()
    assert isinstance(found, bool), found
    return found


def _try(folder: Path, take: Callable[[Path], object], theirs: Connection) -> None:
    theirs.send(_outcome(folder, take))


def _outcome(folder: Path, take: Callable[[Path], object]) -> Any:
    try:
        take(folder)
    except REFUSED:
        return False
    except BaseException as error:
        return repr(error)
    return True


def copy(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))


def read(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            path.read_bytes()


def judge(folder: Path) -> None:
    """As the launcher does at the end, on a disk that is full."""
    run = RunDir(folder).at_attempt(0)
    run.exit_json.mkdir()
    record_end(run, 1, stopped="a test")


def ask(folder: Path) -> None:
    assert not RunDir(folder).is_held()  # by another
    with RunDir(folder).submitting():
        pass


def start_a_child(folder: Path) -> None:
    """As a data worker, or a rank, which ends later than its parent."""
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)


def start_a_child_that_ends(folder: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def take_and_give_back(folder: Path) -> None:
    lease = Lease(folder)
    lease.acquire()
    lease.release()


THEN = {f.__name__: f for f in (copy, read, judge, ask, start_a_child_that_ends)}


@pytest.mark.parametrize("kind", TAKE)
@pytest.mark.parametrize("then", THEN)
def test_nothing_that_a_process_does_with_its_folder_gives_it_to_another(tmp_path: Path, kind: str, then: str) -> None:
    run = RunDir.create(tmp_path, "a", begin=False)
    with holding(run.path, TAKE[kind], THEN[then]):
        assert not is_free(run.path, TAKE[kind])
    assert is_free(run.path, TAKE[kind])


def test_a_lease_taken_twice_is_given_back_twice(tmp_path: Path) -> None:
    with holding(tmp_path, take_lease, take_and_give_back):
        assert not is_free(tmp_path, take_lease)


@pytest.mark.parametrize("kind", TAKE)
def test_a_child_that_outlives_its_parent_does_not_keep_the_folder(tmp_path: Path, kind: str) -> None:
    with holding(tmp_path, TAKE[kind], start_a_child) as pid:
        os.kill(pid, signal.SIGKILL)
        while not is_free(tmp_path, TAKE[kind]):  # the kernel may still be at it
            time.sleep(0.01)


@pytest.mark.parametrize("kind", TAKE)
def test_without_locks_the_text_keeps_the_others_out_and_a_killed_process_keeps_nobody(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.fcntl", no_locks)
    folder = RunDir.create(tmp_path, "a", begin=False).path
    with holding(folder, TAKE[kind], copy):
        assert not is_free(folder, TAKE[kind])
        assert kind != "run" or RunDir(folder).is_held()
    assert is_free(folder, TAKE[kind])


@pytest.mark.full
@pytest.mark.parametrize("there", ["nothing", "a dead process's", "an empty file"])
@pytest.mark.parametrize("locks", [True, False])
def test_of_many_that_come_at_once_one_has_the_folder(
    tmp_path: Path, there: str, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:
        monkeypatch.setattr("fcntl.fcntl", no_locks)
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        if there == "an empty file":
            (folder / ".lease").touch()
        elif there != "nothing":
            with holding(folder, take_lease, read):
                pass
            assert (folder / ".lease").exists()
        many, gate = [], fork.Event()
        for _ in range(6):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_race, args=(folder, gate, theirs))
            process.start()
            many.append((process, ours, theirs))
        gate.set()
        assert sorted(ours.recv() for _, ours, _ in many) == [False] * 5 + [True]
        for process, *ends in many:
            process.kill()
            process.join()
            for end in ends:
                end.close()
        left = {p.name for p in folder.iterdir()}
        assert left == {".lease"}


def _race(folder: Path, gate: Any, theirs: Connection) -> None:
    gate.wait()
    theirs.send(_outcome(folder, take_lease))
    time.sleep(100)


def test_who_was_thought_dead_and_lives_learns_that_another_has_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ten minutes of a machine that stood still: it must remove nothing of the other's."""
    monkeypatch.setattr("fcntl.fcntl", no_locks)
    lease = Lease(tmp_path)
    lease.acquire()
    lease.refresh()
    text = json.loads((tmp_path / ".lease").read_text())
    (tmp_path / ".lease").write_text(json.dumps({**text, "host": "node7", "token": "theirs"}))
    with refused(CheckpointInUseError):
        lease.refresh()
    lease.release()
    assert "node7" in (tmp_path / ".lease").read_text()


@pytest.mark.parametrize("start, free", [("1", True), ("0", False)])
def test_without_locks_a_start_of_a_job_does_not_wait_for_the_one_before(
    tmp_path: Path, start: str, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the first was lost a moment ago, and cannot have given anything back."""
    monkeypatch.setattr("fcntl.fcntl", no_locks)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with holding(tmp_path, take_lease, read):
        text = json.loads((tmp_path / ".lease").read_text())
    (tmp_path / ".lease").write_text(json.dumps({**text, "host": "node7"}))
    monkeypatch.setenv("SLURM_RESTART_COUNT", start)
    assert is_free(tmp_path, take_lease) == free


@pytest.mark.full
def test_without_locks_a_launcher_that_lives_says_so_to_other_machines(tmp_path: Path) -> None:
    """Of any kind: one rank in the launcher itself, or a launch command, has no loop that would."""
    run = RunDir.create(tmp_path, "a", begin=False)
    waiting = "import sys, unittest.mock as m; from echelon.contracts import run_dir as r"
    waiting += "; from tests.common.test_lock import no_locks"
    holds = f"m.patch('fcntl.fcntl', no_locks).start(); r.RunDir({str(run.path)!r}).hold(renew_s=0.05); sys.stdin.read()"
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", f"{waiting}; {holds}"], stdin=subprocess.PIPE, cwd=root) as process:

        def seen() -> dict[str, Any]:
            return json.loads(file.read_text() or "{}") if (file := run.path / ".lock").exists() else {}

        wait_until(seen, "the folder is held", 100.0)
        before = seen()
        wait_until(lambda: seen().get("seen", 0.0) > before["seen"], "it says that it lives", 100.0)
        assert all(seen()[name] == before[name] for name in ("token", "since", "pid"))
        process.communicate()
    assert process.returncode == 0 and not (run.path / ".lock").exists()


def test_who_has_a_folder_is_said_by_name_with_its_run_and_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("USER", ""), ("ECHELON_RUN_DIR", "/runs/lm"), ("SLURM_JOB_ID", "4711")):
        monkeypatch.setenv(name, value)
    with holding(tmp_path, take_lease, read) as pid, pytest.raises(CheckpointInUseError) as caught:
        Lease(tmp_path).acquire()
    text = str(caught.value)
    assert f"process {pid} of " in text and f"process {pid} of 0 " not in text
    assert "the run in /runs/lm" in text and "scancel 4711" in text


class WrittenOnly:
    """As a bucket that this user may write to, and not read from."""

    def read(self) -> bytes | None:
        return None

    def create(self, text: bytes) -> bool:
        return True

    def replace(self, text: bytes) -> None: ...

    def set_aside(self, text: bytes) -> bool:
        return True

    def remove(self) -> None: ...


def test_a_place_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot be read back"):
        Lock.take(None, place=WrittenOnly())
