"""Progress for people, from records and events alone."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ech
from echelon.contracts.events import encode, read_lines
from echelon.observe.sinks.model import ProgressModel
from echelon.observe.sinks.progress import ProgressSink, RunScreen
from tests.conftest import clean_environment
from tests.kit.models import batch
from tests.kit.own_loops import own_loop
from tests.kit.units import Regression


def _record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "update": step,
        "loss": 2.0,
        "lr": 1e-3,
        "grad_norm": None,
        "tokens_per_s": 1e4,
        "time": 100.0 + step,
        **more,
    }


def test_the_line_holds_loss_rate_learning_rate_time_left_memory_and_the_slowest_rank() -> None:
    model = ProgressModel()
    model.event({"event": "train_start", "total_steps": 100, "step": 0})
    for step in range(1, 41):
        model.record(_record(step))
    assert model.line() == "update 40/100  loss 2.0000  lr 0.001  10.0k tokens/s  1:00 left"
    model.record({"step": 40, "eval_accuracy": 0.5, "time": 141.0})  # numbers of an evaluation leave it as it is
    assert model.line() == "update 40/100  loss 2.0000  lr 0.001  10.0k tokens/s  1:00 left"
    model = ProgressModel()
    model.event({"event": "train_start", "total_steps": None, "step": 0})
    model.record(_record(1, memory_peak_bytes=3 << 30, mfu=0.4))
    model.record(_record(2))
    model.slowest = "rank 3 1.8x slow"
    assert model.line().endswith("MFU 40%  3 GiB  rank 3 1.8x slow")
    assert "left" not in model.line() and model.fraction is None  # a run without an end


def test_a_slow_rank_is_said_once_and_stands_in_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.observe.sinks.progress.RANKS_EVERY_S", 0.0)
    run = ech.evidence.RunDir.create(tmp_path, "slow")
    run.metrics.write_text("")
    stream = io.StringIO()
    screen = RunScreen(run, stream)
    screen.tick()
    with open(run.metrics, "a") as file:
        file.write(encode(_record(200)) + "\n")
    for rank in range(3):
        own = 0.03 if rank == 1 else 0.01
        spent = {"forward_s": 50 * own, "wait_s": 50 * (0.031 - own), "wall_s": 1.55, "own_s": own, "line": "train.py:4 in f"}
        records = [{"steps": [s, s + 50], **spent} for s in range(0, 200, 50)]
        run.times(rank).write_text("".join(encode(record) + "\n" for record in records))
    for _ in range(3):
        screen.tick()
    screen.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "echelon: rank 1 takes 3.0 x as long as the others: its own computation, train.py:4 in f"
    assert lines[1].startswith("update 200") and "rank 1 3.0x slow" in lines[1] and len(lines) == 2


def test_a_resumed_run_counts_its_own_steps_and_a_second_training_shows_nothing_of_the_first() -> None:
    model = ProgressModel()
    model.event({"event": "train_start", "total_steps": 1000, "step": 900})
    model.record(_record(901, loss=1e13, lr=0.5, mfu=0.9))
    model.record(_record(911))
    assert model.left_s == pytest.approx(89)
    model.event({"event": "train_end"})
    model.event({"event": "train_start", "total_steps": 20, "step": 0})
    assert "loss" not in model.line() and "lr" not in model.line()
    model.record({"step": 1, "loss": 3.5, "samples_per_s": 10.0, "time": 300.0})
    assert model.line() == "update 1/20  loss 3.5000  10 samples/s"


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_or_none_is_forgotten_with_the_next(odd: str) -> None:
    model = ProgressModel()
    model.record(_record(1, loss=odd, tokens_per_s=None))
    model.record(_record(2, loss=odd))
    assert f"update 2  loss {odd}" in model.line()
    model.record(_record(3))
    assert "loss 2.0000" in model.line()


def test_without_a_terminal_there_are_lines_and_no_control_characters() -> None:
    stream = io.StringIO()
    sink = ProgressSink(stream)
    sink.event({"event": "train_start", "total_steps": 2, "step": 0})
    sink.records([_record(1)])
    sink.records([_record(2)])
    sink.event({"event": "train_end"})
    sink.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "training from update 0 of 2" and lines[-1].startswith("update 2/2")
    assert all(c.isprintable() or c == "\n" for c in stream.getvalue())


def test_a_run_folder_gets_a_record_for_every_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ech.evidence.RunDir.create(tmp_path, "here")
    for name, value in run.to_env().items():
        monkeypatch.setenv(name, value)
    unit = Regression(accumulate=2, clip_grad_norm=1.0)
    ech.fit(unit, [batch(4, 0), batch(2, 1), batch(3, 2)], [batch(5, 3)], max_epochs=1)
    training = [r for r in read_lines(run.metrics) if "loss" in r]
    evaluation = [r for r in read_lines(run.metrics) if "eval_loss" in r]
    assert [r["step"] for r in training] == [1, 2]  # updates
    assert all(r["grad_norm"] > 0 and r["lr"] == 0.1 and r["samples_per_s"] > 0 for r in training)
    assert evaluation == [{"step": 2, "eval_loss": unit.eval_loss, "time": evaluation[0]["time"]}]
    events = [e["event"] for e in read_lines(run.events(0))]
    assert events == ["train_start", "eval_start", "eval_end", "train_end"]


def test_a_failed_run_says_so_in_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ech.evidence.RunDir.create(tmp_path, "here")
    for name, value in run.to_env().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError):
        ech.train(Regression(), [(batch(4, 0)[0][:, :2], batch(4, 0)[1])], max_epochs=1)
    assert read_lines(run.events(0))[-1]["event"] == "exception"


def test_a_run_that_is_read_whole_at_once_is_shown_in_its_order(tmp_path: Path) -> None:
    """A busy machine: the launcher looks for the first time when all is over."""
    run = ech.evidence.RunDir.create(tmp_path, "short")
    stream = io.StringIO()
    screen = RunScreen(run, stream)
    events = [
        {"event": "train_start", "total_steps": 2, "step": 0, "time": 1.0},
        {"event": "train_end", "time": 4.0},
    ]
    run.metrics.write_text("".join(json.dumps({**_record(step), "time": 1.0 + step}) + "\n" for step in (1, 2)))
    run.events(0).write_text("".join(json.dumps(event) + "\n" for event in events))
    screen.close()
    first, last = stream.getvalue().splitlines()
    assert first == "training from update 0 of 2" and last.startswith("update 2/2") and last.endswith("0:00 left")


class _Counting(Regression):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        state.log("height", 3.0)  # as good at first as ever after
        return super().compute_loss(state, data)


def _lines_of_a_run(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is shown of a training with evaluations, which a number that does not improve ends after the second."""
    run = ech.evidence.RunDir.create(folder, name)
    for key, value in run.to_env().items():
        monkeypatch.setenv(key, value)
    ech.train(
        _Counting(),
        [batch(4, 0), batch(4, 1)],
        max_epochs=9,
        eval=[batch(5, 3)],
        checkpoints=ech.Checkpoints(folder / "saved", best=("eval_height", "max")),
        callbacks=[ech.EarlyStopping("eval_height", mode="max", patience=1)],
    )
    model = ProgressModel()
    return [line for event in read_lines(run.events(0)) if (line := model.event(event))]


def test_a_run_says_what_it_measured_why_it_ended_which_checkpoint_is_best_and_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _lines_of_a_run(tmp_path, "first", monkeypatch)
    assert lines[0] == "training from update 0 of 18"
    measured = [line for line in lines if "eval_loss" in line]
    assert len(measured) == 2 and all(line.endswith("eval_height 3.0000") for line in measured)
    assert any(line.startswith("stopped early by eval_height at update 4: 3 does not improve") for line in lines)
    assert "step-00000002  eval_height 3.0000" in next(line for line in lines if line.startswith("best"))
    again = _lines_of_a_run(tmp_path, "again", monkeypatch)
    assert again[0].startswith("stopped early by eval_height") and again[2].startswith("best")
    assert again[1].startswith("training from update 4 of 18, restored from ") and again[1].endswith("step-00000004")


def test_a_loop_of_ones_own_with_nothing_left_to_do_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for name in ("first", "again", "longer"):
        run = ech.evidence.RunDir.create(tmp_path, name)
        for key, value in run.to_env().items():
            monkeypatch.setenv(key, value)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
        options: dict[str, Any] = {"epochs": 3 if name == "longer" else 2, "layout": "none", "checkpoints": tmp_path / "saved"}
        own_loop(torch.nn.Linear(2, 1), data, lambda model, x: model(x).square().mean(), **options)
        shown = ProgressModel()
        said.append(next(line for event in read_lines(run.events(0)) if (line := shown.event(event))))
    assert said[0] == "training from update 0 of 4" and "of 6, restored from" in said[2]
    assert said[1].startswith("training from update 4, restored from ") and said[1].endswith(
        ": 2 epochs reached, nothing is left to train"
    )


def test_an_event_that_holds_anything_is_shown_or_left_out() -> None:
    model = ProgressModel()
    for logged in (None, 3, [], {"a\x1b[2J": 1.0, "b": "x", "c": "nan"}):
        line = model.event({"event": "eval_end", "step": 2, "eval_loss": None, "logged": logged})
        assert line is None or ("\x1b" not in line and "eval_c nan" in line and "eval_b" not in line)
    many = model.event({"event": "eval_end", "step": 2, "logged": {f"n{i}": i for i in range(40)}})
    assert many is not None and many.endswith("and 32 more")


_UNIT = """
import sys, logging, torch, echelon as ech
class Fit(ech.AutoUnit):
    def compute_loss(self, state, data):
        state.log("height", 3.0)
        return self.module(data).square().mean(), None
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None
if len(sys.argv) > 2: logging.basicConfig(level=sys.argv[2])
loader = ech.Loader(torch.ones(8, 2), global_batch=4)
stop = ech.EarlyStopping("eval_height", mode="max", patience=1)
unit = Fit(module=torch.nn.Linear(2, 1), layout="none")
ech.train(unit, loader, max_updates=int(sys.argv[1]), eval=loader, checkpoints="saved", callbacks=[stop])
"""
_OWN = """
import sys, torch, echelon as ech
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
model, optimizer, loader = ech.prepare(model, optimizer, loader, checkpoints="saved")
for _ in ech.epochs(loader, int(sys.argv[1])):
    for x in loader:
        with ech.window(model) as window:
            window.backward(model(x).square().mean())
            optimizer.step()
"""


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_script_without_a_launcher_says_where_it_goes_on_why_it_ends_and_where_it_saved(tmp_path: Path) -> None:
    def run(script: str, folder: str, *args: str) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-c", script, *args]
        env = clean_environment()
        done = subprocess.run(command, cwd=tmp_path / folder, capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 0 and done.stdout == "", done.stderr
        return done.stderr.splitlines()

    assert run(_OWN, "own", "1") == ["echelon: checkpoint saved/step-00000002"]
    resumed = "echelon: training from update 2 of 4, restored from saved/step-00000002"
    assert run(_OWN, "own", "2") == [resumed, "echelon: checkpoint saved/step-00000004"]
    complete = "echelon: training from update 4, restored from saved/step-00000004: 2 epochs reached, nothing is left to train"
    assert run(_OWN, "own", "2") == [complete]
    assert run(_UNIT, "unit", "2") == ["echelon: checkpoint saved/step-00000002"]
    again = "training from update 2 of 2, restored from saved/step-00000002: max_updates=2 reached, nothing is left to train"
    assert run(_UNIT, "unit", "2") == [f"echelon: {again}"]
    stopped = run(_UNIT, "unit", "9")
    assert stopped[1].startswith("echelon: stopped early by eval_height at update 4: 3 does not improve")
    assert stopped[2:] == ["echelon: checkpoint saved/step-00000004"]
    assert run(_UNIT, "quiet", "2", "WARNING") == []
    assert [line for line in run(_UNIT, "quiet", "2", "INFO") if again in line] == [f"INFO:echelon:{again}"]
    assert "INFO:echelon:" not in run(_UNIT.replace(', checkpoints="saved", callbacks=[stop]', ""), "unsaved", "2", "INFO")
