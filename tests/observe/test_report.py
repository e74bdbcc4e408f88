"""The report: what the page says, that it says so without any error, and that nothing in a file can become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.common.errors import RunFolderError
from echelon.contracts.run_dir import RunDir
from echelon.observe import report
from echelon.observe.columns import Line
from echelon.observe.report.charts import limit_points, means
from echelon.observe.report.text import script_json
from tests.kit.refusals import refused
from tests.kit.run_folders import PAYLOADS, START, Page, evaluation, make_run, page_of, training

# What the page says


def test_a_normal_run_has_its_figures_and_charts_and_none_of_a_norm_that_it_lacks(tmp_path: Path) -> None:
    records = [training(s, 10.0 / s, tokens_per_s=1e3 * s) for s in range(1, 101)]
    page = page_of(make_run(tmp_path, [*records, evaluation(50, 0.25), evaluation(100, 0.5)]))
    last_ten = sum(10.0 / s for s in range(91, 101)) / 10
    assert f"nano finished Train loss {last_ten:.4g} mean of the last 10" in page.text().removeprefix("nano: finished ")
    assert "Eval loss 0.5 best: 0.25 at update 50 Updates 100 of the optimizer Throughput 50.5k tokens/s, median" in page.text()
    assert "Wall time 1m 30s Ranks 2 local Attempts 1" in page.text()
    assert [s["label"] for s in page.charts()[0]["series"]] == ["training", "smoothed", "evaluation"]
    assert page.charts()[0]["series"][2] == {"label": "evaluation", "kind": "points", "x": [50, 100], "y": [0.25, 0.5]}
    assert len(page.charts()) == 4
    page = page_of(make_run(tmp_path / "without", [training(s, 1.0, grad_norm=None) for s in range(1, 9)]))
    assert "Gradient norm" not in page.text()
    assert len(page.charts()) == 3


def test_the_curves_are_in_a_table_for_whoever_cannot_see_them(tmp_path: Path) -> None:
    losses = [4.0, math.nan, 1.0, 3.0]
    page = page_of(make_run(tmp_path, [*(training(s, loss) for s, loss in enumerate(losses)), evaluation(2, 5.0)]))
    assert "Loss training 4 4 at 0 1 at 2 4 at 0 3 at 3 1 nan" in page.text()
    assert "Loss evaluation 1 5 at 2 5 at 2 5 at 2 5 at 2 \N{EN DASH}" in page.text()
    assert [tag for tag, _ in page.elements].count("noscript") == 1


@pytest.mark.parametrize(
    ("end", "title"),
    [
        ({"exit_code": 0}, "nano: finished"),
        ({"exit_code": 1}, "nano: failed with code 1"),
        ({"exit_code": 137, "first_failure": {"rank": 1}}, "nano: failed with code 137"),
        ({"exit_code": 143, "first_failure": {"rank": 1}}, "nano: failed with code 143"),
        ({"exit_code": 143, "first_failure": None}, "nano: stopped"),
        ({"exit_code": 75, "first_failure": None}, "nano: stopped"),
        ({"exit_code": None}, "nano: unknown"),
        (None, "nano: unknown"),
    ],
)
def test_the_title_says_how_the_last_attempt_ended(tmp_path: Path, end: Mapping[str, Any] | None, title: str) -> None:
    page = page_of(make_run(tmp_path, ends=[{"exit_code": 3}, end]))
    assert [text for tag, text in page.texts if tag == "title"] == [title]


def test_a_failure_is_told_with_rank_message_and_traceback(tmp_path: Path) -> None:
    failure = {
        "rank": 3,
        "kind": "ValueError",
        "message": "bad batch\nat row 7",
        "traceback": "Traceback:\n  \x1b[31mhere\x1b[0m",
    }
    page = page_of(make_run(tmp_path, ends=[{"exit_code": 1, "first_failure": failure}]))
    assert "failed with code 1 rank 3: ValueError: bad batch Traceback" in page.text()
    assert "Failure on rank 3: ValueError bad batch at row 7" in page.text()
    assert ("pre", "Traceback:\n  here") in page.texts


def test_tables_of_attempts_checkpoints_and_facts(tmp_path: Path) -> None:
    saved = {"event": "checkpoint_saved", "step": 500, "time": START + 60}
    ends = [{"exit_code": 75, "started": START, "ended": START + 7500}, None]
    run = make_run(
        tmp_path,
        [training(500, 1.0), evaluation(500, 1.25)],
        ends,
        [{"event": "train_start", "time": START + 50}, saved],
        command=["train.py", "--note", "a b"],
        versions={"python": "3.11.7"},
        git={"commit": "9f3c", "dirty": True},
    )
    for name, size in (("step-00000500", 2048), ("step-odd", 3), ("unfinished", 4)):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "data").write_bytes(b"x" * size)
    text = page_of(run).text()
    assert "0 2025-10-09 08:53:20 UTC 2h 05m stopped, exit code 75 none" in text
    assert "1 2025-10-09 08:54:10 UTC 10.0s, to its last event unknown 1, last at update 500" in text
    assert "500 step-00000500 2 KiB 2025-10-09 08:54:20 UTC 1 1.25" in text
    assert "step-odd 3 B unknown" in text
    assert "unfinished" not in text
    assert "command train.py --note 'a b'" in text
    assert "python 3.11.7 git 9f3c, with uncommitted changes" in text


# Missing, broken and repeated records


def test_an_empty_folder_gives_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    text = page_of(RunDir(tmp_path)).text()
    assert f"{tmp_path.name} unknown there is no exit.json" in text
    assert "run.json is missing. metrics.jsonl is missing. attempts/ has no attempt." in text
    assert "metrics.jsonl has no record of an update." in text


def test_unreadable_files_and_a_cut_off_last_line_are_left_out_and_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(1, 2.0), training(2, 1.0)])
    run.metrics.write_text("{half\n" + run.metrics.read_text()[:-9])
    run.run_json.write_text('{"name": ')
    run.exit_json.write_text("[" * 100_000)
    run.events(0).unlink()
    run.events(0).mkdir()
    page = page_of(run)
    text = page.text()
    assert "metrics.jsonl: the last line is not whole and was left out." in text and page.charts()[0]["series"][0]["x"] == [1]
    assert "run.json is not a whole JSON object and was left out." in text
    assert "metrics.jsonl: 1 unreadable line was left out." in text
    assert "attempts/000/exit.json is not a whole JSON object and was left out." in text
    assert "attempts/000/events.rank0.jsonl cannot be read." in text


def test_nan_and_inf_are_told_and_drawn(tmp_path: Path) -> None:
    losses = [4.0, 3.0, math.nan, 2.0, 2.0, math.inf, 1.0]
    loss, *others = page_of(make_run(tmp_path, [training(s, loss) for s, loss in enumerate(losses)])).charts()
    assert loss["not_finite"] == "1 inf, 1 nan" and not any("not_finite" in each for each in others)
    assert loss["series"][0]["y"] == [4, 3, "nan", 2, 2, "inf", 1]
    assert (
        page_of(make_run(tmp_path / "never", [training(s, math.nan) for s in range(100)])).charts()[0]["not_finite"] == "100 nan"
    )


@pytest.mark.parametrize(
    ("losses", "figure"),
    [
        ([9.0] * 5 + [1.0] * 5 + [2.0] * 5, "1.5 mean of the last 10"),
        ([9.0, math.nan, 1.0, 3.0], "2 mean of the last 2"),
        ([9.0, math.inf, 1.0], "1 last record"),
        ([9.0, 8.0, math.inf, math.nan], "nan last finite: 8 at update 1"),
        ([math.inf], "inf never finite"),
        ([], "\N{EN DASH} no record"),
    ],
)
def test_the_final_loss_is_a_mean_that_hides_no_nan(tmp_path: Path, losses: list[float], figure: str) -> None:
    page = page_of(make_run(tmp_path, [training(s, loss) for s, loss in enumerate(losses)]))
    assert f"Train loss {figure} Eval loss" in page.text()


def test_a_resumed_run_shows_the_later_record_of_a_repeated_step_and_all_steps_in_their_order(tmp_path: Path) -> None:
    first = [training(s, 100.0 + s) for s in range(1, 31)]
    again = [training(s, float(s)) for s in range(21, 36)]
    page = page_of(make_run(tmp_path, [*first, evaluation(25, 7.0), *again, evaluation(25, 6.0)]))
    train, evals = page.charts()[0]["series"]
    assert train["x"] == list(range(1, 36))
    assert train["y"] == [100.0 + s for s in range(1, 21)] + [float(s) for s in range(21, 36)]
    assert (evals["x"], evals["y"]) == ([25], [6.0])
    # With another logging interval it writes steps between those that are there.
    page = page_of(make_run(tmp_path / "other", [training(s, float(s)) for s in (10, 20, 30, 15, 25)]))
    assert page.charts()[0]["series"][0]["x"] == [10, 15, 20, 25, 30]


def test_a_number_too_large_for_a_float_counts_as_infinite(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(1, 1.0), training(2, 1.0) | {"loss": 10**400}, training(3, 1.0) | {"step": -(10**400)}])
    page = page_of(run)
    assert page.charts()[0]["not_finite"] == "1 inf"
    assert page.charts()[0]["series"][0]["x"] == [1, 2]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["nan", "-inf", 10**400, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def objects(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(keys, JSON))


@pytest.mark.full
@settings(max_examples=150)
@given(
    about=objects("name", "command", "ranks", "launcher", "started", "versions", "git", "host"),
    end=objects("exit_code", "first_failure", "started", "ended") | st.none(),
    metrics=st.lists(objects("step", "update", "loss", "eval_loss", "lr", "grad_norm", "tokens_per_s", "_per_s"), max_size=6),
    events=st.lists(objects("event", "time", "step"), max_size=3),
)
def test_no_content_of_the_files_is_an_error(
    about: dict[str, Any], end: dict[str, Any] | None, metrics: list[dict[str, Any]], events: list[dict[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), metrics, [end], events, **about)
        assert report.write(run).read_text(encoding="utf-8").endswith("</html>\n")


# Hostile text


def hostile_run(folder: Path, text: str) -> RunDir:
    """A failed run that says `text` wherever text can stand."""
    failure = dict.fromkeys(("rank", "kind", "message", "traceback"), text)
    metrics = [training(s, 1.0, **{f"{text}_per_s": s}) for s in range(1, 60)]
    about: dict[str, Any] = dict.fromkeys(("name", "script", "host", "launcher", "ranks"), text)
    about |= {"command": [text], "versions": {text: text}, "git": {"commit": text, "dirty": True}}
    ends = [{"exit_code": 1, "first_failure": failure}, None, {"exit_code": 1, "first_failure": failure}]
    run = make_run(folder, metrics, ends, [{"event": text, "step": text, "time": 1.0}], **about)
    (run.checkpoints / ("step-" + re.sub(r"[/\x00\ud800]", "_", text))).mkdir()
    return run


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_text_stays_text(tmp_path: Path, payload: str) -> None:
    """The page has the very elements and attributes that harmless text gives it, and the same script and style."""
    harmless, hostile = page_of(hostile_run(tmp_path / "a", "harmless")), page_of(hostile_run(tmp_path / "b", payload))
    assert hostile.shape() == harmless.shape()
    for kind in ("script", "style"):
        ours = [t for tag, t in harmless.texts if tag == kind and not t.startswith("{")]
        assert [t for tag, t in hostile.texts if tag == kind and not t.startswith("{")] == ours
    assert [c["series"][0]["kind"] for c in hostile.charts()] == [c["series"][0]["kind"] for c in harmless.charts()]
    assert [a["href"] for _, a in hostile.elements if "href" in a] == ["#failure"]
    if payload == PAYLOADS[0]:  # shown as it is
        assert {("h1", payload), ("pre", payload)} <= set(hostile.texts)
        assert hostile.charts()[-1]["series"][0]["label"] == f"{payload}/s"


def test_the_page_has_no_address_of_anything_outside(tmp_path: Path) -> None:
    """Nor may anything load one, or run a script or use a style but ours. The licence of what draws is on it."""
    html = report.render(make_run(tmp_path, [training(s, 1.0) for s in range(100)]))
    (script, uplot), (style,) = (
        re.findall(r"<script>(/\*!.*?\*/\n(.*?\n).*?)</script>", html, re.DOTALL)[0],
        re.findall(r"<style>(.*?)</style>", html, re.DOTALL),
    )
    ours = html.replace(uplot, "")
    assert "http" not in ours.replace("http-equiv", "").replace("uPlot", "") and not re.search(r"url\(|@import|\bsrc=", html)
    hashes = (f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}" for text in (style, script))
    assert "content=\"default-src 'none'; style-src '{}'; script-src '{}'\"".format(*hashes) in html
    assert "Copyright (c) 2022 Leon Sorokin" in html and "this permission notice shall be included" in html


@given(JSON.filter(lambda value: "nan" not in repr(value) and "inf" not in repr(value)) | st.sampled_from(PAYLOADS))
def test_json_in_a_script_cannot_end_it(value: object) -> None:
    text = script_json(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value


# Long runs


@pytest.mark.full
def test_a_hundred_thousand_records_are_less_than_a_megabyte_and_quick(tmp_path: Path) -> None:
    records = [training(s, 2.0 + s % 7 / 10 + 50.0 * (s == 77_777), grad_norm=1e3 / (s + 1)) for s in range(100_000)]
    run = make_run(tmp_path, [*records, *(evaluation(s, 2.0) for s in range(0, 100_000, 50))])
    began = time.process_time()
    html = report.render(run)
    took = time.process_time() - began
    assert len(html.encode()) < 1_000_000
    assert took < 20, f"{took:.1f} s"  # about 1 s on an idle machine
    line = Page(html).charts()[0]["series"][0]
    assert (line["x"][0], line["x"][-1]) == (0, 99_999)
    assert max(line["y"]) == 52.0 + 77_777 % 7 / 10
    assert line["x"][line["y"].index(max(line["y"]))] == 77_777


def test_many_keys_attempts_and_notes_are_cut_short(tmp_path: Path) -> None:
    metrics = [training(s, 1.0, **{f"k{k}_per_s": 1.0 for k in range(100)}) for s in range(3)]
    page = page_of(make_run(tmp_path, metrics, ends=[None] * 200))
    assert len(page.charts()) == 3 + 4
    assert "The last 50 of 200." in page.text()
    assert "and 180 more." in page.text()


POINTS = st.lists(st.floats(-1e300, 1e300) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=200).map(
    lambda values: [(float(i), v) for i, v in enumerate(values)]
)


def line_of(points: list[tuple[float, float]]) -> Line:
    return Line([x for x, _ in points], [v for _, v in points])


@given(POINTS, st.integers(2, 50))
def test_thinning_keeps_records_extremes_and_gaps(points: list[tuple[float, float]], limit: int) -> None:
    drawn = list(limit_points(line_of(points), limit))
    assert len(drawn) <= limit * 1.5 + 2
    steps = [x for x, _ in drawn]
    assert steps == sorted(set(steps))
    assert all(points[int(x)][1] is v for x, v in drawn)
    assert (steps[0], steps[-1]) == (points[0][0], points[-1][0])
    finite = [v for _, v in points if math.isfinite(v)]
    if finite:
        assert {min(finite), max(finite)} <= {v for _, v in drawn}
    assert all(map(math.isfinite, [v for _, v in points])) == all(map(math.isfinite, [v for _, v in drawn]))


@given(POINTS)
def test_means_stay_between_lowest_and_highest(points: list[tuple[float, float]]) -> None:
    finite = [v for _, v in points if math.isfinite(v)]
    slack = 1e-9 * max(map(abs, finite), default=0.0)
    for _, v in means(line_of(points), 10):
        assert math.isnan(v) or min(finite) - slack <= v <= max(finite) + slack


def test_write_replaces_the_page_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, [training(1, 1.0)])
    run.report.write_text("old")
    replaced: list[tuple[str, str]] = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        replaced.append((self.read_text(), target.name))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    assert report.write(run) == run.report
    assert replaced == [(report.render(run), "report.html")]
    assert run.report.read_text() == report.render(run)

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    run.metrics.write_text("")
    before = run.report.read_text()
    with pytest.raises(KeyboardInterrupt):
        report.write(run)
    assert run.report.read_text() == before
    assert [p.name for p in tmp_path.glob(".report*")] == []


def test_rendering_changes_nothing_and_repeats_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(1, 1.0)], ends=[None, None])
    before = sorted(tmp_path.rglob("*"))
    assert report.render(run) == report.render(run)
    assert sorted(tmp_path.rglob("*")) == before


# Writing


def test_a_folder_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    with refused(RunFolderError):
        report.write(RunDir(tmp_path / "gone"))
    assert not (tmp_path / "gone").exists()


def test_the_report_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, echelon.observe.report; sys.exit(bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
