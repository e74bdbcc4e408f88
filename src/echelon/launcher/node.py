"""`python -m echelon.launcher.node RUN`: the launcher of one node of a submitted job; and, with `--conclude`, its last word.

A batch system starts one on every node; it reads what to run from the run's folder, meets the others, and runs the node's
ranks. Afterwards the batch script has one process read what all nodes left, name the rank that failed first, and say whether
the job is to be started again: the exit code is 75 then, and only then.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from echelon.contracts.errors import EchelonError, LauncherEnvironmentError
from echelon.contracts.hostlist import expand_hostlist
from echelon.contracts.run_dir import RunDir, read_json, write_json
from echelon.contracts.stopping import REQUEUE
from echelon.launcher.failure import render
from echelon.launcher.job import Failure
from echelon.launcher.nodes import meet, meeting_path
from echelon.launcher.protocol import read_spec

__all__ = ["conclude", "main"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m echelon.launcher.node")
    parser.add_argument("run", type=Path)
    parser.add_argument("--conclude", type=int, metavar="CODE", help="the exit code with which the nodes' launchers ended")
    arguments = parser.parse_args(argv)
    try:
        if arguments.conclude is not None:
            return conclude(RunDir(arguments.run), arguments.conclude, start_of(os.environ))
        return run_node(RunDir(arguments.run), os.environ)
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 1


def start_of(env: Mapping[str, str]) -> str:
    """Names this start of the job: every requeue has another."""
    return f"{env.get('SLURM_JOB_ID', os.getppid())}.{env.get('SLURM_RESTART_COUNT', '0')}"


def run_node(run: RunDir, env: Mapping[str, str]) -> int:
    """Run this node's ranks until they end.

    Returns:
        0 also when they are to be started again, which is no bad exit for which srun would kill the others.
    Raises:
        LauncherEnvironmentError: as many nodes as were asked for are not there.
    """
    # Until the launcher listens, a request to save and end would kill this process without a word; then it is delivered.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    spec, said = read_spec(run)
    hosts = expand_hostlist(env.get("SLURM_STEP_NODELIST", "")) or ["localhost"]
    node = int(env.get("SLURM_NODEID", "0"))
    if len(hosts) != spec.nodes:
        raise LauncherEnvironmentError(f"{spec.nodes} nodes were submitted, but this step has {len(hosts)}: {', '.join(hosts)}.")
    meeting = meet(run, start_of(env), node, hosts)
    here = run.at_attempt(meeting.attempt)
    os.chdir(str(said.get("cwd", ".")))

    from echelon.launcher.local import run_local

    outcome = run_local(spec, here, meeting=meeting)
    if outcome.failure is not None and spec.nodes == 1:
        print(render(outcome.failure, spec.ranks), file=sys.stderr)
    return 0 if outcome.exit_code == REQUEUE else outcome.exit_code


def conclude(run: RunDir, code: int, start: str) -> int:
    """Write exit.json for all nodes and name the first failure. Returns the job's exit code; 75 asks for one more start.

    Args:
        code: with which srun ended: the highest of the nodes', 128 + n after signal n.
    """
    spec, _ = read_spec(run)
    said = read_json(meeting_path(run, start))
    if said is None:
        print(f"echelon: no node came so far as to begin (exit code {code}); see the lines above", file=sys.stderr)
        return code or 1
    here = RunDir(run.path, int(said["attempt"]))
    if spec.nodes > 1:
        code = _merge(here, spec.nodes, spec.ranks * spec.nodes, list(said["nodes"]), code)
    else:
        code = _of_one_node(here, code)
    if code == REQUEUE and (run.path / "job" / "cancelled").exists():
        print("echelon: saved, and cancelled: not started again", file=sys.stderr)
        return 143
    return code


def _of_one_node(here: RunDir, code: int) -> int:
    newest = max((here.path / "attempts").glob("[0-9]*"))  # after restarts of the group, a later one than it began with
    return int((read_json(newest / "exit.json") or {}).get("exit_code", code or 1))


def _merge(here: RunDir, nodes: int, ranks: int, hosts: list[str], code: int) -> int:
    """One exit.json out of the nodes' own; the exit code of them all."""
    ends = {node: read_json(here.node_exit(node)) for node in range(nodes)}
    failures = [Failure.from_json(f) for end in ends.values() if end for f in end["ranks"].values()]
    silent = [hosts[node] for node, end in ends.items() if end is None]
    first = Failure.first(failures) if failures else None
    stopped = next((str(end["stopped"]) for end in ends.values() if end and end["stopped"]), None)
    if first is not None:
        print(f"{render(first, ranks)}\nnode: {hosts[first.rank // (ranks // nodes)]}", file=sys.stderr)
        code = first.exit_code
    elif silent:
        stopped = f"the launcher on {', '.join(silent)} ended without a word"
        print(f"echelon: {stopped} (exit code {code}): was the node lost, or out of memory?", file=sys.stderr)
        code = code or 1
    else:
        codes = [int(end["exit_code"]) for end in ends.values() if end]
        code = REQUEUE if REQUEUE in codes and set(codes) <= {0, REQUEUE} else max(codes)
    write_json(
        here.exit_json,
        {
            "exit_code": code,
            "stopped": stopped,
            "first_failure": first.as_json() if first else None,
            "ranks": {str(f.rank): f.as_json() for f in failures},
            "ended": time.time(),
        },
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
