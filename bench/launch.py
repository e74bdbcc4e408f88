"""Seconds until ranks work together: after the command, and again after one of them was killed.

start     from the start of the command until the last rank has finished its first all-reduce (gloo).
recovery  rank 1 kills itself with SIGKILL after --kill-after seconds of small steps in the first attempt; from then until the
          last rank has finished a step in the restarted group.

Both launchers run this file as the ranks' program, in turn, with the same environment and one thread a rank; ranks
record the system's monotonic clock, which all processes of a machine share. A program that loads a model would add the same
time to both. torchrun runs with --standalone and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with torch 2.13 its recovery needs this
variable to succeed every time (without it, restarted ranks can read the addresses of dead ranks and hang).

    python bench/launch.py [--rounds N] [--ranks 2 4] [--json]

Targets: start at most 0.6 of torchrun's, recovery at most 0.25.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _timing import emit, machine, median, options, spread, versions

TARGETS = {"start": 0.6, "recovery": 0.25}
LIMIT_S = 60.0
PAUSE_S = 0.01  # between steps, since a training step also computes


# --- the ranks' program


def note(folder: Path, name: str) -> None:
    (folder / f"{name}.{os.environ['RANK']}").write_text(repr(time.monotonic()))


def rank_program(what: str, folder: Path, kill_after_s: float) -> None:
    import torch
    import torch.distributed as dist

    restarted = what == "recovery" and (folder / "killed.1").exists()
    dist.init_process_group("gloo")
    value = torch.ones(1000)
    dist.all_reduce(value)
    if what == "start" or restarted:
        note(folder, what)
    else:
        began = time.monotonic()
        while True:  # until rank 1 ends it
            if dist.get_rank() == 1 and time.monotonic() - began > kill_after_s:
                note(folder, "killed")
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(value.fill_(1.0))
            time.sleep(PAUSE_S)
    dist.destroy_process_group()


# --- the process that measures


def command_of(launcher: str, ranks: int, restarts: int, runs: str) -> list[str]:
    if launcher == "echelon":
        return [sys.executable, "-m", "echelon", "run", "--ranks", str(ranks), "--max-restarts", str(restarts), "--runs", runs]
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def measure(launcher: str, what: str, ranks: int, kill_after_s: float) -> float | None:
    """Seconds of one start or recovery; None if the job failed or took longer than a minute."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")}
    environment.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = command_of(launcher, ranks, 3 if what == "recovery" else 0, str(folder / "runs"))
        command += [str(Path(__file__).resolve()), "--kill-after", str(kill_after_s), "--as-rank", what, name]
        with open(folder / "log", "wb") as log:
            started = time.monotonic()
            job = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                code = job.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGTERM)
                try:
                    job.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
                return None
        times = [float(path.read_text()) for path in folder.glob(f"{what}.*")]
        if code or len(times) != ranks:
            sys.stderr.write(f"{launcher} {what} failed:\n{(folder / 'log').read_text(errors='replace')[-2000:]}\n")
            return None
        if what == "recovery":
            started = float((folder / "killed.1").read_text())
        return max(times) - started


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--kill-after", type=float, default=3.0, metavar="S", help="of the first life (default 3 seconds)")
    parser.add_argument("--as-rank", nargs=2, metavar=("WHAT", "FOLDER"), help="for this script itself: be a rank")
    arguments = parser.parse_args()
    if arguments.as_rank:
        rank_program(arguments.as_rank[0], Path(arguments.as_rank[1]), arguments.kill_after)
        return
    facts: dict[str, Any] = {"machine": machine(), "versions": versions("torch", "echelon"), "seconds": {}}
    rows = []
    for what in arguments.only:
        for ranks in arguments.ranks:
            found: dict[str, list[float | None]] = {"echelon": [], "torchrun": []}
            for _ in range(arguments.rounds):
                for launcher, seconds in found.items():
                    seconds.append(measure(launcher, what, ranks, arguments.kill_after))
            facts["seconds"][f"{what}, {ranks} ranks"] = found
            good = {k: [s for s in v if s is not None] for k, v in found.items()}
            failed = {k: len(v) - len(good[k]) for k, v in found.items()}
            cells = [f"{median(v):.2f} ({spread(v, 2)})" if v else "none succeeded" for v in good.values()]
            ratio = f"{median(good['echelon']) / median(good['torchrun']):.2f}" if all(good.values()) else "-"
            failures = f"{failed['echelon']} / {failed['torchrun']}"
            rows.append([f"{what}, {ranks} ranks", *cells, failures, ratio, f"<= {TARGETS[what]}"])
    header = ["", "echelon, s", "torchrun, s", "failed", "ratio", "target"]
    emit(arguments, f"Launch: seconds, median of {arguments.rounds} (smallest .. largest)", header, rows, facts=facts)


if __name__ == "__main__":
    main()
