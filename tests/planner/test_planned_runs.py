"""`echelon run --plan`: what was planned is kept with the run, and its report says beside it what was measured; a plan's page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from echelon.planner.memory import Answer, Picture
from echelon.planner.page import page
from echelon.planner.trace import KINDS
from tests.kit.plans import TRAINS, UNIT, Command
from tests.kit.run_folders import START, make_run, page_of, training

GIB = 2**30


def _planned(tmp_path: Path, planned: Any, **measured: float) -> str:
    records = [{**training(step, 1.0), "time": START + 0.5 * step, **measured} for step in range(1, 9)]
    run = make_run(tmp_path, records)
    run.run_json.write_text(json.dumps(json.loads(run.run_json.read_text()) | {"planned": planned}))
    text = page_of(run).text()
    return text[text.index("Planned and measured") :][:160] if "Planned and measured" in text else ""


def test_a_report_says_what_was_planned_beside_what_was_measured(tmp_path: Path) -> None:
    planned = {"device": "h100-sxm", "layout": "fsdp", "peak": 33 * GIB, "seconds": 0.4, "tokens": 1, "samples": 1}
    shown = _planned(tmp_path, planned, memory_peak_bytes=30.0 * GIB)
    assert "fsdp on h100-sxm planned measured, rank 0 planned is off by memory of a rank 33 GiB 30 GiB +10.0%" in shown
    assert "an update 400 ms 500 ms -20.0%" in shown


@pytest.mark.parametrize(
    "planned",
    [None, [], {}, {"peak": "much"}, {"peak": -1}, {"peak": math.nan}, {"peak": math.inf}, {"peak": 10**400, "seconds": True}],
)
def test_a_plan_that_says_nothing_is_left_out(tmp_path: Path, planned: Any) -> None:
    assert "an update" not in _planned(tmp_path, planned)


def test_a_run_keeps_its_plan_which_holds_for_fewer_ranks_too(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(UNIT + TRAINS)
    several = ("run", "--ranks", "1:2", "--max-restarts", "1", "--layout", "fsdp")
    done = echelon_command(*several, "--plan", "h100-sxm", "train.py")
    assert done.returncode == 0 and "on 2 ranks" in done.stderr and "on 1 ranks" in done.stderr, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    planned = json.loads((run / "run.json").read_text())["planned"]
    assert planned["layout"] == "fsdp" and planned["device"] == "h100-sxm" and planned["peak"] > 0 < planned["seconds"]
    assert echelon_command("report", str(run)).returncode == 0
    assert "Planned and measured" in (run / "report.html").read_text()

    both = planned["peak"] * 3 // 2048  # enough for a rank of two, whose parameters are halves
    done = echelon_command(*several, "--plan", f"{both}KiB", "train.py")
    assert done.returncode == 2 and "with 1 ranks" in done.stderr and len(list((tmp_path / "runs").iterdir())) == 1, done.stderr


# --- the page of a plan

MIB = 2**20
HELD = {"parameters": 4 * MIB, "activations": 12 * MIB}
MEMORY = [
    [4 * MIB if kind == "parameters" else part * MIB if kind == "activations" else 0 for kind in KINDS] for part in (0, 12, 3)
]


def _answer(layout: str = "fsdp", **more: object) -> Answer:
    shares = {("product", False): [1.0, 0.5, 0.0], ("all-gather", True): [0.0, 0.25, 0.75]}
    return Answer(layout, True, peak=16 * MIB, by_kind=HELD, seconds=1.0, verdict="fits", picture=Picture(MEMORY, shares), **more)  # type: ignore[arg-type]


def test_a_page_needs_nothing_else_and_names_are_text() -> None:
    text = page([_answer("<script>alert(1)</script>"), Answer("pp=2", False, why="no")], 0, "a <table>", "<train>.py")
    assert "<script" not in text and "a &lt;table&gt;" in text and "&lt;train&gt;.py" in text
    assert not re.search(r"(src|href|url)\s*[=(]", text)
    assert page([Answer("ddp", True, why="it cannot be traced")], 0, "nothing", "train.py").count("<svg") == 0
