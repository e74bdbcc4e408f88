"""Start the ranks of `echelon doctor`, on this machine or on all nodes of a Slurm allocation, and collect their lines.

A node that does not answer holds up no other: srun gives up on it, or is ended when the time limit is over. Then the other nodes
are asked again, without it. No folder and no process is left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from echelon.common.errors import ClusterError, EchelonError, RankFailedError, RankTimeoutError
from echelon.common.files import read_bytes
from echelon.common.hostlist import expand_hostlist
from echelon.common.numbers import digits
from echelon.contracts.run_dir import RunDir
from echelon.diagnosis.failure import render
from echelon.launcher.job import JobSpec
from echelon.launcher.local.relay import SilentScreen
from echelon.launcher.local.run import run_local
from echelon.launcher.local.server import die_with_parent

__all__ = ["allocation", "here", "on_nodes"]

_MODULE = "echelon.world.checkup"
_MOST_BYTES = 64 << 20  # for all lines together
_GRACE_S = 5.0
_POLL_S = 0.05
_HERE = re.compile(r'^echelon-doctor \[\d+, "here", \{"host": "([\w.-]+)"')
_LABEL = re.compile(r"^ *(\d+): ")
_OF_TASK = re.compile(r"error: ([\w.-]+): tasks? (\d+)[\d,-]*: (.*)")
_OF_NODE = re.compile(r"error: .*\b(?:on node|[Nn]ode) ([\w.-]*\w)")
# srun waits for resources that this allocation may not have free, and for nodes that do not answer: for so long.
_IMMEDIATE_S = 20


def allocation(env: Mapping[str, str]) -> list[str]:
    """The nodes of the allocation that this process is in; empty outside of one.

    Raises:
        UsageError: this process is one of several that srun started.
    """
    if "SLURM_JOB_ID" not in env:
        return []
    tasks = digits(env.get("SLURM_STEP_NUM_TASKS", "")) or 1
    if "SLURM_PROCID" in env and tasks > 1:
        raise ClusterError(
            f"srun started {tasks} copies of `echelon doctor`. Start it once, without srun: it starts its ranks itself."
        )
    return expand_hostlist(env.get("SLURM_JOB_NODELIST", ""), "SLURM_JOB_NODELIST")


def here(ranks: int, words: Sequence[str], env: Mapping[str, str], limit_s: float) -> tuple[list[str], str]:
    """Run the checkup on ranks of this machine. Returns their lines, and a sentence if it ended early."""
    with tempfile.TemporaryDirectory(prefix="echelon-doctor-") as folder:
        written = Path(folder) / "said"
        written.mkdir()
        # Not in the current folder, where a user's file may have the name of a module.
        where = str(Path(__file__).parents[3])
        job = JobSpec(_MODULE, "module", ("--to", str(written), *words), ranks, grace_s=_GRACE_S, env=dict(env), code=where)
        ended = ""
        try:
            outcome = run_local(job, RunDir.create(folder, "checkup"), screen=SilentScreen(), timeout_s=limit_s)
            if outcome.failure is not None:
                ended = render(outcome.failure, ranks)
        except RankTimeoutError:
            ended = f"Time was up after {limit_s:g} s"
        except RankFailedError as error:
            ended = str(error)
        except (ImportError, OSError) as error:  # torch is broken or missing: the server loads it for all ranks
            ended = f"torch cannot be imported here: {type(error).__name__}: {error}"
        lines: list[str] = []
        for rank in range(ranks):
            with contextlib.suppress(OSError):
                lines += read_bytes(written / f"rank{rank}.jsonl").decode("utf-8", "replace").splitlines()
        return lines, " ".join(ended.split())[:600]


def on_nodes(
    nodes: Sequence[str], per_node: int, words: Sequence[str], env: Mapping[str, str], limit_s: float,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[list[str], dict[str, str], str]:  # fmt: skip
    """Run the checkup on these nodes of the allocation, with srun.

    Args:
        tell: called with a line about what is being waited for.
    Returns:
        the ranks' lines; for each node without an answer, the reason; a sentence if the checkup ended early.
    Raises:
        EchelonError: srun does not exist.
    """
    until = time.monotonic() + limit_s
    silent: dict[str, str] = {}
    asked = list(nodes)
    while True:
        step = _Step(asked, per_node, words, env)
        ended = step.run(until - time.monotonic())
        lost = {node: why for node, why in step.lost.items() if node in asked}
        left = until - time.monotonic()
        if not lost or len(lost) == len(asked) or left < _GRACE_S:
            return step.lines, {**silent, **lost}, ended
        silent |= lost
        asked = [node for node in asked if node not in lost]
        tell(f"no answer from {', '.join(lost)}; asking the others without {'it' if len(lost) == 1 else 'them'}")


def _cores(per_node: int) -> list[str]:
    """All cores of a node, for its ranks together: by default srun gives each task one core."""
    counts = [int(each) for each in re.findall(r"(?:^|,)([0-9]{1,9})(?![0-9])", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    return [f"--cpus-per-task={max(1, min(counts) // per_node)}"] if counts else []


def _with_parent() -> None:
    die_with_parent(signal.SIGTERM)


class _Step:
    """One srun step over some nodes.

    Attributes:
        lines: the ranks' output.
        lost: for each node that did not begin, the reason.
    """

    def __init__(self, nodes: Sequence[str], per_node: int, words: Sequence[str], env: Mapping[str, str]) -> None:
        srun = shutil.which("srun")
        if srun is None:
            raise EchelonError("this is a Slurm allocation, but srun is not on the PATH. Load Slurm's commands, and try again.")
        self.nodes, self.lines = list(nodes), list[str]()
        self.lost: dict[str, str] = {}
        self._begun: set[str] = set()
        self._errors: list[str] = []
        self._size = 0
        self._command = [
            srun, "--overlap", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", f"--ntasks={len(nodes) * per_node}",
            f"--ntasks-per-node={per_node}", "--kill-on-bad-exit=0", "--wait=0", f"--immediate={_IMMEDIATE_S}", "--export=ALL",
            "--input=none", "--label", *_cores(per_node), sys.executable, "-P", "-m", _MODULE, *words,
        ]  # fmt: skip
        # Without the variables that shaped this process's own step, and those that would give the ranks the identity of a
        # script's ranks.
        own = re.compile(
            r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ECHELON_(STORE_PREFIX|ASKED)"
            r"|SLURM_(NTASKS|NPROCS|NNODES|STEP_.*|TASKS_PER_NODE|NTASKS_PER_NODE|CPU_BIND.*|EXACT|DISTRIBUTION)"
        )
        self._env = {name: value for name, value in {**os.environ, **env}.items() if not own.fullmatch(name)}

    def run(self, limit_s: float) -> str:
        """Run until the step has ended, at most `limit_s`. Returns a sentence if it ended early."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, preexec_fn=_with_parent
        )
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(pipe, take), daemon=True)
            for pipe, take in ((process.stdout, self._line), (process.stderr, self._errors.append))
        ]
        for reader in readers:
            reader.start()
        began, late = time.monotonic(), False
        try:
            while process.poll() is None and not late:
                since = time.monotonic() - began
                # Give up early on nodes that have not begun while others wait for them: the others need the remaining time.
                late = since > limit_s or (since > limit_s / 3 and self._begun < set(self.nodes))
                time.sleep(_POLL_S)
        finally:
            self._end(process)
        for reader in readers:
            reader.join(_GRACE_S)
        for stream in (process.stdout, process.stderr):
            stream.close()
        self._find_lost(f"said nothing within {time.monotonic() - began:.0f} s" if late else "")
        if late:
            return f"Time was up after {time.monotonic() - began:.0f} s"
        return f"srun: {self._errors[-1]}"[:300] if process.returncode and self._errors else ""

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)

    def _read(self, pipe: IO[bytes], take: Callable[[str], object]) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed here
            for line in iter(lambda: pipe.readline(1 << 16), b""):
                self._size += len(line)
                if self._size < _MOST_BYTES:
                    take(line.decode("utf-8", "replace").rstrip("\n"))

    def _line(self, line: str) -> None:
        line = _LABEL.sub("", line)
        self.lines.append(line)
        if match := _HERE.search(line):
            self._begun.add(match[1])

    def _find_lost(self, why: str) -> None:
        """Find nodes that srun named; and if there is a reason `why`, those without any output."""
        silent = {node: why for node in self.nodes if why and node not in self._begun}
        last_words: dict[str, str] = {}  # by task
        for line in self._errors:
            if (label := _LABEL.match(line)) and not line[label.end() :].startswith("slurmstepd:"):
                last_words[label[1]] = line[label.end() :]
            elif (match := _OF_NODE.search(line)) and match[1] in self.nodes:
                self.lost[match[1]] = re.sub(r"^(?:srun: )?(?:error: )?", "", line)[:200]
            elif (match := _OF_TASK.search(line)) and match[1] in self.nodes and match[1] not in self._begun:
                words = last_words.get(match[2], "")
                silent[match[1]] = f"{match[3]}{f': {words}' if words else ''}"[:200]
        # If srun cannot reach a node, it ends the tasks of the others, some before their first output.
        self.lost = self.lost or silent
