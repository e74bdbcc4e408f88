"""Microseconds that watching a run costs a step, and seconds that its report takes.

The step is that of loop_overhead.py: a small MLP, one thread, a fraction of a millisecond, so that other work beside it shows.
The same loop trains the same model in three processes that take turns, one pass of `--steps` steps each, beside the bare loop:

    unwatched   echelon's loop; nothing is recorded
    recorded    a run folder: metrics.jsonl with every update, events, progress on stderr, and the pulse that a launcher reads
    all         the same, and where the time goes: marks in the loop, samples of its thread, and times.rank0.jsonl

The clock is read as in loop_overhead.py. The cost of a round is a process's time per step minus that of the unwatched loop in the
same round. The table shows the median over the rounds, by the wall clock and by the processor time of all the process's threads.

    python bench/observe.py [--rounds N] [--steps N] [--report-steps N] [--json]

Targets: all at most 15 us beyond the loop, of which the times less than 10; a report of 10^6 steps within 10 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from _timing import emit, machine, median, options, spread, versions
from loop_overhead import Batches, make_model, make_optimizer, run_bare

ALL_US, TIMES_US, REPORT_S = 15.0, 10.0, 10.0
NAMES = ("bare loop", "unwatched", "recorded", "all")


class Watched(Batches):
    """Also records the processor time of the whole process, since observers have threads of their own."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.used: dict[int, float] = {}

    def __getitem__(self, index: int) -> Any:
        if index in (self.first, self.last):
            self.used[index] = time.process_time()
        return super().__getitem__(index)

    @property
    def cost_us(self) -> tuple[float, float]:
        """Wall time, and processor time of all threads, per step."""
        return self.step_us[0], (self.used[self.last] - self.used[self.first]) / (self.last - self.first) * 1e6


def run_loop(data: Batches, name: str, folder: Path) -> None:
    import torch
    import torch.nn.functional as F

    import echelon as ech
    from echelon.contracts import pulse
    from echelon.loop.reporting import times

    class Unit(ech.AutoUnit[Any]):
        def compute_loss(self, state: ech.State, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = batch
            logits = self.module(x)
            return F.cross_entropy(logits, y), logits

        def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[Any, Any]:
            return make_optimizer(module), None

    os.environ.pop("ECHELON_RUN_DIR", None)
    run = ech.evidence.RunDir.create(folder, None)
    if name != "unwatched":
        os.environ.update(run.to_env())
        pulse.join(pulse.make())
    noted = times.noted
    if name != "all":
        times.noted = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    try:
        ech.train(Unit(module=make_model(), device=torch.device("cpu")), data.loader(), max_epochs=1)
    finally:
        times.noted = noted
    written = run.times(0).exists()
    if written != (name == "all"):
        raise SystemExit(f"{name}: the times were {'' if written else 'not '}written down")


def work(name: str, steps: int) -> None:
    """A process that runs a pass for each line, and answers with the time that it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    for _ in sys.stdin:
        torch.manual_seed(0)
        data = Watched(steps)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if name == "bare loop":
                run_bare(data, False, Path(folder))
            else:
                run_loop(data, name, Path(folder))
        answers.write(json.dumps(data.cost_us) + "\n")
        answers.flush()


class Process:
    """A process that stays alive between its passes."""

    def __init__(self, name: str, steps: int, log: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", name, "--steps", str(steps)]
        self._name, self._log = name, log
        with open(log, "w") as file:
            self._process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=file, text=True, env=environment)

    def measure(self) -> tuple[float, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            raise SystemExit(f"{self._name} failed:\n{self._log.read_text(errors='replace')[-3000:]}")
        wall, used = json.loads(answer)
        return wall, used

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        living = {name: Process(name, steps, Path(folder) / f"{name}.log") for name in NAMES}
        try:
            for process in living.values():
                process.measure()  # imports, and other work that is slow only once
            return {name: list(each) for name, each in zip(NAMES, zip(*_turns(living, rounds), strict=True), strict=True)}
        finally:
            for process in living.values():
                process.close()


def _turns(living: dict[str, Process], rounds: int) -> list[list[tuple[float, float]]]:
    """Each round in another order: in a fixed order, a process would always get the noise of the one before it."""
    found = []
    for n in range(rounds):
        order = [*NAMES[n % len(NAMES) :], *NAMES[: n % len(NAMES)]]
        taken = {name: living[name].measure() for name in order}
        found.append([taken[name] for name in NAMES])
    return found


def report_s(steps: int) -> float:
    """Seconds for the report of a run with this number of steps."""
    from echelon.contracts.run_dir import RunDir
    from echelon.observe import report

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(folder).at_attempt(0)
        with open(run.metrics, "w") as file:
            for step in range(1, steps + 1):
                record = {"step": step, "update": step, "loss": 2 + 1 / step, "lr": 0.01, "grad_norm": 1.0, "samples_per_s": 9e3}
                file.write(json.dumps({**record, "time": 1.7e9 + step}) + "\n")
        began = time.perf_counter()
        report.write(run)
        return time.perf_counter() - began


def main() -> None:
    parser = options(__doc__, rounds=12)
    parser.add_argument("--steps", type=int, default=3000, help="timed steps of a pass (default 3000)")
    parser.add_argument("--report-steps", type=int, default=10**6, help="of the run that is reported (default 10^6; 0: none)")
    parser.add_argument("--worker", help="for this script itself: be this process")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.steps)
        return
    before = machine()
    found = measure(arguments.rounds, arguments.steps)
    rows = []
    for name, minus, target in (
        ("unwatched", "bare loop", ""),
        ("recorded", "unwatched", ""),
        ("all", "recorded", f"< {TIMES_US:.0f}"),
        ("all", "unwatched", f"<= {ALL_US:.0f}"),
    ):
        wall, used = ([a[i] - b[i] for a, b in zip(found[name], found[minus], strict=True)] for i in (0, 1))
        least = min(a[0] for a in found[name]) - min(b[0] for b in found[minus])
        rows.append([f"{name} - {minus}", f"{median(wall):.1f}", spread(wall, 1), f"{least:.1f}", f"{median(used):.1f}", target])
    bare = [wall for wall, _ in found["bare loop"]]
    rows.insert(0, ["bare loop", f"{median(bare):.0f}", spread(bare), f"{min(bare):.0f}", "", ""])
    facts: dict[str, Any] = {"machine": before, "versions": versions("torch", "echelon"), "step_us": found}
    notes = [
        "us a step, wall clock: median, smallest and largest of the rounds' differences; least: between the fastest passes,",
        "which other programs have disturbed least; CPU: of all threads of the process.",
    ]
    if arguments.report_steps:
        facts["report_s"] = report_s(arguments.report_steps)
        notes.append(f"report of {arguments.report_steps} steps: {facts['report_s']:.1f} s (target {REPORT_S:.0f} s)")
    title = f"Cost of watching ({arguments.rounds} rounds of {arguments.steps} steps, one thread)"
    emit(arguments, title, ["", "us/step", "rounds", "least", "CPU", "target"], rows, notes=notes, facts=facts)


if __name__ == "__main__":
    main()
