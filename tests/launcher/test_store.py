"""The store in which ranks meet: on an address of its own, and every key of one start begins with a token of that start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.contracts.run_dir import RunDir, read_json
from echelon.diagnosis import Evidence, explain
from echelon.launcher.calls import checksum
from echelon.launcher.cluster.finish_job import finish_job
from echelon.launcher.job import JobSpec
from tests.conftest import clean_environment, ends_of
from tests.kit.started import wait_until
from tests.kit.two_nodes import start_nodes

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist, echelon as ech
ech.init_from_env()
dist.all_reduce(torch.ones(1))
info = ech.RankInfo()
stranger = dist.TCPStore(info.master_addr, info.master_port, is_master=False, wait_for_workers=False)
if info.rank == 0:
    said = {"address": info.master_addr, "keys": stranger.list_keys()}
    Path(f"keys{info.restart_count}.json").write_text(json.dumps(said))
dist.barrier()
if info.restart_count == 0:
    sys.exit(3)
"""


@pytest.mark.full
def test_every_key_of_a_start_begins_with_its_own_token(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = echelon_command("run", "--ranks", "2", "--max-restarts", "1", "train.py")
    assert said.returncode == 0, said.stderr
    tokens = []
    for attempt in range(2):
        seen = json.loads((tmp_path / f"keys{attempt}.json").read_text())
        assert seen["address"] == "127.0.0.1" and len(seen["keys"]) >= 2
        begins = {tuple(key.split("/")[:2]) for key in seen["keys"]}
        assert len(begins) == 1, seen["keys"]
        token, number = begins.pop()
        assert len(token) == 32 and number == str(attempt)
        tokens.append((token, number))
    assert tokens[0] != tokens[1]


# The interpreter tells of every class and function that is looked up while something is unpickled, in every process of the job.
SITE = """
import os, sys, traceback
def hear(event, args):
    if event == "pickle.find_class":
        with open(os.environ["UNPICKLED"], "a") as file:
            file.write(f"{args}\\n{''.join(traceback.format_stack())}")
sys.addaudithook(hear)
"""


@pytest.mark.full
def test_two_nodes_share_one_store_by_a_token_and_restart_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("sys.exit(3)", "sys.exit(3 * info.rank)"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    run, said = RunDir.create(tmp_path, "a", begin=False), tmp_path / "said"
    path = f"{tmp_path / 'site'}:{clean_environment().get('PYTHONPATH', '')}"
    spec = JobSpec(str(tmp_path / "train.py"), nodes=2, max_restarts=1)
    nodes = start_nodes(run, spec, [said, said], UNPICKLED=str(tmp_path / "unpickled"), PYTHONPATH=path)
    assert ends_of(nodes) == [0, 0], said.read_text()
    token = str((read_json(run.path / "job" / "meeting-7.0.json") or {})["token"])
    seen = [json.loads((tmp_path / f"keys{attempt}.json").read_text()) for attempt in range(2)]
    assert len(token) == 32 and {key.split("/")[0] for each in seen for key in each["keys"]} == {token}
    assert [{f"{token}/{n}" for n in range(2) if any(k.startswith(f"{token}/{n}/") for k in each["keys"])} for each in seen] == [
        {f"{token}/0"},
        {f"{token}/0", f"{token}/1"},
    ]
    assert not (tmp_path / "unpickled").exists(), (tmp_path / "unpickled").read_text()
    assert finish_job(run, 0, "7.0") == 0
    first, last = (read_json(run.path / "attempts" / n / "exit.json") or {} for n in ("000", "001"))
    assert (first["exit_code"], first["first_failure"]["rank"], last["exit_code"]) == (3, 1, 0)


MEETS = """
import os, time
import torch, torch.distributed as dist, echelon as ech
from pathlib import Path
ech.init_from_env()
calls = 0
while not os.path.exists("go"):
    dist.all_reduce(torch.ones(1))
    calls += 1
    Path("calls" + os.environ["RANK"]).write_text(str(calls))
    time.sleep(0.05)
"""


def _calls(folder: Path, rank: int) -> int:
    path = folder / f"calls{rank}"
    return int(path.read_text() or 0) if path.exists() else 0


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces with the addresses 10.77.0.1 and 10.77.0.2, joined by a link."""
    names = f"echelon-a-{os.getpid()}", f"echelon-b-{os.getpid()}"

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip(f"netns add {name}")
            ip(f"link add link0 netns {names[0]} type veth peer name link0 netns {names[1]}")
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no network namespace can be made: install iproute2, and run the tests as root")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev link0")
            for link in ("lo", "link0"):
                ip(f"-n {name} link set {link} up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


CALLED = """
import echelon as ech
@ech.slurm_fn
def meets():
    exec(open("train.py").read(), {})
if __name__ == "__main__":
    meets[ech.SlurmConfig(mode="slurm")]()
"""
TORCHRUN = (
    "torchrun --nnodes {num_machines} --nproc-per-node 1 --node-rank {machine_rank} "
    "--master-addr {main_process_ip} --master-port {main_process_port} main.py"
)


def _by_a_command(folder: Path) -> JobSpec:
    """What `slurm_fn` submits of CALLED."""
    (folder / "main.py").write_text(CALLED)
    text = json.dumps({"call": {"number": 0, "function": "meets", "earlier": []}, "argv": []}).encode()
    (folder / "call.json").write_bytes(text)
    words, file = TORCHRUN.split(), str(folder / "call.json")
    return JobSpec("meets", "command", args=words, code=file, sha256=checksum(text), nodes=2, hang_timeout_s=10)


@pytest.mark.parametrize("kind", ["script", "command"])
@pytest.mark.full
def test_a_link_that_goes_dead_ends_both_sides_and_the_job_is_queued_again(tmp_path: Path, kind: str) -> None:
    """Where restarts are allowed, the second node's main thread stands in a call to the store of the first."""
    (tmp_path / "train.py").write_text(MEETS)
    run = RunDir.create(tmp_path, "a", begin=False)
    spec = JobSpec(str(tmp_path / "train.py"), nodes=2, max_restarts=1, hang_timeout_s=10)
    spec = spec if kind == "script" else _by_a_command(tmp_path)
    said = [tmp_path / f"said{node}" for node in range(2)]
    with two_networks() as names:
        within = [("ip", "netns", "exec", name) for name in names]
        nodes = start_nodes(run, spec, said, hosts="10.77.0.1,10.77.0.2", before=within, impatient=True)
        try:
            wait_until(lambda: min(_calls(tmp_path, rank) for rank in range(2)) > 5, "the ranks meet", 120.0)
            subprocess.run(["ip", "-n", names[1], "link", "set", "link0", "down"], check=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in nodes:
                    process.wait(180.0)
            codes = [process.poll() for process in nodes]
        finally:
            for process in nodes:
                process.kill()
                process.wait()
    texts = [path.read_text() for path in said]
    assert all(codes), f"{codes}: None did not end\n" + "\n".join(texts)
    for node, other in ((0, "node 1 (10.77.0.2)"), (1, "node 0 (10.77.0.1)")):
        assert f"nothing was heard of {other}" in texts[node]
        record = read_json(RunDir(run.path).node_exit(node)) or {}
        assert record["exit_code"] == 75 and f"nothing was heard of {other}" in record["stopped"]
    first = explain(Evidence.of(run.path, 0))
    assert finish_job(run, 1, "7.0") == 75
    for verdict in (first, explain(Evidence.of(run.path, 0))):
        assert verdict.cause == "launcher" and verdict.guilty == ()
        assert "node 1 (10.77.0.2)" in verdict.paragraph and "since 20" in verdict.paragraph


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_ranks_that_come_on_are_not_ended_while_a_launcher_is_silent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEETS)
    run, said = RunDir.create(tmp_path, "a", begin=False), tmp_path / "said"
    nodes = start_nodes(run, JobSpec(str(tmp_path / "train.py"), nodes=2, hang_timeout_s=8), [said, said], impatient=True)
    try:
        wait_until(lambda: min(_calls(tmp_path, rank) for rank in range(2)) > 5, "the ranks meet", 120.0)
        nodes[1].send_signal(signal.SIGSTOP)
        named = "nothing was heard of node 1 (localhost)"
        wait_until(lambda: named in said.read_text(), named, 120.0)
        since = _calls(tmp_path, 0)
        wait_until(lambda: _calls(tmp_path, 0) > since + 200, "the ranks come on", 120.0)
        assert nodes[0].poll() is None
    finally:
        nodes[1].send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()
        codes = ends_of(nodes)
    assert codes == [0, 0], said.read_text()


MISSES = """
import os, sys, time
from echelon.launcher.local import silence
from echelon.launcher.local.nodes import Meeting
class Runs:
    silent, hang_limit_s = "", 0.0
    attempt = {"answers once": None, "never answers": 0}[sys.argv[1]]
    moves, end_at_once = dict, print
silence.SILENT_S = 5.0  # on a busy machine an answer takes a second
here = silence.Silence(Meeting(1, 2, 0, "127.0.0.1", int(sys.argv[2]), "token", "lo", hosts=("a", "b")), print, Runs(), print)
here.start()
while not here.words(): time.sleep(0.05)
print(here.words(), flush=True)
os._exit(0)
"""
SERVES = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
until = time.monotonic() + 120
while (beats := store.add("token/beat/1", 0)) < 2 and time.monotonic() < until: time.sleep(0.05)
print("heard" if beats >= 2 else "nothing", flush=True)  # the first beat's answer has come before the second one is sent
time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.parametrize("first_node", ["answers once", "never answers"])
def test_a_first_node_that_never_beat_is_missed(first_node: str) -> None:
    """A link that goes dead in the first seconds, when its launcher has not begun to beat: no rank would come on, for ever."""
    with subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        port = serving.stdout.readline().strip()
        if first_node == "never answers":
            serving.send_signal(signal.SIGSTOP)
        missing = subprocess.Popen([sys.executable, "-c", MISSES, first_node, port], stdout=subprocess.PIPE, text=True)
        try:
            if first_node == "answers once":
                assert serving.stdout.readline() == "heard\n"
                serving.send_signal(signal.SIGSTOP)
            said, _ = missing.communicate(timeout=120.0)
        finally:
            missing.kill()
            missing.communicate()
            serving.kill()
    assert "nothing was heard of node 0 (a)" in said


TRAINS_ON = """
import os, time
import echelon as ech
from pathlib import Path
ech.init_from_env()
Path("ready" + os.environ["RANK"]).touch()
while not os.path.exists("go"): time.sleep(0.05)
"""


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_node_of_which_nothing_is_heard_is_named_and_one_that_is_heard_of_again(tmp_path: Path) -> None:
    """Its launcher stands, as if the link to it were dead; either half says so."""
    (tmp_path / "train.py").write_text(TRAINS_ON)
    said = [tmp_path / f"said{node}" for node in range(2)]
    run, spec = RunDir.create(tmp_path, "a", begin=False), JobSpec(str(tmp_path / "train.py"), nodes=2)
    nodes = start_nodes(run, spec, said, impatient=True)
    try:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), "the ranks run")
        for other in (1, 0):
            nodes[other].send_signal(signal.SIGSTOP)
            words = f"nothing was heard of node {other} "
            wait_until(lambda path=said[1 - other], words=words: words in path.read_text(), words, 120.0)
            nodes[other].send_signal(signal.SIGCONT)
            words = f"node {other} (localhost) is heard of again"
            wait_until(lambda path=said[1 - other], words=words: words in path.read_text(), words, 120.0)
            assert "nothing was heard" not in said[other].read_text() or other == 0
    finally:
        for process in nodes:
            process.send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()
        codes = ends_of(nodes)
    assert codes == [0, 0], [path.read_text() for path in said]
