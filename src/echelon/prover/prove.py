"""Run a program under a matrix of layouts, numbers of ranks and accumulation splits, and say whether all train alike."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.arguments import flags
from echelon.common.errors import ProveError, require
from echelon.common.machine import DEVICE_VARIABLE, visible_devices
from echelon.common.numbers import number, whole
from echelon.loop.target import Target
from echelon.prover.matrix import Row, matrix
from echelon.prover.proof import Proof, Result
from echelon.prover.proving import Proving

__all__ = ["Proof", "Result", "prove", "prove_target"]


def prove(
    make_unit: Callable[[], Any],
    make_data: Callable[[], Any],
    *,
    layouts: Sequence[str] | Mapping[str, Any] | None = None,
    ranks: Sequence[int] = (1, 2, 4),
    accumulation: Sequence[int] = (1, 2),
    updates: int = 5,
    float64: bool = False,
    sgd: bool = True,
    parts: int | None = None,
    bf16: bool = False,
    seed: int = 0,
    timeout_s: float | None = 600.0,
    device: str | None = None,
    eager: bool = False,
    on_result: Callable[[Result], None] | None = None,
) -> Proof:
    """Train what two functions make under every layout, and compare each step with one process in plain PyTorch.

    Args:
        make_unit: builds the unit; called on every rank after the ranks have joined. Both functions are sent to other
            processes, as with `launch`.
        make_data: builds the loader, best an `echelon.Loader`, whose global batches do not depend on the ranks.
        layouts: names, or a mapping of the table's names to Layouts. By default ddp, fsdp, hsdp, zero1, zero2, and every
            direction (tp, cp, pp, ep, products) in which the model can be divided; a note says why others are left out. Of
            the defaults, only ddp and fsdp are also tried on more ranks, with accumulation and with SGD.
        ranks: numbers of processes. 1 is the loop itself against plain PyTorch.
        accumulation: micro-batches per update on each rank, tried at the smallest number of ranks above one.
        updates: how many optimizer updates are compared. A mistake usually shows in the first; five let buffers, momentum
            and schedules take part. If they end within the first epoch, only the unit's own row and the first that divides
            batches between ranks compare all of them; others on several ranks compare two.
        float64: compare in float64, to 1e-11.
        sgd: rows with SGD in place of the unit's optimizer, too.
        parts: also the bit-equal mode, with so many parts in a global batch.
        bf16: each layout once in bf16, compared with one process under autocast.
        seed: of every process before `make_unit`.
        timeout_s: a row that takes longer is stopped and failed, with the stacks of its ranks; None waits for ever.
        device: "cpu" or "cuda"; by default a GPU for each rank if there are enough for the largest of `ranks`, else the CPU.
        eager: never compile, also where the unit compiles its module.
        on_result: called with each row as it is ready.
    Raises:
        UsageError: there is nothing to compare, or the reference cannot be computed.
    """
    for name, given, what in (("make_unit", make_unit, "unit"), ("make_data", make_data, "loader")):
        wanted = f"a function that builds the {what}"
        require(callable(given), name, wanted, given, f"Write {name}=lambda: ...", kind=ProveError)
    require(device in (None, "cpu", "cuda"), "device", "'cpu', 'cuda' or None", device, kind=ProveError)
    flags(float64=float64, sgd=sgd, bf16=bf16, eager=eager, kind=ProveError)
    rows = matrix(layouts, ranks, accumulation, sgd=sgd, parts=parts, bf16=bf16, yours=layouts is None, eager=eager)
    target = Target(make_unit=make_unit, make_data=make_data, device=device)
    proof = prove_target(target, rows, updates, float64, seed, on_result, timeout_s)
    if proof.interrupted:
        raise KeyboardInterrupt
    return proof


def prove_target(
    target: Target,
    rows: list[Row],
    updates: int,
    float64: bool,
    seed: int = 0,
    on_result: Callable[[Result], None] | None = None,
    timeout_s: float | None = 600.0,
    logs: Path | None = None,
) -> Proof:
    """`prove` for a script or functions, over given rows.

    Args:
        logs: folder for the logs of failed rows; by default a temporary one each, which stays.
    Returns:
        What was compared, also if it was interrupted.
    """
    updates = whole("updates", updates, at_least=1, kind=ProveError)
    if timeout_s is not None:
        number("timeout_s", timeout_s, "above 0 seconds", lambda seconds: seconds > 0, kind=ProveError)
    with tempfile.TemporaryDirectory(prefix="echelon-prove-", ignore_cleanup_errors=True) as folder:
        most, gpus = max((row.ranks for row in rows), default=1), len(visible_devices())
        lacks = target.device is None and DEVICE_VARIABLE not in os.environ and 0 < gpus < most
        target = replace(target, device="cpu") if lacks else target
        run = Proving(target, Path(folder), updates, torch.float64 if float64 else torch.float32, seed, timeout_s, logs)
        if lacks:
            run.proof.notes.append(
                f"{most} ranks have {gpus} GPU{'s' if gpus > 1 else ''} here: everything ran on the CPU. `--device cuda --ranks "
                f"{gpus}` proves as much as fits on the GPU{'s' if gpus > 1 else ''}."
            )
        try:
            for result in run.results(rows):
                run.proof.results.append(result)
                if on_result is not None:
                    on_result(result)
        except KeyboardInterrupt:  # what was compared is worth showing
            run.proof.interrupted = True
        return run.proof
