"""What a training loop adds to each step of the bare loop, on this device: bench/loop_overhead.py's contenders and model.

A step of the small MLP is a few dozen kernels of microseconds each, so the time of a step is that of the Python code that
launches them, and the framework's own time shows. Each contender has a process of its own; they take turns, a pass each.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.gpu.rows import Notes
from bench.gpu.runner import Setting

CONTENDERS = {"bare": "torch", "echelon": "echelon", "Accelerate": "accelerate", "Lightning": "lightning"}


def run(setting: Setting, notes: Notes) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # loop_overhead imports its neighbours by name
    steps, warm, rounds = (20, 5, 1) if setting.small else (400, 100, 4)
    names = ["bare", "echelon"] if setting.small else list(CONTENDERS)
    there = [name for name in names if importlib.util.find_spec(CONTENDERS[name]) is not None]
    living = {name: Contender(name, setting.device, steps, warm) for name in there}
    found: dict[str, list[list[float]]] = {name: [] for name in there}
    end = time.monotonic() + 0.7 * setting.limit_s  # a round takes about ten seconds if Lightning starts slowly
    for turn in range(rounds + 1):  # the first turn imports, and does other work that is slow only once
        if turn > 1 and time.monotonic() > end:
            break
        for watched in (False, True):
            for name, contender in living.items():
                us = contender.measure(watched)
                if turn:
                    found[name].append([float(watched), us])
    for watched in (False, True):
        kind = "progress and metrics written" if watched else "plain"
        times = {name: [us for w, us in values if w == float(watched)] for name, values in found.items()}
        notes(f"bare loop, {kind}", statistics.median(times["bare"]), "us/step")
        for name in names[1:]:
            if name not in there:
                notes(f"{name}, {kind}", remark=f"{CONTENDERS[name]} is not installed", status="left out")
                continue
            beyond = [us - bare for us, bare in zip(times[name], times["bare"], strict=True) if us == us]
            if beyond:
                remark = f"beyond the bare loop; rounds {min(beyond):.0f} to {max(beyond):.0f}"
                notes(f"{name}, {kind}", statistics.median(beyond), "us/step", remark)
            else:
                notes(f"{name}, {kind}", remark=living[name].problem, status="failed")


class Contender:
    """A contender's process, which answers each request with the microseconds of a step."""

    def __init__(self, name: str, device: str, steps: int, warm: int) -> None:
        self.problem = ""
        context: Any = multiprocessing.get_context("fork")  # this process has not touched the device
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_work, args=(name, device, steps, warm, theirs, self._connection), daemon=True)
        process.start()
        theirs.close()

    def measure(self, watched: bool) -> float:
        """Microseconds of a step; nan after a failure."""
        if not self.problem:
            try:
                self._connection.send(watched)
                answer = self._connection.recv()
                if isinstance(answer, float):
                    return answer
                self.problem = str(answer)
            except (EOFError, OSError):
                self.problem = "its process died"
        return float("nan")


def _work(name: str, device: str, steps: int, warm: int, connection: Connection, other_end: Connection) -> None:
    other_end.close()
    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from loop_overhead import RUNS, Batches

    torch.set_num_threads(1)
    while True:
        try:
            watched = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            data = Batches(steps, device, warm)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                RUNS[name](data, watched, Path(folder))
            connection.send(data.step_us[0])
        except BaseException as error:
            traceback.print_exc()
            connection.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
