"""Seconds that a call takes which runs a function on ranks: echelon.launch against torch.multiprocessing.spawn.

first   the first call in a process that has imported torch, as from a script or a notebook's first cell.
later   the third call in the same process, as in a test suite, a sweep or a notebook.

The function joins a gloo group, takes three steps of a small model in DDP, and returns. Each measurement is a process of its own;
the two take turns. One thread a rank.

    python bench/launch_function.py [--rounds N] [--ranks 2 4] [--json]

Target: at most 0.5.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from _timing import emit, machine, median, options, spread, versions

TARGET = 0.5


def train(port: int) -> float:
    import torch
    import torch.distributed as dist

    if port:  # mp.spawn does not set these variables
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return loss.item()


def spawned(rank: int, ranks: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    train(port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def calls(launcher: str, ranks: int) -> list[float]:
    """Seconds of the first and the third call in this process."""
    import torch

    import echelon

    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        if launcher == "echelon":
            echelon.launch(train, ranks=ranks, args=(0,))
        else:
            torch.multiprocessing.spawn(spawned, (ranks, free_port()), nprocs=ranks)
        seconds.append(time.perf_counter() - began)
    return [seconds[0], seconds[2]]


def main() -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--as-caller", nargs=2, metavar=("LAUNCHER", "RANKS"), help="for this script itself: make three calls")
    arguments = parser.parse_args()
    if arguments.as_caller:
        print(json.dumps(calls(arguments.as_caller[0], int(arguments.as_caller[1]))))
        return
    facts: dict[str, Any] = {"machine": machine(), "versions": versions("torch", "echelon"), "seconds": {}}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rows = []
    for ranks in arguments.ranks:
        found: dict[str, list[list[float]]] = {"echelon": [], "spawn": []}
        failed = dict.fromkeys(found, 0)
        for _ in range(arguments.rounds):
            for launcher, seconds in found.items():
                command = [sys.executable, __file__, "--as-caller", launcher, str(ranks)]
                said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
                if said.returncode:  # with torch 2.13 a spawned rank sometimes aborts as it ends, in gloo's thread
                    failed[launcher] += 1
                    continue
                seconds.append(json.loads(said.stdout.splitlines()[-1]))
        for index, which in enumerate(("first", "later")):
            of = {k: [pair[index] for pair in v] for k, v in found.items()}
            facts["seconds"][f"{which} call, {ranks} ranks"] = of
            ratio = f"{median(of['echelon']) / median(of['spawn']):.2f}"
            cells = [f"{median(v):.2f} ({spread(v, 2)})" for v in of.values()]
            failures = f"{failed['echelon']} / {failed['spawn']}"
            rows.append([f"{which} call, {ranks} ranks", *cells, failures, ratio, f"<= {TARGET}"])
    header = ["", "launch, s", "mp.spawn, s", "failed", "ratio", "target"]
    emit(arguments, f"A function on ranks: seconds, median of {arguments.rounds}", header, rows, facts=facts)


if __name__ == "__main__":
    main()
