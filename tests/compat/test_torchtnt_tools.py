"""TorchTNT's smaller tools: what memory ran out of, operations."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.compat.torchtnt.utils.data import CudaDataPrefetcher
from echelon.compat.torchtnt.utils.flops import FlopTensorDispatchMode
from echelon.compat.torchtnt.utils.module_summary import get_module_summary
from echelon.compat.torchtnt.utils.oom import attach_oom_observer, log_memory_snapshot
from echelon.compat.torchtnt.utils.timer import Timer, get_timer_summary


def test_a_timer_records_seconds_by_name_of_stages_that_were_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, timer = [0.0], Timer(verbose=True)
    monkeypatch.setattr("echelon.compat.torchtnt.utils.timer.time.perf_counter", lambda: now[0])
    for name, seconds in (("a", 1.0), ("a", 3.0), ("b", 4.0)):
        with timer.time(name):
            now[0] += seconds
    with pytest.raises(StopIteration), timer.time("a"):
        next(iter(()))
    assert timer.recorded_durations == {"a": [1.0, 3.0], "b": [4.0]}
    timer.reset()
    assert timer.recorded_durations == {} and timer.recorded_durations["new"] == []
    with timer.time("at once"):
        pass
    assert "at once" in get_timer_summary(timer), "TorchTNT divides by zero here"


# --- memory


def test_without_a_gpu_there_is_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attach_oom_observer(str(tmp_path))
    log_memory_snapshot(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_snapshots_of_a_gpu(tmp_path: Path) -> None:
    attach_oom_observer(str(tmp_path))
    kept = torch.empty(7_000_000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**45, device="cuda")
    log_memory_snapshot(str(tmp_path), "mine")
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    for folder in ("oom_rank0", "mine_rank0"):
        snapshot = pickle.loads((tmp_path / folder / "snapshot.pickle").read_bytes())
        sizes = {event["size"] for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"}
        assert any(28_000_000 <= size < 30_000_000 for size in sizes), folder


# --- numbers


def test_operations_are_counted_by_submodule() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.ReLU()))
    with FlopTensorDispatchMode(module) as counter:
        out = module(torch.ones(2, 3)).sum()
        forward = copy.deepcopy(counter.flop_counts)
        counter.reset()
        assert counter.flop_counts == {}
        out.backward()
        backward = copy.deepcopy(counter.flop_counts)
    assert forward[""] == {"addmm.default": 2 * 3 * 4 + 2 * 4 * 5} and forward["absent"] == {}
    assert forward["0"] == {"addmm.default": 2 * 3 * 4} and forward["1"] == forward["1.0"] == {"addmm.default": 2 * 4 * 5}
    assert backward[""] == {"mm.default": 2 * 3 * 4 + 2 * 2 * 4 * 5}, "of the input, which needs none, no gradient"


class _Twice(nn.Module):
    """Calls one part twice, beside another, and one that gives back what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.same = nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(self.same(self.a(x))) + self.b(x)
        return out


def test_operations_of_a_backward_pass_are_those_of_the_parts_that_made_them() -> None:
    """torch's own tracker gives `same` those of `a`, and loses some of `a`'s."""
    module = nn.Sequential(_Twice(), nn.Dropout(0.0), nn.Linear(8, 2))
    with FlopTensorDispatchMode(module) as counter:
        out = module(torch.ones(4, 8)).sum()
        counter.reset()
        out.backward()
    one = 4 * 8 * 8  # the inputs, which need no gradient, get none
    counts = {name: sum(ops.values()) for name, ops in counter.flop_counts.items()}
    assert counts == {"": 4 * one + 2 * 4 * 8 * 2, "0": 4 * one, "0.a": 3 * one, "0.b": one, "2": 2 * 4 * 8 * 2}
    summary = get_module_summary(module, module_args=(torch.ones(4, 8),))
    assert summary.submodule_summaries["0"].flops_backward == 4 * one
    assert summary.submodule_summaries["0"].submodule_summaries["0.same"].flops_backward == 0
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


# --- data


@pytest.mark.gpu
def test_the_prefetcher_gives_every_batch_on_the_gpu() -> None:
    data = [{"x": torch.full((1000, 1000), float(i)).pin_memory(), "i": i} for i in range(20)]
    read: list[int] = []

    class Read:
        def __iter__(self) -> Iterator[Any]:
            for batch in data:
                read.append(int(batch["i"]))
                yield batch

    for ahead in (1, 3):
        batches = CudaDataPrefetcher(Read(), torch.device("cuda"), ahead)
        assert not read, "nothing is read before it is asked for"
        for _ in range(2):
            sums = []
            for batch in batches:
                assert batch["x"].is_cuda and len(read) == min(20, batch["i"] + 1 + ahead)
                sums.append(batch["x"].mean())
                del batch
                torch.empty(1000, 1000, device="cuda").fill_(-1.0)
            assert [float(s) for s in sums] == [float(i) for i in range(20)]
            read.clear()
