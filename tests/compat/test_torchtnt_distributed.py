"""torchtnt.utils' half about ranks: names, who a rank is, how ranks meet, and what they tell each other."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.common.errors import LauncherEnvironmentError, RankFailedError, UsageError
from echelon.compat.torchtnt import utils
from echelon.compat.torchtnt.utils import device, distributed, env, rank_zero_log
from echelon.launcher.functions.launch import launch
from tests.conftest import Ranks
from tests.kit.refusals import refused


def test_the_package_gives_what_its_modules_have() -> None:
    assert utils.init_from_env is env.init_from_env
    with pytest.raises(AttributeError, match="Ghost"):
        utils.Ghost  # noqa: B018


# --- who a rank is


def test_ranks_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.get_device_from_env().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (distributed.get_global_rank(), distributed.get_world_size()) == (0, 1)
    assert (distributed.get_local_rank(), distributed.get_local_world_size()) == (0, 1)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)  # each alone is enough, as there
    assert (distributed.get_global_rank(), distributed.get_world_size()) == (3, 4)
    assert (distributed.get_local_rank(), distributed.get_local_world_size()) == (1, 2)
    monkeypatch.setenv("LOCAL_RANK", "first")
    with refused(UsageError):
        distributed.get_local_rank()
    assert distributed.get_process_group_backend_from_device(torch.device("cuda:1")) == "nccl"
    assert distributed.get_process_group_backend_from_device(torch.device("cpu")) == "gloo"


def test_only_rank_0_logs_and_the_record_names_the_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    own = logging.getLogger("mine")
    caplog.set_level(logging.DEBUG)
    levels = {"debug": 10, "info": 20, "warn": 30, "error": 40, "critical": 50}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for level in levels:
            getattr(rank_zero_log, f"rank_zero_{level}")("step %d of %s", 3, level, logger=own if level == "error" else None)
        rank_zero_log.rank_zero_print("a", "b", sep="-")
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(n, f"step 3 of {level}") for level, n in levels.items()]
    assert {r.filename for r in caplog.records} == {Path(__file__).name} and caplog.records[3].name == "mine"
    assert {r.funcName for r in caplog.records} == {"test_only_rank_0_logs_and_the_record_names_the_caller"}
    assert capsys.readouterr().out == "a-b\n"


# --- alone


def test_without_a_group_a_process_speaks_to_itself() -> None:
    distributed.barrier()
    mine = torch.tensor([1.0], requires_grad=True)
    (got,) = distributed.all_gather_tensors(mine)
    assert torch.equal(got, mine.detach()) and not got.requires_grad


# --- together


def _error(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        return str(call(*args, **kwargs))
    except UsageError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _told() -> dict[str, Any]:
    rank = dist.get_rank()
    mine = [dist.new_group([0]), dist.new_group([1])][rank]
    found: dict[str, Any] = {}
    tensors = {
        "uneven": torch.full((rank + 1, 3 - rank), float(rank)),
        "scalar": torch.tensor(rank),
        "empty": torch.empty(0, 2) if rank else torch.ones(1, 2),
        "bools": torch.tensor([True, False])[: rank + 1],
        "bf16": torch.ones(3, 2, dtype=torch.bfloat16).t() * rank,
    }
    found["tensors"] = {name: distributed.all_gather_tensors(t) for name, t in tensors.items()}
    found["own tensors"] = distributed.all_gather_tensors(torch.tensor([rank]), mine)
    found["types"] = _error(distributed.all_gather_tensors, torch.zeros(1, dtype=torch.float64 if rank else torch.float32))
    distributed.barrier()
    return found


def test_what_ranks_tell_each_other(ranks: Ranks) -> None:
    both = ranks(2, _told)
    for rank, found in enumerate(both):
        tensors = found["tensors"]
        assert [t.shape for t in tensors["uneven"]] == [(1, 3), (2, 2)] and float(tensors["uneven"][1].sum()) == 4
        assert [int(t) for t in tensors["scalar"]] == [0, 1] and [t.shape for t in tensors["empty"]] == [(1, 2), (0, 2)]
        assert [t.tolist() for t in tensors["bools"]] == [[True], [True, False]]
        assert [float(t.sum()) for t in tensors["bf16"]] == [0, 6] and tensors["bf16"][1].dtype == torch.bfloat16
        assert [t.tolist() for t in found["own tensors"]] == [[rank]]
        assert found["types"].startswith("RanksDisagreeError: ") and "rank 1: torch.float64" in found["types"]


# --- how ranks meet


def _joined(method: str) -> tuple[Any, ...]:
    """By the launcher's variables alone, again and again: who comes first must not read where the last group's ranks were."""
    if os.environ["RANK"] == "0":
        time.sleep(0.2)
    made = env.init_from_env(dist_init_method_type=method, pg_timeout=timedelta(seconds=20))
    again = env.init_from_env()
    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value)
    got = (str(made), made == again, int(value), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    return got


def _met(file: str) -> tuple[Any, ...]:
    said = (_error(distributed.get_file_init_method),)
    port, os.environ["MASTER_PORT"] = os.environ["MASTER_PORT"], "http"
    said += (_error(distributed.get_tcp_init_method),)
    del os.environ["MASTER_PORT"]
    said += (_error(distributed.get_tcp_init_method),)
    os.environ["MASTER_PORT"] = port
    totals = []
    for method in (distributed.get_tcp_init_method(), distributed.get_file_init_method(filename=file)):
        dist.init_process_group("gloo", init_method=method, timeout=timedelta(seconds=40))
        value = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(value)
        totals.append(int(value))
        dist.destroy_process_group()
    return totals, said, [_joined(method) for method in ("env", "tcp", "file")]


@pytest.mark.full
def test_several_ranks_meet_by_every_method(tmp_path: Path) -> None:
    """TorchTNT's "tcp" and "file" make up another port or file on each rank, which then wait for each other."""
    for rank, (totals, said, joined) in enumerate(launch(_met, ranks=2, args=(str(tmp_path / "a file"),), timeout_s=90)):
        assert totals == [3, 3]
        assert said[0].startswith("get_file_init_method: 2 ranks need one filename")
        assert said[1] == "MASTER_PORT='http' is no number." and said[2].startswith("get_tcp_init_method: 2 ranks need one port")
        assert joined == [("cuda:0" if torch.cuda.is_available() else "cpu", True, 3, rank, 2)] * 3


def test_the_ways_of_meeting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (distributed.get_tcp_init_method(), distributed.get_file_init_method()):
        dist.init_process_group("gloo", init_method=method)
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert distributed.get_tcp_init_method(world_size=2, rank=1, hostname="::1", port=5) == "tcp://[::1]:5?world_size=2&rank=1"
    with refused(UsageError):
        env.init_from_env(dist_init_method_type="mpi")  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "1")
    with refused(LauncherEnvironmentError):
        env.init_from_env()


# --- data and devices


class Jagged:
    """No tensor, but it moves and is used on streams, as torchrec's."""

    def __init__(self, streams: list[Any], moved: tuple[Any, ...] = ()) -> None:
        self.streams, self.moved = streams, moved

    def to(self, *args: Any, **kwargs: Any) -> Jagged:
        return Jagged(self.streams, (*args, kwargs))

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    image: Any
    label: int


def test_a_stream_is_told_of_data_however_deep() -> None:
    """TorchTNT loses the stream below the first level, so that memory in use is given away."""
    told: list[Any] = []
    one = Jagged(told)
    data = {"a": [one, (one, Pair(one, 3))], "b": defaultdict(list, x=Sample(one, 1)), "c": OrderedDict(y=one), "d": "text"}
    cpu, stream = torch.device("cpu"), object()
    got: Any = device.copy_data_to_device(data, cpu, stream, non_blocking=True)  # type: ignore[arg-type]
    assert told == [stream] * 5
    assert got["a"][1][1].x.moved == (cpu, {"non_blocking": True}) and got["a"][1][1].y == 3 and got["d"] == "text"
    assert got["b"].default_factory is list and isinstance(got["b"]["x"], Sample) and type(got["c"]) is OrderedDict
    assert device.copy_data_to_device((torch.ones(2),), cpu, None, torch.float16)[0].dtype == torch.float16
    device.copy_data_to_device(data, cpu)
    assert len(told) == 5
    device.record_data_in_stream([torch.ones(1), {"z": one}], stream)  # type: ignore[arg-type]
    assert told[5:] == [stream]


def test_float32_precision() -> None:
    before = torch.get_float32_matmul_precision()
    device.set_float32_precision("high")
    assert torch.cuda.is_available() or torch.get_float32_matmul_precision() == before
    torch.set_float32_matmul_precision(before)


def test_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    try:
        env.seed(5)
        first = torch.rand(2)
        assert (torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark) == before
        for mode, level in {"warn": 1, "error": 2, "default": 0}.items():
            env.seed(5, mode)
            assert torch.get_deterministic_debug_mode() == level
            assert (cudnn.deterministic, cudnn.benchmark) == (level > 0, level == 0)
        assert torch.equal(first, torch.rand(2)) and os.environ["PYTHONHASHSEED"] == "5"
        with refused(UsageError):
            env.seed(-1)
    finally:
        torch.set_deterministic_debug_mode(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]


def _spawned(factor: int, *, add: int = 0) -> tuple[Any, ...]:
    if add < 0 and dist.get_rank() == 1:
        raise ArithmeticError("below")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    value = torch.tensor([dist.get_rank() + add])
    dist.all_reduce(value)
    return [int(os.environ[n]) for n in names], int(value) * factor, dist.get_backend()


@pytest.mark.full
def test_spawn_multi_process_gives_each_ranks_value_and_sets_its_rank() -> None:
    got = distributed.spawn_multi_process(2, "gloo", _spawned, 10, add=1, timeout_s=40)
    assert got == [([rank, 2, rank, 2], 30, "gloo") for rank in range(2)]
    with pytest.raises(RankFailedError, match="below") as failed:
        distributed.spawn_multi_process(2, "gloo", _spawned, 1, add=-1)
    assert failed.value.rank == 1 and isinstance(failed.value.__cause__, ArithmeticError)
