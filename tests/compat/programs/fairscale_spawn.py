"""Ranks of torch.multiprocessing.spawn that send everything that FairScale's classes send, and then end.

python -m tests.compat.programs.fairscale_spawn FOLDER: three that leave their groups, and two that destroy them.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.compat.fairscale.nn.data_parallel import ShardedDataParallel
from echelon.compat.fairscale.optim import OSS

PATIENCE_S = 90.0


def rank_of(rank: int, size: int, init: str, is_destroyed: bool) -> None:
    """The rank ends with what it has built still in hand."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    module, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, broadcast_fp16=True)
    around = nn.parallel.DistributedDataParallel(module)
    group = dist.new_group(list(range(size)))
    divided = OSS(other.parameters(), torch.optim.SGD, group=group, lr=0.1, momentum=0.9)
    model = ShardedDataParallel(other, divided, group)
    for wrapped, its in ((around, optimizer), (model, divided)):
        wrapped(torch.ones(2, 4)).sum().backward()
        its.clip_grad_norm(1.0)
        its.step()
        its.consolidate_state_dict(0)
        its.state_dict(all_ranks=True)
    if is_destroyed:
        dist.destroy_process_group()


def main(folder: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        tcp = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    for size, init, is_destroyed in ((2, tcp, True), (3, f"file://{folder}/store", False)):
        context: Any = torch.multiprocessing.spawn(rank_of, (size, init, is_destroyed), nprocs=size, join=False)
        last = time.monotonic() + PATIENCE_S
        while not context.join(timeout=1):
            if time.monotonic() > last:
                alive = [process for process in context.processes if process.is_alive()]
                for process in alive:
                    process.kill()
                sys.exit(f"{len(alive)} of {size} ranks did not end")
        print(f"{size} ranks ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
