"""`init_from_env`: the same call joins whoever started the ranks; what cannot work is said before anyone waits."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import DeviceError, EchelonError, LauncherEnvironmentError, UsageError
from echelon.common.machine import missing_interface
from echelon.contracts.rank import RankInfo
from echelon.launcher.functions.launch import launch
from echelon.launcher.local.nodes import free_port
from echelon.world.device import copy_data_to_device, device_of, set_threads, use
from echelon.world.init import World, ensure_group, init_from_env
from echelon.world.meeting import Facts, meet
from echelon.world.mesh import ParallelDims
from echelon.world.timeout import inherit_timeout, timeout_of_default_group
from tests.conftest import clean_environment
from tests.kit.refusals import refused

LAUNCHERS = ("ours", "torchrun", "by hand", "srun", "Open MPI", "PMI", "Dragon")


def _environment_of(launcher: str, rank: int, size: int, port: int) -> dict[str, str]:
    """What each launcher sets for a rank on one node."""
    r, n, meet = str(rank), str(size), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {
        "torchrun": {**meet, "RANK": r, "WORLD_SIZE": n, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": n, "GROUP_RANK": "0"},
        "by hand": {**meet, "RANK": r, "WORLD_SIZE": n},
        "srun": {
            "MASTER_PORT": str(port), "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": r, "SLURM_LOCALID": r,
            "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": n, "SLURM_NTASKS": n, "SLURM_STEP_TASKS_PER_NODE": n,
            "SLURM_STEP_NODELIST": "this-host-has-no-address",
        },
        "Open MPI": {
            "MASTER_PORT": str(port), "OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": n,
            "OMPI_COMM_WORLD_LOCAL_RANK": r, "OMPI_COMM_WORLD_LOCAL_SIZE": n,
        },
        "PMI": {"MASTER_PORT": str(port), "PMI_RANK": r, "PMI_SIZE": n, "MPI_LOCALRANKID": r, "MPI_LOCALNRANKS": n},
        "Dragon": {
            "_DRAGON_CG_RANK": r, "_DRAGON_CG_WORLD_SIZE": n, "_DRAGON_CG_LOCAL_RANK": r, "_DRAGON_CG_LOCAL_WORLD_SIZE": n,
            "_DRAGON_CG_MASTER_ADDR": "127.0.0.1", "_DRAGON_CG_MASTER_PORT": str(port),
        },
    }[launcher]  # fmt: skip


def _forget_our_launcher() -> int:
    """Remove what started this process; returns its rank."""
    rank = int(os.environ["RANK"])
    for name in (*RankInfo().to_env(), "TORCHELASTIC_USE_AGENT_STORE", "ECHELON_RUN_DIR", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    return rank


def _join_as(launcher: str, port: int) -> tuple[str, int, int, float]:
    if launcher != "ours":
        os.environ.update(_environment_of(launcher, _forget_our_launcher(), 2, port))
    device = init_from_env(timeout=timedelta(seconds=30))
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    init_from_env()  # a second call changes nothing
    result = (str(device), dist.get_rank(), dist.get_world_size(), value.item())
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_every_launcher_join(launcher: str) -> None:
    assert launch(_join_as, ranks=2, args=(launcher, free_port()), timeout_s=180) == [("cpu", 0, 2, 3.0), ("cpu", 1, 2, 3.0)]


def test_no_launcher_is_a_world_of_one_without_a_group() -> None:
    assert init_from_env() == torch.device("cpu") or torch.cuda.is_available()
    assert not dist.is_initialized()


def test_a_world_of_one_on_purpose_takes_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two such programs at once would otherwise fight for the default port."""
    assert (World.current().rank, World.current().size) == (0, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in _environment_of("by hand", 0, 1, taken.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        init_from_env()
    ensure_group(torch.device("cpu"))  # there is one
    assert (World.current().rank, World.current().size, dist.get_world_size()) == (0, 1, 1)
    dist.destroy_process_group()
    ensure_group(torch.device("cpu"))
    assert dist.is_initialized()
    dist.destroy_process_group()


def _program(code: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean_environment(), **env}, timeout=180
    )


@pytest.mark.full
def test_a_taken_port_is_said_at_once_and_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        done = _program("import echelon; echelon.init_from_env()", _environment_of("by hand", 0, 2, port))
    assert done.returncode == 1
    assert f"rank 0 cannot serve on MASTER_PORT={port}: Address already in use. Set MASTER_PORT" in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.full
def test_a_port_that_was_used_a_moment_ago_can_be_used_again() -> None:
    """Its closed connections linger for a minute; a restart must not trip over them."""
    port = free_port()
    for _ in range(2):
        assert len(launch(_join_as, ranks=2, args=("torchrun", port), timeout_s=180)) == 2


def _wait_in_vain(port: int) -> str:
    _forget_our_launcher()
    os.environ.update(_environment_of("torchrun", 1, 2, port))
    with pytest.raises(LauncherEnvironmentError) as caught:
        init_from_env(timeout=timedelta(seconds=1))
    return str(caught.value)


@pytest.mark.full
def test_a_rank_that_waits_in_vain_says_for_whom() -> None:
    port = free_port()
    (text,) = launch(_wait_in_vain, ranks=1, args=(port,), timeout_s=180)
    assert f"rank 1 of 2 could not join at MASTER_ADDR=127.0.0.1 MASTER_PORT={port} within 1 s" in text
    assert text.endswith("Do rank 0, which serves it, and the others run, and can this host reach that address?")
    assert len(text.splitlines()) == 1


def test_a_half_set_environment_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with refused(LauncherEnvironmentError):
        init_from_env()
    assert not dist.is_initialized()


def _timeouts() -> list[timedelta | None]:
    """Of the default group, of both axes of a mesh, and as the hang itself shows it."""
    init_from_env(timeout=timedelta(seconds=37))
    root = ParallelDims.of(2, dp_replicate=2, dp_shard=1).data_mesh(torch.device("cpu"))
    groups = [dist.group.WORLD, root.get_group("dp_replicate"), root.get_group("dp_shard")]
    found = [g._get_backend(torch.device("cpu")).options._timeout for g in groups]  # type: ignore[union-attr]
    inherit_timeout(beside := dist.new_group([0, 1]))
    found += [timeout_of_default_group(), beside._get_backend(torch.device("cpu")).options._timeout]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_groups_of_a_mesh_wait_as_long_as_the_default_group() -> None:
    assert launch(_timeouts, ranks=2, timeout_s=180) == [[timedelta(seconds=37)] * 5] * 2


# ---- the device -------------------------------------------------------------------------------------------------------------


def _pretend_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


# Of a rank on a node with so many GPUs: the device that it takes, or None where it is refused.
CHOSEN: dict[str, tuple[int, dict[str, str], tuple[int, int], dict[str, Any], str | None]] = {
    "its local rank's": (4, {}, (2, 4), {}, "cuda:2"),
    "more ranks than devices": (2, {}, (2, 4), {}, None),
    "each sees one": (1, {"CUDA_VISIBLE_DEVICES": "3"}, (3, 4), {}, "cuda:0"),
    "there is one": (1, {}, (1, 2), {}, None),
    "shared": (1, {}, (1, 2), {"shared": True}, "cuda:0"),
    "as the command says": (1, {"ECHELON_DEVICE": "cpu"}, (1, 2), {"device_type": "cuda"}, "cpu"),
    "an unknown type": (0, {}, (0, 1), {"device_type": "tpu"}, None),
    "an unknown type in the command": (1, {"ECHELON_DEVICE": "tpu"}, (0, 1), {}, None),
    "none there": (0, {}, (0, 1), {"device_type": "cuda"}, None),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_a_rank_takes_the_device_that_is_its_own_or_is_refused(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    gpus, env, (local, size), options, want = CHOSEN[case]
    _pretend_devices(monkeypatch, gpus)
    for name in ("CUDA_VISIBLE_DEVICES", "ECHELON_DEVICE"):
        monkeypatch.setenv(name, env.get(name, "")) if name in env else monkeypatch.delenv(name, raising=False)
    info = RankInfo(rank=local, local_rank=local, world_size=size, local_world_size=size)
    if want is None:
        with refused(DeviceError):
            device_of(info, **options)
    else:
        assert device_of(info, **options) == torch.device(want)


def _threads_of(ranks: int, omp: str | None) -> int:
    os.environ.pop("OMP_NUM_THREADS", None)
    if omp:
        os.environ["OMP_NUM_THREADS"] = omp
    torch.set_num_threads(7)
    set_threads(RankInfo(rank=0, world_size=ranks, local_world_size=ranks))
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("ranks", "omp", "want"), [(10_000, None, 1), (1, None, 7), (10_000, "3", 7)], ids=["shared", "alone", "as the user says"]
)
def test_ranks_of_a_node_share_its_cores(ranks: int, omp: str | None, want: int) -> None:
    assert launch(_threads_of, ranks=1, args=(ranks, omp)) == [want]


# ---- ranks that cannot compute together ---------------------------------------------------------------------------------------


def _refused(*, gpus: int, uuid: str = "one", **options: Any) -> str:
    """What joining says on a rank with so many pretended GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        _pretend_devices(patch, gpus)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{uuid}"))
        patch.setattr(socket, "gethostname", lambda: f"host-{os.environ['RANK']}")
        with pytest.raises(UsageError) as caught:
            init_from_env(timeout=timedelta(seconds=30), **options)
    return str(caught.value)


def _meet_badly() -> dict[str, str]:
    rank = int(os.environ["RANK"])
    found = {
        "lost": _refused(gpus=0 if rank == 2 else 8, uuid=str(rank)),
        "shared": _refused(gpus=8, uuid="same" if rank else "other"),
        "absent": _refused(gpus=0 if rank == 1 else 8, uuid=str(rank), device_type="cuda"),
        "too few": _refused(gpus=2, uuid=str(rank)),
    }
    init_from_env("cpu")
    found["then"] = f"{init_from_env()} {dist.get_world_size()}"
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.full
def test_ranks_that_cannot_compute_together_are_refused_by_name_on_all_of_them() -> None:
    every = launch(_meet_badly, ranks=3, timeout_s=180)
    for said in every:
        got = "got cuda on ranks 0-1 and cpu on rank 2. On rank 2 (host-2): "
        assert said["lost"].startswith(f"ranks must compute on one type of device, {got}")
        assert said["shared"].startswith(
            "ranks 1-2 compute on one GPU, GPU-same of host-1, which NCCL refuses. Start fewer ranks"
        )
        assert "pg_backend='gloo'" in said["shared"] and said["then"] == "cpu 3"
    own = "device_type is 'cuda', but torch finds no CUDA device here."
    assert [said["absent"].startswith(own) for said in every] == [False, True, False]
    assert every[0]["absent"].startswith(f"rank 1 (host-1) cannot join: {own}")
    assert every[0]["too few"].startswith("rank 2 (host-2) cannot join: rank 2 has local rank 2, but its node has 2 CUDA devices")


def _met(store: dist.Store, rank: int, facts: Facts, *, fresh: bool) -> str:
    try:
        meet(store, RankInfo(rank=rank, world_size=3), facts, timedelta(seconds=2), fresh=fresh)
    except LauncherEnvironmentError as error:
        return str(error)
    return ""


def _together(store: dist.Store, every: dict[int, Facts], *, fresh: bool) -> dict[int, str]:
    with ThreadPoolExecutor(len(every)) as pool:
        asked = {rank: pool.submit(_met, store, rank, facts, fresh=fresh) for rank, facts in every.items()}
        return {rank: answer.result() for rank, answer in asked.items()}


def test_a_store_with_words_of_an_earlier_attempt_misleads_nobody_and_a_wish_to_share_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, gpus = dist.HashStore(), {rank: Facts("cuda", gpu=str(rank), nccl=True) for rank in range(3)}
    assert _together(store, gpus, fresh=False) == {0: "", 1: "", 2: ""}
    again = _together(store, {**gpus, 1: Facts("cpu", why="its torch finds no GPU")}, fresh=False)
    assert "cpu on rank 1" in again[1]  # the others may have read what it said before
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert _together(dist.HashStore(), {**gpus, 1: gpus[0]}, fresh=True) == {0: "", 1: "", 2: ""}


@pytest.mark.full
def test_ranks_that_never_come_are_named_also_long_before_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_LOOK_S", "_LONGEST_LOOK_S"):
        monkeypatch.setattr(f"echelon.world.meeting.{name}", 0.1)
    said = _together(dist.HashStore(), {0: Facts(), 2: Facts()}, fresh=True)
    assert said[0] == said[2] and said[0].startswith("rank 1 of 3 did not come within 2 s. ")
    assert all(name in said[0] for name in ("WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"))
    assert re.search(r"rank 0 waits for rank 1 of 3, and gives up in [012] s. ", caplog.text)


def test_what_a_store_holds_is_not_believed_blindly() -> None:
    nested = b"[" * 200_000, b'{"host": ' + b"[" * 200_000
    for text in (b"", b"\xff", b"[]", b'{"device": 3, "nccl": "yes", "host": null}', *nested):
        assert Facts.read(text) == Facts()


@pytest.mark.parametrize("size", ["\u00b2", "9" * 5000, "-3", "three"])
def test_a_world_size_that_is_no_number_brings_no_rank_down(size: str) -> None:
    store = dist.HashStore()
    store.set("answer", f"go {size} digest")
    said = _met(store, 1, Facts(), fresh=True)
    assert said.startswith("the world size must be the same on all ranks, got rank 0: 0; rank 1: 3.")


def test_segments_of_a_gpus_memory_may_grow_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append({n: os.environ.get(n) for n in names}))
    for name in names:
        monkeypatch.setenv(name, "")  # so that both are put back
    for said in ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": ""}):
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(said)
        use(torch.device("cuda", 0))
        want = said or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        assert seen.pop() == {name: want.get(name) for name in names}
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    use(torch.device("cpu"))
    assert not seen and "PYTORCH_ALLOC_CONF" not in os.environ


# ---- the world --------------------------------------------------------------------------------------------------------------


# What a script's environment may say while its ranks have met elsewhere: half of a launcher's facts, or another job's.
OTHERS = {
    "nothing": {},
    "half": {"RANK": "{rank}", "WORLD_SIZE": "2"},
    "another's": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"},
    "contradicting": {"RANK": "7", "WORLD_SIZE": "2"},
    "an allocation": {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"},
    "local rank alone": {"LOCAL_RANK": "{rank}"},
}


def _trained_by_hand(store: str, env: dict[str, str], layout: Any) -> tuple[int, int, float]:
    rank = _forget_our_launcher()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    os.environ.update({name: value.format(rank=rank) for name, value in env.items()})
    world = World.current()
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
    model, optimizer, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4), layout=layout)
    for x, y in loader:
        with ech.window(model) as window:
            window.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    return world.rank, world.size, float(window.loss)


@pytest.mark.full(but=("nothing",))
@pytest.mark.parametrize("others", OTHERS)
def test_a_group_that_exists_is_the_truth_whatever_the_environment_says(tmp_path: Path, others: str) -> None:
    for i, layout in enumerate(("ddp", ech.FSDPStrategy(sharding_strategy="HYBRID_SHARD"))):
        told = launch(_trained_by_hand, ranks=2, args=(str(tmp_path / str(i)), OTHERS[others], layout))
        assert [each[:2] for each in told] == [(0, 2), (1, 2)] and told[0][2] == told[1][2]


# ---- data on its way --------------------------------------------------------------------------------------------------------


def test_data_keeps_its_structure_on_its_way_to_the_device() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    queue = deque([torch.ones(1)], maxlen=4)
    data: dict[str, Any] = {"a": [torch.ones(2), (torch.zeros(1), "text")], "b": {"c": 3}, "x": packed, "y": queue}
    moved = copy_data_to_device(data, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["a"][1][1] == "text" and moved["b"] == {"c": 3} and isinstance(moved["a"][1], tuple)
    assert isinstance(moved["x"], PackedSequence) and moved["x"].data.is_meta and moved["x"].sorted_indices.is_meta
    assert moved["x"].batch_sizes.equal(packed.batch_sizes)  # torch wants lengths in host memory
    assert isinstance(moved["y"], deque) and moved["y"].maxlen == 4 and moved["y"][0].is_meta


@pytest.mark.parametrize(
    ("variable", "value", "backend", "is_wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "eth99", "gloo", True),
        ("GLOO_SOCKET_IFNAME", "lo", "gloo", False),
        ("GLOO_SOCKET_IFNAME", "lo,eth99", "gloo", True),
        ("GLOO_SOCKET_IFNAME", "", "gloo", False),
        ("GLOO_SOCKET_IFNAME", "eth99", "cuda:nccl", False),
        ("NCCL_SOCKET_IFNAME", "eth99", "cpu:gloo,cuda:nccl", True),
        ("NCCL_SOCKET_IFNAME", "=l", "nccl", True),
        ("NCCL_SOCKET_IFNAME", "l", "nccl", False),
        ("NCCL_SOCKET_IFNAME", "eth99,lo", "nccl", False),
        ("NCCL_SOCKET_IFNAME", "=lo:1234", "nccl", False),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "nccl", False),
    ],
)
def test_an_interface_that_this_host_does_not_have_is_named_with_those_that_it_has(
    variable: str, value: str, backend: str, is_wrong: bool
) -> None:
    said = missing_interface({variable: value}, backend)
    assert bool(said) == is_wrong
    if is_wrong:
        assert said.startswith(f"{variable} must name a network interface of ") and f"got {value!r}" in said and " lo" in said


def test_a_rank_whose_interface_is_not_there_tells_the_others() -> None:
    assert launch(_joins_by_eth99, ranks=2) == [True, True]


def _joins_by_eth99() -> bool:
    if os.environ["RANK"] == "1":
        os.environ["GLOO_SOCKET_IFNAME"] = "eth99"
    with pytest.raises(EchelonError) as caught:
        init_from_env(timeout=timedelta(seconds=60))
    return "GLOO_SOCKET_IFNAME must name a network interface of" in str(caught.value) and "eth99" in str(caught.value)
