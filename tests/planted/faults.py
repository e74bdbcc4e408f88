"""A program with one planted fault: `echelon run --ranks N faults.py FAULT RANK [STEP [PATIENCE]]`. Its loop is plain torch.

Every rank makes ten steps: it computes, and all sum up a gradient of four numbers. At step STEP, rank RANK does what FAULT says.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

STEPS = 10


def load() -> torch.Tensor:
    return torch.ones(4)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminated() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def crashes() -> None:
    ctypes.string_at(0)


def aborts() -> None:
    os.abort()


def raises() -> None:
    raise ValueError("the labels of this shard are missing")


def raises_beside_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("the labels of this shard are missing")


def raises_from_what_it_lost() -> None:
    try:
        dist.recv(torch.ones(1), src=dist.get_rank(), tag=1)
    except Exception as error:
        raise KeyError("labels") from error


def exits() -> None:
    sys.exit(3)


def exits_hard() -> None:
    os._exit(7)


def leaves() -> None:
    sys.exit(0)


def leaves_hard() -> None:
    os._exit(0)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    time.sleep(600)


def keeps_the_interpreter() -> None:
    time.sleep(0.6)  # until the launcher has heard of all steps: after few it waits far longer
    re.match(r"(a+)+$", "a" * 60 + "b")  # years, in C


def waits_for_a_program() -> None:
    subprocess.Popen(["cat"], stdin=subprocess.PIPE).wait()  # which ends with this process


def spins() -> None:
    while True:
        pass


def no_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    torch.ones(1 << 34)


def file_too_large() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2 << 20))


def no_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
    spins()


class Worker(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raises":
            raise OSError(5, "Input/output error", "shard-3")
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its rank, which cannot end it any more
        time.sleep(600)
        return torch.ones(1)


def _reads(how: str) -> None:
    list(torch.utils.data.DataLoader(Worker(how), num_workers=1))


def worker_dies() -> None:
    _reads("dies")


def worker_raises() -> None:
    _reads("raises")


def worker_stands() -> None:
    _reads("stands")


def connection_elsewhere() -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


AT_ONCE: dict[str, Callable[[], None]] = {
    name: found for name, found in list(globals().items()) if callable(found) and getattr(found, "__module__", "") == __name__
}


def step(fault: str, guilty: int, group: dist.ProcessGroup | None) -> None:
    """What a rank does in the step of the fault."""
    gradient, mine = load(), dist.get_rank() == guilty
    if mine and fault in AT_ONCE:
        AT_ONCE[fault]()
    if fault == "all_raise":
        raise ValueError("every rank has it")
    if fault == "skips" and mine:
        return
    if fault == "more" and mine:
        dist.all_reduce(gradient)
    if fault == "another_operation" and mine:
        dist.all_gather([torch.ones(8) for _ in range(dist.get_world_size())], torch.ones(8))
        return
    if fault == "another_shape" and mine:
        gradient = torch.ones(3)
    if fault == "another_type" and mine:
        gradient = torch.ones(4, dtype=torch.float64)
    if fault == "barrier_first" and mine:
        dist.barrier()
    if fault == "group_first":
        first, second = (group, None) if mine else (None, group)
        dist.all_reduce(gradient, group=first)
        dist.all_reduce(gradient, group=second)
        return
    if fault == "sleeps_in_group":
        if mine:
            time.sleep(600)
        dist.all_reduce(gradient, group=group)
    if fault == "slow":
        time.sleep(1.5 if mine else 0.0)
    if fault == "no_message":
        others = [rank for rank in range(dist.get_world_size()) if rank != guilty]
        if mine:
            time.sleep(600)
        elif dist.get_rank() == others[0]:
            dist.recv(gradient, src=guilty)
    dist.all_reduce(gradient)


def _all_come(store: dist.Store, to: str, rank: int, ranks: int) -> None:
    store.set(f"{to}/{rank}", "")
    store.wait([f"{to}/{each}" for each in range(ranks)])


def main(fault: str, guilty: int, at: int = 5, wait_s: float = 3.0) -> None:
    """
    Args:
        wait_s: gloo's patience.
    """
    patience = timedelta(seconds=wait_s)
    store, rank, ranks = next(dist.rendezvous("env://"))
    _all_come(store, "begun", rank, ranks)  # on a busy machine they start seconds apart
    if fault == "all_raise":
        atexit.register(_all_come, store, "raised", rank, ranks)  # else the first one's end may be that of the others
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=patience) if "group" in fault else None
    steps = STEPS - 2 if fault == "fewer_steps" and rank == guilty else STEPS
    for number in range(steps):
        if number == at:
            step(fault, guilty, group)
        else:
            dist.all_reduce(load())
    if fault != "ends_without_meeting":
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
