"""What a run and the commands do when nobody reads them, the disk is full, the folder goes, or strangers hold connections."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.common.files import write_whole
from echelon.contracts.events import EventLog, read_lines
from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.started import Started, wait_until

TALKS = """
import logging, os, subprocess, sys, warnings
for i in range(3000):
    print("line", i, flush=i % 7 == 0)
    print("error", i, file=sys.stderr)
warnings.warn("look")
logging.getLogger("x").warning("look")
sys.stdout.buffer.write(b"bytes\\n")
sys.stdout.buffer.flush()
sys.stderr.writelines(["a\\n", "b\\n"])
open("finished-" + os.environ["RANK"], "w").close()
"""

# the launcher and the other rank may write into the folder while it is removed
REMOVES = "while os.path.exists(os.environ['ECHELON_RUN_DIR']): shutil.rmtree(os.environ['ECHELON_RUN_DIR'], ignore_errors=True)"


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_logs_all(started: Started, ranks: str) -> None:
    """`echelon run 2>&1 | head -1`: both streams are the same pipe, and nobody reads it."""
    reader, writer = os.pipe()
    process = started.run("--ranks", ranks, "--name", "a", started.script(TALKS), stdout=writer, stderr=writer)
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    assert process.wait(120) == 0
    assert len(list(started.folder.glob("finished-*"))) == int(ranks)
    log = (started.folder / "runs/a/attempts/000/rank0.log").read_text()
    assert "line 2999\n" in log and "error 2999\n" in log and "bytes\n" in log
    assert json.loads((started.folder / "runs/a/attempts/000/exit.json").read_text())["exit_code"] == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, ">&- 2>&-"),
        (2, "<&- >&- 2>&-"),
        (1, "> /dev/full"),
        (2, "2> /dev/full"),
    ],
)
def test_rng_that_are_closed_or_full_do_not_harm_a_run(tmp_path: Path, ranks: int, how: str) -> None:
    (tmp_path / "train.py").write_text(TALKS)
    words = shlex.join([sys.executable, "-m", "echelon", "run", "--ranks", str(ranks), "--name", "a", "train.py"])
    done = subprocess.run(
        ["bash", "-c", f"exec {words} {how}"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "line 2999\n" in (tmp_path / "runs/a/attempts/000/rank0.log").read_text()


@pytest.mark.full
def test_commands_end_quietly_when_their_reader_goes_away(tmp_path: Path) -> None:
    """With the exit code of a program that SIGPIPE ended; but what was done is done."""
    (tmp_path / "train.py").write_text("print('x' * 300_000)\n")

    def echelon(*words: str, closed: bool = True) -> subprocess.CompletedProcess[str]:
        reader, writer = os.pipe()
        if closed:
            os.close(reader)
        try:
            return forked.run(
                [sys.executable, "-m", "echelon", *words],
                cwd=tmp_path, env=clean_environment(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
            )  # fmt: skip
        finally:
            os.close(writer)
            if not closed:
                os.close(reader)

    submitted = echelon("submit", "--to", "local", "--name", "a", "train.py")
    assert submitted.returncode == 0, submitted.stderr
    log = tmp_path / "runs/a/attempts/000/rank0.log"
    wait_until(lambda: log.exists() and log.stat().st_size > 300_000, "the job has written its line")
    for words in (["jobs"], ["logs", "a"], ["logs", "a", "--follow"], ["report", "a"], ["ckpt", "ls", "runs/a"], ["--help"]):
        said = echelon(*words)
        assert "Traceback" not in said.stderr and "Exception" not in said.stderr, (words, said.stderr)
        assert said.returncode in ((141,) if words[0] in ("jobs", "logs") else (0, 1, 2, 141)), (words, said)
    with open("/dev/full", "w") as full:
        said = forked.run(
            [sys.executable, "-m", "echelon", "jobs"],
            cwd=tmp_path, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    assert (said.returncode, said.stderr) == (1, "echelon: standard output cannot be written: No space left on device\n")


def _limit_files(size: int) -> Any:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_full_disk_costs_lines_and_not_the_run(started: Started, ranks: str) -> None:
    """No file may be larger than 20 kB here: the logs are, and the program prints on."""
    script = started.script(TALKS)
    process = started.run("--ranks", ranks, "--name", "a", script, stdout=subprocess.DEVNULL, preexec_fn=_limit_files(20_000))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()[-2000:]
    assert len(list(started.folder.glob("finished-*"))) == int(ranks) and b"Traceback" not in err


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_folder_that_disappears_does_not_turn_a_good_run_into_a_bad_one(started: Started, ranks: str) -> None:
    script = started.script(
        "import os, shutil, time\nrun, ranks = os.environ['ECHELON_RUN_DIR'], range(int(os.environ['WORLD_SIZE']))\n"
        "open(f'here{os.environ[\"RANK\"]}', 'w').close()\n"
        "while not all(os.path.exists(f'here{rank}') for rank in ranks): time.sleep(0.01)\n"
        f"if os.environ['RANK'] == '0':\n    {REMOVES}\nwhile os.path.exists(run): time.sleep(0.01)\nprint('done')\n"
    )
    out, err = started.run("--ranks", ranks, "--name", "a", script).communicate(timeout=120)
    assert started.processes[-1].returncode == 0 and out == b"done\n" and b"Traceback" not in err, err.decode()
    assert b"exit.json cannot be written: No such file or directory" in err


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_error_after_the_runs_folder_has_disappeared_is_told(started: Started, ranks: str) -> None:
    script = started.script(
        "import os, pathlib, shutil, time\nup = pathlib.Path('up')\nif os.environ['RANK'] == '1':\n    up.touch()\n"
        "if os.environ['RANK'] == '0':\n"
        "    while os.environ['WORLD_SIZE'] == '2' and not up.exists():\n        time.sleep(0.01)\n"
        f"    {REMOVES}\n    raise ValueError('after that')\n"
    )
    _, err = started.run("--ranks", ranks, "--name", "a", script).communicate(timeout=120)
    assert started.processes[-1].returncode == 1 and b"ValueError: after that" in err, err.decode()


def test_a_file_that_a_full_disk_refuses_is_named(tmp_path: Path) -> None:
    path, before = tmp_path / "page.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_whole(path, b"x" * 2_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(raised.value) == f"[Errno 27] File too large: '{path}'" and not list(tmp_path.iterdir())


def test_a_disk_that_was_full_for_a_while_costs_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    log, records = EventLog(path), [{"step": step, "loss": 0.5} for step in range(200)]
    try:
        for step, record in enumerate(records):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000 if 20 < step < 150 else before[0], before[1]))
            log.write([record])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.close()
    assert read_lines(path) == records
    assert [r.getMessage() for r in caplog.records] == [
        f"{path} cannot be written: File too large. The run continues, and lines are kept for later."
    ]


def test_records_that_were_never_written_are_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.contracts.events._KEPT", 100)
    log = EventLog(Path("/dev/full"))
    for step in range(50):
        log.write([{"step": step}])
    log.close()
    assert caplog.records[-1].getMessage() == "/dev/full lacks 50 lines, which could not be written"


HALF_OPEN = """
import os, socket, sys, time
import torch.distributed as dist
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":  # strangers, who say nothing
    import resource
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 200   # the user's own
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
    held = [socket.create_connection(address) for _ in range(600)]
    time.sleep(0.5)
dist.init_process_group("gloo")
dist.barrier()
print("met")
"""


@pytest.mark.full
def test_hundreds_of_connections_that_say_nothing_do_not_end_a_job(started: Started) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1000))

    process = started.run("--ranks", "2", started.script(HALF_OPEN), preexec_fn=limit)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out == b"met\n", err.decode()[-3000:]


@pytest.mark.full
def test_a_limit_of_open_files_that_is_too_low_for_the_ranks_is_named_before_they_start(started: Started, tmp_path: Path) -> None:
    """Some would wait for minutes to be connected to the store."""
    script = started.script("open('began', 'w')")
    process = started.run("--ranks", "14", script, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and not (tmp_path / "began").exists()
    assert b"68 open files for 14 ranks, got 64" in err and b"Traceback" not in err, err.decode()


@pytest.mark.full
def test_a_rank_that_has_closed_its_standard_streams_still_says_how_it_failed(started: Started) -> None:
    body = "import os\nfor fd in range(3): os.close(fd)\nif os.environ['RANK'] == '1': raise ValueError('planted')\n"
    process = started.run("--ranks", "2", started.script(body))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and b"rank 1 failed" in err and b"ValueError: planted" in err, err.decode()


def test_a_run_that_cannot_begin_for_a_full_disk_says_so_in_a_line(started: Started) -> None:
    process = started.run("--ranks", "1", started.script("pass"), preexec_fn=_limit_files(10))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and b"cannot be written: File too large" in err and b"Traceback" not in err


@pytest.mark.parametrize("verb", [("run", "--ranks", "1"), pytest.param(("dragon",), marks=pytest.mark.full)])
def test_a_guard_that_is_never_true_is_said(started: Started, verb: tuple[str, ...]) -> None:
    """Dragon's own page has it: the script ended with 0 and did nothing."""
    body = 'from echelon.launching import CollectiveGroup\nif __name__ == "main":\n    CollectiveGroup(print).start()\n'
    if verb == ("dragon",) and importlib.util.find_spec("dragon") is None:
        pytest.skip("needs Dragon: pip install 'echelon[dragon]'")
    process = started.python("-m", "echelon", *verb, started.script(body))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"line 2: __name__ == 'main' is never true of a script" in err and b"No CollectiveGroup is made there" in err, (
        err.decode()
    )
