"""Run folders with wrong values in them: whatever reads a folder tells the rest of it, and never ends with a traceback."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from echelon.cli.run import finish
from echelon.contracts.run_dir import RunDir
from echelon.observe import report
from echelon.observe.endpoint import Numbers
from echelon.observe.goodput import goodput
from echelon.observe.top import Watch, lines
from tests.kit.run_folders import START, begun, evaluation, make_run, page_of, stretch, training

Files = dict[str, list[Any]]  # the lines of each, as JSON

FAILURE = {"rank": 1, "kind": "ValueError", "message": "bad batch", "traceback": "Traceback"}
END = {"exit_code": 1, "first_failure": FAILURE, "explained": "Rank 1 raised.", "started": START, "ended": START + 9, "hang": {}}
EVENTS = [
    begun(100) | {"name": "train"},
    {"event": "eval_start", "time": START + 1},
    {"event": "eval_end", "time": START + 2, "step": 3, "eval_loss": 1.5, "within_fit": True},
    {"event": "checkpoint_saved", "step": 3, "time": START + 3, "path": "checkpoints/step-00000003"},
    {"event": "checkpoint_failed", "step": 4, "time": START + 4, "error": "full"},
    {"event": "exception", "kind": "ValueError", "message": "bad batch", "time": START + 4},
    {"event": "stopped", "signal": "SIGTERM", "step": 5, "time": START + 5, "saved": True},
    {"event": "train_end", "step": 5, "time": START + 6},
]
MORE = {"mfu": 0.4, "memory_peak_bytes": 1e9, "alloc_retries": 0, "host_memory_bytes": 1e9, "accuracy": 0.5}
SPENT = dict.fromkeys(("data", "forward", "backward", "optimizer", "wait", "checkpoint", "eval", "other"), 0.01)
WHOLE: Files = {
    "run.json": [
        {"name": "nano", "command": ["train.py"], "ranks": 2, "launcher": "local", "started": START, "versions": {"torch": "2"}}
        | {"git": {"commit": "9f3c", "dirty": True}, "host": "a", "cwd": "/", "script": "train.py", "args": ["--lr", "1"]}
    ],
    "metrics.jsonl": [*(training(s, 1.0 / s, **MORE) for s in range(1, 5)), evaluation(4, 1.5)],
}
for n in range(2):
    WHOLE[f"attempts/00{n}/exit.json"] = [END]
    WHOLE[f"attempts/00{n}/events.rank0.jsonl"] = EVENTS
    for r in range(2):
        records = [stretch(s, s + 20, **SPENT) | {"own_s": 0.01, "gc_s": 0.1, "time": START + s} for s in (0, 20, 40)]
        WHOLE[f"attempts/00{n}/times.rank{r}.jsonl"] = [records[0] | {"startup_s": 1.0, "role": "stage 0"}, *records[1:]]


def written(folder: Path, files: Files) -> RunDir:
    """Numbers that JSON has none for are written as Python reads them: 1e400 is Infinity."""
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True, exist_ok=True)
    return RunDir(folder)


def places(value: Any, *path: Any) -> list[tuple[Any, ...]]:
    """The ways to each value in nested ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, *path, key))]


def replaced(place: tuple[Any, ...], by: Any, files: Files) -> None:
    """If what was there is still there."""
    at: Any = files
    with contextlib.suppress(LookupError, TypeError):
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = by


def survives(run: RunDir) -> None:
    assert report.render(run).endswith("</html>\n")
    watch, registry = Watch(run), CollectorRegistry(auto_describe=False)
    registry.register(Numbers(run))
    for _ in range(2):
        now = watch.look()
        assert lines(now) and generate_latest(registry).endswith(b"\n")
    found = goodput(run)
    assert found is None or (math.isfinite(found.wall_s) and 0 <= found.share <= 1 and str(found))


ODD: list[Any] = [
    *(math.nan, math.inf, -math.inf, "nan", "inf", "-inf", 1e301, -1e301, 1e308, 5e-324, 0, -1, 1, 10**400, -(10**400)),
    *(2**53, 2**63, 1 << 62, 1e12, 4e9, True, None, "", "x", "7", "\u00b2", "\ud800", "\n\x1b[2J", [], {}, [[]], [0, 0], [1e301]),
    *(-0.0, 0.5, {"step": math.nan}, ["train_start"], "train_start", "checkpoint_saved", "eval_start"),
]
PLACES = [place for place in places(WHOLE) if len(place) > 1]


def with_wrong_values(wrong: list[tuple[tuple[Any, ...], Any]]) -> None:
    files = copy.deepcopy(WHOLE)
    for place, value in wrong:
        replaced(place, value, files)
    with tempfile.TemporaryDirectory() as folder:
        survives(written(Path(folder), files))


WRONG = st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(ODD)), min_size=1, max_size=20)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(WRONG)
def test_many_wrong_values_end_nothing_that_reads_a_folder(wrong: list[tuple[tuple[Any, ...], Any]]) -> None:
    with_wrong_values(wrong)


ENDED: dict[tuple[Any, ...], list[Any]] = {
    ("attempts/001/events.rank0.jsonl", 0, "event"): [[], {}, ["train_start"]],
    ("attempts/001/exit.json", 0, "started"): ["-inf", -1e301, math.nan],
    ("attempts/001/events.rank0.jsonl", 3, "step"): ["inf", math.inf, "nan", math.nan],
    ("metrics.jsonl", 0, "step"): [math.nan],
    ("metrics.jsonl", 2, "step"): [math.nan],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in ENDED.items() for value in values], ids=repr)
def test_one_wrong_value_ends_nothing(place: tuple[Any, ...], value: Any) -> None:
    with_wrong_values([(place, value)])


def test_a_step_that_is_no_number_costs_its_record_alone(tmp_path: Path) -> None:
    """One that is not first hides from `max` and `min`, by which a column of numbers is known."""
    run = make_run(tmp_path, [training(s, 1.0) for s in range(1, 6)])
    run.metrics.write_text(run.metrics.read_text().replace('"step": 3', '"step": NaN'))
    assert page_of(run).charts()[0]["series"][0]["x"] == [1, 2, 4, 5]


def test_a_time_that_no_clock_shows_is_not_known(tmp_path: Path) -> None:
    end = {"exit_code": 0, "started": "-inf", "ended": 1e301}
    run = make_run(tmp_path, [training(1, 1.0)], [end], [begun(5), {"event": "train_end", "time": START + 7}])
    assert "Wall time 7.0s" in page_of(run).text() and lines(Watch(run).look())[0] == "nano  finished  2 ranks  0:07"


def test_a_report_that_fails_leaves_a_good_run_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(run: RunDir) -> Path:
        raise ValueError("out of range")

    monkeypatch.setattr(report, "write", broken)
    finish(make_run(tmp_path))
    said = capsys.readouterr().err
    assert "report     not written: ValueError('out of range'). Nothing of the run is lost." in said
    assert f"`echelon report {tmp_path}` tries again" in said and "Traceback" not in said
