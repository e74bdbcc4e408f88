"""Tests of several ranks: `ranks` runs a function in worker processes; the leak police looks after every test.

Worker processes are forked from one server that has torch loaded, so that two ranks cost a tenth of a second. They meet
through a file in the test's own folder: no port that another process could take. A test that hangs ends with the stacks
of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import torch
import torch.distributed as dist

from echelon.launcher.functions import launch as functions
from echelon.launcher.functions.launch import launch
from echelon.launcher.local.server import ForkServer
from tests.kit import forked, refusals
from tests.kit.standing import StandingRanksBySize

TIMEOUT_S = 180.0  # a machine that is busy with others takes ten times as long as it does alone

STANDING: set[StandingRanksBySize] = set()  # of the module whose tests run

# The server forks ranks with these loaded; each rank would import them itself, in up to a second of computing.
LOADED = (
    *forked.TORCH,
    "echelon.loop.auto.auto",
    "echelon.loop.callbacks",
    "echelon.loop.run",
    "echelon.prover.prove",
    "echelon.prover.rank",
    "echelon.prover.reference",
    "pytest",
    "tests.conftest",
)

# Folders with files of many minutes, each by one worker: prove's processes, and jobs that wait for Slurm's clocks. They begin
# first, since at the end of the suite nothing would be left to run beside them.
LONGEST = ("prover", "slurm")


# Hypothesis gives an example 200 ms, and judges how fast it draws them: on a busy machine that would decide a test.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write tests/golden/messages.txt anew for the tests that run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_golden") and not hasattr(config, "workerinput"):
        refusals.collect()
    # Background jobs of a shell, and `nohup`, are born with these ignored, and so would be every process of the tests.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    # As `echelon run` does for itself, starting anew for it.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    # Until the tests are collected: the collector would search what stays again and again, a third of the time.
    gc.disable()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # else others run the tests
        for name in LOADED:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                if not name.startswith("torch."):  # another torch may lack it, and nothing is lost but time
                    raise
    torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    server = functions.running_server()
    if server is not None:
        server.close()
    forked.close()
    if config.getoption("write_golden") and not hasattr(config, "workerinput"):
        refusals.write()


@pytest.hookimpl(tryfirst=True)  # before `-m "not full"` leaves tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `full(but=(...))`, the cases of these ids (or what begins with them and -) are in `make test` as well.

    Tests for a GPU are not part of the suite of a machine without one; everything else that is skipped fails in CI.

    The reduced form of `make gpu` asks for those that a CPU can run as well, so that they are never broken when needed.
    """
    longest = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: longest.get(item.path.parent.name, len(LONGEST)))
    for item in items:
        for mark in [each for each in item.own_markers if each.name == "full" and "but" in each.kwargs]:
            case: str = item.callspec.id  # type: ignore[attr-defined]
            if any(case == each or case.startswith(f"{each}-") for each in mark.kwargs["but"]):
                item.own_markers.remove(mark)
    if not torch.cuda.is_available():
        reduced = os.environ.get("ECHELON_GPU_TESTS_ON") == "cpu"
        marked = [(item, item.get_closest_marker("gpu")) for item in items]
        gpu = [item for item, mark in marked if mark is not None and not (reduced and mark.kwargs.get("on_cpu"))]
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded stays: the collector need not look through it in every test, a tenth of a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield  # type: ignore[misc]
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which fails in CI: {report.longrepr}"
    return report  # type: ignore[return-value]


class Ranks:
    """Runs functions on ranks. Each call starts fresh processes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._calls = folder, 0

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on `world_size` ranks of a gloo group; its values, by rank. A rank's error is raised."""
        self._calls += 1
        store = self._folder / f"store-{self._calls}"
        return launch(
            functools.partial(_joined, str(store), fn),
            ranks=world_size,
            args=args,
            kwargs=kwargs,
            timeout_s=timeout_s,
            run_dir=self._folder / f"launch-{self._calls}",
        )


def _joined(store: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    dist.barrier()  # one that leaves at once would close a connection that another still makes
    # The launcher's folder is the harness's own: what a test trains should leave nothing in it.
    os.environ.pop("ECHELON_RUN_DIR", None)
    try:
        return fn(*args, **kwargs)
    finally:
        # While torch still holds the group: the death of a DistributedDataParallel that takes its gloo group along
        # can wait for a thread of gloo's that waits for the interpreter (torch 2.13: ~Reducer keeps the GIL).
        gc.collect()
        dist.destroy_process_group()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Ranks | StandingRanksBySize:
    """`ranks(2, fn, *args)` runs `fn` on two ranks and returns its values by rank.

    The processes are new ones for each call, or in a module or test marked `standing_ranks`, those of the module's last call.
    """
    if request.node.get_closest_marker("standing_ranks") and not request.node.get_closest_marker("fresh_ranks"):
        return request.getfixturevalue("standing_ranks")
    server_with(request.module.__name__)
    return Ranks(tmp_path)


@pytest.fixture(scope="module")
def standing_ranks(request: pytest.FixtureRequest) -> Iterator[StandingRanksBySize]:
    """Ranks that wait for the next function when one has ended; they end with the module. See tests/kit/standing.py."""
    # A short path: it holds a Unix socket.
    with tempfile.TemporaryDirectory(prefix="echelon-") as folder:
        ranks = StandingRanksBySize(lambda: server_with(request.module.__name__), Path(folder))
        STANDING.add(ranks)
        yield ranks
        ranks.close()
        STANDING.remove(ranks)


@pytest.fixture(autouse=True)
def launched_ranks_are_loaded() -> None:
    """Also those that a test starts by `launch` itself."""
    server = functions.running_server()
    if server is not None and server.alive():
        server.preload(LOADED)


def server_with(module: str) -> ForkServer:
    """The server, which imports the test's module, and all that this imports, once for all ranks."""
    with forked.instead_of_new():
        server = functions.shared_server()
    server.preload([*LOADED, module])
    return server


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    from tests.kit.started import Started  # which imports this module

    programs = Started(tmp_path)
    yield programs
    programs.end()


@pytest.fixture
def forked_programs() -> Iterator[None]:
    """Programs of Python that the test, or the library in it, starts by `subprocess` are forked with their imports done."""
    with forked.instead_of_new():
        yield


@pytest.fixture
def echelon_command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in a folder of its own, without a terminal: forked with its imports done, or with `fresh` from nothing."""

    def run(
        *args: str, timeout_s: float = TIMEOUT_S, env: dict[str, str] | None = None, fresh: bool = False
    ) -> subprocess.CompletedProcess[str]:
        with forked.anew() if fresh else forked.instead_of_new():
            return subprocess.run(
                [sys.executable, "-m", "echelon", *args],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={**clean_environment(), **(env or {})},
            )

    return run


def clean_environment() -> dict[str, str]:
    """This process's environment without anything a launcher or a test runner put there."""
    foreign = ("ECHELON_", "PYTEST_", "COV_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "MASTER_", "SLURM_", "TORCHELASTIC_")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


def ends_of(processes: list[subprocess.Popen[bytes]], timeout_s: float = TIMEOUT_S) -> list[int]:
    """Exit codes. Whoever is late is killed, and makes the test fail."""
    try:
        return [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


# pytest's own, what torch sets when its compiler is first imported, or used on a GPU, and what init_from_env sets there.
_NOT_OURS = {
    "PYTORCH_ALLOC_CONF",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}


def _children() -> set[int]:
    server = functions.running_server()
    known = {pid for ranks in STANDING for pid in ranks.pids} | ({server.pid} if server is not None else set())
    return {pid for pid in _descendants() - known - forked.server_pids() if _runs(pid)}


def _descendants() -> set[int]:
    """From the kernel's own lists, where it has them: psutil looks through all processes of the machine, twice a test."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return {process.pid for process in psutil.Process().children(recursive=True)}
    found, new = set[int](), [os.getpid()]
    while new:
        pid = new.pop()
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                children = set(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
                new += children - found
                found |= children
    return found


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


_OF_PYTHON = ("forkserver", "resource_tracker")


def _is_left(pid: int, before: set[int]) -> bool:
    """Whether a process is new, and not the business of one that was there before: a module's job that asks Slurm, say.
    Nor one of the two that Python keeps to the end once it has started processes without forking, as from 3.14 on by default,
    nor one that names places in C++ for torch, which keeps one for each library.
    """
    try:
        command = " ".join(psutil.Process(pid).cmdline())
        if any(f"from multiprocessing.{name} import main" in command for name in _OF_PYTHON) or command.startswith("addr2line "):
            return False
        return not any(parent.pid in before for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return False


def _left_after(seconds: float, before: set[int]) -> list[int]:
    """One that was killed may take a moment to go on a busy machine."""
    until = time.monotonic() + seconds
    while left := [pid for pid in _children() - before if _is_left(pid, before)]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return left


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    """A test may not leave behind: environment variables, a process group, processes, threads, open files, another directory."""
    environment, directory = dict(os.environ), os.getcwd()
    threads, children = set(threading.enumerate()), _children()
    files = len(psutil.Process().open_files())
    server = functions.running_server()
    yield
    leaks = []
    changed = {k for k in {*environment, *os.environ} if environment.get(k) != os.environ.get(k)} - _NOT_OURS
    if changed:
        leaks.append(f"environment: {', '.join(sorted(changed))}")
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("a process group")
    # tqdm has one for the whole process, once torch's compiler or a callback has drawn a bar. A "Dummy" is a thread of torch's
    # own that has run Python: nobody can join it.
    left = [
        t
        for t in threading.enumerate()
        if t not in threads and t.is_alive() and not t.name.startswith(("tqdm_monitor", "Dummy-"))
    ]
    for thread in left:
        thread.join(2.0)
    leaks += [f"thread {t.name}" for t in left if t.is_alive()]
    leaks += [f"process {pid}" for pid in _left_after(2.0, children)]
    if len(psutil.Process().open_files()) > files and functions.running_server() is server:
        gc.collect()
        if len(psutil.Process().open_files()) > files:
            leaks.append(f"open files: {[f.path for f in psutil.Process().open_files()]}")
    if os.getcwd() != directory:
        os.chdir(directory)
        leaks.append("another working directory")
    for key in changed:
        os.environ.pop(key, None)
        if key in environment:
            os.environ[key] = environment[key]
    assert not leaks, f"the test left behind {'; '.join(leaks)}"
