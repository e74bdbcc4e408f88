"""`python -m echelon.launcher.cluster.node RUN`: run one node's part of a submitted job; with `--conclude`, finish the job.

The batch system starts it on every node. It reads the job from the run's folder, meets the other nodes, and runs the node's
ranks. Afterwards the batch script has one process read what all nodes left (`launcher.cluster.finish_job`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from echelon.common.errors import ClusterError, EchelonError, LauncherEnvironmentError
from echelon.common.hash_seed import fix_hash_seed
from echelon.common.hostlist import expand_hostlist
from echelon.common.numbers import count_in
from echelon.common.terminal import say
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import render
from echelon.launcher.cluster.finish_job import finish_job, refuse
from echelon.launcher.job import JobSpec, Outcome
from echelon.launcher.local.nodes import Meeting, meet
from echelon.launcher.local.output import forgive_output
from echelon.launcher.local.start import CallFile
from echelon.launcher.protocol import read_spec

__all__ = ["main", "run_node", "start_of"]

_STALE_LOCK_S = 120.0  # NFS releases the locks of a dead machine after 90 s


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m echelon.launcher.cluster.node")
    parser.add_argument("run", type=Path)
    parser.add_argument("--call-sha256", metavar="HEX", help="checksum of the call's file; another file is not loaded")
    parser.add_argument("--spec-sha256", metavar="HEX", help="checksum of the submitted job.json; another file is not run")
    parser.add_argument("--task", type=int, default=0, metavar="N", help="index in an array of calls")
    parser.add_argument("--conclude", type=int, metavar="CODE", help="the exit code with which the nodes' launchers ended")
    arguments = parser.parse_args(argv)
    run, start = RunDir(arguments.run), start_of(os.environ, arguments.spec_sha256)
    try:
        if arguments.conclude is not None:
            return finish_job(run, arguments.conclude, start, arguments.spec_sha256, requeues=True)
        task, spec = arguments.task, arguments.spec_sha256
        return run_node(run, os.environ, arguments.call_sha256, task, start=start, spec_sha256=spec)
    except EchelonError as error:
        say(str(error))
        if arguments.conclude is None and (run.path / "job").is_dir():
            with contextlib.suppress(EchelonError, OSError):  # the folder itself may be the problem
                refuse(run, start, count_in(os.environ, "SLURM_NODEID", 0), str(error))
                if "SLURM_JOB_ID" not in os.environ:  # a job of this machine has no batch script to conclude it
                    return finish_job(run, 1, start, arguments.spec_sha256)
        return 1


def start_of(env: Mapping[str, str], spec_sha256: str | None = None) -> str:
    """The name of this start of the job, unique in its folder: every requeue has another.

    Args:
        spec_sha256: of the submitted job.json; tells apart two jobs with the same number, as after a controller lost its state.
    """
    job = env.get("SLURM_JOB_ID")
    if job is None:  # a job of this machine is started once, by one process
        return f"{secrets.token_hex(8)}.0"
    return f"{job}.{env.get('SLURM_RESTART_COUNT', '0')}{f'-{spec_sha256[:16]}' if spec_sha256 else ''}"


def run_node(
    run: RunDir,
    env: Mapping[str, str],
    call_sha256: str | None = None,
    task: int = 0,
    *,
    start: str,
    spec_sha256: str | None = None,
) -> int:
    """Run this node's ranks until they end.

    Args:
        start: the name from `start_of`.
        call_sha256: checksum of the call's file, if the job is a call; trusted, since it comes from the command line.
        task: index in an array of calls.
        spec_sha256: checksum of the folder's job.json, likewise.
    Returns:
        The exit code; 0 also if the job is to be started again, since srun would kill the other nodes after another code.
    Raises:
        LauncherEnvironmentError: the number of nodes is not the one that was submitted.
        UsageError: another launcher holds this run's folder.
    """
    # Until the launcher listens, SIGUSR1 (save and end) would kill this process; blocked, it is delivered later.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    spec, submitted = read_spec(run, spec_sha256)
    hosts = expand_hostlist(env.get("SLURM_STEP_NODELIST", ""), "SLURM_STEP_NODELIST") or ["localhost"]
    node = count_in(env, "SLURM_NODEID", 0)
    if len(hosts) != spec.nodes:
        raise LauncherEnvironmentError(f"{spec.nodes} nodes were submitted, but this step has {len(hosts)}: {', '.join(hosts)}.")
    if spec.kind == "script" and not Path(spec.target).is_file():
        raise LauncherEnvironmentError(f"{socket.gethostname()} does not find {spec.target}. Does every node see this folder?")
    try:
        os.chdir(str(submitted.get("cwd", ".")))
    except OSError as error:
        raise LauncherEnvironmentError(f"{socket.gethostname()} cannot go to {submitted['cwd']}: {error.strerror}.") from error
    if node == 0:
        # After a requeue, a shared file system may not have released the lock of a lost node yet.
        again = env.get("SLURM_RESTART_COUNT", "0") != "0"
        run.hold(job=start if "SLURM_JOB_ID" in env else "", patience_s=_STALE_LOCK_S if again else 1.0)
    meeting = meet(run, start, node, hosts, command=spec.kind == "command")
    attempt_dir = run.at_attempt(meeting.attempt)

    outcome = _run(spec, attempt_dir, meeting, call_sha256, task, str(submitted.get("key", "")))
    if outcome.failure is not None and spec.nodes == 1:
        print(render(outcome.failure, spec.ranks), file=sys.stderr)
    return 0 if outcome.exit_code == REQUEUE else outcome.exit_code


def _run(spec: JobSpec, attempt_dir: RunDir, meeting: Meeting, call_sha256: str | None, task: int, key: str) -> Outcome:
    if spec.kind == "command":
        from echelon.launcher.functions.launch_command import run_command

        return run_command(spec, attempt_dir, meeting, task, key)
    from echelon.launcher.local.run import run_local

    if spec.kind != "call":
        return run_local(spec, attempt_dir, meeting=meeting)
    if call_sha256 is None:
        raise ClusterError("a call is run only with --call-sha256, the checksum of what was submitted.")
    return run_local(spec, attempt_dir, meeting=meeting, call=CallFile(call_sha256, key, task))


if __name__ == "__main__":
    fix_hash_seed()
    forgive_output()
    sys.exit(main())
