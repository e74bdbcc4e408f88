"""CollectiveGroup, System and Policy: on ranks of this machine, and on the real Dragon runtime."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.contracts.errors import RankFailedError, RankTimeoutError, UsageError
from tests.conftest import clean_environment

ROOT = Path(__file__).parents[1]


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
    time.sleep(60)


def fall() -> None:
    sys.stderr.write("said before\n")
    if ech.RankInfo().my_rank == 1:
        raise ValueError("a fault in the training function")
    time.sleep(60)


def run(group: ech.CollectiveGroup) -> list[Any]:
    group.init()
    group.start()
    try:
        group.join()
    finally:
        group.close()
    assert group.values is not None
    return group.values


def test_a_group_meets_as_dragons_page_does_it() -> None:
    values = run(ech.CollectiveGroup(meet, (2.0,), {"more": 1.0}, [ech.Policy(), ech.Policy()], False, 29500))
    assert [v[:5] for v in values] == [(0, 0, 0, 2, 8.0), (1, 1, 0, 2, 8.0)]


def test_ranks_go_where_their_policies_say() -> None:
    mine = sorted(os.sched_getaffinity(0))
    policies = [ech.Policy(cpu_affinity=[mine[-1]]), ech.Policy(cpu_affinity=mine, gpu_affinity=[3, 1])]
    values = run(ech.CollectiveGroup(meet, (1.0,), policies=policies))
    assert [v[5] for v in values] == [[mine[-1]], mine]
    assert [v[6] for v in values] == [1, len(mine)]
    assert values[1][7] == "3,1"


@pytest.mark.parametrize("policies", [None, []])
def test_without_policies_there_is_a_rank_per_core(policies: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    group = ech.CollectiveGroup(meet, (1.0,), policies=policies)
    assert len(group.policies) == len(os.sched_getaffinity(0))
    assert len(ech.CollectiveGroup(meet, nprocs=3).policies) == 3


def test_a_failing_ranks_own_traceback_arrives_and_close_closes() -> None:
    group = ech.CollectiveGroup(fall, policies=[ech.Policy()] * 2)
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="a fault in the training function") as error:
        run(group)
    assert error.value.rank == 1 and "in fall" in str(error.value)
    assert time.monotonic() - began < 20
    group.close()


@pytest.mark.parametrize("hide", [True, False])
def test_hide_stderr_hides_it(hide: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError):
        run(ech.CollectiveGroup(fall, policies=[ech.Policy()] * 2, hide_stderr=hide))
    assert ("said before" in "".join(capfd.readouterr())) != hide


def test_close_ends_ranks_that_still_run_and_the_next_group_works(tmp_path: Path) -> None:
    group = ech.CollectiveGroup(stand, (str(tmp_path),), policies=[ech.Policy()] * 2)
    group.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    with pytest.raises(RankTimeoutError, match=r"not finished after 0\.1 s"):
        group.join(timeout=0.1)
    group.close()
    until = time.monotonic() + 10
    while any(psutil.pid_exists(int(p.name)) for p in tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(psutil.pid_exists(int(p.name)) for p in tmp_path.iterdir())
    with ech.CollectiveGroup(meet, (1.0,), policies=[ech.Policy()] * 2) as again:
        again.join()
    assert again.values is not None and again.values[0][4] == 3.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policies": [ech.Policy(host_name="elsewhere")]}, r"policy 0: host_name 'elsewhere' is not this machine"),
        ({"policies": [ech.Policy(), ech.Policy(cpu_affinity=[4000])]}, "policy 1: this process may not use core 4000"),
        ({"port": 0}, "port 0"),
        ({"policies": [ech.Policy()], "nprocs": 2}, "nprocs=2, but there are 1 policies"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ech.CollectiveGroup(meet, **options).init()


def test_the_order_of_calls_is_named() -> None:
    group = ech.CollectiveGroup(meet, policies=[ech.Policy()])
    with pytest.raises(UsageError, match=r"join\(\) on a group that is new: the order is init, start, join, close"):
        group.join()
    group.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cpu_policies_divide_the_cores(ranks: int) -> None:
    mine = sorted(os.sched_getaffinity(0))
    policies = ech.System().cpu_policies(ranks)
    assert len(policies) == ranks
    cores = [core for policy in policies for core in policy.cpu_affinity]
    assert sorted(cores) == mine if ranks <= len(mine) else set(cores) == set(mine)


# --- on Dragon

dragon = pytest.mark.skipif(
    importlib.util.find_spec("dragon") is None and not os.environ.get("ECHELON_REQUIRE_DRAGON"),
    reason="needs Dragon: pip install 'echelon[dragon]' (Linux on x86_64)",
)

Dragon = Callable[..., subprocess.CompletedProcess[str]]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("DD")}


@pytest.fixture
def on_dragon(tmp_path: Path) -> Dragon:
    def start(*command: str) -> subprocess.CompletedProcess[str]:
        # A session leader, as which `dragon` itself hangs for ever; and without the virtual environment on the path.
        env = {**clean_environment(), "PYTHONPATH": f"{ROOT}/src:{ROOT}", "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [sys.executable, "-m", "echelon", "dragon", *command],
            cwd=tmp_path,
            env=env,
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=200,
        )

    return start


@dragon
def test_the_example_trains_on_dragon_as_in_one_process(on_dragon: Dragon, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shared_memory()
    done = on_dragon(str(ROOT / "examples/dragon_train.py"))
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 has trained 24 steps" in done.stdout
    monkeypatch.syspath_prepend(ROOT / "examples")
    dragon_train = importlib.import_module("dragon_train")
    [alone] = run(ech.CollectiveGroup(dragon_train.train, (3,), nprocs=1))
    line = next(line for line in done.stdout.splitlines() if line.startswith("trained: "))
    trained = json.loads(line.removeprefix("trained: ").replace("'", '"'))
    for name, values in alone.items():
        assert trained[name] == pytest.approx(values, abs=1e-13)
    assert shared_memory() <= before


FAULTS = """
import echelon as ech
from tests.test_group import fall, meet

if __name__ == "__main__":
    group = ech.CollectiveGroup(fall, policies=[ech.Policy(), ech.Policy()], hide_stderr=True)
    try:
        group.start()
        group.join()
    except ech.EchelonError as error:
        print(f"{type(error).__name__} of rank {error.rank}: {error}")
    group.close()
    group = ech.CollectiveGroup(fall, policies=[ech.Policy(), ech.Policy()], hide_stderr=True)
    group.start()
    group.close()
    group = ech.CollectiveGroup(meet, (2.0,), policies=[ech.Policy(), ech.Policy()])
    group.start()
    group.join()
    group.close()
    print("after the failures:", [value[:5] for value in group.values])
    raise SystemExit(3)
"""


@dragon
def test_on_dragon_a_traceback_arrives_and_close_always_closes(on_dragon: Dragon, tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    done = on_dragon("faults.py")
    assert "RankFailedError of rank 1" in done.stdout and "in fall" in done.stdout, done.stdout + done.stderr
    assert "ValueError: a fault in the training function" in done.stdout
    assert "after the failures: [(0, 0, 0, 2, 6.0), (1, 1, 0, 2, 6.0)]" in done.stdout
    assert done.returncode == 3


WAITS = """
import sys
import echelon as ech
from tests.test_group import stand

if __name__ == "__main__":
    group = ech.CollectiveGroup(stand, (sys.argv[1],), policies=[ech.Policy()] * 2)
    group.start()
    group.join()
"""


@dragon
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_dragon_with_all_that_it_started(tmp_path: Path, number: signal.Signals) -> None:
    before = shared_memory()
    (tmp_path / "waits.py").write_text(WAITS)
    stands = tmp_path / "stands"
    stands.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", "dragon", "--grace", "1", "waits.py", str(stands)],
        cwd=tmp_path,
        env={**clean_environment(), "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while len(list(stands.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    pids = [int(p.name) for p in stands.iterdir()]
    assert len(pids) == 2
    process.send_signal(number)
    try:
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert shared_memory() <= before
