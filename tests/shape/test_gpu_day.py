"""`make gpu` without a GPU: its reduced form runs every part to its end, and nothing that a part does ends the day."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench.gpu.llama import SIZES, Llama, flops_per_token
from bench.gpu.parts import PARTS
from bench.gpu.table import BEGIN, END, into_file
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import clean_environment
from tests.kit import forked

ROOT = Path(__file__).resolve().parents[2]


def start(tmp_path: Path, *args: str, program: tuple[str, ...] = ("-m", "bench.gpu"), **env: str) -> Any:
    environment = {
        **clean_environment(),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "TABLE": str(tmp_path / "table.md"),
        "LEFT": str(tmp_path / "left"),
        **env,
    }
    command = [sys.executable, *program, "--device", "cpu", "--out", str(tmp_path / "results.json"), *args]
    return forked.popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_bad(tmp_path: Path, *args: str, parts: str) -> Any:
    (tmp_path / "table.md").write_text("# Others\n")
    return start(tmp_path, *args, program=("-m", "tests.kit.gpu_day_program"), PARTS=parts)


def results(tmp_path: Path) -> list[dict[str, Any]]:
    return json.loads((tmp_path / "results.json").read_text())["results"]  # type: ignore[no-any-return]


# What needs no launcher of its own, and no compiler.
QUICK = ("loop", "saves", "model: plain", "model: memory")
OTHERS = tuple(part.name for part in PARTS[1:] if not part.name.startswith(QUICK))


@pytest.mark.full
@pytest.mark.parametrize("only", [QUICK, OTHERS], ids=["quick", "others"])
def test_the_reduced_form_runs_every_part_to_its_end(tmp_path: Path, only: tuple[str, ...]) -> None:
    day = start(tmp_path, "--only", *only)
    shown, _ = day.communicate(timeout=300)
    assert day.returncode == 0, shown
    found = results(tmp_path)
    assert {row["part"] for row in found} == {part.name for part in PARTS if part is PARTS[0] or part.name.startswith(only)}
    assert [row for row in found if row["status"] == "failed"] == []
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["command"].startswith('make gpu ARGS="--device cpu ')
    assert facts["commit"] and facts["date"] and facts["took_s"] > 0


@pytest.mark.full
def test_where_a_fork_cannot_use_the_device_each_part_gets_a_new_interpreter(tmp_path: Path) -> None:
    day = start(tmp_path, "--fresh", "--only", "waits", "model: eager")
    shown, _ = day.communicate(timeout=300)
    assert day.returncode == 0, shown
    assert {row["part"] for row in results(tmp_path)} == {"environment", "waits", "model: eager"}


@pytest.mark.full
def test_no_part_ends_the_day_whatever_it_does(tmp_path: Path) -> None:
    day = start_bad(tmp_path, "--write", parts="bad")
    shown, _ = day.communicate(timeout=120)
    assert day.returncode == 1, shown
    found = {(row["part"], row["name"]): row for row in results(tmp_path)}

    def end_of(part: str) -> tuple[str, str]:
        return found[part, part]["status"], found[part, part]["remark"]

    assert found["hangs", "before it hung"]["value"] == 1.5
    assert end_of("hangs")[1].startswith("killed after 4 s, its limit, in kit/gpu_day_program.py, line ")
    assert end_of("says_nothing") == ("failed", "ended without a result")
    assert found["crashes", "before it crashed"]["value"] == 2
    assert end_of("crashes")[1].startswith("died by SIGSEGV, in kit/gpu_day_program.py, line ")
    assert end_of("is_killed") == ("failed", "died by SIGKILL")
    assert end_of("raises") == ("failed", "RuntimeError: CUDA out of memory.")
    assert end_of("exits")[0] == "failed"
    assert end_of("lacks_a_package") == ("left out", "needs the package no_such_package, which is not installed")
    assert end_of("lacks_a_feature") == ("left out", "not there: float8")
    assert end_of("too long")[1].endswith("it needs 10000")
    assert found["is_well", "a | b"]["value"] == "nan"
    said = (tmp_path / "results.log").read_text()
    assert "===== raises\nTraceback" in said and "Tried to allocate 20.00 GiB" in said
    pid = int((tmp_path / "left").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("# Others\n") and "| is_well | a \\| b | nan x | two lines |" in table


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    day = start_bad(tmp_path, "--write", parts="waits")
    while not (tmp_path / "left").exists():
        assert day.poll() is None
        time.sleep(0.02)
    day.send_signal(signal.SIGINT)
    shown, _ = day.communicate(timeout=180)
    assert day.returncode == 130, shown
    assert [(row["part"], row["name"], row["status"]) for row in results(tmp_path)] == [
        ("environment", "device", "ok"),
        ("waits", "before the wait", "ok"),
        ("waits", "waits", "left out"),
    ]
    assert (tmp_path / "table.md").read_text() == "# Others\n", "a table of half a day does not replace a whole one"


@pytest.mark.parametrize(
    ("out", "says"), [("file/results.json", "file/results.json cannot be written ("), ("pipe", "it is no file")]
)
def test_results_that_cannot_be_written_go_elsewhere_and_replace_no_device(tmp_path: Path, out: str, says: str) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    day = start_bad(tmp_path, "--only", "is_well", "--out", str(tmp_path / out), parts="waits")
    shown, _ = day.communicate(timeout=180)
    assert day.returncode == 0 and says in shown, shown
    assert (tmp_path / "pipe").is_fifo()
    other = Path(shown.partition("the results go to ")[2].splitlines()[0])
    assert "is_well" in other.read_text()
    other.unlink()
    other.parent.rmdir()


def test_the_table_of_a_file_is_written_without_measuring(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("# Others\n")
    row = {"part": "p", "name": "n", "value": 1234.5, "unit": "GB/s", "remark": "", "status": "ok"}
    facts = {"date": "today", "commit": "abc", "device": "a card", "command": "make gpu", "took_s": 1.0, "results": [row]}
    (tmp_path / "results.json").write_text(json.dumps(facts))
    day = start_bad(tmp_path, "--table", parts="waits")
    shown, _ = day.communicate(timeout=180)
    assert day.returncode == 0, shown
    assert "| p | n | 1,234 GB/s |  |" in (tmp_path / "table.md").read_text()
    (tmp_path / "results.json").write_text("{")
    day = start_bad(tmp_path, "--table", parts="waits")
    shown, _ = day.communicate(timeout=180)
    assert day.returncode == 1 and "was not written" in shown and "Traceback" not in shown


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a device")
def test_without_a_device_it_says_what_to_do_and_leaves_earlier_results_alone(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    day = start(tmp_path, "--device", "cuda")
    shown, _ = day.communicate(timeout=180)
    assert day.returncode == 2, shown
    assert 'make gpu ARGS="--device cpu"' in shown and "Traceback" not in shown
    assert (tmp_path / "results.json").read_text() == "{}"


def test_the_table_is_put_between_its_marks_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "b.md"
    path.write_text("# Head\n")
    into_file(path, "one")
    path.write_text(path.read_text() + "\n## Tail\n")
    into_file(path, "two")
    assert path.read_text().split("##")[0] == "# Head\n\n" and "one" not in path.read_text()
    assert f"{BEGIN}\ntwo\n{END}\n\n## Tail\n" in path.read_text()


@pytest.mark.full
def test_parameters_and_flops_of_the_model_are_those_that_torch_counts() -> None:
    for size in SIZES.values():
        with torch.device("meta"):
            module = Llama(size)
        assert sum(p.numel() for p in module.parameters()) == size.parameters
    size = SIZES["tiny"]
    tokens = torch.zeros(2, size.context, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        Llama(size)(tokens, tokens).backward()
    attention = 12 * size.depth * size.width * size.context  # of which torch counts nothing on a CPU
    assert counted.get_flop_counts()["Global"][torch.ops.aten.mm] == (flops_per_token(size) - attention) * tokens.numel()
