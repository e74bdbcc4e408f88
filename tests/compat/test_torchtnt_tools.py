"""TorchTNT's smaller tools: memory, what it ran out of, operations, nan, versions, bars, file systems, events."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
import weakref
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils import event_handlers
from echelon.compat.torchtnt.utils.event import Event
from echelon.compat.torchtnt.utils.event_handlers import EventHandler, log_event, log_interval
from echelon.compat.torchtnt.utils.flops import FlopTensorDispatchMode
from echelon.compat.torchtnt.utils.fsspec import get_filesystem
from echelon.compat.torchtnt.utils.memory import RSSProfiler, get_tensor_size_bytes_map, measure_rss_deltas
from echelon.compat.torchtnt.utils.memory_snapshot_profiler import MemorySnapshotParams, MemorySnapshotProfiler
from echelon.compat.torchtnt.utils.misc import days_to_secs, transfer_batch_norm_stats, transfer_weights
from echelon.compat.torchtnt.utils.module_summary import get_module_summary
from echelon.compat.torchtnt.utils.nan import check_for_nan_or_inf, register_nan_hooks_on_whole_graph
from echelon.compat.torchtnt.utils.oom import (
    attach_oom_observer,
    is_out_of_cpu_memory,
    is_out_of_cuda_memory,
    is_out_of_memory_error,
    log_memory_snapshot,
)
from echelon.compat.torchtnt.utils.tqdm import close_progress_bar, create_progress_bar, update_progress_bar
from echelon.compat.torchtnt.utils.version import get_python_version, get_torch_version, is_torch_version_geq, is_windows
from tests.kit.refusals import refused

# --- memory


def test_tensors_within_an_object_are_found_however_deep() -> None:
    """In TorchTNT an object that refers to itself never ends."""
    a, b, c, d = torch.zeros(10), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.int8), torch.zeros(4)
    pair = namedtuple("pair", "x y")
    holder = SimpleNamespace(deep={"a": [a, (b, "text", b"bytes", 3)]}, pair=pair(c, a), kind=logging.Logger, some={d})
    holder.itself = holder
    holder.deep["back"] = holder.deep
    assert get_tensor_size_bytes_map(holder) == {a: 40, b: 48, c: 1, d: 16}
    module = nn.Linear(3, 2)
    assert sorted(get_tensor_size_bytes_map(module).values()) == [8, 24]


def test_growth_of_memory_is_measured_and_a_short_stage_too() -> None:
    profiler = RSSProfiler(interval=timedelta(days=1))  # TorchTNT waits for the whole interval at the end
    with profiler.profile("grows"):
        kept = bytearray(50_000_000)
        kept[::4096] = b"x" * len(kept[::4096])
    with pytest.raises(KeyError), profiler.profile("fails"):
        raise KeyError
    assert [len(each) for each in profiler.rss_deltas_bytes.values()] == [1, 1]
    assert profiler.rss_deltas_bytes["grows"][0] > 40_000_000
    with profiler.profile("grows"):
        pass
    assert len(profiler.rss_deltas_bytes["grows"]) == 2
    profiler.reset()
    assert profiler.rss_deltas_bytes == {}
    deltas: list[int] = []
    with measure_rss_deltas(deltas, timedelta(milliseconds=1)):
        while len(deltas) < 3:
            pass
    assert len(deltas) > 3


def test_which_errors_say_that_memory_ran_out() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**55)
    cpu: list[BaseException] = [real.value, MemoryError()]
    cuda: list[BaseException] = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("RuntimeError: cuda runtime error (2) : out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ]
    others: list[BaseException] = [
        RuntimeError("shapes cannot be multiplied"),
        RuntimeError(),
        ValueError("CUDA out of memory."),
        KeyError(3),
    ]
    assert [[is_out_of_cpu_memory(e), is_out_of_cuda_memory(e), is_out_of_memory_error(e)] for e in cpu] == [
        [True, False, True]
    ] * 2
    assert [[is_out_of_cpu_memory(e), is_out_of_cuda_memory(e), is_out_of_memory_error(e)] for e in cuda] == [
        [False, True, True]
    ] * 5
    assert not any(is_out_of_memory_error(e) for e in others)


@pytest.mark.parametrize(
    "params",
    [
        {"start_step": -1},
        {"start_step": 2, "stop_step": None},
        {"start_step": 2, "stop_step": 2},
        {"stop_step": 0},
        {"stop_step": None, "enable_oom_observer": False},
        {"stop_step": 3, "enable_oom_observer": False},
    ],
)
def test_a_memory_profiler_that_could_not_work_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        MemorySnapshotProfiler("here", MemorySnapshotParams(**params))


@pytest.fixture
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of CUDA's memory, in order; no GPU is needed."""
    calls: list[str] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all", max_entries=0: calls.append(f"record {enabled} {max_entries}")
    )
    monkeypatch.setattr(memory, "_snapshot", lambda: calls.append("snapshot") or {"segments": [], "device_traces": []})
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", lambda fn: calls.append("observe"), raising=False)
    return calls


def test_a_memory_profiler_records_between_its_steps(tmp_path: Path, cuda_calls: list[str]) -> None:
    profiler = MemorySnapshotProfiler(str(tmp_path), MemorySnapshotParams(2, 4, 77, enable_oom_observer=False))
    seen = []
    for _ in range(6):
        profiler.step()
        seen.append(len(cuda_calls))
    assert seen == [0, 1, 1, 3, 3, 3] and cuda_calls == ["record all 77", "snapshot", "record None 0"]
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert files == [f"step_4_rank0/{name}" for name in ("segment_plot.html", "snapshot.pickle", "trace_plot.html")]
    assert pickle.loads((tmp_path / "step_4_rank0/snapshot.pickle").read_bytes())["segments"] == []
    cuda_calls.clear()
    waits = MemorySnapshotProfiler(str(tmp_path))
    waits.step()
    waits.step()
    assert cuda_calls == ["record all 100000", "observe", "snapshot", "record None 0"], "TorchTNT goes on recording"
    cuda_calls.clear()
    with MemorySnapshotProfiler(str(tmp_path)) as observing:  # the default: until step 2, for an observer
        assert cuda_calls == ["record all 100000", "observe", "record all 100000"]
        observing.log_memory_snapshot()
    assert cuda_calls[3:] == ["snapshot", "record None 0"] and (tmp_path / "step_0_rank0").is_dir()


def test_a_snapshot_that_cannot_be_written_is_logged(
    tmp_path: Path, cuda_calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log_memory_snapshot(str(tmp_path / "file"))
    assert "Failed to log memory snapshot to" in caplog.text
    log_memory_snapshot(str(tmp_path), "mine")
    log_memory_snapshot(f"memory://{tmp_path.name}")
    assert (tmp_path / "mine_rank0/snapshot.pickle").exists()
    assert get_filesystem("memory://").exists(f"/{tmp_path.name}/memory_snapshot_rank0/trace_plot.html")


def test_without_a_gpu_there_is_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attach_oom_observer(str(tmp_path))
    log_memory_snapshot(str(tmp_path))
    profiler = MemorySnapshotProfiler(str(tmp_path), MemorySnapshotParams(0, 1))
    profiler.step()
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_snapshots_of_a_gpu(tmp_path: Path) -> None:
    profiler = MemorySnapshotProfiler(str(tmp_path), MemorySnapshotParams(start_step=0, stop_step=1))
    kept = torch.empty(7_000_000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2**45, device="cuda")
    assert is_out_of_cuda_memory(error.value)
    profiler.step()
    del kept
    for folder in ("oom_rank0", "step_1_rank0"):
        snapshot = pickle.loads((tmp_path / folder / "snapshot.pickle").read_bytes())
        sizes = {event["size"] for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"}
        assert any(28_000_000 <= size < 30_000_000 for size in sizes), folder
        assert (tmp_path / folder / "trace_plot.html").stat().st_size > 100


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


class _MakesNan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


def test_nan_is_found_where_it_comes_up() -> None:
    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(2, requires_grad=True)
        bad = _MakesNan.apply(x * 2)
        return (bad * 3).sum(), x

    for named in (lambda out: out, get_gradient_edge):
        out, _ = outputs()
        register_nan_hooks_on_whole_graph([named(out)])
        with pytest.raises(RuntimeError, match=r"NaN in 'grad_inputs\[0\]' after executing Node _MakesNanBackward"):
            out.backward()
    out, x = outputs()
    register_nan_hooks_on_whole_graph([out])()
    out.backward()
    assert x.grad is not None and x.grad.isnan().all()
    with refused(UsageError):
        register_nan_hooks_on_whole_graph([x, torch.ones(1)])


def test_nan_hooks_do_not_keep_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    inner = x * 2
    register_nan_hooks_on_whole_graph([(inner * inner).sum()])
    gone = weakref.ref(inner)
    del inner
    assert gone() is None


def test_nan_and_inf_in_a_tensor() -> None:
    check_for_nan_or_inf(torch.tensor([1.0, -1e30]))
    check_for_nan_or_inf(torch.tensor([1, 2]))
    for value in ("nan", "inf", "-inf"):
        with pytest.raises(RuntimeError, match="my words"):
            check_for_nan_or_inf(torch.tensor([1.0, float(value)]), "my words")


def test_days() -> None:
    assert (days_to_secs(None), days_to_secs(0), days_to_secs(2)) == (None, 0, 172800)
    with pytest.raises(UsageError):
        days_to_secs(-1)


def _with_norms(track: bool = True, width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width, momentum=0.3, track_running_stats=track))


def test_weights_and_statistics_are_copied_to_a_twin() -> None:
    source, target = _with_norms(), _with_norms()
    source(torch.randn(8, 2))
    norm: Any = target[1]
    norm.momentum = 0.9
    transfer_weights(source, target)
    assert all(map(torch.equal, source.parameters(), target.parameters()))
    assert all(p.grad_fn is None and p.requires_grad for p in target.parameters())
    assert not torch.equal(source[1].running_mean, norm.running_mean)  # type: ignore[arg-type]
    transfer_batch_norm_stats(source, target)
    assert all(map(torch.equal, source.buffers(), target.buffers())) and norm.momentum == 0.3
    transfer_batch_norm_stats(_with_norms(track=False), _with_norms(track=False))  # None in TorchTNT, which fails

    before = [p.clone() for p in target.parameters()]
    for other in (nn.Linear(2, 3), _with_norms(width=1)):  # TorchTNT copies what there is, and one value to many
        with refused(UsageError):
            transfer_weights(other, target)
    assert all(map(torch.equal, before, target.parameters()))
    for other in (nn.Linear(2, 3), _with_norms(track=False), _with_norms(width=1)):
        with refused(UsageError):
            transfer_batch_norm_stats(other, target)


# --- versions, bars, file systems


def test_versions_compare_as_versions() -> None:
    from packaging.version import Version

    assert get_torch_version() >= Version("2.9.0") and get_python_version() > Version("3.9")
    assert is_torch_version_geq("2.9.1") and not is_torch_version_geq("100.0") and is_torch_version_geq(str(get_torch_version()))
    assert is_windows() is False


@pytest.mark.parametrize(
    ("loader", "limits", "total"),
    [
        (range(10), (None, None), 10),
        (range(10), (6, None), 6),
        (range(10), (None, 4), 4),
        (range(10), (20, None), 10),
        (iter(range(10)), (None, None), None),
        (iter(range(10)), (6, None), 6),
    ],
)
def test_a_progress_bar_is_as_long_as_loader_and_limits_allow(
    loader: Any, limits: tuple[Any, Any], total: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of tqdm's
    text = io.StringIO()
    bar = create_progress_bar(
        loader, desc="Train Epoch", num_epochs_completed=3, num_steps_completed=0, max_steps=limits[0],
        max_steps_per_epoch=limits[1], mininterval=0.0, file=text,
    )  # fmt: skip
    assert bar.total == total and bar.desc.startswith("Train Epoch 3")
    counts = []
    for step in range(1, 5):
        update_progress_bar(bar, step, 3)
        counts.append(bar.n)
    assert counts == [0, 0, 3, 3]
    close_progress_bar(bar, 4, 3)
    assert bar.n == 4 and bar.disable and "Train Epoch 3" in text.getvalue()


def test_a_file_system_for_a_path(tmp_path: Path) -> None:
    assert get_filesystem(str(tmp_path)).exists(str(tmp_path))
    assert type(get_filesystem("memory://x")).__name__ == "MemoryFileSystem"


# --- events


class Collects:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle_event(self, event: Event) -> None:
        self.events.append(event)


class Fails:
    def handle_event(self, event: Event) -> None:
        raise OSError("the service is down")


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installed as a package would, after one that fails."""
    collects = Collects()
    found = {
        "tnt_event_handlers": [
            SimpleNamespace(value=k.__name__, load=lambda m=m: m) for k, m in ((Fails, Fails), (Collects, lambda: collects))
        ]
    }
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found.get(group, []))
    event_handlers.get_event_handlers.cache_clear()
    yield collects
    event_handlers.get_event_handlers.cache_clear()


def test_an_interval_ends_after_an_exception_too(handler: Collects, caplog: pytest.LogCaptureFixture) -> None:
    """In TorchTNT the end is missing then, and what the caller gave is changed."""
    given: dict[str, Any] = {"path": "here"}
    random.seed(3)
    before = random.getstate()
    with log_interval("save", given):
        log_event(Event("within"))
    with pytest.raises(KeyError), log_interval("save", given):
        raise KeyError
    assert random.getstate() == before and given == {"path": "here"}
    assert [event.name for event in handler.events] == ["save", "within", "save", "save", "save"]
    start, _, end, again, failed = (event.metadata for event in handler.events)
    assert (start["action"], end["action"], failed["action"], failed["exception"]) == ("start", "end", "end", "KeyError")
    assert start["unique_id"] == end["unique_id"] != again["unique_id"] == failed["unique_id"]
    assert all(event.metadata["path"] == "here" for event in handler.events if event.name == "save")
    assert "Fails failed on the event save" in caplog.text, "one that fails keeps no event from the others"
    assert isinstance(handler, EventHandler)


def test_what_is_no_handler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [SimpleNamespace(value="x:make", load=lambda: dict)])
    event_handlers.get_event_handlers.cache_clear()
    with refused(UsageError):
        log_event(Event("any"))
