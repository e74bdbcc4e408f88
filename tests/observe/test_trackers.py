"""Trackers by name, with the real packages: what is in their files is what metrics.jsonl has."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echelon as ech
from echelon.common.errors import LoggerError, UsageError
from echelon.contracts.events import read_lines
from echelon.contracts.run_dir import RunDir, write_json
from echelon.observe.loggers import TrackioLogger, WandbLogger
from echelon.observe.sinks import trackers
from echelon.observe.sinks.background import BackgroundCalls
from echelon.observe.sinks.folder import FolderSink, default_sinks
from tests.conftest import clean_environment
from tests.kit.models import batch
from tests.kit.refusals import refused
from tests.kit.started import wait_until
from tests.kit.units import Regression

RECORDS = [
    {"step": s, "update": s, "loss": 1 / s, "lr": 0.1, "grad_norm": None, "tokens_per_s": 5.0, "time": 1e9 + s} for s in (1, 2, 3)
]
RECORDS += [{"step": 3, "eval_loss": 0.5, "time": 1e9 + 4}, {"step": 4, "loss": "nan", "time": 1e9 + 5}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    made = ech.evidence.RunDir.create(tmp_path / "runs", "mine")
    write_json(made.run_json, {"name": "mine", "ranks": 2, "versions": {"torch": "2"}, "args": ["--lr", "1"]})
    for name, value in made.to_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield made
    end_trackers(made, monkeypatch)


def end_trackers(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the end of a process does."""
    monkeypatch.setenv("ECHELON_TRACK", "")
    assert trackers.trackers(run) == []


def track(names: str, records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank does: the records come in portions."""
    monkeypatch.setenv("ECHELON_TRACK", names)
    sinks = default_sinks()
    for sink in sinks:
        sink.records(records[:2])
        sink.event({"event": "train_start", "time": 1.0})
        sink.records(records[2:])
        sink.close()
    run = RunDir.current()
    assert run is not None
    end_trackers(run, monkeypatch)


def wandb_records(path: Path) -> Iterator[Any]:
    """Of a run that was kept offline: records of protobuf in the form of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block has no room for a header
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def wandb_rows(path: Path) -> list[dict[str, Any]]:
    """Its history."""
    every = [record.history.item for record in wandb_records(path) if record.HasField("history")]
    return [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items} for items in every]


OWN = """
import torch, echelon as ech
from tests.kit.models import batch

model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = ech.prepare(model, optimizer, [batch(4, i) for i in range(2)], layout="none")
for epoch in range(3):
    for x, y in loader:
        with ech.window(model) as window:
            window.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_folder_is_one_run_of_each_tracker_whatever_loop_trains_and_after_a_restart(run: RunDir, tmp_path: Path) -> None:
    """A loop that counts its epochs itself has a run of ours for each of them. Where nobody is logged in, wandb keeps it offline.

    In processes of their own: wandb leaves threads and a process until the end of the one that used it.
    """
    env = {
        **clean_environment(),
        **run.to_env(),
        "HOME": str(tmp_path),
        "ECHELON_TRACK": "wandb,mlflow",
        "PYTHONPATH": os.getcwd(),
    }
    env |= {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", OWN], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "no more numbers" not in done.stderr, done.stderr
        assert "kept offline in" in done.stderr, done.stderr
    paths = sorted(run.path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(paths) == 2 and len({path.name for path in paths}) == 1  # a file of each process, of one run
    rows, written = [wandb_rows(path) for path in paths], read_lines(run.metrics)
    assert [[r["step"] for r in each] for each in rows] == [[1, 2, 3, 4, 5, 6]] * 2
    names = {"step", "loss", "samples_per_s"}
    assert [[r[name] for name in names] for each in rows for r in each] == [[r[name] for name in names] for r in written]
    metrics = list((tmp_path / "mlruns").glob("*/*/metrics/loss"))
    assert len(metrics) == 1 and len(metrics[0].read_text().splitlines()) == 12


def test_folders_of_one_name_are_different_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(trackers, "WandbLogger", lambda *args: seen.append(args[-1]))
    for name in ("a/mine", "b/mine", "a/mine", "\u00e9 t\u00e9"):
        trackers.TRACKERS["wandb"](RunDir(tmp_path / name), {})
    assert seen[0] == seen[2] != seen[1] and all(re.fullmatch(r"(mine|--t-)-[0-9a-f]{12}", each) for each in seen)


@pytest.mark.full
def test_mlflow_gets_numbers_and_settings(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("ECHELON_PROJECT", "of mine")
    track("mlflow", RECORDS, monkeypatch)
    import mlflow

    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("of mine").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "loss")] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert found.data.params["versions.torch"] == "2" and found.data.params["args"] == "--lr 1"
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")


FAILS = """
import torch
from tests.kit.models import batch
from tests.kit.units import Regression
import echelon as ech
from echelon.observe.sinks import trackers

trackers._HURRIED_S = 100.0  # on a busy machine a tracker takes long to begin

class Fails(Regression):
    def on_train_step_end(self, state, data, step, results):
        raise ValueError("planted")

ech.train(Fails(), [batch(2, 0)] * 4, max_epochs=1)
"""


@pytest.mark.usefixtures("forked_programs")
def test_a_training_that_fails_is_a_failed_run_of_its_trackers(run: RunDir, tmp_path: Path) -> None:
    env = {**clean_environment(), **run.to_env(), "HOME": str(tmp_path), "PYTHONPATH": os.getcwd(), "WANDB_MODE": "offline"}
    env |= {"ECHELON_TRACK": "wandb,mlflow", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run([sys.executable, "-c", FAILS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "planted" in done.stderr
    (path,) = (tmp_path / "mlruns").glob("*/*/meta.yaml")
    assert "status: 4" in path.read_text()  # FAILED
    (kept,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    assert [record.exit.exit_code for record in wandb_records(kept) if record.HasField("exit")] == [1]


@pytest.mark.full
def test_trackio_gets_numbers(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    track("trackio", RECORDS, monkeypatch)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as opened:
        rows = [(step, json.loads(text)) for step, text in opened.execute("SELECT step, metrics FROM metrics ORDER BY id")]
    assert [(step, row["loss"]) for step, row in rows if "loss" in row] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert capsys.readouterr().out == ""


def test_tensorboard_and_csv_get_numbers(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard, csv", RECORDS, monkeypatch)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors("loss")][:2] == [(1, 1.0), (2, 0.5)]
    with open(run.path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["eval_loss"]) for row in rows][2] == ("3", str(1 / 3), "0.5")


def test_a_training_run_is_tracked_with_what_it_logs(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Logs(Regression):
        def compute_loss(self, state: Any, data: Any) -> Any:
            state.log("rows", float(len(data[0])))
            return super().compute_loss(state, data)

    monkeypatch.setenv("ECHELON_TRACK", "csv")
    ech.fit(Logs(), [batch(4, 0), batch(2, 1)], [batch(5, 3)], max_epochs=1)
    with open(run.path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    written = [r for r in read_lines(run.metrics) if "rows" in r]
    assert [float(row["rows"]) for row in rows] == [r["rows"] for r in written] == [4.0, 2.0]
    assert rows[-1]["eval_rows"] == "5.0"


class Broken:
    """A tracker whose server went away."""

    def __init__(self, error: Exception) -> None:
        self.calls, self._error = 0, error

    def log(self, name: str, data: Any, step: int) -> None: ...

    def log_dict(self, payload: Any, step: int) -> None:
        self.calls += 1
        raise self._error

    def flush(self) -> None:
        self.calls += 1

    def close(self) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("gone"), "ConnectionError('gone')"),
        (UsageError("it cannot begin. Set its address."), "it cannot begin. Set its address"),
    ],
)
def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(
    run: RunDir, caplog: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    broken = Broken(error)
    sinks = [FolderSink(run), trackers.TrackerSink("wandb", broken)]
    for sink in sinks:
        sink.records(RECORDS)
        sink.close()
    assert broken.calls == 1 and len(read_lines(run.metrics)) == len(RECORDS)
    assert [r.getMessage() for r in caplog.records] == [
        f"wandb gets no more numbers: {said}. The run continues; metrics.jsonl has them."
    ]


@pytest.mark.full
def test_an_mlflow_server_that_is_away_ends_no_training(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as nobody:  # has the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("ECHELON_TRACK", "mlflow,csv")
        ech.train(Regression(), [batch(4, 0), batch(4, 1)], max_epochs=1)
    assert [r["step"] for r in read_lines(run.metrics)] == [1, 2] and len((run.path / "metrics.csv").read_text().split()) == 3
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("echelon")]
    assert said.startswith("mlflow gets no more numbers: MLflow cannot begin a run") and "MLFLOW_TRACKING_URI" in said


class Slow:
    """A tracker whose server does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers, self.steps, self.threads = threading.Event(), list[int](), set[threading.Thread]()
        self.closed = False

    def log(self, name: str, data: Any, step: int) -> None: ...

    def log_dict(self, payload: Any, step: int) -> None:
        self.threads.add(threading.current_thread())
        self.answers.wait(600)
        self.steps.append(step)

    def flush(self) -> None: ...

    def close(self) -> None:
        self.threads.add(threading.current_thread())
        self.closed = True


@pytest.fixture
def slow(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(trackers, "TRACKERS", {**trackers.TRACKERS, "tensorboard": lambda run, config: made})
    monkeypatch.setattr(trackers, "_FLUSH_S", 0.01)
    monkeypatch.setattr(trackers, "_QUIET_S", 0.01)
    monkeypatch.setattr(trackers, "_END_S", 0.03)
    monkeypatch.setenv("ECHELON_TRACK", "tensorboard")
    yield made
    made.answers.set()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("echelon")]


def test_a_tracker_that_does_not_answer_holds_no_training(
    slow: Slow, run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ech.train(Regression(), [batch(4, i) for i in range(3)], max_epochs=2)
    assert [r["step"] for r in read_lines(run.metrics)] == [1, 2, 3, 4, 5, 6] and slow.steps == []
    slow.answers.set()
    monkeypatch.setattr(trackers, "_END_S", 120.0)
    end_trackers(run, monkeypatch)
    assert slow.steps == [1, 2, 3, 4, 5, 6] and slow.closed
    assert len(slow.threads) == 1 and threading.main_thread() not in slow.threads
    assert all("waiting for" in each for each in said(caplog))


BEGINS_SLOWLY = """
import atexit, time
import echelon as ech
from echelon.observe.sinks import trackers
from tests.kit.models import batch
from tests.kit.units import Regression

class Slow:
    def log_dict(self, numbers, step):
        if step == 1:
            atexit.register(print, "the tracker ends by itself")
            time.sleep(3)

    def flush(self): pass

    def close(self): print("all was given")

trackers.TRACKERS["tensorboard"] = lambda run, config: Slow()
trackers._FLUSH_S = 0.01
ech.train(Regression(), [batch(4, i) for i in range(2)], max_epochs=1)
"""


@pytest.mark.full
def test_a_tracker_that_begins_as_the_process_ends_is_given_all_before_it_ends_itself(run: RunDir) -> None:
    env = {**clean_environment(), **run.to_env(), "ECHELON_TRACK": "tensorboard", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", BEGINS_SLOWLY], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["all was given", "the tracker ends by itself"], done.stderr


def test_a_training_that_fails_does_not_wait_for_its_tracker(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_FLUSH_S", 600.0)
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        ech.train(Regression(), (batch(4, 1 // (2 - i)) for i in range(5)), max_epochs=1)
    assert time.monotonic() - begun < 300


def test_what_a_tracker_has_not_taken_at_the_end_is_said_to_be_cut_off(
    slow: Slow, run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ech.train(Regression(), [batch(4, i) for i in range(3)], max_epochs=1)
    end_trackers(run, monkeypatch)
    waits, cut = said(caplog)
    assert waits == "waiting for tensorboard to take the last numbers, for 0 s at most"
    assert cut.startswith("tensorboard had not ended after 0 s: what it was given last is cut off") and "metrics.jsonl" in cut


def test_a_tracker_that_is_far_behind_says_so_and_leaves_out_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    slow, behind = Slow(), BackgroundCalls("wandb", most=3)
    sink = trackers.TrackerSink("wandb", slow, behind)
    sink.records([{"step": 0, "loss": 1.0}])
    wait_until(lambda: slow.threads, "it is given the first")
    for step in range(1, 8):
        sink.records([{"step": step, "loss": 1.0}])
    (full,) = said(caplog)
    assert full.startswith("wandb is 3 records behind: from now on the oldest")
    slow.answers.set()
    assert behind.settle(120)
    sink.end()
    assert slow.steps == [0, 5, 6, 7]
    assert said(caplog)[1:] == ["wandb was too slow: 4 records were left out there. metrics.jsonl has them."]


OWN_END = """
import atexit, sys
from echelon.observe.sinks.background import BackgroundCalls
from echelon.observe.sinks.trackers import TrackerSink

class Late:
    def log_dict(self, payload, step):
        if step == 0:
            atexit.register(self.close)  # as a tracker's library does when it begins
        print(step, flush=True)
    def flush(self): pass
    def close(self): print("closed", flush=True)

sink = TrackerSink("late", Late(), BackgroundCalls("late"))
sink.records([{"step": n, "loss": 1.0} for n in range(3)])
sink.close()
sink.records([{"step": n, "loss": 1.0} for n in range(3, 300)])
"""


def test_at_the_end_of_a_process_a_tracker_ends_once_and_after_all_it_was_given() -> None:
    done = subprocess.run([sys.executable, "-c", OWN_END], env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [*map(str, range(300)), "closed"] and done.stderr == ""


def test_what_other_threads_print_while_trackio_speaks_is_the_scripts_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Speaks:
        def init(self, **_: Any) -> None:
            print("of trackio")
            other = threading.Thread(target=print, args=("of the script",))
            other.start()
            other.join()

    monkeypatch.setitem(sys.modules, "trackio", Speaks())
    made, usual = TrackioLogger("p"), sys.stdout
    with contextlib.suppress(AttributeError):  # there is no run
        made.log("a", 1.0, 1)
        made.flush()
    monkeypatch.setattr(made, "_end", lambda: None)
    made.close()
    assert capsys.readouterr() == ("of the script\n", "of trackio\n") and sys.stdout is usual


class Counted(Broken):
    """Counts what it is told."""

    def log_dict(self, payload: Any, step: int) -> None:
        self.calls += 1


def test_a_tracker_is_made_once_for_all_trainings_of_a_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counted] = []

    def make(run: RunDir, config: Any) -> Counted:
        made.append(Counted(ValueError()))
        return made[-1]

    monkeypatch.setattr(trackers, "TRACKERS", {**trackers.TRACKERS, "csv": make})
    monkeypatch.setenv("ECHELON_TRACK", "csv")
    exec(OWN, {"__name__": "__main__"})
    ech.train(Regression(), [batch(4, 0)], max_epochs=1)
    assert len(made) == 1 and made[0].calls == 3 * 2 + 1 + 4  # numbers, and four trainings end
    other = ech.evidence.RunDir.create(run.path.parent, "other")
    assert len(trackers.trackers(other)) == 1 and made[0].calls == 12 and len(made) == 2


def test_only_known_trackers_that_are_installed_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trackers.names_of(" csv,tensorboard,,csv") == ["csv", "tensorboard"]
    with refused(LoggerError):
        trackers.names_of("csv,neptune")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(LoggerError):
        trackers.names_of("wandb")


def test_another_rank_logs_nothing_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "wandb", None)
    made = WandbLogger("p")
    made.log("a", 1.0, 1)
    made.close()
    assert not os.path.exists("wandb")


Command = Callable[..., Any]


def test_the_command_refuses_a_tracker_before_it_starts_anything(echelon_command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = echelon_command("run", "--track", "neptune", "train.py")
    assert done.returncode == 2 and "got 'neptune'" in done.stderr and not (tmp_path / "runs").exists()


def test_a_bad_value_of_the_environment_is_blamed_on_its_variable(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_TRACK", "neptune")
    with refused(LoggerError):
        trackers.trackers(run)
