"""Which cores, threads, device and network interface each rank has."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.common.errors import LaunchError
from echelon.common.machine import usable_cores, visible_devices
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import RunDir
from echelon.launcher.functions import launch as functions
from echelon.launcher.job import JobSpec
from echelon.launcher.local import placement
from echelon.launcher.local.placement import (
    bound,
    cores_near,
    cores_of_gpus,
    cores_of_rank,
    interfaces,
    numa_nodes,
    parse_cpu_list,
)
from echelon.launcher.local.relay import SilentScreen
from echelon.launcher.local.run import run_local
from echelon.world import device
from tests.kit.refusals import refused


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """(allowed cores, NUMA nodes, ranks)."""
    cores = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
    home = draw(st.lists(st.integers(0, 3), min_size=len(cores), max_size=len(cores)))
    numa = [[c for c, h in zip(cores, home, strict=True) if h == node] for node in range(draw(st.integers(0, 4)))]
    return cores, numa, draw(st.integers(1, 24))


@given(nodes())
def test_shares_are_disjoint_and_together_all_that_is_allowed(case: tuple[list[int], list[list[int]], int]) -> None:
    cores, numa, ranks = case
    shares = [cores_of_rank(cores, rank, ranks, numa) for rank in range(ranks)]
    assert all(shares)
    if ranks <= len(cores):
        assert sorted(c for share in shares for c in share) == sorted(cores)
    else:
        assert all(share == sorted(cores) for share in shares)


@given(nodes())
def test_no_rank_crosses_a_numa_node_where_there_are_ranks_for_all(case: tuple[list[int], list[list[int]], int]) -> None:
    cores, numa, ranks = case
    rest = set(cores) - {c for node in numa for c in node}
    sets = [set(node) for node in (*numa, rest) if node]
    if len(sets) <= ranks <= len(cores):
        for rank in range(ranks):
            assert any(set(cores_of_rank(cores, rank, ranks, numa)) <= node for node in sets)


@given(st.integers(1, 64), st.integers(1, 64))
def test_on_one_node_shares_differ_by_one_core_at_most(cores: int, ranks: int) -> None:
    sizes = {len(cores_of_rank(range(cores), rank, ranks)) for rank in range(ranks)}
    assert max(sizes) - min(sizes) <= 1


def test_cores_that_are_not_allowed_are_left_alone() -> None:
    assert cores_of_rank([2, 3, 6, 7], 0, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]) == [2, 3]
    assert cores_of_rank([2, 3, 6, 7], 1, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]) == [6, 7]


def test_the_kernels_lists_are_read(tmp_path: Path) -> None:
    for node, text in (("node0", "0-1,4\n"), ("node10", "8\n"), ("node2", "2-3\n"), ("node3", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text)
    assert numa_nodes(tmp_path) == [[0, 1, 4], [2, 3], [8]]
    assert numa_nodes(tmp_path / "absent") == []
    assert parse_cpu_list("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]


SAYS = """
import os, pathlib
seen = sorted(os.sched_getaffinity(0)), *map(os.environ.get, ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
pathlib.Path("rank" + os.environ["RANK"]).write_text(repr(seen))
"""


@pytest.mark.full
def test_echelon_run_binds_ranks_if_asked(tmp_path: Path, echelon_command: Any) -> None:
    (tmp_path / "where.py").write_text(SAYS)
    mine = sorted(os.sched_getaffinity(0))
    for bind in ("none", "cores"):
        done = echelon_command("run", "--ranks", "2", "--bind", bind, "where.py", env={"NCCL_SOCKET_IFNAME": "own"})
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            cores, threads, gloo, nccl = ast.literal_eval((tmp_path / f"rank{rank}").read_text())
            assert cores == (mine if bind == "none" else cores_of_rank(mine, rank, 2, numa_nodes()))
            assert int(threads) == (max(1, usable_cores() // 2) if bind == "none" or len(mine) < 2 else len(cores))
            assert (gloo, nccl) == ("lo", "own")


@pytest.mark.skipif(bool(visible_devices()), reason="there are GPUs")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_device_for_each_rank_needs_devices(tmp_path: Path, echelon_command: Any, ranks: str) -> None:
    (tmp_path / "where.py").write_text("print('it ran')")
    done = echelon_command("run", "--ranks", ranks, "--bind", "both", "where.py")
    assert done.returncode != 0 and "it ran" not in done.stdout
    assert f"{ranks} ranks need a GPU each, but 0 are visible here." in done.stderr
    assert "Traceback" not in done.stderr


def test_this_machines_cores_become_threads() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert bound(0, 1, {}) == ([], {})
    cores, variables = bound(0, 1, {}, cores=True)
    assert sorted(cores) == mine and variables == {"OMP_NUM_THREADS": str(len(mine))}
    assert bound(1, 2, {"OMP_NUM_THREADS": "7"}, cores=True)[1] == {}
    assert bound(0, len(mine) + 1, {}, cores=True) == (mine, {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(placement, "visible_devices", functools.partial(visible_devices, dev=tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, ["0", "1", "2", "3"]),
        ("3, 1", ["3", "1"]),
        ("", []),
        ("2,-1,3", ["2"]),
        ("0,4,1", ["0"]),
        ("MIG-7,MIG-8", ["MIG-7", "MIG-8"]),
    ],
)
def test_devices_are_those_that_cuda_would_show(four_gpus: Path, text: str | None, seen: list[str]) -> None:
    env = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_devices(env, four_gpus) == seen
    assert visible_devices(env, four_gpus / "none") == []
    for rank, name in enumerate(seen):
        assert bound(rank, len(seen), env, devices=True) == ([], {"CUDA_VISIBLE_DEVICES": name})
    with refused(LaunchError):
        bound(0, len(seen) + 1, env, devices=True)


def test_each_rank_sees_its_own_device_if_asked(tmp_path: Path, four_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with devices that are only pretended."""
    (tmp_path / "sees.py").write_text("import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    for own, seen in ((True, ["3", "1"]), (False, ["3,1,0"] * 2)):
        run = RunDir.create(tmp_path / "runs", f"own-{own}")
        job = JobSpec(str(tmp_path / "sees.py"), ranks=2, own_device=own)
        assert run_local(job, run, screen=SilentScreen(), server=functions.shared_server()).exit_code == 0
        assert [run.log(rank).read_text() for rank in range(2)] == [f"{text}\n" for text in seen]


@pytest.mark.parametrize(
    ("way", "known", "wanted"),
    [
        (None, ["lo", "eth0"], {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}),
        (None, ["eth0"], {}),
        ("eth0", ["lo", "virbr0", "eth0"], {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
        ("eth0", ["lo", "eth0", "ib0"], {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("", ["lo", "eth0"], {}),
    ],
)
def test_interfaces_are_the_way_to_the_others(tmp_path: Path, way: str | None, known: list[str], wanted: dict[str, str]) -> None:
    for name in known:
        (tmp_path / name).mkdir()
    assert interfaces(way, tmp_path) == wanted


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/jobs/mine\n", {"jobs/cpu.max": "300000 100000", "jobs/mine/cpu.max": "max 100000"}, 3),
        ("0::/of/the/machine\n", {"cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu:/a\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("2:cpuset:/\n", {"cpu.max": "100000 100000"}, 8),
        ("", {}, 8),
    ],
)
def test_a_containers_share_of_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path / "groups", tmp_path / "own") == cores
    assert usable_cores(tmp_path / "absent", tmp_path / "absent") == 8


@pytest.mark.parametrize(
    ("slurm", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, 3),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 2),  # of which this rank is no task
        ({}, 2),
    ],
)
def test_a_task_of_slurms_has_threads_for_its_own_cores(
    monkeypatch: pytest.MonkeyPatch, slurm: dict[str, str], threads: int
) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    try:
        device.set_threads(RankInfo(1, world_size=4))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# ---- near a rank's GPU ---------------------------------------------------------------------------------------------------------


def _machine(folder: Path, gpus: list[tuple[str, int, str]]) -> dict[str, Path]:
    """A pretended machine with GPUs: (PCI address, NUMA node, the cores nearby)."""
    for number, (address, node, cores) in enumerate(gpus):
        for where in ("driver", "devices"):
            (folder / where / address).mkdir(parents=True)
        (folder / "driver" / address / "information").write_text(
            f"Model: \t X\nGPU UUID: \t GPU-{number}abc-def\nDevice Minor: 9\n"
        )
        (folder / "devices" / address / "numa_node").write_text(f"{node}\n")
        (folder / "devices" / address / "local_cpulist").write_text(f"{cores}\n")
    return {"driver": folder / "driver", "devices": folder / "devices"}


def test_cores_are_those_of_the_gpus_numa_node_and_not_of_the_ranks_number(tmp_path: Path) -> None:
    """GPUs 0 and 1 hang on the second socket, as on many machines."""
    gpus = [("0000:17:00.0", 1, "4-7"), ("0000:65:00.0", 1, "4-7"), ("0000:ca:00.0", 0, "0-3"), ("0000:e3:00.0", 0, "0-3")]
    where = _machine(tmp_path, gpus)
    near = cores_of_gpus(["0", "1", "2", "3"], **where)
    assert [cores_near(range(8), near, rank, 4) for rank in range(4)] == [[4, 5], [6, 7], [0, 1], [2, 3]]
    chosen = cores_of_gpus(["3", "GPU-0abc"], **where)
    assert [cores_near(range(8), chosen, rank, 2) for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [cores_near([1, 2, 5], chosen, rank, 2) for rank in range(2)] == [[1, 2], [5]]


def test_without_knowledge_of_every_gpu_the_ranks_number_decides(tmp_path: Path) -> None:
    where = _machine(tmp_path, [("0000:17:00.0", -1, "0-7"), ("0000:65:00.0", 1, "4-7")])
    assert cores_of_gpus(["0", "1", "MIG-1", "7"], **where) == [[], [4, 5, 6, 7], [], []]
    assert cores_of_gpus(["0"], tmp_path / "no", tmp_path / "no") == [[]]
    for near in ([], [[0, 1], []], [[0, 1], [1, 2]], [[0, 1], [0, 1]], [[0], [0], [1, 2]]):
        assert cores_near(range(4), near, 0, max(2, len(near))) == []


def test_bind_cores_asks_for_the_gpus_place(monkeypatch: pytest.MonkeyPatch) -> None:
    every = sorted(os.sched_getaffinity(0))
    if len(every) < 2:
        pytest.skip("one core")
    monkeypatch.setattr(placement, "visible_devices", lambda env: ["1", "0"])
    monkeypatch.setattr(placement, "cores_of_gpus", lambda names: [every[1:] if name == "1" else every[:1] for name in names])
    assert bound(0, 2, {}, cores=True)[0] == every[1:] and bound(1, 2, {}, cores=True)[0] == every[:1]
    assert bound(0, 2, {"ECHELON_DEVICE": "cpu"}, cores=True)[0] == cores_of_rank(every, 0, 2, numa_nodes())
