"""The list of section 4 of the research on reliability, item by item; where an item has its test elsewhere, this says where.

S1  no pickle on the way into a checkpoint: test_checkpoint_restore.py (a_pickle_with_code_is_refused_and_does_not_run,
    a_checkpoints_own_files_hold_no_pickle)
S2  a pickled call is loaded only if its checksum matches, a value only with its seal: tests of `slurm_fn`; scripts travel as text
S3  the store: test_store.py (token, restarts, nothing unpickled), test_rendezvous.py (loopback); the address of
    several nodes: here
S4  no collectives of objects: here
S5  no servers beyond the store: tests/launcher/test_rendezvous.py (listen_on_loopback_only); in the source: here
S6  no shell: tests/launcher/test_submit.py (paths, values, `bash -n`), names in test_run_dir.py; in the source: here
S7  no way out of a folder: run names in test_run_dir.py; the files of a checkpoint: here, test_checkpoint_hostile.py
S8  secrets: here; not in a batch script: test_submit.py. `job/job.json` alone holds a job's arguments, which it needs
S9  names that can be guessed, temporary files in the source: here; a link in place of the lease: test_checkpoint_commit.py;
    of a staged folder or an export: tests/checkpoint/test_checkpoint_foreign.py
S10 0600 in 0700, and whose a folder is: here, meeting files in tests/launcher/test_submit.py
S11 the report: tests/observe/test_report.py (hostile_text_stays_text, ...)
S12 control characters: here; names in test_run_dir.py
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import io
import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echelon
from echelon.checkpoint import manifest
from echelon.cli.main import main
from echelon.common.errors import CheckpointCorruptError, RankFailedError, UsageError
from echelon.common.files import private_folder
from echelon.common.machine import boot_id, started_at
from echelon.common.redact import redacted, redacted_words, secret_values
from echelon.common.terminal import OutputFilter, printable
from echelon.contracts.events import EventLog
from echelon.contracts.restart_notes import note_begun
from echelon.contracts.run_dir import RunDir, write_json
from echelon.diagnosis.failure import Failure, render
from echelon.launcher.calls import write_value
from echelon.launcher.cluster import node as node_of_job
from echelon.launcher.cluster.background import LocalLauncher
from echelon.launcher.cluster.finish_job import finish_job
from echelon.launcher.cluster.function_job import FunctionJob
from echelon.launcher.cluster.jobs import job_of
from echelon.launcher.cluster.slurm import commands
from echelon.launcher.cluster.slurm.job import SlurmLauncher
from echelon.launcher.cluster.slurm.render import SlurmOptions
from echelon.launcher.job import JobSpec
from echelon.launcher.local import nodes
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.end_record import write_exit
from echelon.launcher.local.relay import Relay, SilentScreen
from echelon.launcher.protocol import JobState, note_submitted, read_spec, write_spec
from echelon.loop.checkpointing.changes import facts
from echelon.loop.unit import Unit
from echelon.observe import report
from echelon.observe.sinks.model import ProgressModel
from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.refusals import refused

SOURCE = Path(echelon.__file__).parent
CANARY = "canary-7f3a"
ANOTHER = 4321


@functools.cache
def _used() -> frozenset[tuple[Path, int, type[ast.AST], str]]:
    """`_names_in` of all sources: where, which line, what kind of node."""
    return frozenset((path, getattr(node, "lineno", 0), type(node), name) for path, node, name in _names_in(SOURCE))


def _names_in(folder: Path) -> Iterator[tuple[Path, ast.AST, str]]:
    """Every name, attribute and imported module in the source, and every keyword of a call as `name=value`."""
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        given = {node for function in ast.walk(tree) for node in _of_arguments(function)}  # `train(eval=...)` is no builtin
        for node in ast.walk(tree):
            if node in given:
                continue
            if isinstance(node, ast.Attribute):
                yield path, node, node.attr
                yield path, node, _dotted(node)
            elif isinstance(node, ast.Name):
                yield path, node, node.id
            elif isinstance(node, ast.alias):
                yield path, node, node.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path, node, node.module
                yield from ((path, node, f"{node.module}.{each.name}") for each in node.names)
            elif isinstance(node, ast.keyword) and node.arg:
                yield path, node, f"{node.arg}={ast.unparse(node.value)}"


def _dotted(node: ast.expr) -> str:
    """As `ast.unparse` writes names with dots between them, in a tenth of its time; nothing of what is longer."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _of_arguments(function: ast.AST) -> Iterator[ast.Name]:
    """The names in a function's body that mean its own arguments."""
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = function.args
        names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        inner = (node for statement in function.body for node in ast.walk(statement))
        yield from (node for node in inner if isinstance(node, ast.Name) and node.id in names)


FORBIDDEN = {
    "S4": {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"},
    "S5": {"http.server", "socketserver", "torch.distributed.debug", "prometheus_client", "start_http_server"},
    "S6": {"shell=True", "os.system", "popen", "getoutput", "getstatusoutput", "eval"},
    "S9": {"mktemp", "gettempdir", "tmpnam"},
}
# A server of the run's numbers, only where it is asked for, on loopback; tests/observe/test_endpoint.py has its enemies.
# The length of the temporary folder's name is measured, on which sockets depend; nothing is made in it.
ALLOWED = {
    "S5": Path("observe/endpoint.py"),
    "S9": Path("data/workers.py"),
}


@pytest.mark.full
@pytest.mark.parametrize("item", FORBIDDEN)
def test_the_source_does_without(item: str) -> None:
    harmless = {"eval": ast.Attribute}  # Module.eval
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path, line, kind, name in _used()
        if name in FORBIDDEN[item] and kind is not harmless.get(name) and path.relative_to(SOURCE) != ALLOWED.get(item)
    ]
    assert not found


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
    with refused(CheckpointCorruptError):
        manifest.read(folder)


def test_s8_what_is_taken_out_of_a_command_line() -> None:
    url = "https://me:pw@host/data?x=1"
    assert redacted(f"cannot read {url}, nor s3://key:a@b@bucket") == (
        "cannot read https://***@host/data?x=1, nor s3://***@bucket"
    )
    words = ["--hf-token", "abc", "--api_key=abc", "PASSWORD=abc", "--secret", "--lr", "0.1"]
    words += [f"--data={url}", "--credentials", "x"]
    assert redacted_words(words) == [
        "--hf-token", "***", "--api_key=***", "PASSWORD=***", "--secret", "--lr", "0.1",
        "--data=https://***@host/data?x=1", "--credentials", "***",
    ]  # fmt: skip
    harmless = ["--tokenizer=gpt2", "--tokens", "4096", "--keys=a", "me@host", "--monkey=1", "secretary=2"]
    assert redacted_words(harmless) == harmless


# What ought to stay as it is: a report is for reading it. Numbers, paths, names of models, commits, ids of runs, shards of data.
ORDINARY = [
    *("--lr", "3e-4", "--betas", "0.9,0.95", "-n", "4", "--model", "meta-llama/Llama-3-8B", "--tokenizer", "gpt2", "--tokens"),
    *("4096", "--max-token=512", "--pad-token", "<pad>", "--eos_token=</s>", "--image-key", "jpg", "--sort-key=length"),
    *("--author", "me", "--use-auth-token", "True", "--monkey=1", "secretary=2", "--keys=a", "me@host", "--key-frames", "3"),
    *(
        "--sha",
        "4e40632a1b2c3d4e5f60718293a4b5c6d7e8f901",
        "4e40632",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd1",
    ),
    *("--run-id", "550e8400-e29b-41d4-a716-446655440000", "--resume", "0ujtsYcgvSTl8PAuAdqWYSMnLOv", "exp-2024-01-01_lr3e-4"),
    *("ResNet50V2Fp16Bs256Lr1e4Ep90", "Llama3VisionInstructFinetuneOnFineWebEdu2024", "Qwen2.5-Coder-32B-Instruct-GPTQ-Int8"),
    *("--data", "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWP24o7", "/data/dGhpcyBpcyBhIGZpbGU/Zm9vYmFyYmF6cXV4MTIz.tar"),
    *("s3://bucket/imagenet-{000..146}.tar", "https://host/data?rev=4e40632&split=train#top", "http://localhost:8080/path@x"),
    *("git+https://github.com/org/repo@v1.0", "hf_transformers", "hf_llama_3_finetune", "sk-learn-pipeline-of-trees"),
    *('{"lr": 0.1, "pad_token": "<pad>", "key": "loss"}', "optimizer.lr=0.1", "+trainer.max_updates=100", "a=b=c", "--passes=3"),
    *("torch.optim.AdamW", "[1, 2, 3]", "layers.0.attn.key.weight", "2024-11-22T01:02:03Z", "--seed=12345678901234567890"),
]


def test_s8_ordinary_arguments_stay_as_they_are() -> None:
    assert redacted_words(ORDINARY) == ORDINARY
    address = "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWP24o7"  # of data by their content: in prose it might be a secret
    assert [word for word in ORDINARY if redacted(word) != word] == [address]
    code = """
    loss = attention(query, key=key, value=value)
    best = max(runs, key=lambda run: run.loss)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "eos_token": "</s>"})
    token = tokens[position]; sort_key = "length"
KeyError: 'hf_token'
RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x512 and 256x10)
"""
    assert redacted(code) == code


PARTS_OF_NAMES = ("train", "large", "model", "run", "final", "base", "small", "tuned", "v1", "v2", "fp16", "bs256")


@given(
    st.lists(
        st.one_of(
            # Without those that their option alone tells from a secret.
            st.sampled_from([word for word in ORDINARY if word[:3] not in ("0uj", "QmY")]),
            st.floats().map(str),
            st.integers().map(str),
            st.uuids().map(str),
            st.binary(min_size=16, max_size=32).map(bytes.hex),
            st.from_regex(r"(--)?[a-z]{1,9}([_.-][a-z]{1,9}){0,3}(=[0-9]{1,4})?", fullmatch=True),
            st.lists(st.sampled_from(PARTS_OF_NAMES), min_size=1).map("_".join),
        )
    )
)
def test_s8_no_word_vanishes_but_as_a_secret(words: list[str]) -> None:
    """As many words come out as went in, twice is as once, and nothing is hidden that no name and no form says to be a secret."""
    named = re.compile(r"key|token|secret|passw|pwd|auth|bearer|jwt|cookie|cred|passphrase|passcode|pass|user|-u", re.I)
    shown = redacted_words(words)
    assert len(shown) == len(words) and redacted_words(shown) == shown
    for before, word, after in zip(["", *words], words, shown, strict=False):
        assert word == after or named.search(before) or named.search(word), (before, word, after)


def test_s8_a_checkpoint_tells_no_secret_of_a_config() -> None:
    """As of a script's own arguments, kept as `unit.config`."""
    config = {
        "lr": 0.1,
        "hf_token": "abc",
        "wandb": {"api_key": "abc", "name": "run-7"},
        "pad_token": "<pad>",
        "key": "loss",
        "pwd": 7,
    }
    unit = Unit()
    unit.config = argparse.Namespace(**config, url="https://me:pw@host/x", layers=[1, 2])
    hidden = {"hf_token": "***", "wandb": {"api_key": "***", "name": "run-7"}, "pwd": "***", "url": "https://***@host/x"}
    assert facts(unit, None)["user"] == {**config, "layers": [1, 2], **hidden}


@given(st.text(max_size=300), st.lists(st.text(max_size=40), max_size=6))
def test_s8_any_text_can_be_redacted(text: str, words: list[str]) -> None:
    redacted(text, secret_values(words, {"HF_TOKEN": text}))
    assert len(redacted_words(words)) == len(words)


HANGS = (
    *("sk-", "-eyJ", "://a:b", "-x", "a", "?a=", "Bearer ", '"aa":"'),
    *("--a ", "hf_", "-----BEGIN PRIVATE KEY-----", "a=", "a:", "=;"),
)


@pytest.mark.full
@pytest.mark.parametrize("piece", HANGS)
def test_s8_no_text_takes_long_to_redact(piece: str) -> None:
    """An error holds what somebody's data makes it hold: patterns that try everything twice would hang on some of it."""
    redacted(piece * (200_000 // len(piece)))


PLANTED_SECRETS = [
    ("https://x.blob.core.windows.net/c/f?sv=2022&sig={}&se=2026",),
    ("container/blob?sig={}",),
    ("s3://bucket/x?X-Amz-Credential=a&X-Amz-Signature={}",),
    ("https://me:{}@host/x",),
    ("--header", "Authorization: Bearer {}"),
    ("-H", "X-Api-Key: {}"),
    ("--hf-token", "-{}"),
    ("--pwd", "{}"),
    ("--auth", "me:{}"),
    ("--config", '{{"lr": 0.1, "api_key": "{}"}}'),
    ("--logger={{'name': 'wandb', 'token': '{}'}}",),
    ("+trainer.logger.api_key={}",),
    ("Server=db;User=me;Password={}",),
    ("--wandbApiKey={}",),
    ("-u", "me:{}"),
    ("--secret={}",),
    ("PASSWORD={}",),
]
BARE_SECRETS = [
    "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",
    "sk-proj-q1W2e3R4t5Y6u7I8o9P0",
    "ghp_q1W2e3R4t5Y6u7I8o9P0q1W2e3R4t5Y6",
    "AKIAQ7W6E5R4T3Y2U1I0",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "xoxb-1234567890-abcdefghij",
    "kV9xQ2mZ7pLwX4tR8bJ1nYqG5sKdHz3v",
]


def test_s8_secrets_go_by_name_by_form_and_by_value() -> None:
    for words in PLANTED_SECRETS:
        given_ = [word.format(CANARY) for word in words]
        shown = redacted_words(given_)
        assert CANARY not in " ".join(shown) and len(shown) == len(words), shown
        assert shown[0] == given_[0] or len(words) == 1
        if words[0] != "-u":  # which means something else elsewhere
            assert CANARY not in redacted(f"cannot do: {' '.join(given_)}"), given_
    for secret in BARE_SECRETS:
        assert redacted_words([secret, f"--x={secret}"]) == ["***", "--x=***"]
        assert redacted(f"refused: {secret}, twice") == "refused: ***, twice"
    known = secret_values(["--pwd", "hunter2", "--lr", "0.1", "--token", "/a/file"], {"HF_TOKEN": "planted-x", "PWD": "/home/me"})
    assert known == {"hunter2", "planted-x"}
    assert redacted("no entry for hunter2 in planted-x-y", known) == "no entry for *** in ***-y"


SCRIPT = """
import os, sys
from echelon.contracts.run_dir import RunDir
assert os.environ["HF_TOKEN"] == "canary-7f3a-env" and "canary-7f3a-user:canary-7f3a-pw@" in sys.argv[2]
if sys.argv[1] == "leaves":
    sys.exit(f"no such user: {sys.argv[3:]}, {os.environ['HF_TOKEN']}")
(RunDir.current().path / "checkpoints" / "mine").write_text("x")
if sys.argv[1] == "fail":
    raise ValueError(f"cannot reach {sys.argv[2]} with {sys.argv[3:]}, nor with {os.environ['HF_TOKEN']}")
"""


def _with_the_canary(run: Path) -> set[str]:
    return {
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.is_file() and path.relative_to(run).parts[:2] != ("job", "code") and CANARY.encode() in path.read_bytes()
    }


@pytest.mark.full
def test_s8_a_secret_is_in_no_file_and_no_output(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"HF_TOKEN": f"{CANARY}-env"}
    planted = [word.format(f"{CANARY}-{n}") for n, words in enumerate(PLANTED_SECRETS) for word in words]
    arguments = (f"https://{CANARY}-user:{CANARY}-pw@host/x", f"--hf-token={CANARY}-1", "--wandb-key", f"{CANARY}-2", *planted)
    outputs = []
    for ranks, what in ((1, "fine"), (2, "fail"), (1, "fail"), (1, "leaves")):
        said = echelon_command("run", "--ranks", str(ranks), "--name", f"{what}{ranks}", "train.py", what, *arguments, env=env)
        assert (said.returncode == 0) is (what == "fine"), said.stderr
        outputs += [said.stdout, said.stderr]
        assert ("https://***@host/x" in said.stderr) is (what != "fine")
        run = tmp_path / "runs" / f"{what}{ranks}"
        assert _with_the_canary(run) == set()
        private = [run / "run.json", run / "report.html", *(p for p in run.glob("attempts/*/*") if "events" not in p.name)]
        assert [p for p in private if stat.S_IMODE(p.stat().st_mode) != 0o600] == [] and len(private) > 3
    for more in (("--dry-run",), ("--to", "local", "--name", "sent")):
        said = echelon_command("submit", *more, "train.py", "fail", *arguments, env={**env, "PATH": str(tmp_path)})
        outputs += [said.stdout, said.stderr]
        assert said.returncode == 0, said.stderr
    job = job_of(RunDir(tmp_path / "runs" / "sent"))
    with pytest.raises(echelon.common.errors.RankFailedError) as raised:
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


WAYS_IN = {
    "the run's folder is another's": (lambda run: _of_another(run), "belongs to"),
    "its group can write to it": (lambda run: run.chmod(0o775), "its group can write to"),
    "everybody can write to it": (lambda run: run.chmod(0o777), "everybody can write to"),
    "everybody can rename it": (lambda run: run.parent.chmod(0o777), ", and so replace "),
    "a link there can be replaced": (lambda run: _linked_from_where_all_write(run), ", and so replace "),
    "the job's folder is another's": (lambda run: ((run / "job").mkdir(), _of_another(run / "job")), "belongs to"),
    "the job's folder is a link": (lambda run: (run / "job").symlink_to(run.parent), "is a link"),
    "the job is another's": (lambda run: (_job_in(run), _of_another(run / "job" / "job.json")), "belongs to"),
    "the job is a pipe": (
        lambda run: ((run / "job").mkdir(), os.mkfifo(run / "job" / "job.json")),
        "holds no submitted job that can be read",
    ),
}
WAYS_OF_PROJECTS = {
    "everybody can write further up, but not rename": lambda run: run.parent.chmod(0o1777),
    "its project's group can write, and new folders are the group's": lambda run: run.parent.chmod(0o2775),
    "the project's folder is another's": lambda run: _of_another(run.parent),
}


def _linked_from_where_all_write(run: Path) -> None:
    """`run` becomes a link, in a folder where everybody may put another."""
    run.rmdir()
    (run.parents[1] / "kept").mkdir()
    run.symlink_to(run.parents[1] / "kept")
    run.parent.chmod(0o777)


def _job_in(run: Path) -> str:
    return write_spec(RunDir(run), JobSpec(str(run / "train.py")), launcher="local", cwd=str(run))


@pytest.mark.parametrize("way", WAYS_IN)
def test_s10_a_folder_that_others_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    run, (prepare, reason) = tmp_path / "runs" / "a", WAYS_IN[way]
    run.mkdir(parents=True, mode=0o755)
    prepare(run)
    (tmp_path / "train.py").write_text("open('it-ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "--to", "local", "--name", "a", "train.py"]) == 2
    said = capsys.readouterr().err
    assert reason in said and any(remedy in said for remedy in ("--name", "--runs", "chmod")), said
    assert not (tmp_path / "it-ran").exists() and not list(run.glob("job/script.sh")) + list(run.glob("attempts/*"))


@pytest.mark.parametrize("way", WAYS_OF_PROJECTS)
def test_s10_a_project_folder_of_a_group_does(tmp_path: Path, way: str) -> None:
    """With the umask of such folders, under which all that is new can be written by the group."""
    before = os.umask(0o002)
    try:
        run = RunDir.create(tmp_path / "runs", "a", begin=False)
        WAYS_OF_PROJECTS[way](run.path)
        sha256 = _job_in(run.path)
        assert read_spec(run, sha256)[0] == JobSpec(str(run.path / "train.py"), args=[])
        modes = [p.stat().st_mode & 0o022 for p in (run.path, run.path / "job", run.next_attempt().attempt_path)]
    finally:
        os.umask(before)
    assert modes == [0, 0, 0]


def test_s10_root_believes_root_alone_and_a_user_root_too(tmp_path: Path) -> None:
    """As ssh and sudo do: else a user could have root run what he likes; and whom root wants to harm, he harms."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user: run the tests as root, as CI does")
    with contextlib.ExitStack() as stack:
        seen_by_all = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        seen_by_all.chmod(0o755)
        _root_and_a_user(seen_by_all)


def _root_and_a_user(folder: Path) -> None:
    run = RunDir.create(folder, "a", begin=False)
    sha256 = _job_in(run.path)
    for path in (run.path, run.path / "job", run.path / "job" / "job.json"):
        path.chmod(path.stat().st_mode | 0o055)  # so that others could read it at all
    code = f"""
import os, sys
from pathlib import Path
from echelon.contracts.run_dir import RunDir
from echelon.launcher.protocol import read_spec
run = RunDir(Path("."))
def said(uid):
    os.seteuid(0); os.seteuid(uid)
    try:
        return read_spec(run, {sha256!r})[0].ranks
    except Exception as error:
        return str(error)
first = [said(0), said(4321)]
os.seteuid(0)
os.chown("job/job.json", 4321, -1)
print([*first, said(4321), said(0)])
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=run.path, env=clean_environment(), capture_output=True, text=True, check=True
    ).stdout
    *ours, roots = ast.literal_eval(shown)
    assert ours == [1, 1, 1] and "root trusts only root" in roots, shown


def test_s4_a_job_that_was_changed_does_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A requeue starts the same batch script, whose checksum is of what was submitted; also where the owner says nothing."""
    run, evidence = RunDir.create(tmp_path / "runs", "a", begin=False), tmp_path / "it-ran"
    (tmp_path / "evil.py").write_text(f"open({str(evidence)!r}, 'w').close()\n")
    sha256 = _job_in(run.path)
    before = (run.path / "job" / "job.json").read_text()
    assert _job_in(run.path) != sha256  # and nobody can write the very same from what he knows
    evil = json.dumps({**json.loads(before), "spec": {"target": str(tmp_path / "evil.py")}})
    (run.path / "job" / "job.json").write_text(evil)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        for more in ([], ["--conclude", "75"]):
            assert node_of_job.main([str(run.path), "--spec-sha256", sha256, *more]) == 1
            assert "is not what was submitted" in capsys.readouterr().err
    finally:  # a node's launcher blocks one, and ends with its process
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert not evidence.exists() and run.attempts() == []


@pytest.mark.parametrize("tasks", [None, 3])
def test_s4_the_batch_script_knows_what_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int | None) -> None:
    sent = list[str]()
    monkeypatch.setattr(commands, "submit", lambda script, export: sent.append(script) or "7")
    monkeypatch.setattr(commands, "refuse_if_never", lambda job: None)
    run = RunDir.create(tmp_path, "a", begin=False)
    private_folder(run.path / "job", 0o700)
    launcher, spec = SlurmLauncher(SlurmOptions(), cwd=tmp_path), JobSpec("train.py")
    sweep = [[("lr", str(n))] for n in range(tasks or 0)]
    jobs = launcher.submit_all(spec, sweep, run) if tasks else [launcher.submit(spec, run)]
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> said\n')
    (tmp_path / "python").chmod(0o755)
    script = sent[0].replace("srun --kill", 'srun() { shift 3; "$@"; }\nsrun --kill')
    script = re.sub(r"(?m)^python=.*", f"python={tmp_path / 'python'}", script)
    for n, job in enumerate(jobs):
        env = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(n), "SLURM_JOB_ID": "7"}
        subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, check=False, capture_output=True)
        said = (tmp_path / "said").read_text().splitlines()
        (tmp_path / "said").unlink()
        right = hashlib.sha256((job.run.path / "job" / "job.json").read_bytes()).hexdigest()
        assert len(said) == 2 and all(f"node {job.run.path} --spec-sha256 {right}" in line for line in said), said
        assert job.id == ("7" if tasks is None else f"7_{n}") and read_spec(job.run, right)[0].target == "train.py"


def _planted_job(run: RunDir, pid: int, **changes: Any) -> None:
    _job_in(run.path)
    note_submitted(run, id=str(pid), **{"host": socket.gethostname(), "boot": boot_id(), "ticks": started_at(pid), **changes})


def test_s4_cancel_ends_no_process_that_another_user_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor one that was given the same number since: after a start of the machine, or by chance; nor one of another machine."""
    victim = subprocess.Popen(["sleep", "600"])
    try:
        cases = {"foreign": {}, "boot": {"boot": "x"}, "ticks": {"ticks": 1}, "host": {"host": "elsewhere"}, "dashed": {}}
        for name, changes in cases.items():
            run = RunDir.create(tmp_path, name, begin=False)
            _planted_job(run, victim.pid, **changes)
            if name == "dashed":
                note_submitted(run, id=f"-{victim.pid}", boot=boot_id(), ticks=started_at(victim.pid))
            if name == "foreign":
                _of_another(run.path)
            code = main(["cancel", "--runs", str(tmp_path), name])
            assert code == (2 if name in ("foreign", "host") else 0), capsys.readouterr()
            assert (victim.poll() is None and not (run.path / "job" / "cancelled").exists()) or name == "host"
        run = RunDir.create(tmp_path, "mine", begin=False)
        _planted_job(run, victim.pid)
        assert main(["cancel", "--runs", str(tmp_path), "mine"]) == 0 and victim.wait(60) == -signal.SIGTERM
    finally:
        victim.kill()
        victim.wait()


def test_a_step_of_the_clock_loses_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil tells when a process began by the clock; after a step of that it is another time."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    job = LocalLauncher(cwd=tmp_path).submit(JobSpec(str(tmp_path / "train.py")), RunDir.create(tmp_path, "a", begin=False))
    try:
        before = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: before(self) + 3.0)
        assert job_of(job.run).state() is JobState.RUNNING
    finally:
        job.cancel()
        job.wait(60)


# --- files at names that can be guessed

WRITERS: dict[str, tuple[str, Callable[[RunDir], object]]] = {
    "run.json": (".run.json.{pid}", lambda run: write_json(run.run_json, {"a": 1})),
    "report.html": (".report.html.{pid}", report.write),
    "value": ("attempts/000/value.rank0.pkl.{pid}", lambda run: write_value(1, run.attempt_path / "value.rank0.pkl", "ab" * 32)),
    "lock": (".lock", lambda run: run.hold()),
    "metrics": ("metrics.jsonl", lambda run: EventLog(run.metrics).close()),
    "events": ("attempts/000/events.rank0.jsonl", lambda run: EventLog(run.events(0)).close()),
    "begun": ("attempts/000/begun", lambda run: _begun(run)),
    "cancelled": ("job/cancelled", lambda run: job_of(run).cancel()),
    "log": ("attempts/000/rank0.log", lambda run: [os.close(fd) for fd in Relay(SilentScreen()).open(run.log(0))]),
    "output": ("job/output.log", lambda run: LocalLauncher().submit(JobSpec("train.py"), run)),
}


def _begun(run: RunDir) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**run.to_env(), "ECHELON_RESTART": "1"}.items():
            patch.setenv(name, value)
        note_begun()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("there", ["file", "nothing", "pipe"])
def test_s9_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path: Path, writer: str, there: str) -> None:
    """Whoever can guess a name can be there first."""
    run = RunDir.create(tmp_path / "runs", "a")
    _planted_job(run, 1)
    name, write = WRITERS[writer]
    link, victim = run.path / name.format(pid=os.getpid()), tmp_path / "victim"
    if there == "pipe":
        os.mkfifo(link)
    else:
        link.symlink_to(victim)
    if there == "file":
        victim.write_text("mine")
    with contextlib.suppress(OSError, UsageError):
        write(run)
    assert victim.read_text() == "mine" if there == "file" else not victim.exists()


# --- what is read

BAD_TEXT = {
    "deep": "[" * 200_000,
    "deep in an object": '{"spec": ' * 900 + "1" + "}" * 900,
    "another kind": "[1]",
    "cut off": '{"spec": {"targ',
    "binary": "\x00\udcff",
    "numbers": '{"exit_code": 1e999, "spec": {"target": 5, "ranks": -1}, "launcher": [], "step": 1' + "0" * 5000 + "}",
    "kinds": '{"exit_code": "x", "first_failure": [], "ranks": 7, "name": {}, "command": 5, "versions": [], "loss": {}}',
    "halves": '{"name": "\\ud800", "launcher": "local", "spec": {"target": "\\ud800\\u0000"}, "cwd": "\\u0000", "id": "\\ud800"}',
}


def _bad_folders(root: Path) -> list[str]:
    names = []
    for file in ("run.json", "metrics.jsonl", "attempts/000/exit.json", "job/job.json", "job/submitted.json"):
        for kind in (*BAD_TEXT, "pipe", "link", "folder", "huge"):
            run = RunDir.create(root, re.sub(r"[/ .]", "-", f"{file}-{kind}"))
            _planted_job(run, 1, boot="another")
            write_json(run.exit_json, {"exit_code": 0})
            path = run.path / file
            path.unlink(missing_ok=True)
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "link":
                path.symlink_to("/dev/zero")
            elif kind == "folder":
                path.mkdir()
            elif kind == "huge":
                with open(path, "wb") as sparse:
                    sparse.truncate(1 << 40)
            else:
                path.write_bytes(BAD_TEXT[kind].encode("utf-8", "surrogateescape"))
            names.append(run.name)
    for strange in ("attempts/²", "attempts/999999999999", "tasks/x/job", "tasks/1/job"):
        path = RunDir.create(root, re.sub(r"[^a-z0-9]", "-", strange)).path / strange
        path.mkdir(parents=True)
        (path / "job.json").write_text("{}")
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "job")
    return names


def test_one_bad_run_folder_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = RunDir.create(tmp_path / "runs", "good")
    _planted_job(good, 1, boot="another")
    write_json(good.exit_json, {"exit_code": 0})
    with contextlib.closing(EventLog(good.metrics)) as log:
        log.write([{"step": 7, "loss": 0.5}])
    names = _bad_folders(tmp_path / "runs")
    assert main(["jobs", "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in shown.splitlines()}
    assert rows["good"][1:] == ["1", "done", "1", "1", "7", "0.5"] and rows.keys() >= set(names)
    assert all(line.isprintable() and len(line) < 1000 for line in shown.splitlines())
    for name in names:  # each by itself: an answer or a reason, at once, and never a traceback
        for verb in ("jobs", "logs", "cancel"):
            assert main([verb, "--runs", str(tmp_path / "runs"), name]) in (0, 1, 2), (verb, name)
        if not name.startswith("metrics-jsonl-huge"):  # of which half a gigabyte is read
            assert main(["report", str(tmp_path / "runs" / name)]) == 0
            assert (tmp_path / "runs" / name / "report.html").stat().st_size < 100_000


def test_a_link_in_a_run_brings_no_file_of_mine_into_its_report(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "a")
    (tmp_path / "mine.json").write_text(json.dumps({"name": CANARY, "command": [CANARY], "exit_code": 1}))
    (tmp_path / "lines").write_text(json.dumps({"step": 1, "loss": 1.0, f"{CANARY}_per_s": 2.0}) + "\n")
    for path in (run.run_json, run.exit_json):
        path.symlink_to(tmp_path / "mine.json")
    run.metrics.symlink_to(tmp_path / "lines")
    assert CANARY not in report.write(run).read_text()
    run.log(0).symlink_to(tmp_path / "mine.json")
    _planted_job(run, 1)
    assert main(["logs", str(run.path)]) == 2


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
ANYTHING = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
KEYS = "exit_code time_ns kind message user_frames traceback ours loaded rank log time reported stopped first_failure ranks ended"
KEYS += " came_to steps checkpoint host port token attempt nodes why event step total_steps loss lr eval_loss samples_per_s"
NAMES = st.sampled_from(KEYS.split())
RECORDS = st.dictionaries(NAMES, ANYTHING | st.dictionaries(NAMES, ANYTHING, max_size=4), max_size=12)


@pytest.mark.full
@settings(max_examples=40)
@given(st.lists(RECORDS, min_size=4, max_size=4))
def test_no_record_that_is_not_as_expected_ends_the_launcher(said: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        run = RunDir.create(folder, "a")
        attempt = Attempt(0, run.attempt_path)
        attempt.pids, attempt.ended = {0: 1, 1: 1, 2: 1}, {1: (256, 0), 2: (9, 0)}
        for rank, record in enumerate(said[:3]):
            write_json(run.rank_exit(rank), record)
        assert {f.rank: f.exit_code for f in attempt.failures()}.items() >= {1: 1, 2: 137}.items()
        attempt.stuck(), attempt.left()
        write_spec(run, JobSpec("x", nodes=2), launcher="slurm", cwd="/")
        meeting = nodes.meeting_path(run, "7.0")
        write_json(meeting, said[3])
        write_json(meeting.with_name("refused-7.0.node0.json"), said[0])
        assert finish_job(run, 1, "7.0") != 0
        write_json(meeting, {"host": "h", "port": 1, "command_port": 0, "token": "0" * 32, "attempt": 0, "nodes": ["a", "b"]})
        for node_, record in enumerate(said[:2]):
            write_json(run.node_exit(node_), record)
        finish_job(run, 0, "7.0")
        write_json(run.exit_json, said[2])
        job = job_of(run)
        assert job.outcome(job.state()).exit_code in range(256)
        report.render(run)
        model = ProgressModel()
        for record in said:
            model.record(record), model.event(record), model.line()


# --- the terminal


def _on_a_terminal(command: list[str], cwd: Path) -> bytes:
    master, terminal = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as ours:
        process = forked.popen(command, cwd=cwd, env=clean_environment(), stdout=terminal)
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the other end has gone
            while block := ours.read(65536):
                shown += block
        assert process.wait(60) == 0
    return shown.replace(b"\r\r\n", b"\r\n")


def test_s12_files_of_others_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    edge = 1 << 20  # the size of the blocks in which logs are read
    evil = b"\x1b]0;title\x07\x1b[2J\xc2\x9b31m\x9b\x1b[31mred\x1b[0m\ttab\xe2\x80\xae\r\n"
    evil += b"x" * (edge - len(evil) - 1) + b"\xc2\x9b2J\n"
    run = RunDir.create(tmp_path / "runs", "a")
    run.log(0).write_bytes(evil)
    write_spec(run, JobSpec("x"), launcher="local", sweep=[["k", "\u001b[2J\n"]])
    note_submitted(run, id="1", host="\x1b[2J")
    command = [sys.executable, "-m", "echelon"]
    shown = forked.run([*command, "jobs"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=True)
    assert "\x1b" not in shown.stdout and shown.stdout.count("\n") == 2 and "?[2J?" in shown.stdout
    raw = forked.run([*command, "logs", "a"], cwd=tmp_path, env=clean_environment(), capture_output=True, check=True)
    assert raw.stdout == evil  # into a file or a pipe as it is
    shown_ = _on_a_terminal([*command, "logs", "a"], tmp_path)
    first = "?]0;title??[2J?31m\ufffd\x1b[31mred\x1b[0m\ttab?\r\n".encode()
    assert shown_.startswith(first) and shown_.endswith(b"x?2J\r\n\x1b[0m") and shown_.count(b"\x1b") == 3


@given(
    st.lists(
        st.sampled_from([b"\x1b", b"[", b"31", b"m", b"2J", b"\xc2", b"\x9b", b"\xe2\x80", b"\xae", b"a", b"\r", b"\n", b"\x07"])
    )
)
def test_s12_output_is_safe_wherever_it_is_cut(pieces: list[bytes]) -> None:
    def shown(parts: list[bytes]) -> str:
        filtered = OutputFilter()
        return "".join([*map(filtered.feed, parts), filtered.end()])

    text = shown(pieces)
    assert text == shown([b"".join(pieces)])
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", text)
    assert printable(rest.replace("\r", "")) == rest.replace("\r", "")


def test_s12_an_error_that_holds_escapes_is_text(tmp_path: Path) -> None:
    evil = "\x1b[2J\x9b\u202e"
    failure = Failure(0, 1, 0, f"Kind{evil}", f"message{evil}", (f"frame{evil}",), f"trace{evil}", log=Path(f"/log{evil}"))
    assert printable(render(failure, 2)) == render(failure, 2)
    run = RunDir.create(tmp_path, "a", begin=False)
    write_spec(run, JobSpec("x"), launcher="local")
    write_exit(run.next_attempt().exit_json, 1, [failure], failure, evil)
    for call in (lambda: job_of(run).result(1), lambda: FunctionJob(job_of(run)).result(1)):
        with pytest.raises(RankFailedError) as raised:
            call()
        assert printable(str(raised.value)) == str(raised.value)


def _of_another(*paths: Path) -> None:
    """Another user's, as far as this process can make it so."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user: run the tests as root, as CI does")
    for path in paths:
        os.chown(path, ANOTHER, -1, follow_symlinks=False)


PLANTED = "import os\nopen(os.environ['EVIDENCE'], 'w').close()\nfrom importlib import import_module\n"
CALLER = """
import operator
from echelon import launch
if __name__ == "__main__":
    print(launch(operator.add, ranks=2, args=(1, 2)))
"""


@pytest.mark.full
def test_launch_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """Also what the server imports long after it has begun: psutil, when its last rank has ended."""
    here, elsewhere = tmp_path / "shared", tmp_path / "mine"
    here.mkdir()
    elsewhere.mkdir()
    (elsewhere / "program.py").write_text(CALLER)
    for name in ("psutil", "torch", "echelon", "operator", "numpy"):
        (here / f"{name}.py").write_text(PLANTED)
    env = {**clean_environment(), "EVIDENCE": str(tmp_path / "it-ran")}
    said = subprocess.run(
        [sys.executable, str(elsewhere / "program.py")], cwd=here, env=env, capture_output=True, text=True, timeout=180
    )
    assert said.stdout == "[3, 3]\n", said.stderr
    assert not (tmp_path / "it-ran").exists()
