"""The page of a plan."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from echelon.planner.devices import device_named
from echelon.planner.links import Links
from echelon.planner.memory import Answer, Picture
from echelon.planner.page import page
from echelon.planner.steps import Collective, Operator
from echelon.planner.timeline import simulate
from echelon.planner.trace import KINDS

MIB = 2**20
HELD = {"parameters": 4 * MIB, "activations": 12 * MIB}
MEMORY = [
    [4 * MIB if kind == "parameters" else part * MIB if kind == "activations" else 0 for kind in KINDS] for part in (0, 12, 3)
]


def _answer(layout: str = "fsdp", **more: object) -> Answer:
    shares = {("product", False): [1.0, 0.5, 0.0], ("all-gather", True): [0.0, 0.25, 0.75]}
    return Answer(layout, True, peak=16 * MIB, by_kind=HELD, seconds=1.0, verdict="fits", picture=Picture(MEMORY, shares), **more)  # type: ignore[arg-type]


def _drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.S)]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    bars, area, lanes = _drawings(page([_answer()], 32 * MIB, "the table", "train.py"))
    widths = {each.attrib["class"]: float(each.attrib["width"]) for each in bars.iter("rect")}
    assert widths["k-activations"] == pytest.approx(3 * widths["k-parameters"], rel=0.01)
    (line,) = bars.iter("line")  # the device's memory, twice of what is needed
    assert float(line.attrib["x1"]) == pytest.approx(2 * sum(widths.values()), rel=0.01)
    assert {each.attrib["class"] for each in area.iter("polygon")} == {"k-parameters", "k-activations"}
    heights = [float(each.attrib["height"]) for each in lanes.iter("rect") if each.attrib["class"] == "k-product"]
    assert heights[0] == pytest.approx(2 * heights[1]) and len(heights) == 2


def test_a_page_needs_nothing_else_and_names_are_text() -> None:
    text = page([_answer("<script>alert(1)</script>"), Answer("pp=2", False, why="no")], 0, "a <table>", "<train>.py")
    assert "<script" not in text and "a &lt;table&gt;" in text and "&lt;train&gt;.py" in text
    assert not re.search(r"(src|href|url)\s*[=(]", text)
    assert page([Answer("ddp", True, why="it cannot be traced")], 0, "nothing", "train.py").count("<svg") == 0


def test_parts_of_an_update_are_shared_by_what_runs_in_them() -> None:
    device = device_named("h100-sxm")
    steps = [
        Operator("aten::mm", "forward", (0,), (1,), 8, "product", 10**12, "bfloat16"),
        Collective("all-reduce", "backward", (1,), (1,), 10**8, (0, 1)),
        Operator("aten::add", "backward", (1,), (2,), 10**9),
    ]
    found = simulate(steps, device, Links(device, 8))
    shares = found.shares(50)
    for (kind, collective), each in shares.items():
        spent = sum(ends - begins for begins, ends, *of in found.spans if tuple(of) == (kind, collective))
        assert sum(each) / 50 * found.seconds == pytest.approx(spent) and min(each) >= 0 and max(each) < 1.001
    assert {kind for kind, _ in shares} == {"product", "all-reduce", "memory"}
