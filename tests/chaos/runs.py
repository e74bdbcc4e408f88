"""Runs of `tests/chaos/train.py` under `echelon run`, started again whenever their launcher was killed; and their ledgers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.chaos.train import GLOBAL_BATCH, SAMPLES
from tests.conftest import clean_environment
from tests.kit import forked

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("train.py"))


def start(
    folder: Path, ranks: int, *script: str, restarts: int = 0, grace_s: float = 30.0, library: Path | None = None
) -> subprocess.Popen[str]:
    """`echelon run` in a folder of its own: the first time as a new run, then as one more attempt of it."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**clean_environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if library is not None:
        env["LD_PRELOAD"] = str(library)
    options = ["--ranks", str(ranks), "--max-restarts", str(restarts), "--grace", str(grace_s), "--name", "chaos"]
    command = ["-m", "echelon", "run", *options, *script]
    return forked.popen(
        [sys.executable, *command], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output; a run that does not end is killed, which is a failure."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"not done within {timeout_s:g} s:\n{output[-3000:]}") from None
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, output


@dataclass
class Survived:
    attempts: int
    launchers: int
    seconds: float


def until_done(
    folder: Path, ranks: int, kills: int, *script: str, library: Path | None = None, timeout_s: float = 240.0
) -> Survived:
    """Run until the script ends by itself, with as many launchers as it takes."""
    began, launchers = time.monotonic(), 0
    while True:
        launchers += 1
        left = timeout_s - (time.monotonic() - began)
        assert left > 0 and launchers <= kills + 1, f"not done within {timeout_s:g} s and {launchers} launchers"
        arguments = (SCRIPT, str(folder), "--kills", str(kills), *script)
        code, output = finish(start(folder, ranks, *arguments, restarts=kills, library=library), left)
        if code == 0:
            attempts = len(list((folder / "runs" / "chaos" / "attempts").iterdir()))
            return Survived(attempts, launchers, time.monotonic() - began)
        assert code == -signal.SIGKILL, f"exit code {code}:\n{output[-6000:]}"


def values(folder: Path, ranks: int) -> list[Any]:
    return [torch.load(folder / f"final-{rank}.pt") for rank in range(ranks)]


@dataclass
class History:
    """What the ledgers of all ranks say.

    Attributes:
        steps: the samples of each step, over all ranks: the last attempt that made it counts.
        redone: rank-steps that were made again.
    """

    steps: dict[int, list[int]]
    redone: int


def history(folder: Path, *, same_ranks: bool = True) -> History:
    """Read the ledgers.

    Raises:
        AssertionError: a step that was made again, by the same rank of as many, used other samples.
    """
    by_step: dict[int, dict[int, dict[int, list[int]]]] = {}
    lines = 0
    for path in sorted(folder.glob("ledger-*.jsonl")):
        rank = int(re.findall(r"\d+", path.name)[0])
        for text in path.read_bytes().split(b"\n"):
            with contextlib.suppress(json.JSONDecodeError):  # torn by a kill
                line = json.loads(text)
                lines += 1
                by_step.setdefault(line["step"], {}).setdefault(line["attempt"], {})[rank] = line["ids"]
    steps: dict[int, list[int]] = {}
    useful = 0
    for step, attempts in sorted(by_step.items()):
        last = attempts[max(attempts)]
        useful += len(last)
        steps[step] = [i for rank in sorted(last) for i in last[rank]]
        for attempt, found in attempts.items():
            if same_ranks:
                assert all(last.get(rank, ids) == ids for rank, ids in found.items()), f"step {step} of attempt {attempt}"
            else:
                missing = {i for ids in found.values() for i in ids} - set(steps[step])
                assert not missing, f"step {step} of attempt {attempt} used {missing} besides"
    return History(steps, lines - useful)


def every_sample_once(steps: dict[int, list[int]], accumulation: int = 1) -> int:
    """Each epoch has every sample once; the number of whole epochs."""
    per_epoch = -(-SAMPLES // GLOBAL_BATCH) * accumulation
    assert sorted(steps) == list(range(1, len(steps) + 1)), "a step is missing"
    epochs = len(steps) // per_epoch
    for epoch in range(epochs):
        used = Counter(i for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1) for i in steps[step])
        assert used == Counter(range(SAMPLES)), f"epoch {epoch}: {sorted((used - Counter(range(SAMPLES))).elements())} too often"
    return epochs
