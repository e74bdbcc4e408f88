"""The command `echelon` as a person meets it: output, exit codes, signals, bad input, and how fast it starts."""

from __future__ import annotations

import ast
import fcntl
import importlib
import json
import os
import pkgutil
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.cli import plan
from echelon.cli.main import VERBS, main
from echelon.cli.parser import Parser
from echelon.common.errors import UsageError
from echelon.common.traces import shortened
from echelon.contracts.run_dir import RunDir, write_json
from echelon.diagnosis import Evidence, explain
from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.started import Started, wait_until

Command = Callable[..., subprocess.CompletedProcess[str]]

# ---- a program finds what `python script.py` would give it ------------------------------------------------------------------

FACTS = """
import atexit, json, multiprocessing, os, sys, threading, time
from pathlib import Path
import helper

who = os.environ.get("RANK", "plain")

def square(x):
    return x * x

def write_later():
    time.sleep(0.2)
    Path(f"thread-{who}").touch()

if __name__ == "__main__":
    facts = {
        "argv": sys.argv, "file": __file__, "path": sys.path, "main": sys.modules["__main__"].square is square,
        "cwd": os.getcwd(), "stdin": sys.stdin.read(), "helper": helper.__file__, "spec": repr(__spec__),
    }
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            facts[method] = pool.map(square, [2, 3])
    if who != "plain":
        from torch.utils.data import DataLoader
        facts["loader"] = [batch.tolist() for batch in DataLoader(range(4), batch_size=2, num_workers=1)]
        facts["env"] = {k: v for k, v in os.environ.items() if "RANK" in k or "WORLD" in k or k.startswith("ECHELON")}
    Path(f"facts-{who}.json").write_text(json.dumps(facts))
    atexit.register(lambda: Path(f"atexit-{who}").touch())
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    threading.Thread(target=write_later).start()
    print("from rank", who)
    print("error of rank", who, file=sys.stderr)
"""


class Facts:
    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        (folder / "code").mkdir()
        (folder / "code" / "facts.py").write_text(FACTS)
        (folder / "code" / "helper.py").write_text("")
        program = ["code/facts.py", "a b", "--ranks", "9", "--help"]
        options: dict[str, Any] = {"cwd": folder, "env": clean_environment(), "capture_output": True, "timeout": 180}
        python = subprocess.run([sys.executable, *program], input=b"", **options)
        assert python.returncode == 0, python.stderr.decode()
        self.done = subprocess.run(
            [sys.executable, "-m", "echelon", "run", "--ranks", str(ranks), *program], input=b"", **options
        )
        assert self.done.returncode == 0, self.done.stderr.decode()
        self.plain = self._read("plain")
        self.ranks = [self._read(str(rank)) for rank in range(ranks)]

    def _read(self, who: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / f"facts-{who}.json").read_text())
        return facts


@pytest.fixture(scope="module", params=[1, 2], ids=["in-process", "two-ranks"])
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return Facts(tmp_path_factory.mktemp("facts"), request.param)


@pytest.mark.full
@pytest.mark.parametrize("what", ["argv", "file", "path", "main", "cwd", "stdin", "helper", "spec", "spawn", "fork"])
def test_a_program_sees_what_python_would_show_it(facts: Facts, what: str) -> None:
    assert [rank[what] for rank in facts.ranks] == [facts.plain[what]] * len(facts.ranks)


def test_each_rank_knows_its_place_and_runs_as_a_program_does(facts: Facts) -> None:
    """Its exit functions run, data workers work, and a thread is waited for unless it is a daemon."""
    for number, rank in enumerate(facts.ranks):
        env = rank["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(number), str(number), str(len(facts.ranks)))
        assert rank["loader"] == [[0, 1], [2, 3]]
        assert (facts.folder / f"atexit-{number}").exists() and (facts.folder / f"thread-{number}").exists()


def test_rank_0_is_shown_without_a_control_character_and_the_run_folder_has_all(facts: Facts) -> None:
    said = facts.done.stderr.decode()
    assert facts.done.stdout == b"from rank 0\n" and "error of rank 0\n" in said and "rank 1" not in said
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", facts.done.stdout + facts.done.stderr)
    (run,) = (facts.folder / "runs").iterdir()
    for rank in range(len(facts.ranks)):
        log = (run / "attempts" / "000" / f"rank{rank}.log").read_text()
        assert f"from rank {rank}\n" in log and f"error of rank {rank}\n" in log
    described = json.loads((run / "run.json").read_text())
    assert described["script"] == "code/facts.py" and described["ranks"] == len(facts.ranks)
    assert described["args"] == ["a b", "--ranks", "9", "--help"]
    assert json.loads((run / "attempts" / "000" / "exit.json").read_text())["exit_code"] == 0
    assert f"run        runs/{run.name}" in said and (run / "report.html").exists()


def test_a_module_sees_what_python_m_would_show_it(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "other.py").write_text("name = __name__")
    (tmp_path / "package" / "main.py").write_text(
        "import sys\nfrom .other import name\nprint(__name__, sys.argv, name, sys.path, __spec__.name)"
    )
    plain = subprocess.run(
        [sys.executable, "-m", "package.main", "-x"], cwd=tmp_path, capture_output=True, text=True, env=clean_environment()
    )
    ours = echelon_command("run", "--ranks", "1", "-m", "package.main", "-x")
    assert ours.stdout == plain.stdout != ""


def test_one_rank_runs_in_the_launchers_own_process_and_can_ask_the_person_at_the_terminal(started: Started) -> None:
    script = started.script("import os; print('hello', input('name? '), os.getpid())")
    process = started.run("--ranks", "1", script, stdin=subprocess.PIPE)
    out, _ = process.communicate(b"Ada\n", timeout=120)
    assert out.decode() == f"name? hello Ada {process.pid}\n"


def test_a_logger_that_outlives_a_program_of_one_rank_can_still_write(started: Started) -> None:
    script = started.script(
        "import atexit, logging\nlogging.basicConfig(level='INFO')\natexit.register(lambda: logging.info('good' 'bye'))\n"
    )
    _, err = started.run("--ranks", "1", script, fresh=True).communicate(timeout=120)
    assert b"INFO:root:goodbye" in err and b"Error" not in err


def test_a_child_that_a_program_forks_does_not_end_the_run_twice(started: Started) -> None:
    process = started.run("--ranks", "1", started.script("import os\nif os.fork(): os.wait()"), fresh=True)
    _, err = process.communicate(timeout=120)
    assert err.count(b"report     ") == 1


# ---- output -----------------------------------------------------------------------------------------------------------------

OUTPUT = """
import os, sys
if os.environ["RANK"] == "0":
    sys.stdout.buffer.write(b"\\xff\\xfe no UTF-8\\n")
    sys.stdout.buffer.flush()
    for i in range(10_000):
        print(i, "x" * 1000)
    sys.stderr.write("an error without an end")
    print("a line without an end", end="")
else:
    print("y" * 10_000_000)
"""


def test_ten_megabytes_and_bytes_that_are_no_text_arrive_byte_for_byte_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OUTPUT)
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "run", "--ranks", "2", "script.py"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, timeout=120,
    )  # fmt: skip
    after = os.times()
    lines = b"".join(b"%d %s\n" % (i, b"x" * 1000) for i in range(10_000))
    assert done.returncode == 0 and done.stdout == b"\xff\xfe no UTF-8\n" + lines + b"a line without an end", done.stderr
    assert b"an error without an end" in done.stderr
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 20  # 4 s, most of it for importing torch; by the clock it would depend on what else the machine does


# ---- a terminal -------------------------------------------------------------------------------------------------------------


class Terminal:
    """A crude terminal of unlimited height: what a person would see after the bytes have been shown."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0
        self.cursor_is_shown = True

    def feed(self, text: str) -> None:
        for match in re.finditer(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(.)", text, re.DOTALL):
            number, command, char = match.groups()
            if command is not None:
                self._command(command, number)
            elif char == "\r":
                self.column = 0
            elif char == "\n":
                self.row += 1
                while len(self.rows) <= self.row:
                    self.rows.append([])
            elif char >= " ":
                if self.column == self.width:
                    self.feed("\r\n")
                row = self.rows[self.row]
                row.extend(" " * (self.column + 1 - len(row)))
                row[self.column] = char
                self.column += 1

    def _command(self, command: str, number: str) -> None:
        if command == "A":
            self.row = max(0, self.row - int(number or 1))
        elif command == "K" and number == "2":
            self.rows[self.row] = []
        elif command in "hl" and number == "?25":
            self.cursor_is_shown = command == "h"
        elif command not in "mhl":
            raise AssertionError(f"an escape that this terminal does not know: {number}{command}")

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _in_terminal(
    started: Started, *args: str, typed: Sequence[tuple[bytes, bytes]] = (), width: int = 100, fresh: bool = False
) -> tuple[Terminal, int]:
    """Run `echelon run` on a terminal of its own; what it shows at last, and the exit code.

    `typed` are pairs: once the first is shown, the second is typed. No second hangs the terminal up.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    process = started.run(
        *args,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"TERM": "xterm-256color"},
        start_new_session=True,
        fresh=fresh,
        **({"preexec_fn": _take_terminal} if fresh else {}),
    )
    os.close(theirs)
    terminal, data, deadline, rest = Terminal(width), b"", time.monotonic() + 120, list(typed)
    while time.monotonic() < deadline:
        if rest and rest[0][0] in data:
            keys = rest.pop(0)[1]
            if not keys:
                break
            os.write(ours, keys)
        if select.select([ours], [], [], 0.2)[0]:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how Linux says that the last process has closed the terminal
                break
            if not chunk:
                break
            data += chunk
    os.close(ours)
    terminal.feed(data.decode())
    return terminal, process.wait(120)  # a busy machine may need the ranks' whole grace time, which is 30 s


LIVE = """
import json, os, sys, time
if os.environ["RANK"] == "0":
    with open(os.environ["ECHELON_RUN_DIR"] + "/metrics.jsonl", "a", buffering=1) as metrics:
        for step in range(1, 41):
            metrics.write(json.dumps({"step": step, "loss": 1 / step, "lr": 0.1, "time": time.time()}) + "\\n")
            print("user line", step, flush=True)
            time.sleep(0.02)
            if step == 20:
                print("w" * 250, flush=True)
                print("half a line", end="", flush=True)
                time.sleep(0.1)
                print(" and its rest", flush=True)
    with open(os.environ["ECHELON_RUN_DIR"] + "/attempts/000/events.rank0.jsonl", "a") as events:
        events.write(json.dumps({"event": "train_end", "time": time.time()}) + "\\n")
"""


def test_on_a_terminal_every_printed_line_stays_whole_and_one_live_line_remains(started: Started) -> None:
    terminal, code = _in_terminal(started, "--ranks", "2", started.script(LIVE))
    lines = terminal.lines()
    assert [line for line in lines if line.startswith("user line")] == [f"user line {step}" for step in range(1, 41)]
    assert "half a line and its rest" in lines
    assert sum(line.count("w") for line in lines if set(line) == {"w"}) == 250  # a long line loses nothing
    assert [line.split("  ")[0] for line in lines if line.startswith("update ")] == ["update 40"]
    assert terminal.cursor_is_shown and code == 0


WAIT_ON_TERMINAL = LIVE + "    print('all printed', flush=True)\ntime.sleep(600)\n"


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_ctrl_c_typed_at_the_terminal_gives_it_back(started: Started, times: int) -> None:
    """The ranks ignore it in the second case, so that it takes two; the line that is drawn then has hidden the cursor."""
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if times == 2 else ""
    typed = [(b"all printed", b"\x03"), (b"once more kills", b"\x03")][:times]
    script = started.script(stubborn + WAIT_ON_TERMINAL)
    terminal, code = _in_terminal(started, "--ranks", "2", "--grace", "300", script, typed=typed)
    assert code == 130 and terminal.cursor_is_shown
    assert any("SIGINT: asked the ranks to stop" in line for line in terminal.lines())
    started.all_gone()


@pytest.mark.full
def test_a_terminal_that_hangs_up_stops_the_ranks_and_the_run_folder_is_complete(started: Started) -> None:
    script = started.script(WAIT_ON_TERMINAL)
    _, code = _in_terminal(started, "--ranks", "2", "--name", "hung", script, typed=[(b"all printed", b"")])
    assert code == 129
    assert json.loads((started.folder / "runs/hung/attempts/000/exit.json").read_text())["exit_code"] == 129
    assert (started.folder / "runs/hung/report.html").exists()
    started.all_gone()


@pytest.mark.full
def test_a_debugger_works_in_one_rank(started: Started) -> None:
    script = started.script("x = 41\nbreakpoint()\nprint('went on')\n")
    terminal, code = _in_terminal(started, "--ranks", "1", script, fresh=True, typed=[(b"(Pdb) ", b"p x + 1\nc\n")])
    assert code == 0 and "42" in terminal.lines() and "went on" in terminal.lines()


# ---- failures ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(started: Started, end: str, code: int, says: str) -> None:
    script = started.script(
        f"import os, signal, sys, time\ndef work():\n    {end}\nif os.environ['RANK'] == '1': work()\ntime.sleep(600)\n"
    )
    launcher = started.run("--ranks", "2", script)
    _, err = launcher.communicate(timeout=120)
    text = err.decode()
    assert launcher.returncode == code, text
    assert "rank 1 failed first" in text and says in text
    assert re.search(r"log: runs/\S+/attempts/000/rank1.log   all ranks: runs/\S+/attempts/000\n", text)
    started.all_gone()


KILLED = """
import os, signal, torch, echelon as ech
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=4)
saves = ech.Checkpoints("saved", every=1)
model, optimizer, loader = ech.prepare(model, optimizer, loader, checkpoints=saves)
if ech.is_main():
    print(open("/proc/self/comm").read().strip())
for epoch in ech.epochs(loader, 1):
    for i, x in enumerate(loader):
        if i == 3 and ech.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with ech.window(model) as window:
            window.backward(model(x).square().mean())
            optimizer.step()
"""


@pytest.mark.full
def test_a_rank_is_found_by_its_name_and_when_it_is_killed_the_last_words_say_where_it_goes_on(started: Started) -> None:
    launcher = started.run("--ranks", "2", "--name", "it", started.script(KILLED))
    out, err = launcher.communicate(timeout=180)
    assert launcher.returncode == 137 and out == b"echelon:rank0\n"
    assert b"echelon: last saved as saved/step-00000003; the same command goes on from there\n" in err


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('text')", 1),
        ("sys.exit(-1)", 255),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_the_exit_code_of_one_rank_is_what_python_gives(started: Started, end: str, code: int) -> None:
    launcher = started.run("--ranks", "1", started.script(f"import sys\n{end}"), fresh=True)
    launcher.communicate(timeout=120)
    assert launcher.returncode == code


def test_a_failure_shows_the_users_frames_first_and_the_log_has_the_whole_traceback(started: Started) -> None:
    script = started.script("import json\ndef read():\n    json.loads('{')\nread()\n")
    _, err = started.run("--ranks", "1", script).communicate(timeout=120)
    head = err.decode().split("log: ")[0].partition("echelon: rank 0 failed (exit code 1)\n")[2].splitlines()
    assert head == [
        f'  File "{started.folder}/script.py", line 4, in <module>',
        "      read()",
        f'  File "{started.folder}/script.py", line 3, in read',
        "      json.loads('{')",
        "  ... 3 more frames in libraries, in the log",
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]
    (log,) = started.folder.glob("runs/*/attempts/000/rank0.log")
    assert log.read_text().startswith("Traceback") and "json/decoder.py" in log.read_text()


def test_a_restart_is_announced_and_its_output_follows(started: Started) -> None:
    script = started.script(
        "import os, signal, time\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt, flush=True)\n"
        "open('said' + os.environ['RANK'], 'w').close()\n"
        "while attempt == '0' and (os.environ['RANK'] == '0' or not os.path.exists('said0')): time.sleep(0.01)\n"
        "if attempt == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    launcher = started.run("--ranks", "2", "--max-restarts", "1", "--name", "again", script)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0 and out == b"attempt 0\nattempt 1\n", err.decode()
    assert "rank 1 failed first" in err.decode() and "echelon: restart 1 of 1" in err.decode()
    assert (started.folder / "runs/again/attempts/001/rank1.log").read_text() == "attempt 1\n"


@pytest.mark.full
def test_a_killed_server_is_said_and_is_no_usage_error(started: Started) -> None:
    script = started.script("import os, time\nopen(f'ready{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(600)\n")
    launcher = started.run("--ranks", "2", script)
    started.ranks_run()
    (server,) = [p for p in started.alive() if p.ppid() == launcher.pid]
    server.kill()
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert "\nechelon: the process that forks the ranks is gone" in "\n" + err.decode(), err.decode()
    started.all_gone()


# ---- stopping ---------------------------------------------------------------------------------------------------------------

# Each rank has a data worker of torch, a child in its group, and one in a session of its own.
BUSY = """
import os, signal, subprocess, sys, time
from torch.utils.data import DataLoader
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
batches = iter(DataLoader(range(1000), num_workers=1))
next(batches)
for own_session in (False, True):
    subprocess.Popen(["sleep", "600"], start_new_session=own_session)
open(f"ready{os.environ['RANK']}", "w").close()
while True:
    time.sleep(600)
"""


def test_sigterm_stops_the_ranks_and_all_that_they_started(started: Started) -> None:
    launcher = started.run("--ranks", "2", "--grace", "300", started.script(BUSY))
    started.ranks_run()
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=120)  # before the grace time is over
    assert launcher.returncode == 143, err.decode()
    assert b"Traceback" not in err
    started.all_gone()
    (run,) = (started.folder / "runs").iterdir()
    verdict = explain(Evidence.of(run, 0))  # as of one that seems to hang
    assert verdict.cause == "interrupted" and re.fullmatch(r"ranks 0, 1 stood at script\.py:1\d", *verdict.seen), verdict


@pytest.mark.full
def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_time(started: Started) -> None:
    launcher = started.run("--ranks", "2", "--grace", "0.5", started.script(BUSY), "stubborn")
    started.ranks_run()
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=120)
    assert launcher.returncode == 143
    assert time.monotonic() - began >= 0.5
    started.all_gone()


@pytest.mark.full
def test_a_rank_that_saves_when_it_is_asked_to_stop_keeps_its_data_workers_until_then(started: Started) -> None:
    script = started.script(
        "import os, signal, time\n"
        "from torch.utils.data import DataLoader\n"
        "batches = iter(DataLoader(range(100_000), num_workers=1))\n"
        "stop = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.append(1))\n"
        "next(batches)\n"
        "open(f'ready{os.environ[\"RANK\"]}', 'w').close()\n"
        "while not stop: time.sleep(0.01)\n"
        "for _ in range(200): next(batches)\n"
        "print('saved')\n"
    )
    launcher = started.run("--ranks", "2", script)
    started.ranks_run()
    launcher.send_signal(signal.SIGTERM)
    out, err = launcher.communicate(timeout=120)
    assert out == b"saved\n", err.decode()
    started.all_gone()


def test_killing_the_launcher_leaves_nothing_running(started: Started) -> None:
    launcher = started.run("--ranks", "2", started.script(BUSY), "stubborn", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started.ranks_run()
    launcher.kill()
    launcher.wait()
    started.all_gone()


@pytest.mark.full
def test_a_launcher_that_was_told_to_ignore_hang_ups_ignores_them(started: Started) -> None:
    script = started.script(
        "import os, time\nopen(f'ready{os.environ[\"RANK\"]}', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    )
    launcher = started.run("--ranks", "2", script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    started.ranks_run()
    launcher.send_signal(signal.SIGHUP)
    (started.folder / "go").touch()
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err.decode()


def test_ctrl_c_while_the_command_still_starts_leaves_no_traceback(started: Started) -> None:
    launcher = started.run("--ranks", "2", "--name", "early", started.script("import time; time.sleep(600)"), fresh=True)
    wait_until(lambda: (started.folder / "runs/early/run.json").exists(), "the run folder is there")
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=120)
    # Python ends itself by the signal if it came while C code ran Python code, such as torch's import; a shell says 130 of both.
    assert launcher.returncode in (130, -signal.SIGINT), err.decode()
    assert b"Traceback" not in err
    started.all_gone()


def test_ctrl_c_while_a_class_is_made_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11 raises a RuntimeError from it."""

    def interrupted(arguments: object) -> int:
        raise RuntimeError("Error calling __set_name__ on 'Field' instance") from KeyboardInterrupt()

    monkeypatch.setattr("echelon.cli.jobs.execute", interrupted)
    assert main(["jobs"]) == 130 and capsys.readouterr().err == "echelon: stopped by SIGINT\n"


# ---- bad input --------------------------------------------------------------------------------------------------------------

OK = "print('ran')"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "missing.py"], ["missing.py", "does not exist"]),
        (["run", "folder"], ["folder", "is a folder", "-m"]),
        (["run", "syntax.py"], ["syntax.py", "line 2"]),
        (["run", "binary.py"], ["binary.py", "not Python"]),
        (["run", "latin.py"], ["latin.py", "not Python"]),
        (["run", "-m", "ok.py"], ["ok.py", "dotted name"]),
        (["run", "-m", "missing.module"], ["missing.module", "no 'missing'"]),
        (["run", "-m", ""], ["there is no ''"]),
        (["run", "--ranks", "0", "ok.py"], ["ranks must be at least 1", "got 0"]),
        (["run", "--ranks", "two", "ok.py"], ["'two'", "auto"]),
        (["run", "--ranks", "1_0", "ok.py"], ["'1_0'", "auto"]),
        (["run", "--ranks", "٣", "ok.py"], ["'٣'", "auto"]),
        (["run", "--ranks", "1000000", "ok.py"], ["ranks must be at most", "got 1000000"]),
        (["run", "--runs", "", "ok.py"], ["--runs", "got ''"]),
        (["run", "--name", "../up", "ok.py"], ["../up", "characters"]),
        (["run", "--name", "-x y", "ok.py"], ["-x y", "characters"]),
        (["run", "--name", "a\nb", "ok.py"], ["a\\nb"]),
        (["run", "--name", "", "ok.py"], ["name must be", "got ''"]),
        (["run", "--runs", "ok.py", "ok.py"], ["ok.py", "--runs"]),
        (["run", "--max-restarts", "-1", "ok.py"], ["--max-restarts must be at least 0, got -1"]),
        (["run", "--max-restarts", "many", "ok.py"], ["--max-restarts", "many"]),
        (["run", "--grace", "nan", "ok.py"], ["--grace must be", "got nan"]),
        (["run", "--stop-after", "soon", "ok.py"], ["got 'soon'"]),
        (["run", "--hang-timeout", "soon", "ok.py"], ["--hang-timeout must be 'none', or"]),
        (["run", "--ranks", "4:2", "--max-restarts", "1", "ok.py"], ["MIN:MAX with MIN at most MAX", "got '4:2'"]),
        (["run", "--ranks", "1:2", "ok.py"], ["--max-restarts"]),
        (["run", "--frobnicate", "ok.py"], ["--frobnicate"]),
        (["run", "--rank", "2", "ok.py"], ["unrecognized arguments: --rank", "Did you mean --ranks?"]),
        (["submit", "--node=2", "ok.py"], ["unrecognized arguments: --node=2", "Did you mean --nodes?"]),
        (["run"], ["script"]),
        (["rum", "ok.py"], ["'rum'", "known: run, submit, jobs"]),
        (["report", "nowhere"], ["nowhere", "was not found"]),
        (["explain", "nowhere"], ["nowhere", "was not found"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_ends_with_two_and_names_the_value(
    tmp_path: Path, echelon_command: Command, arguments: list[str], says: list[str]
) -> None:
    (tmp_path / "ok.py").write_text(OK)
    (tmp_path / "folder").mkdir()
    (tmp_path / "syntax.py").write_text("x = 1\nx = = 2\n")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\x00\x01\x02")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe4'\n")
    done = echelon_command(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert all(text in done.stderr for text in says), done.stderr
    assert len(done.stderr.splitlines()) <= 10 and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


# Each must be said at once, by every command that takes a script: the ranks would find nothing there, and end well.
@pytest.mark.parametrize(
    "verb", [("run", "--ranks", "1"), ("run", "--ranks", "2"), ("plan", "--layers"), ("prove",), ("submit", "--to", "local")]
)
@pytest.mark.parametrize(
    ("script", "says"),
    [("fifo", "got a pipe"), ("/dev/stdin", "standard input"), ("-", "Standard input"), ("/dev/null", "a device")],
)
def test_a_script_that_can_be_read_only_once_is_refused(
    tmp_path: Path, forked_programs: None, verb: tuple[str, ...], script: str, says: str
) -> None:
    (tmp_path / "ok.py").write_text(OK)
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "ok.py") as program:
        done = subprocess.run(
            [sys.executable, "-m", "echelon", *verb, script, "--ranks=2"],
            cwd=tmp_path,
            stdin=program,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2 and says in done.stderr and "to a file" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


def test_a_script_without_a_statement_is_mentioned(started: Started) -> None:
    _, err = started.run("--ranks", "1", started.script("# not yet\n")).communicate(timeout=120)
    assert b"is empty, so nothing runs" in err


def test_a_report_takes_the_place_of_no_device_and_no_stream(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(started.folder, "a")
    os.mkfifo(started.folder / "fifo")
    for place in ("/dev/stdout", "/proc/self/fd/1", str(started.folder / "fifo"), str(started.folder)):
        assert main(["report", str(run.path), "--output", place]) == 2
        assert "--output must be a file" in capsys.readouterr().err
    assert not os.path.isfile(started.folder / "fifo")


def test_a_tilde_that_the_shell_left_is_the_home_folder(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    done = started.run("--ranks", "1", "--runs=~/kept", "--name", "a", started.script(OK), env={"HOME": str(started.folder)})
    done.communicate(timeout=120)
    assert (started.folder / "kept/a/attempts/000").is_dir() and not (started.folder / "~").exists()


def test_logs_of_a_run_that_was_not_submitted_are_shown(started: Started, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(started.folder, "a")
    run.log(0).write_text("of rank 0\n")
    assert main(["logs", str(run.path)]) == 0
    assert capfd.readouterr().out == "of rank 0\n"
    assert main(["logs", str(run.path), "--rank", "1"]) == 2 and "rank 1 of" in capfd.readouterr().err
    assert main(["logs", str(run.path), "--follow"]) == 2 and "tail -F" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["--calibrate", "none/device.toml"], ["--gpus", "8", "--page", "none/plan.html", "train.py"]])
def test_a_plan_is_not_made_for_a_folder_that_is_not_there(
    started: Started, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    started.script("raise RuntimeError('it ran')", "train.py")
    monkeypatch.chdir(started.folder)
    assert main(["plan", *words]) == 2
    assert "must be a file in a folder that exists, got 'none/" in capsys.readouterr().err


def test_a_folder_that_may_not_be_written_is_named_without_a_traceback(
    started: Started, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (started.folder / "runs").write_text("")
    monkeypatch.chdir(started.folder)
    run = RunDir.create(started.folder / "other", "a")
    run.report.mkdir()
    for words in (["report", str(run.path)], ["prove", started.script(OK)]):
        assert main(words) in (1, 2)
        said = capsys.readouterr().err
        assert "echelon: " in said and "Traceback" not in said and len(said.splitlines()) == 1, said


def test_checkpoints_are_found_by_the_name_of_their_run(
    started: Started, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(started.folder)
    RunDir.create("runs", "a")
    assert main(["ckpt", "ls", "a"]) == 0 and "a holds no checkpoint" in capsys.readouterr().out
    assert main(["ckpt", "ls", "b"]) == 1 and "or a run's name" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["explain", "report", "top"])
def test_a_run_is_named_alike_by_all_commands(started: Started, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(started.folder / "mine", "a")
    write_json(run.exit_json, {"exit_code": 0})
    for words in (["a", "--runs", str(run.path.parent)], [str(run.path)]):
        assert main([verb, *words]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out


@pytest.mark.full
def test_an_option_of_ours_behind_the_script_is_the_scripts_and_is_mentioned_once(
    tmp_path: Path, echelon_command: Command
) -> None:
    (tmp_path / "plain.py").write_text("import sys; print(sys.argv[1:])")
    (tmp_path / "its_own.py").write_text(
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--ranks'); p.parse_args()"
    )
    done = echelon_command("run", "--ranks", "1", "plain.py", "--ranks", "2", "--bind=cores", "--bind", "--lr")
    assert done.stdout == "['--ranks', '2', '--bind=cores', '--bind', '--lr']\n"
    said = [line for line in done.stderr.splitlines() if "stands after" in line]
    assert said == ["echelon: --bind stands after plain.py, so plain.py gets it. For echelon: echelon run --bind ... plain.py"]
    assert "stands after" not in echelon_command("run", "--bind=none", "its_own.py", "--ranks", "2").stderr


def test_a_plan_may_be_written_behind_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser, script = Parser(prog="echelon plan"), str(tmp_path / "train.py")
    plan.add_arguments(parser)
    (tmp_path / "train.py").write_text("import argparse; p = argparse.ArgumentParser(); p.add_argument('--device')")

    given = parser.parse_args([script, "--cluster=2x8xH100", "--lr", "0.1", "--layout", "fsdp", "--device", "cuda", "--json"])
    assert (given.cluster, given.layout, given.device, given.json) == ("2x8xH100", ["fsdp"], None, True)
    assert given.args == ["--lr", "0.1", "--device", "cuda"]

    given = parser.parse_args(["--only", "yours", script, "--gpus", "8", "x", "--", "--gpus", "3"])
    assert (given.only, given.ranks, given.args) == ("yours", 8, ["x", "--gpus", "3"])
    assert not capsys.readouterr().err

    given = parser.parse_args(["--gpus", "8", script, "--layout", "fsdp"])
    assert (given.ranks, given.layout, given.args) == (8, None, ["--layout", "fsdp"])
    assert "--layout stands after" in capsys.readouterr().err


def test_a_folder_that_does_not_exist_is_named(echelon_command: Command) -> None:
    for verb in ("ls", "verify", "export"):
        done = echelon_command("ckpt", verb, "nowhere", *(["out"] if verb == "export" else []))
        assert done.returncode == 1 and done.stderr.startswith("echelon: nowhere does not exist"), done.stderr


TRACED = """
import sys, torch, echelon as ech
class Fit(ech.AutoUnit):
    def compute_loss(self, state, data):
        return self.module(data[0][:, : int(sys.argv[1])]).sum(), 0
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None
def main():
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    ech.train(Fit(module=torch.nn.Linear(4, 1)), ech.Loader(data, global_batch=4), max_epochs=int(sys.argv[2]))
main()
"""


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("arguments", "says"), [(("3", "1"), "mat1 and mat2 shapes"), (("4", "-1"), "LoopError: ")])
def test_a_plain_script_shows_the_users_frames_and_not_ours(
    tmp_path: Path, arguments: tuple[str, ...], says: str, full: bool
) -> None:
    (tmp_path / "train.py").write_text(TRACED)
    env = clean_environment() | ({"ECHELON_FULL_TRACEBACK": "1"} if full else {})
    words = [sys.executable, "train.py", *arguments]
    done = forked.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    ours = [line for line in done.stderr.splitlines() if line.startswith(f'  File "{Path(echelon.__file__).parent}{os.sep}')]
    assert done.returncode == 1 and says in done.stderr and "in main" in done.stderr
    assert ("in compute_loss" in done.stderr) == (arguments[0] == "3")
    assert bool(ours) == full and ("inside echelon left out" in done.stderr) != full


def test_an_error_that_echelon_itself_made_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the library: its frames are what is needed. Causes are shortened each by its own kind."""

    def ours(raises: Exception) -> None:
        raise raises

    ours.__code__ = ours.__code__.replace(co_filename=os.path.join(os.path.dirname(echelon.__file__), "loop", "planted.py"))
    shown = []
    for cause in (KeyError("a fault"), UsageError("a value")):
        try:
            try:
                ours(cause)
            except Exception as error:
                raise ValueError("the user's") from error
        except ValueError as error:
            shown.append(shortened(error))
    assert "planted.py" in shown[0] and "left out" not in shown[0] and "the user's" in shown[0]
    assert "planted.py" not in shown[1] and "(1 frame inside echelon left out" in shown[1] and "UsageError: a value" in shown[1]


def test_without_a_command_the_help_is_shown_and_the_exit_code_says_that_nothing_ran(echelon_command: Command) -> None:
    done = echelon_command()
    assert done.returncode == 2 and done.stderr.startswith("usage: echelon") and done.stdout == ""


def test_a_script_of_ours_in_utf_8_with_a_byte_order_mark_runs(started: Started) -> None:
    (started.folder / "bom.py").write_bytes("\ufeff# coding: utf-8\nprint('ä')\n".encode())
    out, _ = started.run("--ranks", "1", "bom.py").communicate(timeout=120)
    assert out.decode() == "ä\n"


def test_a_name_used_again_gets_one_more_attempt(started: Started) -> None:
    script = started.script(OK)
    for _ in range(2):
        started.run("--ranks", "1", "--name", "twice", script).communicate(timeout=120)
    assert sorted(p.name for p in (started.folder / "runs/twice/attempts").iterdir()) == ["000", "001"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_run_that_is_under_way_has_its_folder_to_itself(started: Started, ranks: str) -> None:
    script = started.script("import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n")
    first = started.run("--ranks", ranks, "--name", "busy", script)
    wait_until(lambda: list(started.folder.glob("runs/busy/attempts/000/rank0.log")), "it has begun")
    second = started.run("--ranks", ranks, "--name", "busy", script)
    _, err = second.communicate(timeout=120)
    assert second.returncode == 2 and f"run busy is under way: process {first.pid} on " in err.decode()
    assert [p.name for p in (started.folder / "runs/busy/attempts").iterdir()] == ["000"]
    (started.folder / "go").touch()
    first.communicate(timeout=120)
    third = started.run("--ranks", ranks, "--name", "busy", script)
    third.communicate(timeout=120)
    assert (first.returncode, third.returncode) == (0, 0)


# ---- starting fast ----------------------------------------------------------------------------------------------------------


def _outside_modules() -> list[str]:
    """Every module that works without torch: all rooms but those that run in a rank, and the elastic agent."""
    found = ["echelon"]
    for package in ("common", "contracts", "launcher", "observe", "doctor", "cli"):
        root = Path(echelon.__path__[0]) / package
        found += [f"echelon.{package}"]
        found += [info.name for info in pkgutil.walk_packages([str(root)], f"echelon.{package}.")]
    return [name for name in found if name not in ("echelon.launcher.local.agent", "echelon.launcher.local.rendezvous")]


@pytest.mark.full
def test_the_outside_half_imports_no_torch() -> None:
    """One process imports them one by one and says at which torch or numpy appears."""
    code = (
        "import importlib, sys\n"
        f"for name in {_outside_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr


HELPS = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]


def test_help_imports_no_torch() -> None:
    """One process shows all."""
    code = (
        "import contextlib, io, json, sys\nfrom echelon.cli.main import main\nfound = {}\n"
        f"for arguments in {HELPS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "        try: code = main(arguments)\n"
        "        except SystemExit as end: code = end.code\n"
        "    found[' '.join(arguments)] = code, 'torch' in sys.modules, shown.getvalue()\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for arguments, (ended, torch_is_there, shown) in json.loads(done.stdout).items():
        assert (ended, torch_is_there) == (0, False) and "echelon" in shown, arguments


def test_a_run_of_one_rank_imports_no_torch_that_the_script_does_not(started: Started) -> None:
    run = started.run("--ranks", "1", started.script("import sys; print('torch' in sys.modules)"), fresh=True)
    assert run.communicate(timeout=120)[0] == b"False\n"


@pytest.mark.full
def test_sets_of_strings_have_one_order_in_every_start(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    script = started.script("print(list(set('abcdefghijklmnop')))")
    for chosen in ({}, {"PYTHONHASHSEED": "random"}):
        runs = [started.run("--ranks", "1", script, fresh=True, env=chosen) for _ in range(2)]
        one, other = (run.communicate(timeout=120)[0] for run in runs)
        assert one.endswith(b"]\n") and (one == other) is (not chosen)


def test_type_checkers_find_every_name_of_the_root_where_it_lives() -> None:
    """They read the imports, a run reads the page."""
    tree = ast.parse(Path(echelon.__file__ or "").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    found = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    modules = {name: f"echelon.{name}" for name in vars(echelon)["_MODULES"]}
    assert found == modules | {name: f"echelon.{home}.{name}" for name, home in vars(echelon)["_HOMES"].items()}


def test_every_name_of_the_root_is_there_and_on_its_page_of_about_fifty_names() -> None:
    assert all(callable(getattr(echelon, name)) for name in echelon.__all__) and set(echelon.__all__) <= set(dir(echelon))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = echelon.no_such_name
    page, _, modules = (echelon.__doc__ or "").partition("More, by subject:")
    assert sorted(re.findall(r"^    (\w+) {2,}\S", page, re.M)) == list(echelon.__all__) and len(echelon.__all__) <= 55
    assert re.findall(r"^    echelon\.(\w+) {2,}\S", modules, re.M) == list(vars(echelon)["_MODULES"])


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("SaveOptions", "callbacks"),
        ("LoaderOptions", "data"),
        ("DataError", "errors"),
        ("RunDir", "evidence"),
        ("World", "launching"),
        ("Precision", "layouts"),
        ("FSDP2Strategy", "compat.torchtnt.utils.prepare_module"),
        ("get_logger", "loggers"),
        ("MoE", "nn"),
        ("test", "units"),
    ],
)
def test_what_is_not_at_the_root_tells_its_place(name: str, now: str) -> None:
    assert hasattr(importlib.import_module(f"echelon.{now}"), name)
    with pytest.raises(AttributeError, match=rf"echelon\.{name} is now echelon\.{now}\.{name}"):
        getattr(echelon, name)
    with pytest.raises(ImportError, match=rf"echelon\.{name} is now echelon\.{now}\.{name}"):
        exec(f"from echelon import {name}")


def test_one_rank_that_changes_its_folder_has_its_end_recorded(echelon_command: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "moves.py").write_text("import os\nos.chdir('other')\nraise ValueError('mine')\n")
    done = echelon_command("run", "--ranks", "1", "--name", "moves", "moves.py")
    assert done.returncode == 1 and "ValueError: mine" in done.stderr and "cannot be written" not in done.stderr, done.stderr
    assert len(list(tmp_path.glob("runs/moves*/attempts/000/exit.json"))) == 1
