"""Slurm's own commands. Never through a shell, and never sacct, which many clusters do not have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence

from echelon.common.errors import ClusterError, EchelonError
from echelon.launcher.protocol import JobState

__all__ = ["ask", "available", "cancel", "refuse_if_never", "submit", "would_start"]

_TIMEOUT_S = 60.0
_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), JobState.PENDING),
    **dict.fromkeys(
        ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"), JobState.RUNNING
    ),
    "COMPLETED": JobState.DONE,
    "CANCELLED": JobState.CANCELLED,
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"), JobState.FAILED
    ),
}


def available() -> bool:
    return shutil.which("sbatch") is not None


def submit(script: str, export: Sequence[str]) -> str:
    """Submit a script and return the job's number.

    Raises:
        UsageError: Slurm refuses it, with its reason in one line.
    """
    output = _sbatch(["--parsable"], script, export)
    if output.returncode:
        raise ClusterError(f"Slurm refuses the job: {_reason(output.stderr)}")
    number = output.stdout.strip().split(";")[0]
    if not number.isdecimal():
        raise EchelonError(f"sbatch must answer with the number of a job, got {output.stdout.strip()[:200]!r}.")
    return number


def would_start(script: str, export: Sequence[str]) -> str:
    """When and where Slurm would start the script, in Slurm's words.

    Raises:
        UsageError: Slurm would refuse it, with its reason in one line.
    """
    output = _sbatch(["--test-only"], script, export)
    if output.returncode:
        raise ClusterError(f"Slurm, as it is now, would not start the job: {_reason(output.stderr)}")
    return output.stderr.strip().removeprefix("sbatch: ")


# Variables that users of a cluster set once for all their jobs. sbatch prefers them to the script's own lines.
_FOR_ALL_JOBS = ("account", "partition", "qos", "constraint", "reservation", "wckey")


def _sbatch(options: Sequence[str], script: str, export: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # sbatch gets only these variables, and passes all on. With a list of names, Slurm would have the node build the user's login
    # environment first, which costs each further job a second.
    usual = {f"SBATCH_{option.upper()}" for option in _FOR_ALL_JOBS if f"\n#SBATCH --{option}=" not in script}
    env = {k: v for k, v in os.environ.items() if k in export or k in usual or k == "SLURM_CONF"}
    return _run([shutil.which("sbatch") or "sbatch", *options, "--export=ALL"], script, env)


def ask(job: str) -> tuple[JobState | None, str]:
    """The state of a job and Slurm's reason; None if Slurm has forgotten the job, as it does minutes after the job's end.

    Raises:
        EchelonError: the controller does not answer.
    """
    output = _run(["scontrol", "-o", "show", "job", job])
    if output.returncode:
        if "Invalid job id" in output.stderr:
            return None, ""
        raise EchelonError(f"Slurm does not answer: {_reason(output.stderr)}")
    states = [
        (_STATES.get(m[1], JobState.RUNNING), m[1], "" if m[2] in ("None", "(null)") else m[2])
        for line in output.stdout.splitlines()
        if (m := re.search(r"\bJobState=(\S+) Reason=(\S+)", line))
    ]
    if not states:
        return None, ""
    for wanted in (JobState.RUNNING, JobState.PENDING, JobState.CANCELLED, JobState.FAILED, JobState.DONE):  # of an array
        match = next((s for s in states if s[0] is wanted), None)
        if match is not None:
            return wanted, f"{match[1]}{': ' + match[2] if match[2] else ''}"
    return None, ""


# Reasons for which a job would wait forever. A drained or busy node is not one of them.
_NEVER = ("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "PartitionInactive", "BadConstraints", "InvalidAccount")
_JUDGED_WITHIN_S = 2.0


def refuse_if_never(job: str) -> None:
    """Cancel a queued job that can never start: Slurm queues such jobs unless EnforcePartLimits is set.

    Raises:
        UsageError: the job can never start, with Slurm's reason.
    """
    until = time.monotonic() + _JUDGED_WITHIN_S
    while True:
        state, why = ask(job)
        reason = why.partition(": ")[2]
        if state is not JobState.PENDING or reason or time.monotonic() > until:
            break
        time.sleep(0.05)
    if state is JobState.PENDING and reason in _NEVER:
        cancel(job)
        raise ClusterError(f"Slurm would never start the job: {reason}. Does that partition have so many nodes, cores and hours?")


def cancel(job: str) -> None:
    """Cancel a job.

    Raises:
        EchelonError: Slurm refuses.
    """
    output = _run(["scancel", job])
    if output.returncode and "Invalid job id" not in output.stderr:  # that job has ended
        raise EchelonError(f"Slurm does not cancel job {job}: {_reason(output.stderr)}")


def _run(command: list[str], text: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, env=env)
    except FileNotFoundError:
        raise ClusterError(f"{command[0]} was not found. Submit from a login node of a Slurm cluster.") from None
    except subprocess.TimeoutExpired:
        raise EchelonError(
            f"{command[0]} gave no answer within {_TIMEOUT_S:g} s: the controller is down, or very busy."
        ) from None


def _reason(stderr: str) -> str:
    """The most telling line of a command's error output: the last error line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    errors = [line for line in lines if "error:" in line or "fatal:" in line] or lines or ["it gave no reason"]
    return re.sub(r"^(\w+: )?((error|fatal|allocation failure): )?", "", errors[-1])
