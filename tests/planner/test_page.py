"""The page of a plan."""

from __future__ import annotations

import re

from echelon.planner.memory import Answer, Picture
from echelon.planner.page import page
from echelon.planner.trace import KINDS

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
