"""torchtnt.utils.data.profile_dataloader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import record_function

from echelon.compat.torchtnt.utils.timer import Timer, TimerProtocol
from echelon.world.device import copy_data_to_device

__all__ = ["profile_dataloader"]


def profile_dataloader(
    dataloader: Iterable[Any],
    profiler: Any,
    *,
    max_steps: int | None = None,
    timer: TimerProtocol | None = None,
    device: torch.device | None = None,
) -> TimerProtocol:
    """Read a loader to its end, timing "iter(dataloader)", "next(iter)" and "copy_data_to_device".

    Args:
        profiler: a `torch.profiler.profile` that the caller has started, told of each step; or None.
        max_steps: read at most so many batches.
        timer: by default a new one.
        device: copy each batch there.
    Returns:
        The timer.
    """
    used = timer if timer is not None else Timer()
    with used.time("iter(dataloader)"), record_function("iter(dataloader)"):
        batches = iter(dataloader)
    steps = 0
    while max_steps is None or steps < max_steps:
        try:
            with used.time("next(iter)"), record_function("next(iter)"):
                batch = next(batches)
        except StopIteration:
            break
        if device is not None:
            with used.time("copy_data_to_device"), record_function("copy_data_to_device"):
                copy_data_to_device(batch, device)
        steps += 1
        if profiler is not None:
            profiler.step()
    return used
