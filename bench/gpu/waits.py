"""Which lines of a training step wait for the device: torch's sync-debug mode on warm steps, under every layout on one rank.

During a wait the host cannot queue the next step's work, and the device idles. torch warns at each call that waits; each warning
is recorded with the innermost line of the library that led to it. The last row plants a wait and must find it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.gpu.llama import SIZES
from bench.gpu.rows import Notes
from bench.gpu.runner import Setting
from bench.gpu.work import Batches, Fit, tiny

import echelon as ech
from echelon.common.errors import UsageError
from echelon.parallel import LAYOUTS

SAYS = "called a synchronizing CUDA operation"  # torch's words
WARM, WATCHED, ACCUMULATION = 6, 8, 2


def run(setting: Setting, notes: Notes) -> None:
    device = ech.init_from_env(setting.device)
    common: dict[str, Any] = {"precision": "bf16", "clip_grad_norm": 1.0, "accumulate": ACCUMULATION}
    for layout in ("none", "fsdp") if setting.small else LAYOUTS:
        _case(layout, device, notes, {**common, "layout": layout})
    _case("none, fp16 and its scaler", device, notes, {**common, "precision": "fp16"})
    saver = ech.DistributedCheckpointSaver(setting.folder / "saves", save_every_n_updates=4, async_checkpoint=True)
    _case("none, asynchronous saves", device, notes, common, callbacks=[saver])
    with _run_folder(setting.folder):
        _case("none, metrics and progress written", device, notes, common)
    found = _watched(Planted(module=tiny(), device=device, **common), device)
    told = sum(found.values())
    notes(
        "a planted wait",
        told,
        "found",
        f"of {WATCHED}: else the zeros above mean nothing",
        status="ok" if told >= WATCHED else "failed",
    )


class Planted(Fit):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        loss, _ = super().compute_loss(state, data)
        if loss.is_cuda:
            loss.item()
        else:
            warnings.warn(SAYS, stacklevel=1)
        return loss, None


def _case(name: str, device: torch.device, notes: Notes, options: dict[str, Any], callbacks: Any = ()) -> None:
    try:
        found = _watched(Fit(module=tiny(), device=device, **options), device, callbacks)
    except UsageError as error:  # such as a layout that needs more ranks
        notes(name, remark=str(error).splitlines()[0], status="left out")
    except Exception as error:
        traceback.print_exc()
        notes(name, remark=f"{type(error).__name__}: {str(error).splitlines()[0]}", status="failed")
    else:
        where = ", ".join(f"{place} ({times})" for place, times in found.most_common(4))
        notes(name, sum(found.values()) / WATCHED, "waits a step", where)
    finally:
        gc.collect()  # the wrapped module holds the process group
        if dist.is_initialized():
            dist.destroy_process_group()


def _watched(unit: Fit, device: torch.device, callbacks: Any = ()) -> Counter[str]:
    """Where warm steps waited, and how often."""
    found: Counter[str] = Counter()

    def see(message: Any, *others: Any) -> None:
        if SAYS in str(message):
            found[_place(traceback.extract_stack()[:-1])] += 1

    def before(batch: int) -> None:
        # One batch is read ahead: the last requested batch has not been used yet.
        if batch == WARM + 1:
            found.clear()
            _mode("warn", device)
        elif batch == WARM + WATCHED + 1:
            _mode("default", device)

    # One batch more than are watched, since the end of an epoch may wait.
    batches = Batches(SIZES["tiny"], 2, WARM + WATCHED + 2, pinned=device.type == "cuda", before=before)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = see
        try:
            ech.train(unit, batches, max_epochs=1, callbacks=list(callbacks))
        finally:
            _mode("default", device)
    return found


def _mode(mode: str, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def _place(stack: traceback.StackSummary) -> str:
    """The innermost line of the library, and if it differs, the innermost line of all."""
    inner = [frame for frame in stack if not frame.filename.endswith("warnings.py")]
    ours = [frame for frame in inner if "/echelon/" in frame.filename or "/bench/" in frame.filename]
    last = inner[-1]
    if not ours:
        return _short(last)
    return _short(ours[-1]) if ours[-1] is last else f"{_short(ours[-1])} in {_short(last)}"


def _short(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"


@contextlib.contextmanager
def _run_folder(folder: Path) -> Iterator[None]:
    """Context with a run folder as the launcher makes it, so that the loop writes metrics and progress."""
    (folder / "run" / "attempts" / "000").mkdir(parents=True)
    os.environ["ECHELON_RUN_DIR"] = str(folder / "run")
    try:
        yield
    finally:
        del os.environ["ECHELON_RUN_DIR"]
