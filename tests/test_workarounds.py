"""What launcher/workarounds.py does is still needed, and still works. A test that fails says which of it to take away."""

from __future__ import annotations

import atexit
import faulthandler
import inspect
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from echelon.contracts.errors import RankFailedError
from echelon.launcher import workarounds
from echelon.launcher.functions.run import launch

LOOK = "launcher/workarounds.py: "


def _frees_a_model_while_the_group_wants_the_interpreter(kept: bool) -> bool:
    """Rank 0 holds the interpreter, frees a wrapped model, and with it its group, whose thread needs it for its last tensor."""
    dist.init_process_group("gloo")
    model, rank, group = DistributedDataParallel(torch.nn.Linear(1, 1)), dist.get_rank(), dist.group.WORLD
    assert group is not None
    destroy = dist.destroy_process_group if kept else dist.destroy_process_group.__wrapped__  # type: ignore[attr-defined]
    destroy()
    time.sleep(0.3 * rank)
    if rank == 0:
        faulthandler.dump_traceback_later(3, exit=True)
        sys.setswitchinterval(1000)
    group.allreduce([torch.ones(1)])
    del group
    until = time.monotonic() + (0.6 if rank == 0 else 0.0)
    while time.monotonic() < until:
        pass
    if rank == 1 and not kept:
        os._exit(0)
    del model
    sys.setswitchinterval(0.005)
    faulthandler.cancel_dump_traceback_later()
    return True


def test_a_group_that_is_kept_does_not_hang_its_rank() -> None:
    assert launch(_frees_a_model_while_the_group_wants_the_interpreter, ranks=2, args=(True,), quiet=True) == [True, True]


def test_a_group_that_is_freed_hangs_its_rank() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(_frees_a_model_while_the_group_wants_the_interpreter, ranks=2, args=(False,), quiet=True)
    print(caught.value)
