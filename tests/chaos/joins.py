"""Ranks that meet, and of which one is killed, again and again: does every restart join, and how soon?

Run by `echelon run`. One line for each meeting and each kill: what, attempt, rank, seconds of the machine's clock.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import echelon as ech


def main(folder: Path, restarts: int, seed: int) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log = os.open(folder / "joins.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str) -> None:
        os.write(log, f"{what} {attempt} {rank} {time.monotonic():.6f}\n".encode())

    time.sleep(random.Random(f"{seed} {attempt} {rank}").random() * 0.5)
    ech.init_from_env(timeout=timedelta(seconds=10))
    total = torch.tensor([attempt + 1.0])
    dist.all_reduce(total)
    assert total.item() == (attempt + 1) * dist.get_world_size(), "a rank of another attempt"
    note("joined")
    if attempt < restarts:
        dice = random.Random(f"{seed} {attempt}")
        if dice.randrange(dist.get_world_size()) == rank:
            time.sleep(dice.random() * 0.02)
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)  # never done: the other has gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
