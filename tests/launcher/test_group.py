"""CollectiveGroup, System and Policy: on ranks of this machine, and on the real Dragon runtime."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import ClusterError, RankFailedError, RankTimeoutError, UsageError
from tests.compat.reference import check_dragon_training
from tests.conftest import clean_environment
from tests.kit.refusals import refused
from tests.kit.started import wait_until

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]


def meet(factor: float, *, more: float = 0.0) -> tuple[Any, ...]:
    """As Dragon's page does it."""
    info = ech.RankInfo()
    where = f"tcp://{info.master_addr}:{info.master_port}"
    dist.init_process_group("gloo", init_method=where, world_size=info.world_size, rank=info.my_rank)
    total = torch.ones(1) * (info.my_rank + 1) * factor + more
    dist.all_reduce(total)
    dist.destroy_process_group()
    place = (info.my_rank, info.my_local_rank, info.my_node_rank, info.my_local_world_size)
    return (
        *place,
        float(total),
        sorted(os.sched_getaffinity(0)),
        torch.get_num_threads(),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def stand(path: str) -> None:
    (Path(path) / f"{os.getpid()}").touch()
    time.sleep(600)


def fall() -> None:
    sys.stderr.write("said before\n")
    if ech.RankInfo().my_rank == 1:
        raise ValueError("a fault in the training function")
    time.sleep(600)


def run(group: ech.launching.CollectiveGroup) -> list[Any]:
    group.init()
    group.start()
    try:
        group.join()
    finally:
        group.close()
    assert group.values is not None
    return group.values


def test_a_group_meets_as_dragons_page_does_it() -> None:
    values = run(
        ech.launching.CollectiveGroup(meet, (2.0,), {"more": 1.0}, [ech.launching.Policy(), ech.launching.Policy()], False, 29500)
    )
    assert [v[:5] for v in values] == [(0, 0, 0, 2, 8.0), (1, 1, 0, 2, 8.0)]


def test_ranks_go_where_their_policies_say() -> None:
    mine = sorted(os.sched_getaffinity(0))
    policies = [ech.launching.Policy(cpu_affinity=[mine[-1]]), ech.launching.Policy(cpu_affinity=mine, gpu_affinity=[3, 1])]
    values = run(ech.launching.CollectiveGroup(meet, (1.0,), policies=policies))
    assert [v[5] for v in values] == [[mine[-1]], mine]
    assert [v[6] for v in values] == [1, len(mine)]
    assert values[1][7] == "3,1"


@pytest.mark.parametrize("policies", [None, []])
def test_without_policies_there_is_a_rank_per_core(policies: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    group = ech.launching.CollectiveGroup(meet, (1.0,), policies=policies)
    assert len(group.policies) == len(os.sched_getaffinity(0))
    assert len(ech.launching.CollectiveGroup(meet, nprocs=3).policies) == 3


def test_a_failing_ranks_own_traceback_arrives_and_close_closes() -> None:
    group = ech.launching.CollectiveGroup(fall, policies=[ech.launching.Policy()] * 2)
    with pytest.raises(RankFailedError, match="a fault in the training function") as error:
        run(group)  # though the other rank sleeps for ten minutes
    assert error.value.rank == 1 and "in fall" in str(error.value)
    group.close()


@pytest.mark.parametrize("hide", [True, False])
def test_hide_stderr_hides_it(hide: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError):
        run(ech.launching.CollectiveGroup(fall, policies=[ech.launching.Policy()] * 2, hide_stderr=hide))
    assert ("said before" in "".join(capfd.readouterr())) != hide


@pytest.mark.full
def test_close_ends_ranks_that_still_run_and_the_next_group_works(tmp_path: Path) -> None:
    group = ech.launching.CollectiveGroup(stand, (str(tmp_path),), policies=[ech.launching.Policy()] * 2)
    group.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    with pytest.raises(RankTimeoutError, match=r"not finished after 0\.1 s"):
        group.join(timeout=0.1)
    group.close()
    wait_until(lambda: not any(psutil.pid_exists(int(p.name)) for p in tmp_path.iterdir()), "the ranks have ended")
    with ech.launching.CollectiveGroup(meet, (1.0,), policies=[ech.launching.Policy()] * 2) as again:
        again.join()
    assert again.values is not None and again.values[0][4] == 3.0


def await_file(path: str) -> int:
    while not Path(path).exists():
        time.sleep(0.01)
    return os.getpid()


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.full
def test_two_groups_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    first = ech.launching.CollectiveGroup(await_file, (str(tmp_path / "go"),), policies=[ech.launching.Policy()])
    second = ech.launching.CollectiveGroup(touch, (str(tmp_path / "go"),), policies=[ech.launching.Policy()] * 2)
    with first, second:
        second.join(120)
        first.join(120)
    assert second.values == [None, None]


@pytest.mark.full
def test_a_ctrl_c_while_joining_leaves_a_group_that_closes(tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    group = ech.launching.CollectiveGroup(stand, (str(tmp_path),), policies=[ech.launching.Policy()] * 2)
    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt), group:
        thread.start()
        group.join()
    thread.join()
    wait_until(lambda: not any(psutil.pid_exists(int(p.name)) for p in tmp_path.iterdir()), "the ranks have ended")


@pytest.mark.full
def test_calls_that_are_repeated() -> None:
    group = ech.launching.CollectiveGroup(fall, policies=[ech.launching.Policy()] * 2)
    with refused(ClusterError):
        group.join()
    group.start()
    for again in (group.init, group.start):
        with refused(ClusterError):
            again()
    for _ in range(2):
        with pytest.raises(RankFailedError, match="a fault in the training function"):
            group.join()
    group.close()
    group.close()
    with refused(ClusterError):
        group.start()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"policies": [ech.launching.Policy(host_name="elsewhere")]},
            r"policies\[0\].host_name must be this machine, got 'elsewhere'",
        ),
        (
            {"policies": [ech.launching.Policy(), ech.launching.Policy(cpu_affinity=[4000])]},
            "policy 1: this process may not use core 4000",
        ),
        ({"port": 0}, "port must be between 1 and 65535, .*, got 0"),
        ({"policies": [ech.launching.Policy()], "nprocs": 2}, "nprocs must be the number of policies, 1, got 2"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ech.launching.CollectiveGroup(meet, **options).init()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cpu_policies_divide_the_cores(ranks: int) -> None:
    mine = sorted(os.sched_getaffinity(0))
    policies = ech.launching.System().cpu_policies(ranks)
    assert len(policies) == ranks
    cores = [core for policy in policies for core in policy.cpu_affinity]
    assert sorted(cores) == mine if ranks <= len(mine) else set(cores) == set(mine)


# --- on Dragon

dragon = pytest.mark.skipif(
    importlib.util.find_spec("dragon") is None and not os.environ.get("ECHELON_REQUIRE_DRAGON"),
    reason="needs Dragon: pip install 'echelon[dragon]' (Linux on x86_64)",
)


def shared_memory() -> set[str]:
    """Dragon's segments that no process uses: there may be other runtimes."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= set(re.findall(r"/dev/shm/(DD\S+)", maps.read_text()))
    return {name for name in os.listdir("/dev/shm") if name.startswith("DD")} - used


PROGRAM = str(ROOT / "tests/kit/dragon_program.py")


def start_dragon(folder: Path, *command: str, **options: Any) -> subprocess.Popen[str]:
    # A session leader, as which `dragon` itself hangs for ever; and without the virtual environment on the path.
    env = {**clean_environment(), "PYTHONPATH": f"{ROOT}/src", "PATH": "/usr/bin:/bin", "TMPDIR": str(folder)}
    env.pop("OMP_NUM_THREADS", None)
    command = (sys.executable, "-m", "echelon", "dragon", "--grace", "1", PROGRAM, *command)
    return subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, text=True, **options)


@dragon
@pytest.mark.full
def test_on_dragon_failures_arrive_groups_close_and_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one start of the runtime, which takes seconds."""
    before = shared_memory()
    example = ROOT / "tests/compat/programs/dragon_train.py"
    page = ROOT / "tests/compat/programs/dragon_training.py"
    process = start_dragon(tmp_path, "cases", str(example), str(page), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 3, said

    assert "fall: RankFailedError of rank 1" in said and ", in fall" in said, said
    assert "ValueError: a fault in the training function" in said and "fall by ValueError('a fault" in said, said
    for killed in ("vanish", "unheard"):
        assert f"{killed}: RankFailedError of rank 1: rank 1 ended without a word" in said, said
    assert "unsendable: RankFailedError of rank " in said and "of type lock, cannot be sent to the caller" in said
    assert "late: RankTimeoutError: the ranks had not finished after 0.1 s" in said

    assert "elsewhere: ClusterError: policies[0].host_name must be one of Dragon's nodes" in said

    places = ast.literal_eval(next(line for line in said.splitlines() if line.startswith("places: ")).removeprefix("places: "))
    mine = sorted(os.sched_getaffinity(0))
    share = str(max(1, len(mine) // 2))
    for rank, devices in enumerate([None, "3"]):
        env = [str(rank), str(rank), "2", "127.0.0.1", share, devices]
        assert places[rank] == ((rank, rank, 0, 2, 2), mine, env, 4)

    [computed] = re.findall(r"waited in (\S+) s of computing", said)
    assert float(computed) < 1.0, "Dragon's thread keeps a core busy while the ranks rest for three seconds"

    assert "rank 1 of 2 has trained 24 steps" in said
    monkeypatch.syspath_prepend(ROOT / "tests/compat/programs")
    dragon_train = importlib.import_module("dragon_train")
    [alone] = run(ech.launching.CollectiveGroup(dragon_train.train, (3,), nprocs=1))
    trained = ast.literal_eval(next(line for line in said.splitlines() if line.startswith("trained: ")).removeprefix("trained: "))
    for name, values in alone.items():
        assert trained[name] == pytest.approx(values, abs=1e-13)
    check_dragon_training(said, shown=[0, 1])
    assert shared_memory() <= before
    # The last group was not closed: the script ended all the same.
    stood = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert all(name.isdigit() and not psutil.pid_exists(int(name)) for name in stood), stood


@dragon
@pytest.mark.full
def test_signals_and_a_kill_end_dragon_with_all_that_it_started(tmp_path: Path) -> None:
    """SIGKILL, too: then the guard does it."""
    before = shared_memory()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    folders = [tmp_path / number.name for number in numbers]
    for folder in folders:
        (folder / "stands").mkdir(parents=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [start_dragon(folder, "stand", str(folder / "stands"), **quiet) for folder in folders]
    try:
        wait_until(lambda: all(len(list((folder / "stands").iterdir())) == 2 for folder in folders), "as it should be", 120)
        for process, number in zip(started, numbers, strict=True):
            process.send_signal(number)
        for process, number in zip(started, numbers, strict=True):
            assert process.wait(120) == (128 + number if number != signal.SIGKILL else -number)
    finally:
        for process in started:
            process.kill()
    pids = [int(path.name) for folder in folders for path in (folder / "stands").iterdir()]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "as it should be", 120)
    wait_until(lambda: shared_memory() <= before, "as it should be", 120)
    wait_until(lambda: all([path.name for path in folder.iterdir()] == ["stands"] for folder in folders), "as it should be", 120)
