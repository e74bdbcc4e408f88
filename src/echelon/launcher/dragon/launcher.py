"""A job whose ranks Dragon's runtime starts, with the same script, run folder, logs and exit codes as other launchers.

Three kinds of processes read their parts from the run's folder. The outermost, in the background, runs the runtime; the runtime's
head process starts a CollectiveGroup; each rank of the group runs the program.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

from echelon.common.errors import ClusterError, EchelonError, RankFailedError
from echelon.common.files import open_to_append
from echelon.common.terminal import say
from echelon.contracts.rank import RankInfo
from echelon.contracts.records import rank_record
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import Failure
from echelon.launcher.cluster.background import LocalLauncher
from echelon.launcher.job import JobSpec
from echelon.launcher.local.end_record import record_end
from echelon.launcher.protocol import read_spec

__all__ = ["DragonLauncher"]


class DragonLauncher(LocalLauncher):
    """Starts jobs in the background on Dragon's runtime: on this node, or with `spec.nodes` > 1 on the nodes of an allocation."""

    name, program = "dragon", "echelon.launcher.dragon.launcher"

    def check(self, spec: JobSpec) -> None:
        if spec.kind == "call":
            raise ClusterError("functions run on Dragon in a CollectiveGroup: `echelon dragon SCRIPT`.")
        if importlib.util.find_spec("dragon") is None:
            raise ClusterError(
                "Dragon is not installed. Run: pip install 'echelon[dragon]' (Linux on x86_64, Python 3.11 or later)."
            )


def run(run: RunDir, sha256: str) -> int:
    """Run the job of this folder on a runtime of its own. Returns its exit code, like any launcher.

    Args:
        sha256: of the folder's job.json, from the command line; every process that reads the file compares it.
    """
    from echelon.launcher.dragon.runtime import run_on_dragon

    spec, _ = read_spec(run, sha256)
    run.hold()
    attempt_dir = run.next_attempt()
    # As a module: with this folder on the path, echelon's package `dragon` would hide Dragon's own.
    head = ["-P", "-m", __spec__.name, str(attempt_dir.path.absolute()), "--spec-sha256", sha256, str(attempt_dir.attempt)]
    code = run_on_dragon(sys.executable, head, nodes=spec.nodes > 1, grace_s=spec.grace_s)
    return write_end(spec, attempt_dir, code)


def write_end(spec: JobSpec, attempt_dir: RunDir, code: int) -> int:
    """Write exit.json from the ranks' records."""
    ranks = spec.ranks * spec.nodes
    records = {rank: rank_record(attempt_dir.rank_exit(rank)) for rank in range(ranks)}
    codes = {rank: int(record["exit_code"]) for rank, record in records.items() if record}
    failures = [
        Failure.from_record(rank, codes[rank], 0, record, attempt_dir.log(rank))
        for rank, record in records.items()
        if record and codes[rank] not in (0, REQUEUE)
    ]
    silent = [rank for rank in range(ranks) if rank not in codes]
    if silent and not failures:
        message = "ended without a word, as when it is killed"
        failures = [Failure(rank, code or 1, 0, "exit", message, log=attempt_dir.log(rank), reported=False) for rank in silent]
    if not failures and codes and set(codes.values()) <= {0, REQUEUE}:
        code = max(codes.values())
    first = record_end(attempt_dir, code, failures, world_size=ranks)
    return first.exit_code if first is not None else code


def head(attempt_dir: RunDir, sha256: str) -> int:
    """The head process of the runtime: run a group and end it."""
    from echelon.launcher.dragon.group import CollectiveGroup
    from echelon.launcher.dragon.system import System

    spec, submitted = read_spec(attempt_dir, sha256)
    os.chdir(str(submitted.get("cwd", ".")))
    ranks = spec.ranks * spec.nodes
    policies = System().gpu_policies() or System().cpu_policies(ranks)
    if len(policies) < ranks:
        raise ClusterError(f"{ranks} ranks were asked for, but Dragon's nodes have {len(policies)} GPUs, one for each rank.")
    group = CollectiveGroup(run_rank, (str(attempt_dir.path), attempt_dir.attempt, sha256), policies=policies[:ranks])
    try:
        group.start()
        group.join()
    except RankFailedError:  # the ranks' records have the details
        return 1
    finally:
        group.close()
    return 0


def run_rank(path: str, attempt: int, sha256: str) -> int:
    """Run the program on one rank."""
    from echelon.common.machine import interface_of
    from echelon.launcher.local.nodes import local_address_towards
    from echelon.launcher.local.placement import interfaces
    from echelon.launcher.local.run import rank_environment
    from echelon.launcher.local.start import Start
    from echelon.launcher.local.worker import run_program

    attempt_dir = RunDir(path, attempt)
    spec, submitted = read_spec(attempt_dir, sha256)
    info = RankInfo()
    given = dict(os.environ)
    if info.local_world_size < info.world_size:  # on one node it is loopback
        given = {**interfaces(interface_of(local_address_towards(info.master_addr))), **given}
    os.environ.update(rank_environment(spec, attempt_dir, given, info.local_world_size, restart=spec.restart))
    os.chdir(str(submitted.get("cwd", ".")))
    log = open_to_append(attempt_dir.log(info.rank))
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.signal(signal.SIGINT, _as_a_wish_to_end)
    record = attempt_dir.rank_exit(info.rank)
    sys_path = [place for place in sys.path if place]
    flight = str(attempt_dir.flight(info.rank).absolute())
    start = Start(
        spec.kind, spec.target, spec.args, {}, os.getcwd(), sys_path, record=str(record.absolute()), flight=flight, code=spec.code
    )
    code = run_program(start)
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, REQUEUE):
        os._exit(code)  # not an exception: Dragon would print it again, without the rank
    return code


def _as_a_wish_to_end(number: int, frame: Any) -> None:
    """Turn SIGINT, Dragon's request to end, into the usual SIGTERM or SIGUSR1; under SIGTERM Dragon's own runtime would end."""
    os.kill(os.getpid(), signal.SIGTERM if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL else signal.SIGUSR1)


def main(argv: list[str] | None = None) -> int:
    path, _, sha256, *attempt = sys.argv[1:] if argv is None else argv
    try:
        return head(RunDir(path, int(attempt[0])), sha256) if attempt else run(RunDir(Path(path)), sha256)
    except EchelonError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    from echelon.launcher.dragon import launcher as dragon_launcher

    sys.exit(dragon_launcher.main())  # functions sent to ranks must belong to an importable module
