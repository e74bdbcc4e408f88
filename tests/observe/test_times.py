"""Where a rank's time goes is written down, adds up, and names the rank for which the others wait; never a healthy one."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import echelon as ech
from echelon.contracts.run_dir import RUN_DIR_VARIABLE, RunDir
from echelon.contracts.times import PARTS, TimeRecord, TimesReader, parse, ranks_of, read_times
from echelon.loop.reporting.times import Garbage, record_of
from echelon.observe.stragglers import Straggler, stragglers
from echelon.world.clock import Clock, Group, Part
from echelon.world.thread_sampler import FRAMES, ThreadSampler
from tests.conftest import Ranks
from tests.kit.models import net
from tests.kit.slow_ranks import Batches, Fault, Net, Unit, run_folder, times_of, train

pytestmark = pytest.mark.standing_ranks


def _adds_up(records: Sequence[TimeRecord], steps: int) -> None:
    """One loop, whole: the parts are all of the time, and no step is missing or twice."""
    assert records[0].steps[0] == 0 and records[-1].steps[1] == steps
    assert all(a.steps[1] == b.steps[0] for a, b in pairwise(records))
    for record in records:
        assert sum(getattr(record, name) for name in PARTS) == pytest.approx(record.wall_s, abs=1e-4)
        assert record.gc_s <= record.wall_s and record.disk_s <= record.wall_s and record.host


# --- who is slow

CAUSE = {"data": "data", "forward": "compute", "backward": "compute", "spin": "compute", "gc": "gc", "disk": "disk"}


@pytest.mark.full(but=("data",))
@pytest.mark.parametrize(("world", "layout", "own"), [(4, "ddp", False), (2, "fsdp", True)])
@pytest.mark.parametrize("kind", sorted(CAUSE))
def test_a_slow_rank_is_named_within_twenty_steps(
    ranks: Ranks, tmp_path: Path, kind: str, world: int, layout: str, own: bool
) -> None:
    run, slow = run_folder(tmp_path), random.randrange(world)
    ranks(world, train, str(tmp_path), kind, slow, layout, own=own)
    times = read_times(run)
    # With the record of the twentieth step: where others use the cores, the one before it may be a moment too short to judge.
    within = {rank: [r for r in records if r.steps[0] < 20] for rank, records in times.items()}
    found = stragglers(within)
    assert [(s.rank, s.cause) for s in found] == [(slow, CAUSE[kind])], (found, within)
    assert found[0].factor > 1.5
    if kind != "gc":
        assert "slow_ranks.py" in found[0].line, found
    for records in times.values():
        _adds_up(records, 22)


def test_a_collection_after_a_records_last_step_is_of_the_next_record() -> None:
    """A record had more seconds of collections than it took: it is written later than its last step."""
    garbage = Garbage(threading.get_ident())
    try:
        gc.collect()
        between = time.perf_counter()
        assert garbage.take(between) > 0
        gc.collect()
        assert garbage.take(between) == 0 and garbage.take(time.perf_counter()) > 0
    finally:
        garbage.close()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_nobody_is_accused_in_a_healthy_run(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """More ranks than there are cores, as a rule: each waits for a core again and again."""
    run_folder(tmp_path)
    ranks(4, train, str(tmp_path), "", None, layout, steps=150)
    times = times_of(tmp_path)
    assert set(times) == {0, 1, 2, 3}
    for end in range(1, max(map(len, times.values())) + 1):
        assert stragglers({rank: records[:end] for rank, records in times.items()}) == []


def _usual(rank: int, own_s: float, wait_s: float, **more: Any) -> list[TimeRecord]:
    each = TimeRecord((0, 10), 1.0, forward_s=own_s * 10, wait_s=wait_s * 10, own_s=own_s, host=f"node{rank}", line="t.py:1 in f")
    return [replace(each, steps=(n * 10, n * 10 + 10), **more) for n in range(4)]


def test_one_slow_step_a_slow_beginning_or_computing_for_which_nobody_waits_accuses_nobody() -> None:
    times = {0: _usual(0, 0.05, 0.05), 1: _usual(1, 0.05, 0.05)}
    times[1][0] = replace(times[1][0], forward_s=60.0, own_s=6.0, wall_s=60.0)  # it compiles
    times[1][2] = replace(times[1][2], data_s=5.0, wall_s=6.0)  # a worker starts
    assert [stragglers({r: records[:end] for r, records in times.items()}) for end in range(5)] == [[]] * 5
    assert stragglers({0: _usual(0, 0.010, 0.089), 1: _usual(1, 0.016, 0.083)}) == []
    assert [s.rank for s in stragglers({0: _usual(0, 0.050, 0.049), 1: _usual(1, 0.080, 0.019)})] == [1]


def _train_in_stages(folder: str) -> None:
    os.environ[RUN_DIR_VARIABLE] = folder
    samples = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    unit = _OfStages(module=net(dtype=torch.float32), layout="pp=2", accumulate=2)
    ech.train(unit, ech.Loader(samples, global_batch=8, seed=0), max_epochs=1)


class _OfStages(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.mse_loss(self.module(data[0]), data[1]), None

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.01), None


def test_stages_of_a_pipeline_write_which_they_are(ranks: Ranks, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    ranks(2, _train_in_stages, str(tmp_path))
    assert {rank: {record.role for record in records} for rank, records in read_times(run).items()} == {
        0: {"stage 0"},
        1: {"stage 1"},
    }


def test_all_slow_ranks_of_a_role_are_named_the_slowest_first() -> None:
    first, last = _usual(0, 0.05, 0.05, role="stage 0"), _usual(1, 0.1, 0.0, role="stage 1")
    assert stragglers({0: first, 1: last}) == []
    assert [s.rank for s in stragglers({0: first, 1: last, 2: _usual(2, 0.1, 0.0, role="stage 0")})] == [2]
    times = {rank: _usual(rank, 0.02, 0.08) for rank in range(5)} | {5: _usual(5, 0.06, 0.04), 6: _usual(6, 0.1, 0.0)}
    assert [(s.rank, s.host, round(s.factor, 1)) for s in stragglers(times)] == [(6, "node6", 5.0), (5, "node5", 3.0)]
    assert str(Straggler(6, "node6", 5.0, "data", "t.py:1 in f")) == (
        "rank 6 on node6 takes 5.0 x as long as the others: its data, t.py:1 in f"
    )
    # Garbage now and then is seen behind usual steps.
    times = {0: _usual(0, 0.05, 0.05), 1: _usual(1, 0.05, 0.0, gc_s=0.5, forward_s=1.0)}
    assert [(s.rank, s.cause) for s in stragglers(times)] == [(1, "gc")]


# --- the records of all kinds of runs


class _Evaluated(Unit, ech.EvalUnit[Any]):  # type: ignore[misc]
    pass


def _everything(folder: str) -> None:
    """Accumulation, evaluations within epochs, checkpoints beside the training, and batches that are moved ahead."""
    os.environ[RUN_DIR_VARIABLE] = folder
    try:
        quiet = Fault("", Path(folder))
        unit = _Evaluated(module=Net(quiet), layout="ddp", accumulate=2, enable_prefetch=True)
        saver = ech.DistributedCheckpointSaver(f"{folder}/checkpoints", save_every_n_updates=2, async_checkpoint=True)
        ech.fit(
            unit,
            Batches(12, quiet),
            Batches(3, quiet),
            max_epochs=2,
            evaluate_every_n_updates=2,
            evaluate_every_n_epochs=None,
            callbacks=[saver],
        )
    finally:
        del os.environ[RUN_DIR_VARIABLE]


def test_evaluations_and_checkpoints_have_times_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    ranks(2, _everything, str(tmp_path))
    times = read_times(run)
    assert ranks_of(run) == [0, 1]
    for records in times.values():
        _adds_up(records, 12)
        for name in ("eval_s", "checkpoint_s", "forward_s", "backward_s", "optimizer_s", "data_s"):
            assert sum(getattr(r, name) for r in records) > 0, name


def _fails(folder: str, error: type[BaseException]) -> None:
    class Failing(Unit):
        def compute_loss(self, state: ech.State, data: Any) -> Any:
            if self.train_progress.num_steps_completed == 7:
                raise error
            return super().compute_loss(state, data)

    os.environ[RUN_DIR_VARIABLE] = folder
    try:
        with pytest.raises(error):
            ech.train(Failing(module=Net(Fault("", Path(folder)))), Batches(20, Fault("", Path(folder))), max_epochs=1)
    finally:
        del os.environ[RUN_DIR_VARIABLE]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_an_error_ends_is_written_to_its_last_step(tmp_path: Path, error: type[BaseException]) -> None:
    run_folder(tmp_path)
    _fails(str(tmp_path), error)
    _adds_up(times_of(tmp_path)[0], 7)


def test_a_full_disk_costs_the_times_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SCREEN", "launcher")  # pytest's standard error is a file, too
    folder, before = run_folder(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    torch.zeros(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        train(str(tmp_path), "", None, "none", steps=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_times(folder) == {} and folder.times(0).read_bytes() == b""


def test_a_working_folder_that_is_removed_costs_neither_times_nor_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, gone = run_folder(tmp_path), tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    train(str(tmp_path), "data", 0, "none", steps=5)
    records = read_times(folder)[0]
    _adds_up(records, 5)
    assert "where time goes ends here" not in caplog.text and any("slow_ranks.py" in record.line for record in records)


@pytest.mark.parametrize("removed", ["before", "after"])
def test_lines_are_told_from_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    if removed == "before":
        gone.rmdir()
    running = Clock(0)
    where = ThreadSampler(running, waits_in_backward=False)
    if removed == "after":
        gone.rmdir()
    calls: dict[str, Any] = {}
    exec(compile("def wait(thread):\n    thread.start()\n    thread.join()\n", "own.py", "exec"), calls)
    try:
        calls["wait"](threading.Thread(target=where.look))
    finally:
        where.close()
        running.close()
    assert sum(where.seen.values()) == 1 and [line.partition(":")[0] for line in where.lines] == ["own.py"]


def test_frames_are_held_by_one_at_a_time() -> None:
    running = Clock(0)
    where = ThreadSampler(running, waits_in_backward=False)
    looks = threading.Thread(target=where.look)
    try:
        with FRAMES:
            looks.start()
            looks.join(0.1)
            assert looks.is_alive() and not where.seen
        looks.join()
    finally:
        where.close()
        running.close()
    assert sum(where.seen.values()) == 1


def test_a_clock_that_nobody_reads_keeps_its_totals_and_not_every_group() -> None:
    running = Clock(0)
    first = running.groups[0]
    try:
        for step in range(30_000):
            running.step_ended(step)
            running.note()
    finally:
        running.close()
    groups = running.groups
    assert len(groups) < 5_000 and groups[0] is first and groups[-1].step == 29_999
    assert all(a.step <= b.step and a.at <= b.at for a, b in pairwise(groups))
    assert sum(groups[-1].wall) - sum(first.wall) == pytest.approx(groups[-1].at - first.at, abs=1e-6)
    assert record_of(groups, {}, alone=True)["steps"] == (0, 29_999)


# --- from totals to a record


def _group(step: int, at: float, queued: float = 0.0, **parts: tuple[float, float]) -> Group:
    wall, used = [0.0] * len(Part), [0.0] * len(Part)
    for name, (seconds, computed) in parts.items():
        wall[Part[name]], used[Part[name]] = seconds, computed
    return Group(step, at, tuple(wall), tuple(used), queued)


def test_what_a_pass_does_not_compute_is_a_wait_if_the_looks_say_so_and_nobodys_if_others_had_the_cores() -> None:
    groups = [_group(0, 0.0), _group(10, 2.0, FORWARD=(1.0, 0.2), BACKWARD=(1.0, 0.5))]
    seen = {(Part.FORWARD, Part.FORWARD, "own"): 3, (Part.FORWARD, Part.FORWARD, "wait"): 1}
    record = record_of(groups, seen, alone=False)  # type: ignore[arg-type]
    assert record["wait_s"] == pytest.approx(0.8 / 4 + 0.5) and record["forward_s"] == pytest.approx(0.8)
    assert record["own_s"] == pytest.approx((0.8 + 0.5) / 10)
    assert record_of(groups, {}, alone=True)["wait_s"] == 0
    record = record_of([_group(0, 0.0), _group(10, 2.0, 1.0, FORWARD=(2.0, 1.0))], {}, alone=False)
    assert (record["queue_s"], record["own_s"]) == (pytest.approx(1.0), pytest.approx(0.1))


def test_a_run_that_was_rolled_back_goes_on_from_its_older_step() -> None:
    groups = [_group(20, 0.0), _group(30, 1.0, FORWARD=(1.0, 1.0)), _group(5, 2.0, FORWARD=(2.0, 2.0))]
    record = record_of(groups, {}, alone=True)
    assert (record["steps"], record["wall_s"], record["own_s"]) == ((5, 5), 2.0, pytest.approx(0.1))
    assert parse({**TimeRecord(**record).to_json(), "steps": list(record["steps"])}) is not None


def test_a_step_of_the_users_own_is_divided_by_looking() -> None:
    seen = {(Part.STEP, Part.FORWARD, "busy"): 2, (Part.STEP, Part.BACKWARD, "busy"): 5, (Part.STEP, Part.OPTIMIZER, "busy"): 1}
    record = record_of([_group(0, 0.0), _group(4, 8.0, STEP=(8.0, 8.0))], seen, alone=False)  # type: ignore[arg-type]
    assert [record[f"{name}_s"] for name in ("forward", "backward", "optimizer")] == [2.0, 5.0, 1.0]


# --- what is read


GOOD = {"steps": [0, 3], "wall_s": 1.0, "data_s": 0.25, "line": "a.py:1 in f", "time": 1.7e9, "unknown": [1]}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"steps": steps} for steps in ([3, 0], [0.0, 3], [-1, 3], [0, 1 << 60], [True, 3], "03", None)),
        *({"wall_s": seconds} for seconds in (-1, "nan", 1 << 5000)),
        *({"data_s": seconds} for seconds in (True, None)),
        *({"line": 1}, {"line": "x" * 301}, {"host": []}, {"time": float("inf")}),
    ],
)
def test_a_line_that_no_rank_of_ours_wrote_is_left_out(wrong: dict[str, Any]) -> None:
    assert parse(GOOD) == TimeRecord((0, 3), 1.0, data_s=0.25, line="a.py:1 in f", time=1.7e9)
    assert parse({**GOOD, **wrong}) is None


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*GOOD, "own_s", "role"]), st.recursive(st.none() | st.floats() | st.text(), st.lists)))
def test_whatever_is_in_a_line_it_is_read_or_left_out(line: dict[str, Any]) -> None:
    found = parse(line)
    if found is not None:
        stragglers({0: [found] * 3, 1: [found] * 3})


def test_records_are_read_as_they_come_and_links_are_not(tmp_path: Path) -> None:
    run, line = run_folder(tmp_path), json.dumps(GOOD)
    reader = TimesReader(run)
    assert reader.read() == {}
    run.times(1).write_text(f"{line}\nnonsense\n{line[:9]}")
    (tmp_path / "elsewhere").write_text(f"{line}\n")
    run.times(2).symlink_to(tmp_path / "elsewhere")
    assert {rank: len(records) for rank, records in reader.read().items()} == {1: 1}
    with open(run.times(1), "a") as file:
        file.write(f"{line[9:]}\n")
    assert {rank: len(records) for rank, records in reader.read().items()} == {1: 1}
    assert reader.read() == {} and len(read_times(RunDir(tmp_path))[1]) == 2
