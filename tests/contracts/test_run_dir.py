"""The run folder and the lines in it: what a run leaves behind, whoever was killed while writing."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.common import errors
from echelon.common.errors import EchelonError, RunFolderError, UsageError
from echelon.contracts.events import EventLog, LineReader, encode, read_lines
from echelon.contracts.run_dir import RunDir, find_run, read_json, write_json
from tests.kit.refusals import refused

# ---- the folder -------------------------------------------------------------------------------------------------------------


def test_a_new_run_has_its_folders_and_a_name_used_again_is_one_more_attempt(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "first")
    assert run.path == tmp_path / "runs" / "first" and run.attempt == 0
    assert run.attempt_path.is_dir() and run.checkpoints.is_dir() and run.dumps.is_dir()
    again = [RunDir.create(tmp_path / "runs", "first") for _ in range(2)]
    assert [each.attempt for each in again] == [1, 2] and {each.path for each in again} == {run.path}
    (tmp_path / "gap" / "attempts" / "007").mkdir(parents=True)
    assert RunDir.create(tmp_path, "gap").attempt == 8


def test_two_launchers_never_share_an_attempt_nor_two_unnamed_runs_of_a_second_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        attempts = list(pool.map(lambda _: RunDir.create(tmp_path, "busy").attempt, range(40)))
    assert sorted(attempts) == list(range(40))
    assert len({RunDir.create(tmp_path, None, stem="train").path for _ in range(5)}) == 5


@pytest.mark.parametrize("stem", ["train", "a b/../c", "", "ä" * 100, "-rf"])
def test_a_name_made_from_a_script_is_a_plain_file_name(tmp_path: Path, stem: str) -> None:
    run = RunDir.create(tmp_path, None, stem=stem)
    assert run.path.parent == tmp_path and re.fullmatch(r"[A-Za-z0-9_-]+", run.name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", ".hidden", "-o", "a/b", "/abs", "a b", "a\nb", "ä", "a\x00", "x" * 65, "$(id)", "'", "; rm -rf ~"],
)
def test_a_name_that_could_be_more_than_a_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunDir.create(tmp_path, name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_root_or_a_run_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for root, name in ((tmp_path / "runs", "x"), (tmp_path, "runs")):
        with refused(RunFolderError):
            RunDir.create(root, name)


def test_a_rank_finds_the_folder_and_the_attempt_of_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was said by a relative path. Without a launcher there is none."""
    monkeypatch.delenv("ECHELON_RUN_DIR", raising=False)
    assert RunDir.current() is None
    monkeypatch.chdir(tmp_path)
    for name, value in RunDir("runs/x", 3).to_env().items():
        monkeypatch.setenv(name, value)
    found = RunDir.current()
    assert found is not None and (found.path, found.attempt) == (tmp_path / "runs/x", 3)


# ---- small files ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A reader that looks all the time never sees half of it, nor the file absent, while another process rewrites it."""
    path, fork = tmp_path / "exit.json", multiprocessing.get_context("fork")
    write_json(path, {"n": 0, "text": ""})
    enough = fork.Event()
    writer = fork.Process(target=_rewrite, args=(path, enough))
    writer.start()
    try:
        seen = set[int]()
        while len(seen) < 50 or max(seen) < 299:
            value = read_json(path)
            assert value is not None and len(value["text"]) == value["n"] * 100
            seen.add(value["n"])
    finally:
        enough.set()
        writer.join()
    assert [p.name for p in tmp_path.iterdir()] == ["exit.json"]


def _rewrite(path: Path, enough: Any) -> None:
    for n in itertools.count():
        if enough.is_set():
            break
        write_json(path, {"n": n, "text": "x" * 100 * n})


@pytest.mark.parametrize("text", [None, "", '{"a": 1', "[1]", "\x00"])
def test_json_that_is_absent_or_cut_off_reads_as_none(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    assert read_json(path) is None


# ---- lines ------------------------------------------------------------------------------------------------------------------


def test_an_event_is_on_disk_when_emit_returns_and_a_closed_log_takes_no_more(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", rank=3)
    log.emit("train_start", step=0)
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["event"], event["rank"], event["step"]) == ("train_start", 3, 0) and event["time"] > 1e9
    log.close()
    log.emit("late")
    log.close()
    assert read_lines(tmp_path / "events.jsonl") == [event]


@pytest.mark.parametrize(("value", "text"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_numbers_that_json_lacks_become_words(value: float, text: str) -> None:
    record = {"loss": value, "deep": {"list": [value, 1]}}
    read = json.loads(encode(record), parse_constant=lambda _: pytest.fail("not JSON"))
    assert read == {"loss": text, "deep": {"list": [text, 1]}}


_TEXTS = st.one_of(st.text(max_size=5), st.sampled_from(["}, {", '"}, {"', "},", "{}"]))
_VALUES = st.recursive(
    st.one_of(st.integers(), _TEXTS, st.floats(), st.none()),
    lambda of: st.one_of(st.lists(of, max_size=3), st.dictionaries(_TEXTS, of, max_size=2)),
    max_leaves=4,
)


@pytest.mark.full
@given(st.lists(st.dictionaries(_TEXTS, _VALUES, max_size=3), max_size=4))
def test_many_records_at_once_are_the_lines_that_they_would_be_one_by_one(records: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "metrics.jsonl")
        log.write(records)
        log.close()
        assert log.path.read_text() == "".join(encode(record) + "\n" for record in records)


@pytest.mark.full
@given(st.lists(st.text(max_size=20), max_size=6), st.lists(st.integers(0, 200), max_size=8))
def test_a_growing_file_is_read_once_wherever_it_is_cut(texts: list[str], cuts: list[int]) -> None:
    """However the bytes arrive, each record is seen once, in order, when its line is complete."""
    data = "".join(encode({"text": text}) + "\n" for text in texts).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        reader, seen = LineReader(path), []
        places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
        for low, high in itertools.pairwise(places):
            with open(path, "ab") as file:
                file.write(data[low:high])
            seen += [record["text"] for record in reader.read()]
    assert seen == texts


def test_lines_that_are_no_record_and_a_last_one_cut_off_by_a_kill_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'{"a": 1}\n{"a": {"a": 3}\n\xff\xfe\n[1]\n\n{"a": 2}\n{"a": 4')
    assert read_lines(tmp_path / "lines") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("anew", ['{"b": 7}\n', '{"b": 7}\n{"b": 8}\n{"b": 9}\n' * 200], ids=["shorter", "longer"])
@pytest.mark.parametrize("how", ["replaced", "cut and written again"])
@pytest.mark.parametrize("from_end", [False, True])
def test_a_reader_finds_a_file_that_another_took_the_place_of(tmp_path: Path, anew: str, how: str, from_end: bool) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    reader = LineReader(path, from_end=from_end)
    assert reader.read() == ([] if from_end else [{"a": 1}, {"a": 2}])
    with open(path, "a") as file:
        file.write('{"a": 3}\n{"a')
    assert reader.read() == [{"a": 3}]
    if how == "replaced":
        (tmp_path / "other").write_text(anew)
        (tmp_path / "other").replace(path)
    else:
        path.write_text(anew)
    assert reader.read() == [json.loads(line) for line in anew.splitlines()]
    with open(path, "a") as file:
        file.write('{"b": 10}\n')
    assert reader.read() == [{"b": 10}]


def test_a_reader_follows_a_file_that_was_away_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n')
    reader = LineReader(path)
    assert reader.read() == [{"a": 1}]
    path.rename(tmp_path / "aside")
    assert reader.read() == []
    (tmp_path / "aside").rename(path)
    assert reader.read() == []


@pytest.mark.parametrize("value", ["x", "-1", "1_0", "٣", "9" * 5000, "1\n2", "0x1"])
def test_an_attempt_that_is_no_number_is_named_with_its_remedy(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_RUN_DIR", "runs/a")
    monkeypatch.setenv("ECHELON_ATTEMPT", value)
    with pytest.raises(EchelonError) as caught:
        RunDir.current()
    text = str(caught.value)
    assert text.startswith("ECHELON_ATTEMPT must be a whole number from 0 on, got ") and "unset both" in text and len(text) < 300
    monkeypatch.setenv("ECHELON_ATTEMPT", "")
    run = RunDir.current()
    assert run is not None and run.attempt == 0


@pytest.mark.parametrize("named", ["here", "./here", "runs/there", "there", "~/runs/there", "runs/there/", "{root}/runs/there"])
def test_a_run_is_found_by_its_name_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    RunDir.create("runs", "there")
    RunDir.create(".", "here")
    found = find_run(named.format(root=tmp_path))
    assert (found / "attempts").is_dir() and found.name == named.rstrip("/").rpartition("/")[2]


@pytest.mark.parametrize(
    "named",
    [
        "thera",
        "",
        "nobody",
        "plain",
        "file",
        "gone",
        "x" * 5000,
    ],
)
def test_a_run_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    RunDir.create("runs", "there")
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to("nowhere")
    with refused(RunFolderError):
        find_run(named)


# ---- errors -----------------------------------------------------------------------------------------------------------------


def test_every_error_is_public_and_also_a_builtin_one() -> None:
    classes = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, EchelonError)]
    assert {c.__name__ for c in classes} == set(errors.__all__) - {"require"}
    for cls in classes:
        if cls is not EchelonError:
            assert any(base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in cls.__mro__)
