"""Starting ranks: values and errors come back, the first failure is the cause, nothing outlives its launcher."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.cli.main import main
from echelon.common.errors import EchelonError, LaunchError, RankFailedError, RunFolderError, UsageError
from echelon.contracts.records import rank_record
from echelon.diagnosis.failure import Failure, render
from echelon.diagnosis.stacks import Frame
from echelon.launcher.functions import launch as functions
from echelon.launcher.functions.launch import launch, spawn
from echelon.launcher.local import attempt as attempt_of_ranks
from echelon.launcher.local.relay import Relay
from tests.kit import forked
from tests.kit.refusals import refused
from tests.kit.started import Started, wait_until

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(autouse=True)
def temporary_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a failed launch keeps lies in the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# ---- functions that ranks run -------------------------------------------------------------------------------------------


def _who(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, kwargs


def _rank_first(rank: int, *args: Any) -> tuple[Any, ...]:
    return rank, args


def _environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def _fail_while_others_wait(how: str, victim: str, folder: str) -> None:
    """Rank 1 ends in some way; rank 0, which waits for it in a collective, ends in consequence in another."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        if how == "raise":
            raise ValueError("rank 1 has bad data")
        if how == "raise after goodbye":  # the peers hear of the end before the launcher can
            try:
                raise ValueError("rank 1 has bad data")
            finally:
                _close_connections()
                _await_traceback_of_rank_0(Path(folder))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            os._exit(7)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        if victim == "wraps":
            raise KeyError("training went wrong") from error
        if victim == "exits":
            sys.exit(9)
        raise


def _close_connections() -> None:
    """Peers see this rank's end now; the process lives on."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_WR)


def _await_traceback_of_rank_0(run_dir: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and not any("Error" in log.read_text() for log in run_dir.glob("*/attempts/*/rank0.log")):
        time.sleep(0.01)


def _leave_early() -> None:
    dist.init_process_group("gloo")
    if int(os.environ["RANK"]) == 0:
        dist.all_reduce(torch.ones(1))


def _die_once(folder: str, skew_ms: int) -> tuple[int, int]:
    """In attempt 0 rank 1 kills itself, at some moment around the first collective; afterwards all must meet."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 1 and attempt == 0:
        threading.Timer(skew_ms / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
    dist.init_process_group("gloo")
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    if attempt == 0:
        time.sleep(600)  # until the launcher ends this attempt
    return int(value), attempt


class TwoArguments(Exception):
    """An exception that pickles but cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def _raise_unpicklable() -> None:
    raise TwoArguments(1, 2)


def _return_a_wrapped_model() -> torch.nn.Module:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def test_a_value_that_only_a_rank_can_load_says_what_to_return() -> None:
    with refused(EchelonError):
        launch(_return_a_wrapped_model, ranks=1, quiet=True)


def _return_a_lock() -> Any:
    return threading.Lock()


def _leave_an_executor_idle() -> int:
    pool = ThreadPoolExecutor(2)
    _KEPT.append(pool)
    return pool.submit(int, "3").result()


_KEPT: list[Any] = []


def _write_without_closing(folder: str) -> None:
    file = open(Path(folder) / f"{os.environ['RANK']}.txt", "w")
    file.write("kept")
    _KEPT.append(file)


def _children_and_return() -> list[int]:
    return [subprocess.Popen(["sleep", "600"], start_new_session=own).pid for own in (False, True)]


def _nothing() -> None:
    pass


# ---- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_launch_returns_each_ranks_value() -> None:
    assert launch(_who, ranks=3, args=(1,), kwargs={"b": 2}) == [(rank, 3, (1,), {"b": 2}) for rank in range(3)]


def test_spawn_refuses_an_option_that_it_cannot_honour() -> None:
    """It passes the rank first, in torch's order of arguments."""
    assert spawn(_rank_first, ("a",), 2) == [(0, ("a",)), (1, ("a",))]
    with refused(LaunchError):
        spawn(_rank_first, nprocs=1, join=False)


def test_ranks_have_the_environment_they_need() -> None:
    """They meet on loopback: containers often cannot resolve the host's name, and others could connect to its address."""
    names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "A_B", "OMP_NUM_THREADS")
    for *found, threads in echelon.launch(_environment, ranks=2, args=names, env={"A_B": "c"}):  # a package has its name, too
        assert found == ["lo", "127.0.0.1", "c"]
        assert 1 <= int(threads) <= max(1, len(os.sched_getaffinity(0)) // 2)  # threads that do not fight for cores


@pytest.mark.full
def test_classes_of_the_main_script_travel_both_ways(started: Started) -> None:
    script = started.script(
        "import echelon\n"
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "class Bad(Exception): pass\n"
        "def double(p): return Point(2 * p.x)\n"
        "def fail(): raise Bad('mine')\n"
        "if __name__ == '__main__':\n"
        "    print([p.x for p in echelon.launch(double, ranks=2, args=(Point(3),))])\n"
        "    try: echelon.launch(fail, ranks=1)\n"
        "    except echelon.EchelonError as e: print(type(e.__cause__) is Bad, e.__cause__)\n"
    )
    out, err = started.python(script).communicate(timeout=120)
    assert out.decode().splitlines() == ["[6, 6]", "True mine"], err.decode()


@pytest.mark.full
def test_a_launch_at_a_scripts_top_level_is_refused_instead_of_starting_ranks_for_ever(started: Started) -> None:
    script = started.script("import echelon\ndef f(): return 1\nprint(echelon.launch(f, ranks=1))\n")
    process = started.python(script)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert 'if __name__ == "__main__"' in err.decode()


def test_an_idle_executor_does_not_keep_a_rank() -> None:
    assert launch(_leave_an_executor_idle, ranks=1, timeout_s=120) == [3]


@pytest.mark.full
def test_a_file_left_open_is_not_cut_off(tmp_path: Path) -> None:
    launch(_write_without_closing, ranks=2, args=(str(tmp_path),))
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["kept", "kept"]


@pytest.mark.full
def test_two_threads_may_launch_at_once_and_so_may_a_rank() -> None:
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda n: launch(_who, ranks=n), (1, 2)))
    assert [len(values) for values in both] == [1, 2]
    assert launch(functools.partial(launch, _who, ranks=2), ranks=1) == [[(0, 2, (), {}), (1, 2, (), {})]]


# ---- what cannot work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, -1, "0", "many", "", "1.5", 1.5, None, [2]])
def test_a_bad_number_of_ranks_is_named(ranks: Any) -> None:
    with pytest.raises(UsageError) as caught:
        launch(_who, ranks=ranks)
    assert str(ranks).strip("'") in str(caught.value) and "auto" in str(caught.value)


def test_a_lambda_and_a_closure_are_sent_by_value() -> None:
    word = "rank"
    assert launch(lambda: word + os.environ["RANK"], ranks=2) == ["rank0", "rank1"]


@pytest.mark.full
@pytest.mark.parametrize("how", ["-c", "-"])
def test_a_function_typed_into_a_session_is_sent_by_value(started: Started, how: str) -> None:
    code = "import echelon\ndef f(): return 40 + 2\nprint(echelon.launch(f, ranks=1))"
    process = started.python(how, *([code] if how == "-c" else []), stdin=subprocess.PIPE)
    out, err = process.communicate(code.encode(), timeout=120)
    assert out.decode().strip() == "[42]", err.decode()


def test_values_and_errors_of_a_sessions_classes_come_back_as_these(started: Started) -> None:
    code = """
import echelon
class Result: pass
class OwnError(Exception): pass
def f(fails):
    if fails: raise OwnError("as asked")
    result = Result()
    result.by = f
    return result
(value,) = echelon.launch(f, ranks=1, args=(False,))
try: echelon.launch(f, ranks=1, args=(True,), quiet=True)
except echelon.errors.RankFailedError as error: cause = error.__cause__
print(type(value) is Result, value.by is f, type(cause) is OwnError)
"""
    out, err = started.python("-c", code).communicate(timeout=120)
    assert out.decode().split() == ["True"] * 3, err.decode()


def test_a_value_that_cannot_be_sent_back_is_named() -> None:
    with pytest.raises(RankFailedError, match="the value that _return_a_lock returned, of type lock, cannot be sent") as caught:
        launch(_return_a_lock, ranks=1)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("end", [sys.exit, os._exit])
def test_a_function_that_ends_its_process_as_if_done_is_named(end: Any) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 exited with 0, but left no value in .*sys\.exit\(0\)") as caught:
        launch(end, ranks=1, args=(0,))
    assert caught.value.exit_code == 0 and Path(str(caught.value.logs)).is_dir()


def test_a_folder_that_was_removed_is_named_where_a_run_would_start(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, runs = tmp_path / "gone", tmp_path / "runs"
    script = started.script("print(1)")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with refused(RunFolderError):
        launch(_who, ranks=1)
    assert main(["run", "--ranks", "1", "--runs", str(runs), str(script)]) == 2 and not runs.exists()
    assert str(Frame("/somewhere/train.py", 3, "f")) == "train.py:3 in f"


def test_an_exception_that_cannot_be_unpickled_still_arrives_as_text_and_the_logs_it_names_are_kept() -> None:
    with pytest.raises(RankFailedError, match="TwoArguments: 1 and 2") as caught:
        launch(_raise_unpicklable, ranks=1)
    assert Path(caught.value.logs or "", "rank0.log").exists()


def test_an_environment_that_is_no_text_is_refused() -> None:
    with refused(LaunchError):
        launch(_who, ranks=1, env={"A": 1})  # type: ignore[dict-item]


def test_a_rank_that_cannot_even_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    functions.shared_server()
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "never"))
    with pytest.raises(RankFailedError, match="FileNotFoundError"):
        launch(_who, ranks=1, run_dir=tmp_path)


# ---- the first failure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "victim", "exit_code", "says"),
    [
        ("raise after goodbye", "raises", 1, "ValueError: rank 1 has bad data"),
        ("raise after goodbye", "wraps", 1, "ValueError: rank 1 has bad data"),
        ("kill", "wraps", 137, "killed by SIGKILL"),
        ("kill", "exits", 137, "killed by SIGKILL"),
        ("segfault", "exits", 139, "killed by SIGSEGV"),
        ("exit", "exits", 7, "exit code 7"),
        *[pytest.param("raise", "raises", 1, "bad data", marks=pytest.mark.full) for _ in range(5)],  # a matter of moments
        *[pytest.param("kill", "raises", 137, "SIGKILL", marks=pytest.mark.full) for _ in range(5)],
    ],
)
def test_the_first_failure_is_the_cause_whatever_follows(
    tmp_path: Path, how: str, victim: str, exit_code: int, says: str
) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(_fail_while_others_wait, ranks=2, args=(how, victim, str(tmp_path)), run_dir=tmp_path)
    text, logs = str(caught.value), Path(caught.value.logs or "")
    assert (caught.value.rank, caught.value.exit_code) == (1, exit_code), text
    assert "rank 1 failed first" in text and says in text
    if how == "raise after goodbye":  # each rank's own traceback is in its log
        assert says in (logs / "rank1.log").read_text() and "RuntimeError" in (logs / "rank0.log").read_text()


def test_a_rank_that_left_early_is_named_beside_the_one_that_noticed(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 left with exit code 0 before the others(.|\n)*rank 0 then failed:"):
        launch(_leave_early, ranks=2, run_dir=tmp_path)


def _fail_in_a_removed_folder(folder: str) -> None:
    os.chdir(folder)
    os.rmdir(folder)
    exec(compile("def own():\n    raise ValueError('mine')\nown()", "own.py", "exec"), {})


def test_an_error_is_told_though_the_working_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    with pytest.raises(RankFailedError, match="ValueError: mine") as caught:
        launch(_fail_in_a_removed_folder, ranks=1, args=(str(tmp_path / "gone"),), run_dir=tmp_path)
    said = rank_record(Path(caught.value.logs or "") / "exit.rank0.json") or {}
    assert said["message"] == "mine" and any('File "own.py", line 2, in own' in each for each in said["user_frames"])


def _break_off_before_the_worker_is_dead() -> None:
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(8), num_workers=1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    here, main = sys._getframe(), threading.main_thread().ident

    def kill_it() -> None:
        while here in [frame for frame, _ in traceback.walk_stack(sys._current_frames()[main or 0])]:
            time.sleep(0.001)
        os.kill(worker.pid or 0, signal.SIGKILL)

    threading.Thread(target=kill_it).start()
    raise ConnectionResetError(104, "Connection reset by peer")


def test_a_connection_to_a_data_worker_that_dies_is_told_as_its_death(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(_break_off_before_the_worker_is_dead, ranks=1, run_dir=tmp_path)
    said = rank_record(Path(caught.value.logs or "") / "exit.rank0.json") or {}
    assert said["kind"] == "RuntimeError" and "killed by signal: Killed" in said["message"]
    assert "ConnectionResetError" in said["traceback"]


@pytest.mark.parametrize(
    ("cause", "later_ms"),
    [
        (Failure(1, 137, 500_000_000, "SIGKILL", "killed by SIGKILL", reported=False), 500),
        (Failure(1, 7, 10_000_000, "exit", "exit code 7", reported=False), 10),
    ],
    ids=["SIGKILL", "os._exit"],
)
def test_a_death_without_a_word_is_heard_of_late(cause: Failure, later_ms: int) -> None:
    """A survivor that notices a closed connection and exits may do so before the parent hears of the death."""
    survivor = Failure(0, 1, 0, "SystemExit", "exit code 1")
    assert cause.time_ns == later_ms * 1_000_000 and Failure.first([survivor, cause]) is cause


def test_user_code_that_speaks_of_connections_is_no_victim() -> None:
    """Only what an exception says counts, not the source lines of its traceback."""
    trace = "Traceback (most recent call last):\n    raise ValueError(x)  # Connection reset by peer\nValueError: x\n"
    assert not Failure(0, 1, 0, "ValueError", "x", traceback=trace).is_victim


def test_a_failure_that_holds_a_whole_file_leaves_room_for_the_rest_on_a_terminal() -> None:
    text = render(Failure(0, 1, 0, "ValueError", "\n".join(f"line {n}" for n in range(100_000))), ranks=1)
    assert "line 0\n" in text and "line 99999" in text and "99900 more lines, in the log" in text and len(text) < 10_000
    assert len(render(Failure(0, 1, 0, "ValueError", "x" * 100_000), ranks=1)) < 10_000


# ---- restarts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew_ms", [0, 3, 15, 40, 130])
def test_a_restart_joins_whenever_a_rank_is_killed(tmp_path: Path, skew_ms: int) -> None:
    values = launch(_die_once, ranks=2, args=(str(tmp_path), skew_ms), max_restarts=1, timeout_s=120, run_dir=tmp_path)
    assert values == [(3, 1), (3, 1)]


def _meet_at_attempt_2() -> str:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", attempt)
    if attempt != "2":
        raise ValueError(f"attempt {attempt}")
    return attempt


def test_each_attempt_of_a_job_that_fails_twice_has_a_folder_with_its_logs_and_its_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(_meet_at_attempt_2, ranks=2, max_restarts=3, timeout_s=120, run_dir=tmp_path) == ["2", "2"]
    assert capfd.readouterr().out.splitlines().count("attempt 2") == 1  # rank 0 is shown, and rank 1 is not
    attempts = sorted(tmp_path.glob("*/attempts/*"))
    ends = [json.loads((attempt / "exit.json").read_text()) for attempt in attempts]
    assert [attempt.name for attempt in attempts] == ["000", "001", "002"] and [end["exit_code"] for end in ends] == [1, 1, 0]
    assert [(end["first_failure"] or {}).get("message") for end in ends] == ["attempt 0", "attempt 1", None]
    for n, end in enumerate(ends):
        rank = (end["first_failure"] or {"rank": 1})["rank"]  # the other one may be ended before it says a word
        assert (attempts[n] / f"rank{rank}.log").read_text().splitlines()[0] == f"attempt {n}"
    assert ends[2]["ranks"] == {}


def test_a_job_that_fails_for_ever_ends_with_its_last_failure(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="attempt 1"):
        launch(_meet_at_attempt_2, ranks=1, max_restarts=1, run_dir=tmp_path)


# ---- what is left behind ------------------------------------------------------------------------------------------------


def test_a_launch_that_went_well_leaves_no_folder(tmp_path: Path) -> None:
    launch(_nothing, ranks=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_many_launches_leak_no_descriptor_no_thread_and_no_zombie() -> None:
    launch(_nothing, ranks=1)
    server = psutil.Process(functions.shared_server().pid)

    def held() -> tuple[int, ...]:
        return psutil.Process().num_fds(), threading.active_count(), server.num_fds()

    before = held()
    for _ in range(15):
        launch(_nothing, ranks=1)
    wait_until(lambda: held() == before, "nothing more is held than before")
    assert [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE] == []


@pytest.mark.full
def test_the_server_has_one_thread_so_that_forking_it_is_safe(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import psutil\n"
        "from echelon.launcher.functions.launch import launch, shared_server\n"
        "def loads():\n"
        "    import echelon.loop.auto.auto\n"
        "if __name__ == '__main__':\n"
        "    for _ in range(3):\n"  # the third finds a server that has what ranks had to load
        "        launch(loads, ranks=1, quiet=True)\n"
        "    print('threads', psutil.Process(shared_server().pid).num_threads())\n"
    )
    with forked.anew():  # of a server that is forked, the libraries learnt how many threads to have when its parent began
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert "threads 1\n" in done.stdout, done.stderr


def _fails_and_stays() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        atexit.register(time.sleep, 600)
        raise ValueError("bad data")
    dist.all_reduce(torch.ones(1))


@pytest.mark.full
def test_a_rank_stuck_in_its_exit_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has failed and does not end must not hold the others."""
    monkeypatch.setattr(attempt_of_ranks, "_EXIT_WAIT_S", 0.2)
    with pytest.raises(RankFailedError, match="rank 1 failed first") as caught:
        launch(_fails_and_stays, ranks=2, timeout_s=120)
    assert isinstance(caught.value.__cause__, ValueError)


FORKS = """
import os, sys
import echelon as ech
ech.init_from_env()
child = os.fork()
if child == 0:
    sys.exit(7)
print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_child_that_a_rank_has_forked_ends_as_it_wants(started: Started, ranks: str) -> None:
    """An ordinary end of the interpreter would wait there for the group's threads, which only the rank has."""
    run = started.run("--device", "cpu", "--ranks", ranks, started.script(FORKS))
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0 and b"the child ended with 7" in out, err.decode()


def test_what_a_rank_started_ends_with_it_even_in_a_session_of_its_own() -> None:
    ((in_group, in_session),) = launch(_children_and_return, ranks=1)
    wait_until(lambda: not (psutil.pid_exists(in_group) or psutil.pid_exists(in_session)), "the children have ended")


def _stay(folder: str) -> None:
    (Path(folder) / f"began{os.environ['RANK']}").touch()
    time.sleep(600)


@pytest.mark.full
def test_a_killed_server_fails_the_launch_and_the_next_one_works(tmp_path: Path) -> None:
    server = functions.shared_server()

    def kill_it() -> None:
        wait_until(lambda: len(list(tmp_path.glob("began*"))) == 2, "the ranks run")
        os.kill(server.pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as killer:
        killed = killer.submit(kill_it)
        with refused(EchelonError):
            launch(_stay, ranks=2, args=(str(tmp_path),))
        killed.result()
    assert launch(_who, ranks=1) == [(0, 1, (), {})]


@pytest.mark.full
@pytest.mark.parametrize("who", ["launcher", "server", "both"])
def test_killing_the_launcher_or_the_server_leaves_nothing_running(started: Started, who: str) -> None:
    """The launcher's death ends what ranks started even in sessions of their own, the server's in their groups, both's ranks."""
    sessions = {"launcher": "False, True", "server": "False,", "both": ""}[who]
    script = started.script(
        "import os, subprocess, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import echelon\n"
        "def wait():\n"
        f"    for own in ({sessions}):\n"
        "        subprocess.Popen(['sleep', '600'], start_new_session=own)\n"
        "    open(f'ready{os.environ[\"RANK\"]}', 'w').close()\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    echelon.launch(wait, ranks=2)\n"
    )
    launcher = started.python(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, fresh=True)
    started.ranks_run()
    (server,) = psutil.Process(launcher.pid).children()
    for pid in {"launcher": [launcher.pid], "server": [server.pid], "both": [launcher.pid, server.pid]}[who]:
        os.kill(pid, signal.SIGKILL)
    launcher.wait(60)
    started.all_gone()


def test_a_signal_to_the_callers_process_takes_its_ordinary_course_after_the_ranks_ended(started: Started) -> None:
    script = started.script(
        "import os, time, signal, threading, echelon\n"
        "def wait():\n    open(f'ready{os.environ[\"RANK\"]}', 'w').close(); time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    try: echelon.launch(wait, ranks=2)\n"
        "    except KeyboardInterrupt: print('interrupted', flush=True)\n"
        "    echelon.launch(wait, ranks=2)\n"
    )
    launcher = started.python(script)
    started.ranks_run()
    for path in started.folder.glob("ready*"):
        path.unlink()
    launcher.send_signal(signal.SIGINT)
    started.ranks_run()  # of the second launch
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == -signal.SIGTERM
    assert launcher.stdout is not None and launcher.stdout.read() == b"interrupted\n"
    started.all_gone()


# ---- the server's protocol ----------------------------------------------------------------------------------------------


@pytest.fixture
def raw_server(started: Started) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A server and the bare socket to it."""
    ours, theirs = socket.socketpair()
    code = f"from echelon.launcher.local.server import main; main({theirs.fileno()}, [])"
    process = started.python("-c", code, pass_fds=[theirs.fileno()])
    theirs.close()
    yield ours, process
    ours.close()


def _request(folder: Path, script: str) -> bytes:
    (folder / "s.py").write_text(script)
    fields = {
        "kind": "script", "target": str(folder / "s.py"), "args": [], "env": dict(os.environ), "cwd": str(folder),
        "sys_path": [p for p in sys.path if p], "log": str(folder / "log"),
    }  # fmt: skip
    return json.dumps({"fork": fields, "handed": []}).encode() + b"\n"


def _answers(sock: socket.socket, count: int) -> list[dict[str, Any]]:
    data = b""
    while data.count(b"\n") < count:
        assert select.select([sock], [], [], 60)[0], f"only {data!r}"
        more = sock.recv(65536)
        assert more, f"the server has gone after {data!r}"
        data += more
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_right_after_the_start_is_not_lost(
    raw_server: tuple[socket.socket, subprocess.Popen[bytes]], tmp_path: Path, number: int, code: int
) -> None:
    sock, _ = raw_server
    for _ in range(5):
        sock.sendall(_request(tmp_path, "import time; time.sleep(600)"))
        (forked,) = _answers(sock, 1)
        sock.sendall(json.dumps({"signal": [forked["forked"], number, False]}).encode() + b"\n")
        (exited,) = _answers(sock, 1)
        assert os.waitstatus_to_exitcode(exited["status"]) == code


class _Screen:
    def __init__(self, takes_s: float) -> None:
        self.data, self.takes_s = b"", takes_s

    def write(self, stream: str, data: bytes) -> None:
        time.sleep(self.takes_s)
        self.data += data

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_a_rank_writes_to_its_log_alone_stands_behind_what_it_printed(tmp_path: Path) -> None:
    screen = _Screen(0.3)
    relay = Relay(screen)
    relay.start()
    pipes = relay.open(tmp_path / "log")
    for fd, data in ((pipes.output, b"a"), (pipes.error, b"b"), (pipes.output, b"c" * 60_000), (pipes.log, b"d")):
        os.write(fd or 0, data)
    for fd in (pipes.output, pipes.error, pipes.log):
        os.close(fd or 0)
    relay.stop()
    assert (tmp_path / "log").read_bytes().endswith(b"d") and (tmp_path / "log").stat().st_size == 60_003
    assert b"d" not in screen.data and len(screen.data) == 60_002


# ---- the relay ----------------------------------------------------------------------------------------------------------


def test_ranks_that_import_a_script_find_the_command_line_it_was_started_with(started: Started) -> None:
    """As with torch.multiprocessing: many scripts parse their arguments at the top level."""
    script = started.script(
        "import argparse, echelon\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('lr', type=float)\narguments = parser.parse_args()\n"
        "def rate():\n    return arguments.lr\n"
        "if __name__ == '__main__':\n    print(echelon.launch(rate, ranks=2))\n"
    )
    launcher = started.python(script, "0.25")
    out, err = launcher.communicate(timeout=120)
    assert out == b"[0.25, 0.25]\n", err.decode()


def _groups_that_live_on() -> list[bool]:
    dist.init_process_group("gloo")
    ended = [weakref.ref(dist.new_group([0, 1])), weakref.ref(dist.group.WORLD)]
    dist.destroy_process_group(ended[0]())
    dist.destroy_process_group()
    gc.collect()
    return [not dist.is_initialized(), *(group() is not None for group in ended)]


def test_a_process_group_is_not_freed_while_its_rank_lives() -> None:
    """Freed at a function's end, with the model that was wrapped, gloo's joins threads that may wait for the interpreter."""
    assert launch(_groups_that_live_on, ranks=2) == [[True, True, True]] * 2
