"""`echelon top`: what it says of a run that runs, has failed, was started again; on a terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.contracts.events import encode
from echelon.contracts.run_dir import RunDir
from echelon.observe.top import Watch, lines
from tests.kit.run_folders import PAYLOADS, begun, make_run, stretch, times, training
from tests.kit.started import Started, wait_until

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_a_run_under_way_is_told_with_its_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(s, 2.0) for s in range(1, 51)], [None], [begun(100)])
    for rank in range(2):
        times(run, 0, rank, stretch(0, 50, forward=0.01) | {"own_s": 0.01})
    state, progress, _, head, *rows = lines(Watch(run).look())
    assert state.startswith("nano  running  2 ranks")
    assert progress == "[############............]  50%  update 50/100  loss 2.0000  lr 0.001  50.0k tokens/s  0:50 left"
    assert head.split("  ")[0] == "rank"
    assert rows[0].split() == ["0", "node1", "50", "10", "ms", "10", "ms", "forward", "100%", "0%", "train.py:41", "in", "load"]


def test_each_look_takes_in_what_came_since(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(1, 2.0)], [None], [begun(10)])
    watch = Watch(run)
    assert "update 1/10" in watch.look().progress
    with open(run.metrics, "a") as file:
        file.write(encode(training(7, 2.0)) + "\n")
    assert "update 7/10" in watch.look().progress
    run.at_attempt(0).exit_json.write_text(json.dumps({"exit_code": 75}))
    run.at_attempt(1).events(0).write_text(encode(begun(10, 5)) + "\n")
    now = watch.look()
    assert "update 5/10" in now.progress and lines(now)[0].startswith("nano  running  2 ranks  attempt 1")
    assert lines(now)[2] == "attempt 0: stopped exit code 75"


def test_a_second_training_in_a_run_shows_nothing_of_the_first(tmp_path: Path) -> None:
    first = [training(s, 1e13) for s in range(1, 4)]
    run = make_run(tmp_path, first, [None], [begun(3)])
    watch = Watch(run)
    assert "loss 10000000000000" in watch.look().progress
    again = begun(5) | {"time": first[-1]["time"] + 1}
    with open(run.at_attempt(0).events(0), "a") as file:
        file.write(encode(again) + "\n")
    assert "loss" not in watch.look().latest
    with open(run.metrics, "a") as file:
        file.write(encode(training(1, 3.5) | {"time": again["time"] + 1}) + "\n")
    now = watch.look()
    assert "update 1/5  loss 3.5000" in now.progress and now.latest["loss"] == 3.5


def test_a_failure_is_told_with_its_reason_and_its_ranks_last_words(tmp_path: Path) -> None:
    failure = {"rank": 1, "kind": "ValueError", "message": "bad batch"}
    end = {
        "exit_code": 1,
        "first_failure": failure,
        "explained": "Rank 1 raised ValueError while rank 0 waited.",
        "started": 1.0,
        "ended": 9.0,
    }
    run = make_run(tmp_path, [training(1, 2.0)], [end], [begun(10)])
    run.log(0).write_text("of rank 0\n")
    run.log(1).write_text("one\ntwo\n")
    shown = lines(Watch(run).look())
    assert shown[0] == "nano  failed with code 1, rank 1: ValueError: bad batch  2 ranks  0:08"
    assert "Rank 1 raised ValueError while rank 0 waited." in shown
    assert shown[-3:] == ["rank 1:", "  one", "  two"]
    assert lines(Watch(run, rank=0).look())[-1] == "  of rank 0"


def test_a_slow_rank_is_named_and_equal_ones_are_not(tmp_path: Path) -> None:
    for name, slow in (("a", 0.030), ("b", 0.011)):
        run = make_run(tmp_path / name, [training(1, 2.0)], [None])
        for rank in range(4):
            own = slow if rank == 2 else 0.010
            records = [stretch(s, s + 50, forward=own, wait=0.031 - own) | {"own_s": own} for s in range(0, 200, 50)]
            times(run, 0, rank, *records)
        said = [line for line in lines(Watch(run).look()) if line.startswith("slow")]
        wanted = "slow: rank 2 on node1 takes 3.0 x as long as the others: its own computation, train.py:41 in load"
        assert said == ([wanted] if name == "a" else [])


def test_a_thousand_ranks_fit_on_a_screen(tmp_path: Path) -> None:
    run = make_run(tmp_path, [training(1, 2.0)], [None])
    for rank in range(300):
        times(run, 0, rank, stretch(0, 50, forward=0.01) | {"own_s": 0.02 if rank == 250 else 0.01})
    shown = lines(Watch(run).look(), width=60, height=20)
    assert len(shown) <= 20 and max(map(len, shown)) <= 60
    assert any(line.startswith("250 ") for line in shown) and any("slowest of 300 ranks" in line for line in shown)


def test_an_empty_folder_has_not_begun(tmp_path: Path) -> None:
    assert lines(Watch(RunDir(tmp_path)).look(), job="job 7 pending") == [f"{tmp_path.name}  job 7 pending  ? ranks"]


def test_a_run_whose_launcher_was_killed_does_not_run(tmp_path: Path, echelon_command: Command) -> None:
    run = make_run(tmp_path, [training(1, 2.0)], [None], [begun(10)])
    run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_text()), "host": socket.gethostname()}))
    (run.path / ".lock").write_text("{}")
    state = echelon_command("top", str(run.path), "--once").stdout.splitlines()[0]
    assert "its launcher has ended" in state and "running" not in state
    run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_text()), "host": "node7"}))
    assert "launcher" not in echelon_command("top", str(run.path), "--once").stdout.splitlines()[0]


@pytest.mark.parametrize("payload", [*PAYLOADS, "\x1b[2J\x1b]0;x\x07\u202e", "a\nb\tc\r"])
def test_hostile_files_do_nothing_to_the_terminal(tmp_path: Path, payload: str) -> None:
    failure = dict.fromkeys(("rank", "kind", "message", "traceback"), payload)
    events = [{"event": "exception", "kind": payload, "message": payload, "time": payload}, {"event": payload, "step": [payload]}]
    end = {"exit_code": 1, "first_failure": failure, "explained": payload}
    run = make_run(
        tmp_path, [training(1, 2.0) | {f"{payload}_per_s": 1}], [end], [begun(10), *events], name=payload, ranks=payload
    )
    times(run, 0, 0, stretch(0, 50, forward=0.01) | {"line": payload, "host": payload})
    run.log(0).write_bytes(payload.encode("utf-8", "surrogatepass") + b"\xff\n")
    for line in lines(Watch(run).look(), job=payload):
        assert all(c.isprintable() or c == " " for c in line), ascii(line)


def test_the_command_prints_once_where_there_is_no_terminal(tmp_path: Path, echelon_command: Command) -> None:
    make_run(tmp_path / "runs" / "mine", [training(1, 2.0)], [None], [begun(10)])
    done = echelon_command("top", "mine")
    assert done.returncode == 0 and done.stdout.startswith("nano  running  2 ranks") and "update 1/10" in done.stdout
    assert echelon_command("top", "mine", "--every", "0").returncode == 2
    assert echelon_command("top", "gone").returncode == 2


RUN = """
import os, time
from pathlib import Path
import echelon as ech
from tests.kit.models import batch
from tests.kit.units import Regression

class Slow(Regression):
    def on_train_step_end(self, state, data, step, results):
        if step == 3:
            Path("there").touch()
            while not Path("go").exists():
                time.sleep(0.01)

ech.init_from_env()
ech.train(Slow(), [batch(4, i) for i in range(6)], max_epochs=1)
"""


def test_a_real_run_is_seen_while_it_runs_and_afterwards(started: Started) -> None:
    """On a terminal: it is drawn on the other screen, again and again, and `q` gives the terminal back as it was."""
    run = started.run("--ranks", "1", "--name", "r", started.script(RUN), env={"PYTHONPATH": os.getcwd()})
    wait_until(lambda: (started.folder / "there").exists(), "the run is in its step")
    ours, theirs = pty.openpty()
    top = started.python("-m", "echelon", "top", "r", "--every", "0.1", stdin=theirs, stdout=theirs)
    os.close(theirs)
    seen = read_until(ours, b"running  1 ranks")
    (started.folder / "go").touch()
    seen += read_until(ours, b"r  finished  1 ranks")
    run.communicate(timeout=120)
    os.write(ours, b"q")
    seen += read_until(ours, b"\x1b[?1049l")
    assert top.wait(60) == 0 and run.returncode == 0
    assert seen.startswith(b"\x1b[?1049h\x1b[?25l") and seen.endswith(b"\x1b[?25h\x1b[?1049l")
    os.close(ours)


def test_ctrl_c_leaves_the_terminal_as_it_was(started: Started) -> None:
    make_run(started.folder / "runs" / "mine", [training(1, 2.0)], [None])
    ours, theirs = pty.openpty()
    top = started.python("-m", "echelon", "top", "mine", stdin=theirs, stdout=theirs)
    os.close(theirs)
    read_until(ours, b"running")
    top.send_signal(signal.SIGINT)
    assert read_until(ours, b"\x1b[?1049l").endswith(b"\x1b[?25h\x1b[?1049l") and top.wait(60) == 0
    os.close(ours)


def read_until(terminal: int, words: bytes, timeout_s: float = 60.0) -> bytes:
    """What comes until these words have; of a terminal that a program still draws on."""
    seen, until = b"", time.monotonic() + timeout_s
    while words not in seen:
        assert select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0], f"{words!r} did not come: {seen!r}"
        seen += os.read(terminal, 1 << 16)
    return seen
