"""A training step through AutoUnit against the same model wrapped by hand in a bare loop, on two ranks (gloo, one thread).

The model is the GPT of examples/gpt.py, for DDP and for FSDP (`fully_shard` on each block and on the root, which is what
echelon's FSDPStrategy does too). Both sides have the same batches, fused AdamW with the same groups, gradient clipping at
1.0 and the same schedule. The hand-written loop watches nothing; echelon's writes every update to metrics.jsonl and
progress to stderr, as it does unasked. Both live in the same two processes and take turns, `--steps` steps at a time, in
alternating order; a round's ratio compares neighbours. The clock is read when a warm step and when the last step ask for
their batch. At the end the parameters of both sides are compared: they did the same work if these are equal.

Memory is the largest resident size of a rank, measured in processes of their own that run one side only.

    python bench/wrapped.py [--rounds N] [--steps N] [--strategies ddp fsdp] [--json]

Target: at most 2% slower.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _timing import emit, machine, median, options, spread, versions

RANKS = 2
TARGET = 1.02
WARM_STEPS = 2
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


# --- the ranks' program


class Batches:
    """The batches of a turn, the same for both sides; it notes when the first timed one and the last were asked for."""

    def __init__(self, arguments: Any, rank: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(rank)
        shape = (8, arguments.batch, arguments.context)
        self.inputs = torch.randint(0, 256, shape, generator=generator)
        self.targets = torch.randint(0, 256, shape, generator=generator)
        self.steps = arguments.steps
        self.started = self.ended = 0.0

    def __len__(self) -> int:
        return WARM_STEPS + self.steps + 1

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self)):
            if i == WARM_STEPS:
                self.started = time.perf_counter()
            elif i == WARM_STEPS + self.steps:
                self.ended = time.perf_counter()
            yield self.inputs[i % 8], self.targets[i % 8]

    @property
    def step_ms(self) -> float:
        return 1e3 * (self.ended - self.started) / self.steps


def make_model(arguments: Any) -> Any:
    import torch
    from gpt import GPT

    torch.manual_seed(0)
    return GPT(arguments.width, arguments.depth, heads=max(1, arguments.width // 64), context=arguments.context)


def by_hand(arguments: Any, strategy: str) -> tuple[Callable[[Any], None], Any]:
    """(train on some batches, the wrapped module)."""
    import torch
    import torch.nn.functional as F
    from gpt import GPTUnit
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = make_model(arguments)
    if strategy == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    # The very groups and schedule of the example, built by its own method on a stand-in.
    recipe = GPTUnit.__new__(GPTUnit)
    recipe.__dict__.update(lr=1e-3, steps=10_000, training=False)
    optimizer, schedule = recipe.configure_optimizers_and_lr_scheduler(model)

    def train(data: Any) -> None:
        model.train()
        for inputs, targets in data:
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    return train, model


def through_autounit(arguments: Any, strategy: str) -> tuple[Callable[[Any], None], Any]:
    from gpt import GPTUnit

    import echelon as ech

    unit = GPTUnit(module=make_model(arguments), strategy=strategy, lr=1e-3, steps=10_000)

    def train(data: Any) -> None:
        ech.train(unit, data, max_epochs=unit.train_progress.num_epochs_completed + 1)

    return train, unit.module


SIDES = {"by hand": by_hand, "AutoUnit": through_autounit}


def largest_difference(modules: list[Any]) -> float:
    """Between the two sides' parameters on this rank."""
    pairs = zip(*(list(m.parameters()) for m in modules), strict=True)
    parts = [[getattr(p, "to_local", lambda p=p: p)().detach() for p in pair] for pair in pairs]
    return max(float((a - b).abs().max()) for a, b in parts if a.numel())


def rank_program(arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    strategy, names = arguments.strategies[0], arguments.sides
    sides = {name: SIDES[name](arguments, strategy) for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.rounds + 1):
        for name in names if turn % 2 else reversed(names):
            data = Batches(arguments, dist.get_rank())
            sides[name][0](data)
            if turn:  # the first is slow for everybody
                found[name].append(data.step_ms)
    difference = largest_difference([m for _, m in sides.values()]) if len(sides) == 2 else 0.0
    peaks: list[Any] = [None] * RANKS
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes on a Mac, KiB on Linux
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in make_model(arguments).parameters())
        answer = {"step_ms": found, "difference": difference, "peak_mib": max(peaks), "parameters": parameters}
        Path(arguments.as_rank).write_text(json.dumps(answer))
    dist.destroy_process_group()


# --- the process that measures


def measure(arguments: Any, strategy: str, sides: list[str], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")}
        (Path(folder) / "run" / "attempts" / "000").mkdir(parents=True)
        environment.update(OMP_NUM_THREADS="1", ECHELON_RUN_DIR=str(Path(folder) / "run"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
        command += ["--rounds", str(rounds), "--strategies", strategy, "--sides", *sides, "--as-rank", str(answer)]
        for name in ("steps", "batch", "context", "width", "depth"):
            command += [f"--{name}", str(getattr(arguments, name))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{strategy} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def main() -> None:
    parser = options(__doc__, rounds=20)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (default 5)")
    parser.add_argument("--strategies", nargs="+", choices=["ddp", "fsdp"], default=["ddp", "fsdp"])
    parser.add_argument("--batch", type=int, default=8, help="windows per rank")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="for this script itself")
    parser.add_argument("--as-rank", help="for this script itself: be a rank, and leave the answer in this file")
    arguments = parser.parse_args()
    if arguments.as_rank:
        rank_program(arguments)
        return
    facts: dict[str, Any] = {"machine": machine(), "versions": versions("torch", "echelon"), "strategies": {}}
    rows = []
    parameters = 0
    for strategy in arguments.strategies:
        found = measure(arguments, strategy, list(SIDES), arguments.rounds)
        peaks = {name: measure(arguments, strategy, [name], 1)["peak_mib"] for name in SIDES}
        facts["strategies"][strategy] = {**found, "peak_mib": peaks}
        hand, ours = found["step_ms"]["by hand"], found["step_ms"]["AutoUnit"]
        ratios = [b / a for a, b in zip(hand, ours, strict=True)]
        memory = " / ".join(f"{peaks[name]:.0f}" for name in SIDES)
        same = f"{found['difference']:.0e}" if found["difference"] else "equal"
        parameters = found["parameters"]
        times = [f"{median(hand):.1f}", f"{median(ours):.1f}", f"{median(ratios):.3f}", spread(ratios, 2)]
        rows.append([strategy, *times, f"<= {TARGET}", memory, same])
    header = ["", "by hand, ms", "AutoUnit, ms", "ratio", "rounds", "target", "peak MiB", "parameters"]
    title = f"By hand against AutoUnit: GPT of {parameters / 1e6:.1f} M parameters, {RANKS} ranks, median of {arguments.rounds}"
    emit(arguments, title, header, rows, notes=["peak MiB: of a rank, by hand / AutoUnit."], facts=facts)


if __name__ == "__main__":
    main()
