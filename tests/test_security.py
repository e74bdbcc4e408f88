"""The list of section 4 of the research on reliability, item by item; where an item has its test elsewhere, this says where.

S1  no pickle on the way into a checkpoint: tests/test_checkpoint_restore.py (a_pickle_with_code_is_refused_and_does_not_run,
    a_checkpoints_own_files_hold_no_pickle)
S2  a pickled function is loaded only if its checksum matches: tests of `slurm_fn`; scripts and modules travel as text
S3  the store: tests/test_store.py (token, restarts, nothing unpickled), tests/test_elastic_seam.py (loopback); the address of
    several nodes: here
S4  no collectives of objects: here
S5  no servers beyond the store: tests/test_elastic_seam.py (ranks_listen_on_loopback_only); in the source: here
S6  no shell: tests/test_submit.py (paths, values, names, `bash -n`); in the source: here
S7  no way out of a folder: run names in tests/test_submit.py; the files of a checkpoint: here, tests/test_checkpoint_hostile.py
S8  secrets: here; not in a batch script: tests/test_submit.py. `job/job.json` alone holds a job's arguments, which it needs
S9  temporary files: in the source: here; links in place of a lease, a staged folder, an export: tests/test_checkpoint_foreign.py
S10 0600 in 0700: here, meeting files in tests/test_submit.py
S11 the report: tests/test_report.py (hostile_text_stays_text, ...)
S12 control characters: here; names in tests/test_submit.py
"""

from __future__ import annotations

import ast
import os
import pty
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.checkpoint import manifest
from echelon.contracts.errors import CheckpointCorruptError, UsageError
from echelon.contracts.redact import redacted, redacted_words
from echelon.contracts.run_dir import RunDir
from echelon.launcher import nodes
from echelon.launcher.jobs import job_of
from tests.conftest import clean_environment

SOURCE = Path(echelon.__file__).parent
CANARY = "canary-7f3a"


def _used() -> Iterator[tuple[Path, ast.AST, str]]:
    """Every name, attribute and imported module in the source, and every keyword of a call as `name=value`."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                yield path, node, node.attr
                yield path, node, ast.unparse(node)
            elif isinstance(node, ast.Name):
                yield path, node, node.id
            elif isinstance(node, ast.alias):
                yield path, node, node.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path, node, node.module
                yield from ((path, node, f"{node.module}.{each.name}") for each in node.names)
            elif isinstance(node, ast.keyword) and node.arg:
                yield path, node, f"{node.arg}={ast.unparse(node.value)}"


FORBIDDEN = {
    "S4": {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"},
    "S5": {"http.server", "socketserver", "torch.distributed.debug", "prometheus_client", "start_http_server"},
    "S6": {"shell=True", "os.system", "popen", "getoutput", "getstatusoutput", "eval"},
    "S9": {"mktemp", "gettempdir", "tmpnam"},
}
# TorchTNT's functions that send objects, for the programs that call them; the test below holds that we do not.
ALLOWED = {"S4": Path("compat/torchtnt/utils/distributed.py")}


@pytest.mark.parametrize("item", FORBIDDEN)
def test_the_source_does_without(item: str) -> None:
    harmless = {"eval": ast.Attribute}  # Module.eval
    found = [
        f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', '?')} {name}"
        for path, node, name in _used()
        if name in FORBIDDEN[item]
        and not isinstance(node, harmless.get(name, ()))
        and path.relative_to(SOURCE) != ALLOWED.get(item)
    ]
    assert not found


def test_s4_nobody_calls_what_sends_objects() -> None:
    names = {"PGWrapper", "rank_zero_read_and_broadcast"}
    assert {path.relative_to(SOURCE) for path, _, name in _used() if name in names} == {ALLOWED["S4"]}


def test_s3_the_store_of_several_nodes_is_on_one_address_only(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "a", begin=False)
    first = nodes.meet(run, "7.0", 0, ["127.0.0.1", "127.0.0.1"])
    assert first.listener is not None
    with first.listener:
        assert first.listener.getsockname()[0] == first.host == nodes.local_address_towards("127.0.0.1")
        with pytest.raises(OSError), nodes.socket.create_connection(("127.0.0.2", first.port), timeout=5):
            pass  # also this machine, but another address
    alone = nodes.meet(run, "8.0", 0, ["localhost"])
    assert alone.listener is None


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "a/b", "", "-rf", ".hidden"])
def test_s7_a_checkpoint_lists_no_file_outside_of_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    entry = {"size": 1, "crc32": ["00000000"]}
    facts = {"step": 1, "time": 0.0, "files": dict.fromkeys(["rank-00000.safetensors", "state.safetensors", "index.json"], entry)}
    (folder / manifest.MANIFEST).write_bytes(manifest.render(facts))
    assert manifest.read(folder)["files"] == facts["files"]
    facts["files"] = {**manifest.read(folder)["files"], name: entry}
    (folder / manifest.MANIFEST).write_bytes(manifest.render(facts))
    with pytest.raises(CheckpointCorruptError, match="no file of a checkpoint"):
        manifest.read(folder)


def test_s8_what_is_taken_out_of_a_command_line() -> None:
    url = "https://me:pw@host/data?x=1"
    assert redacted(f"cannot read {url}, nor s3://key:a@b@bucket") == (
        "cannot read https://***@host/data?x=1, nor s3://***@bucket"
    )
    words = [
        "--hf-token",
        "abc",
        "--api_key=abc",
        "PASSWORD=abc",
        "--secret",
        "--lr",
        "0.1",
        f"--data={url}",
        "--credentials",
        "x",
    ]
    assert redacted_words(words) == [
        "--hf-token", "***", "--api_key=***", "PASSWORD=***", "--secret", "--lr", "0.1",
        "--data=https://***@host/data?x=1", "--credentials", "***",
    ]  # fmt: skip
    harmless = ["--tokenizer=gpt2", "--tokens", "4096", "--keys=a", "me@host", "--monkey=1", "secretary=2"]
    assert redacted_words(harmless) == harmless


SCRIPT = """
import os, sys
from echelon.contracts.run_dir import RunDir
assert os.environ["HF_TOKEN"] == "canary-7f3a-env" and "canary-7f3a-user:canary-7f3a-pw@" in sys.argv[2]
(RunDir.current().path / "checkpoints" / "mine").write_text("x")
if sys.argv[1] == "fail":
    raise ValueError(f"cannot reach {sys.argv[2]}")
"""


def _with_the_canary(run: Path) -> set[str]:
    return {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.is_file() and path.relative_to(run).parts[:2] != ("job", "code") and CANARY.encode() in path.read_bytes()
    }


def test_s8_a_secret_is_in_no_file_and_no_output(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"HF_TOKEN": f"{CANARY}-env"}
    arguments = (f"https://{CANARY}-user:{CANARY}-pw@host/x", f"--hf-token={CANARY}-1", "--wandb-key", f"{CANARY}-2")
    outputs = []
    for ranks, what in ((1, "fine"), (2, "fail"), (1, "fail")):
        said = echelon_command("run", "--ranks", str(ranks), "--name", f"{what}{ranks}", "train.py", what, *arguments, env=env)
        assert (said.returncode == 0) is (what == "fine"), said.stderr
        outputs += [said.stdout, said.stderr]
        assert ("https://***@host/x" in said.stderr) is (what == "fail")
        assert _with_the_canary(tmp_path / "runs" / f"{what}{ranks}") == set()
    for more in (("--dry-run",), ("--to", "local", "--name", "sent")):
        said = echelon_command("submit", *more, "train.py", "fail", *arguments, env={**env, "PATH": str(tmp_path)})
        outputs += [said.stdout, said.stderr]
        assert said.returncode == 0, said.stderr
    job = job_of(RunDir(tmp_path / "runs" / "sent"))
    with pytest.raises(echelon.contracts.errors.RankFailedError) as raised:
        job.result(60)
    assert CANARY not in str(raised.value) and CANARY not in "".join(outputs)
    # What the job is started with: the arguments, as they are. S10: nobody else reads it.
    assert _with_the_canary(job.run.path) == {"job/job.json"}
    assert f"{CANARY}-env" not in (job.run.path / "job" / "job.json").read_text()
    _s10_of(job.run.path)


def _s10_of(run: Path) -> None:
    """The job, its logs and what its ranks write are their owner's alone."""
    wrong = {
        str(path.relative_to(run)): oct(path.stat().st_mode)
        for folder in ("job", "attempts")
        for path in (run / folder, *(run / folder).rglob("*"))
        if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600) and "code/" not in str(path)
    }
    assert not wrong and stat.S_IMODE((run / "checkpoints" / "mine").stat().st_mode) == 0o600


def test_s10_a_folder_that_everybody_can_change_is_refused(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a").chmod(0o777)
    said = echelon_command("submit", "--to", "local", "--name", "a", "train.py")
    assert said.returncode == 2 and "everybody can write to" in said.stderr and not (tmp_path / "runs" / "a" / "job").exists()


def test_s12_files_of_others_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\x1b[31mred\x1b[0m\ttab\r\n"
    run = RunDir.create(tmp_path / "runs", "a")
    run.log(0).write_text(evil)
    (run.path / "job").mkdir()
    (run.path / "job" / "job.json").write_text(
        '{"spec": {"target": "x"}, "launcher": "local", "id": "1", "began": 0, "sweep": [["k", "\\u001b[2J\\n"]]}'
    )
    command = [sys.executable, "-m", "echelon"]
    shown = subprocess.run([*command, "jobs"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=True)
    assert "\x1b" not in shown.stdout and shown.stdout.count("\n") == 2 and "?[2J?" in shown.stdout
    raw = subprocess.run([*command, "logs", "a"], cwd=tmp_path, env=clean_environment(), capture_output=True, check=True)
    assert raw.stdout == evil.encode()  # into a file or a pipe as it is
    master, terminal = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as ours:
        subprocess.run([*command, "logs", "a"], cwd=tmp_path, env=clean_environment(), stdout=terminal, check=True)
        os.close(terminal)
        assert ours.read(4096).replace(b"\r\n", b"\n").replace(
            b"\r\n", b"\n"
        ) == b"?]0;title??[2J?31m\x1b[31mred\x1b[0m\ttab\r\n".replace(b"\r\n", b"\n")


def test_a_run_name_is_no_path() -> None:
    for name in ("../a", "a/b", ".", "..", "/a"):
        with pytest.raises(UsageError):
            RunDir.check_name(name)
