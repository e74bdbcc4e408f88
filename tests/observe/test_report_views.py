"""What the report shows beyond one run's curves: runs compared, ranks, marks; and what its script does in a browser."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echelon.contracts.times
from echelon.cli.main import main
from echelon.common.errors import RunFolderError
from echelon.common.files import parse_object
from echelon.contracts.events import record_of
from echelon.contracts.run_dir import RunDir
from echelon.observe import report
from echelon.observe.attempt_times import times_of
from echelon.observe.columns import Columns, number
from echelon.observe.goodput import goodput
from echelon.observe.report.ranks import spent_of
from tests.kit import browser
from tests.kit.refusals import refused
from tests.kit.run_folders import PAYLOADS, START, Page, evaluation, make_run, page_of, stretch, times, training

# Reading

VALUES = st.none() | st.booleans() | st.floats() | st.integers(-3, 3) | st.sampled_from(["nan", "-inf", "x", 10**400, 1e308, [1]])


@given(st.lists(st.dictionaries(st.sampled_from(["step", "loss", "lr"]), VALUES), max_size=30))
def test_numbers_are_read_in_batches_as_they_would_be_one_by_one(records: list[dict[str, Any]]) -> None:
    columns = Columns()
    columns.add(iter(records))
    for name in ("loss", "lr"):
        expected: dict[float, float] = {}
        for record in records:
            step, value = number(record.get("step")), number(record.get(name))
            if step is not None and math.isfinite(step) and value is not None:
                expected[step] = value
        assert list(map(repr, columns.line(name))) == list(map(repr, sorted(expected.items())))


LINES = st.binary(max_size=12) | st.recursive(
    st.floats() | st.text(max_size=3), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
).map(lambda value: json.dumps(value).encode())


@pytest.mark.full
@given(LINES, st.sampled_from([b"", b" ", b"\xef\xbb\xbf", b"{}", b"[" * 70]))
def test_a_line_is_read_quickly_as_it_is_read_slowly(line: bytes, around: bytes) -> None:
    for each in (line, around + line, line + around, b'{"a":' + around + line + b"}"):
        assert repr(record_of(each)) == repr(parse_object(each))


def test_a_file_of_many_names_is_read_up_to_a_thousand(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, [{"step": 1, **{f"k{i}": 1.0 for i in range(2000)}}]))
    assert "more names of numbers than are read" in page.text()
    assert len(page.charts()) == 24


# Numbers of one's own, marks, reasons


def test_numbers_of_ones_own_have_a_chart_with_their_evaluations(tmp_path: Path) -> None:
    records = [training(s, 1.0, accuracy=s / 10) for s in range(1, 9)] + [{"step": 4, "eval_accuracy": 0.5, "time": 1.0}]
    (own,) = [
        c
        for c in page_of(make_run(tmp_path, records)).charts()
        if [s["label"] for s in c["series"]] == ["training", "evaluation"]
    ]
    assert own["series"][0]["y"] == [s / 10 for s in range(1, 9)] and own["series"][1]["y"] == [0.5]


def test_restarts_and_checkpoints_are_marks_on_every_chart(tmp_path: Path) -> None:
    events = [
        {"event": "train_start", "step": 4, "time": START},
        {"event": "checkpoint_saved", "step": 8, "time": START + 1},
    ]
    page = page_of(make_run(tmp_path, [training(s, 1.0) for s in range(11)], [{"exit_code": 1}, {"exit_code": 0}], events))
    assert page.facts()["marks"] == [[4, "restart", "attempt 1 begins"], [8, "checkpoint", "saved"]]


def test_the_reason_that_was_found_is_told_first_and_what_it_says_is_not_said_again(tmp_path: Path) -> None:
    failure = {"rank": 2, "kind": "ValueError", "message": "bad", "traceback": "T"}
    end = {
        "exit_code": 1,
        "first_failure": failure,
        "explained": "Rank 2 raised <b> while 0 and 1 waited; token=hf_abcdefghijklmnopqrstuvwxyzab",
    }
    page = page_of(make_run(tmp_path, ends=[end]))
    assert "Failure on rank 2: ValueError Rank 2 raised <b> while 0 and 1 waited" in page.text()
    assert "hf_abc" not in page.text()
    for message, is_told in (("bad batch", False), ("another", True)):
        failure = {"rank": 2, "kind": "ValueError", "message": message, "traceback": "T"}
        end = {"exit_code": 1, "first_failure": failure, "explained": "Rank 2 raised ValueError: bad batch."}
        page = page_of(make_run(tmp_path / message, ends=[end]))
        assert (("p", message) in page.texts) == is_told and ("p", end["explained"]) in page.texts


def test_the_clock_shows_what_was_lost_between_attempts(tmp_path: Path) -> None:
    ends = [
        {"exit_code": 1, "started": START, "ended": START + 50},
        {"exit_code": 0, "started": START + 80, "ended": START + 100},
    ]
    text = page_of(make_run(tmp_path, ends=ends)).text()
    assert "2 attempts in 1m 40s, 30.0s of it between attempts" in text


# Ranks


def heat(page: Page) -> dict[str, Any]:
    return next(
        c for text in page.texts if text[0] == "script" and text[1].startswith("{") and "layers" in (c := json.loads(text[1]))
    )


def test_a_rank_that_loads_slowly_stands_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(s, 1.0) for s in range(9)])
    for rank in range(3):
        slow = 0.030 if rank == 1 else 0.001
        times(
            run, 0, rank, stretch(0, 50, data=0.001, forward=0.01), stretch(50, 100, data=slow, forward=0.01, wait=0.031 - slow)
        )
    page = page_of(run)
    data = heat(page)["layers"]["data"]
    assert [row[0] for row in data] == [1.0, 1.0, 1.0] and [row[-1] for row in data] == [1.0, 30.0, 1.0]
    own = heat(page)["layers"]["its own time"]
    assert [row[-1] for row in own] == [11.0, 40.0, 11.0]  # the others wait, which is not their own
    assert "1 26 ms 25.5 ms data 15.5 ms forward 10 ms waiting for other ranks 0.5 ms train.py:41 in load" in page.text()
    assert [a["aria-label"] for tag, a in page.elements if a.get("class") == "bar"][1].startswith("data 15.5 ms, forward 10 ms")


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, ends=[{"exit_code": 1}, {"exit_code": 0}])
    times(run, 0, 0, stretch(0, 60, forward=0.01))
    times(run, 1, 0, stretch(40, 100, forward=0.02))
    (spent,), steps = spent_of(times_of(run))
    assert steps == (0, 100) and spent.steps == pytest.approx(100, abs=2)
    assert spent.cells[-1][1][1] / spent.cells[-1][0] == pytest.approx(0.02)
    # A start that took no step hides nothing.
    run = make_run(tmp_path / "none", ends=[{"exit_code": 1}, {"exit_code": 1}])
    times(run, 0, 0, stretch(0, 60, forward=0.01))
    times(run, 1, 0, {"steps": [0, 0], "wall_s": 1.0, "other_s": 1.0})
    (spent,), _ = spent_of(times_of(run))
    assert spent.steps == pytest.approx(60)


@pytest.mark.full
def test_a_thousand_ranks_are_shown_in_groups_by_their_slowest(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for rank in range(1000):
        times(run, 0, rank, stretch(0, 10, forward=0.5 if rank == 777 else 0.01))
    page = page_of(run)
    found = heat(page)
    assert len(found["ranks"]) <= 64 and len(report.render(run)) < 500_000
    assert [name for name, row in zip(found["ranks"], found["layers"]["forward"], strict=True) if row[0] == 500] == ["768 to 783"]
    assert "The 16 slowest of 1000 ranks." in page.text() and "777 500 ms 500 ms" in page.text()


def test_goodput_and_the_slow_rank_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(s, 1.0) for s in range(9)])
    for rank in range(3):
        data = 0.06 if rank == 1 else 0.001
        parts = {"data": data, "forward": 0.01, "wait": 0.061 - data, "eval": 0.01}
        records = [stretch(s, s + 20, **parts) | {"time": START + 10 + s * 0.08, "own_s": data + 0.01} for s in range(0, 200, 20)]
        times(run, 0, rank, *records)
    text = page_of(run).text()
    assert "Rank 1 on node1 takes 6.4 x as long as the others: its data, train.py:41 in load." in text
    # Of 90 s from start to end: 200 steps of 81 ms, of which 10 ms are evaluation and 60 ms its wait for data.
    assert "Goodput 2% of the wall time" in text and "data 12.0s 13.3% waiting for batches" in text


def test_the_records_of_a_few_ranks_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day of a thousand ranks is six million records. Held are those of the critical rank, the last and this one."""
    run = make_run(tmp_path, [training(1, 1.0)])
    ranks, records = 20, 200
    for rank in range(ranks):
        times(run, 0, rank, *(stretch(s, s + 1, forward=0.01, wait=0.001 * rank) for s in range(records)))
    held: dict[int, weakref.ref[Any]] = {}
    most, parse = 0, echelon.contracts.times.parse

    def counted(line: Any) -> Any:
        nonlocal most
        record = parse(line)
        assert record is not None
        held[id(record)] = weakref.ref(record, lambda _, key=id(record): held.pop(key, None))
        most = max(most, len(held))
        return record

    monkeypatch.setattr(echelon.contracts.times, "parse", counted)
    found = goodput(run)
    assert found is not None and most <= 3 * records + 1
    assert "Where the time goes" in report.render(run) and most <= 3 * records + 1 + 32 * ranks


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_times_stay_text(tmp_path: Path, payload: str) -> None:
    shapes = []
    for name, text in (("a", "harmless"), ("b", payload)):
        run = make_run(tmp_path / name)
        times(run, 0, 0, stretch(0, 10, forward=0.1) | {"line": text, "host": text})
        shapes.append(page_of(run).shape())
    assert shapes[0] == shapes[1]


# Several runs


def three(folder: Path, names: tuple[str, ...] = ("a", "b", "c")) -> list[RunDir]:
    runs = []
    for n, name in enumerate(names):
        records = [training(s, 10.0 / s + n) for s in range(1, 101)] + [evaluation(50, 1.0 + n)]
        versions, args = {"torch": "2.11", "python": f"3.1{n}"}, ["--lr", str(n), "--fast" if n else "--slow", "data.txt"]
        runs.append(make_run(folder / str(n), records, name=name, args=args, versions=versions, secret_token=f"s{n}", ranks=2))
    return runs


def test_runs_are_compared_in_every_chart_and_by_their_numbers_and_settings(tmp_path: Path) -> None:
    page = Page(report.render(*three(tmp_path)))
    assert [s["label"] for s in page.charts()[0]["series"] if s["kind"] == "smooth"] == ["a", "b", "c"]
    assert [(s["label"], s["y"]) for s in page.charts()[0]["series"] if s["kind"] == "points"] == [
        (f"{name}, evaluation", [1.0 + n]) for n, name in enumerate("abc")
    ]
    assert {s["run"] for c in page.charts() for s in c["series"]} == {0, 1, 2}
    assert "c finished 2.105 mean of the last 10" in page.text()
    # Of their settings only what differs is listed.
    listed = page.text().partition("Differences")[2].partition("other settings are the same")[0]
    assert (
        "versions.python 3.10 3.11 3.12" in listed
        and "--lr 0 1 2" in listed
        and "--slow data.txt \N{EN DASH} \N{EN DASH}" in listed
    )
    assert "versions.torch" not in listed and "ranks" not in listed


def test_runs_of_one_name_are_called_by_their_folders(tmp_path: Path) -> None:
    page = Page(report.render(*three(tmp_path, ("same", "same", "c"))))
    labels = [s["label"] for s in page.charts()[0]["series"] if s["kind"] == "smooth"]
    assert labels[0] != labels[1] and labels[0].endswith("/0") and labels[2] == "c"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_names_of_compared_runs_stay_text(tmp_path: Path, payload: str) -> None:
    shapes = [
        Page(report.render(*three(tmp_path / n, (text, "b", "c")))).shape() for n, text in (("x", "harmless"), ("y", payload))
    ]
    assert shapes[0] == shapes[1]


def test_too_many_runs_are_refused_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with refused(RunFolderError):
        report.compare([make_run(tmp_path)] * 25, tmp_path / "c.html")
    with refused(RunFolderError):
        report.compare([RunDir(tmp_path / "gone")], tmp_path / "c.html")


def test_the_page_itself_is_small(tmp_path: Path) -> None:
    assert len(report.render(make_run(tmp_path)).encode()) < 110_000


# In a browser

needs_browser = pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def noisy(step: int) -> float:
    return 2.0 + 50.0 / step + (step * 7919 % 101) / 100 + (40.0 if step == 700 else 0.0)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    events = [{"event": "train_start", "step": 400, "time": START}]
    for name in ("a", "b"):
        records = [training(s, noisy(s), accuracy=s / 1000) for s in range(1, 1201)] + [evaluation(s, 2.0) for s in (300, 600)]
        run = make_run(folder / name, records, [{"exit_code": 1}, {"exit_code": 0}], events, name=name)
        for rank in range(4):
            times(run, 1, rank, stretch(0, 600, data=0.01), stretch(600, 1200, data=0.03 if rank == 2 else 0.01, forward=0.02))
    report.write(RunDir(folder / "a"))
    report.compare([RunDir(folder / "a"), RunDir(folder / "b")], folder / "both.html")
    return folder


def choose(opened: browser.Browser, which: str, value: str) -> None:
    change = "e.dispatchEvent(new Event('input', {bubbles: true}))"
    opened.run(f"const e = document.querySelector({which!r}); e.value = {value!r}; {change}")


LEVELS = "charts[0].left.map(mark => mark[1])"


SMOOTH = "charts[0].uplot.data[2]"


def press(opened: browser.Browser, where: str, key: str, *, shift: bool = False) -> str:
    """Press a key on an element that has the focus; the text of its tip."""
    event = f"new KeyboardEvent('keydown', {{key: {key!r}, shiftKey: {str(shift).lower()}, bubbles: true}})"
    found = (
        f"const e = document.querySelector({where!r}); e.focus(); e.dispatchEvent({event}); const tip = e.querySelector('.tip');"
    )
    return str(
        opened.run(
            f"{found} return getComputedStyle(tip).visibility + ': ' + [...tip.children].map(c => c.textContent).join(' ')"
        )
    )


@pytest.mark.full
@needs_browser
@pytest.mark.parametrize("name", ["a/report.html", "both.html"])
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_a_page_opens_without_a_word_on_the_console(
    chromium: browser.Browser, pages: Path, name: str, width: int, dark: bool
) -> None:
    seen = chromium.open(f"file://{pages / name}", width=width, dark=dark)
    assert (seen.errors, seen.overflow, len(seen.requests)) == ([], 0, 1)
    paper = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 26)" if dark else "rgb(252, 252, 250)")


@pytest.mark.full
@needs_browser
def test_the_reader_chooses_smoothing_and_scale(chromium: browser.Browser, pages: Path) -> None:
    chromium.open(f"file://{pages}/a/report.html", width=1200, dark=False)
    before = chromium.run(f"return {SMOOTH}")
    choose(chromium, "#smoothing", "4")
    assert chromium.run(f"return {SMOOTH}") != before
    choose(chromium, "#smoothing", "2")
    assert chromium.run(f"return {SMOOTH}") == before
    assert chromium.run(f"return {LEVELS}") == ["0", "20", "40", "60"]
    choose(chromium, "#scale", "powers")
    assert chromium.run("return document.querySelector('.unit').textContent") == "loss (log scale)"
    assert chromium.run(f"return {LEVELS}") == ["2", "5", "10", "20", "50", "100"]
    choose(chromium, "#smoothing", "0")
    assert chromium.run("return charts[0].uplot.series.map(s => s.show)") == [True, True, False, True]


@needs_browser
def test_the_curve_runs_through_the_records_and_breaks_where_one_is_not_finite(chromium: browser.Browser, tmp_path: Path) -> None:
    losses = [0.0, 10.0, math.nan, 5.0, 5.0, -math.inf, 5.0]
    page = report.write(make_run(tmp_path, [training(s, loss) for s, loss in enumerate(losses)]))
    chromium.open(f"file://{page}", width=1200, dark=False)
    assert chromium.run("return charts[0].uplot.data") == [[s / 6 for s in range(7)], [0, 1, None, 0.5, 0.5, None, 0.5]]
    assert chromium.run("return charts[0].alone(charts[0].uplot.data[1])") == [6]  # a dot: no line leads to it
    assert press(chromium, ".plot", "Home") == "visible: update 0 training 0"
    press(chromium, ".plot", "ArrowRight")
    assert press(chromium, ".plot", "ArrowRight") == "visible: update 2 training nan"


@pytest.mark.full
@needs_browser
def test_a_part_of_the_updates_is_seen_closer_in_every_chart(chromium: browser.Browser, pages: Path) -> None:
    chromium.open(f"file://{pages}/a/report.html", width=1200, dark=False)
    shown = "return charts.map(c => [c.uplot.scales.x.min, c.uplot.scales.x.max])"
    assert chromium.run(shown)[0] == [0, 1]
    chromium.run("charts[1].uplot.setSelect({left: 0, top: 0, width: charts[1].uplot.over.clientWidth / 4, height: 9})")
    parts = chromium.run(shown)
    assert parts == [parts[0]] * len(parts) and parts[0] == pytest.approx([0, 0.25], abs=0.01)
    assert press(chromium, ".plot", "End").startswith("visible: update 1200 ")  # a key leads there, and the view follows
    assert chromium.run(shown)[0][1] == 1
    press(chromium, ".plot", "-"), press(chromium, ".plot", "-")
    assert chromium.run(shown)[0] == [0, 1] and chromium.run("return document.getElementById('whole').hidden")
    press(chromium, ".plot", "+")
    chromium.run("document.getElementById('whole').click()")
    assert chromium.run(shown)[0] == [0, 1]


@needs_browser
def test_a_spike_makes_the_axis_logarithmic(chromium: browser.Browser, tmp_path: Path) -> None:
    page = report.write(make_run(tmp_path, [training(s, 1e4 if s == 3 else 1.0) for s in range(4)]))
    chromium.open(f"file://{page}", width=1200, dark=False)
    assert chromium.run("return document.querySelector('.unit').textContent") == "loss (log scale)"
    assert chromium.run("return charts[0].uplot.data[1]") == [0, 0, 0, 1]


HOSTILE = [
    *([0.0, 0.0], [5.0, 5.0], [1.0, math.nextafter(1.0, 2.0)], [0.0, 5e-324]),
    *([-1e300, 1e300], [1e-300, 1e300], [-5e-324, 0.0]),
]


@pytest.mark.full
@needs_browser
def test_values_of_any_size_are_drawn(chromium: browser.Browser, tmp_path: Path) -> None:
    """Each in a chart of its own, with a million in between."""
    columns = {f"k{n}": ends for n, ends in enumerate([*HOSTILE, [math.nan, math.nan], [3.0, math.inf]])}
    records = [training(s, 1.0) | {name: ends[n] for name, ends in columns.items()} for n, s in enumerate((0, 10**15))]
    page = report.write(make_run(tmp_path, records))
    for scale in ("fits", "powers"):
        seen = chromium.open(f"file://{page}", width=390, dark=True)
        choose(chromium, "#scale", scale)
        assert (seen.errors, seen.overflow) == ([], 0)
        for chart in chromium.run("return charts.map(c => [c.left, c.bottom, c.uplot.data[1]])"):
            left, bottom, values = chart
            assert 2 <= len(left) <= 9 and len(bottom) >= 2 and all(0 <= v <= 1 for v in values if v is not None)
            assert len({name for _, name in left}) == len(left) and [at for at, _ in left] == sorted(at for at, _ in left)
            assert left[0][0] == 0 and left[-1][0] == 1


@pytest.mark.full
@needs_browser
def test_the_charts_and_the_map_answer_to_keys(chromium: browser.Browser, pages: Path) -> None:
    chromium.open(f"file://{pages}/a/report.html", width=1200, dark=False)
    assert press(chromium, ".plot", "End").startswith("visible: update 1200 training")
    assert press(chromium, ".plot", "Home").startswith(f"visible: update 1 training {noisy(1):.9g} smoothed")
    assert press(chromium, ".plot", "Escape").startswith("hidden")
    cells = ".heat .cells"
    assert press(chromium, cells, "End") == "visible: rank 0 from update 1190 its own time 30 ms"
    press(chromium, cells, "ArrowDown")
    assert press(chromium, cells, "ArrowDown") == "visible: rank 2 from update 1190 its own time 50 ms"
    assert press(chromium, cells, "Home") == "visible: rank 2 from update 0 its own time 10 ms"


@pytest.mark.full
@needs_browser
def test_a_window_that_is_made_narrow_has_room_for_all(chromium: browser.Browser, pages: Path) -> None:
    chromium.open(f"file://{pages}/a/report.html", width=1200, dark=False)
    press(chromium, ".plot", "End")
    assert chromium.resized(390) == 0
    assert chromium.run("return charts.every(c => c.uplot.width === c.plot.clientWidth && c.uplot.width < 390)")


@pytest.mark.full
@needs_browser
def test_a_run_is_taken_out_of_a_comparison_and_put_back(chromium: browser.Browser, pages: Path) -> None:
    chromium.open(f"file://{pages}/both.html", width=1200, dark=False)
    shown = "return charts[0].uplot.series.slice(1).filter(s => s.show).length"
    assert chromium.run(shown) == 6
    for left in (3, 6):
        chromium.run("document.querySelector('input[data-run=\"1\"]').click()")
        assert chromium.run(shown) == left


@needs_browser
def test_the_trend_is_calm_and_keeps_gaps_and_the_start(chromium: browser.Browser, pages: Path) -> None:
    chromium.open(f"file://{pages}/a/report.html", width=1200, dark=False)

    def trend(values: list[Any]) -> list[Any]:
        return list(chromium.run(f"return trend({json.dumps(values)}, 40)"))

    gaps = trend(["nan" if s % 7 == 0 else 1.0 for s in range(50)])
    assert all((v == "nan") == (s % 7 == 0) for s, v in enumerate(gaps))
    # A mean would draw a hill of fifty records, and a running sum would carry the rounding error of 1e20 to the end.
    assert trend([1e20 if s == 250 else 1.0 for s in range(500)]) == pytest.approx([1.0] * 500)
    falling = trend([10.0 - s / 10 if s < 50 else 5.0 + (-1) ** s for s in range(100)])
    assert falling[0] == 10.0 and falling[5] == pytest.approx(9.5) and falling[-1] == pytest.approx(5.0, abs=0.7)
    assert all(abs(v) <= 1.001e300 for v in trend([1e300] * 60 + [-1e300] * 60))


@needs_browser
def test_ticks_are_what_a_person_would_write(chromium: browser.Browser, pages: Path) -> None:
    chromium.open(f"file://{pages}/a/report.html", width=1200, dark=False)
    for low, high, names in (
        (0.0, 3e-4, ["0", "1e-4", "2e-4", "3e-4"]),
        (0.3, 0.7, ["0.3", "0.4", "0.5", "0.6", "0.7"]),
        (2.1, 10.9, ["2", "4", "6", "8", "10", "12"]),
        (0.0, 412_000.0, ["0", "100k", "200k", "300k", "400k", "500k"]),
        (-1.5, 2.0, ["-2", "-1", "0", "1", "2"]),
        (0.0, 2.2e6, ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]),
    ):
        assert chromium.run(f"return labels(ticks({low!r}, {high!r}, 5))") == names
    for low, high, names in ((2, 40, ["2", "5", "10", "20", "50"]), (1, 1e4, ["1", "10", "100", "1000", "1e4"])):
        assert chromium.run(f"return powers({low}, {high}).map(powerLabel)") == names


@needs_browser
@pytest.mark.full
def test_a_million_steps_are_one_small_page(chromium: browser.Browser, tmp_path: Path) -> None:
    """Ten seconds to write and two to open are what was measured; ten times as much says that something is wrong."""
    run = make_run(tmp_path)
    with open(run.metrics, "w") as file:
        for s in range(1, 1_000_001):
            loss = 2.0 + s * 7919 % 101 / 100 + (50.0 if s == 345_678 else 0.0)
            file.write(f'{{"step":{s},"loss":{loss},"lr":0.001,"grad_norm":{loss / 2},"tokens_per_s":5e4,"time":1e9}}\n')
    began = time.process_time()
    page = report.write(run)
    assert time.process_time() - began < 100 and page.stat().st_size < 500_000
    assert max(Page(page.read_text()).charts()[0]["series"][0]["y"]) == pytest.approx(52.0 + 345_678 * 7919 % 101 / 100)
    seen = chromium.open(f"file://{page}", width=1200, dark=False)
    assert seen.errors == [] and press(chromium, ".plot", "End").startswith("visible: update 1000000 ")
    assert chromium.run("return performance.getEntriesByType('navigation')[0].loadEventEnd") < 20_000


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a folder that can only be read: it was a traceback, or said that standard output was full."""
    run = make_run(tmp_path, [training(1, 2.0)])
    (run.report / "x").mkdir(parents=True)
    assert main(["report", str(run.path)]) == 1
    assert "report.html cannot be written: " in (said := capsys.readouterr().err) and "--output FILE" in said
    assert main(["report", str(run.path), "--output", str(tmp_path / "page.html")]) == 0 and (tmp_path / "page.html").is_file()
