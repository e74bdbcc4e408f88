"""What each step of the library costs one rank of 16 to 16,384: milliseconds, kilobytes sent and received, memory.

One process acts as one rank (bench/_steps.py): the library's own code runs, and torch's collectives are simulated, with the
values that the other ranks would send. Time is processor time of the library alone, without the network; bytes are exact.

    python bench/scale.py [--ranks 16 256 4096 16384] [--only WORD ...] [--json]

tests/launcher/test_scale.py checks without a clock that nothing here grows faster than the ranks.
"""

from __future__ import annotations

import logging
import sys
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._steps import STEPS, Step
from bench._timing import emit, machine, median, options, versions


def measured(step: Step, ranks: int, rounds: int) -> dict[str, float]:
    """Milliseconds (the median), bytes, and peak memory."""
    times, sent, peak = [], 0, 0
    for round_ in range(rounds + 1):
        with step.ready(ranks) as (run, network):
            if round_ == 0:  # the first round also loads late imports
                tracemalloc.start()
            start = time.process_time()
            run()
            times.append((time.process_time() - start) * 1e3)
            sent = network.bytes
            if round_ == 0:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
    return {"ms": median(times[1:] or times), "bytes": sent, "memory": peak}


def operations(step: Step, ranks: int) -> tuple[int, int, int]:
    """(Python instructions executed in the library, bytes sent and received, peak bytes of memory)."""
    count = 0

    def look(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("echelon."):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return look

    with step.ready(ranks) as (run, network):
        run()  # late imports, and caches that are filled once
    with step.ready(ranks) as (run, network):
        tracemalloc.start()
        run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    with step.ready(ranks) as (run, network):
        before = sys.gettrace()
        sys.settrace(look)
        try:
            run()
        finally:
            sys.settrace(before)
    return count, network.bytes, peak


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 256, 4096, 16_384])
    parser.add_argument("--only", nargs="+", default=[""], help="steps whose name has one of these words")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    steps = [step for step in STEPS if any(word in step.name for word in arguments.only)]
    found = {step.name: {ranks: measured(step, ranks, arguments.rounds) for ranks in arguments.ranks} for step in steps}
    rows = [
        [name, *(f"{each['ms']:,.2f}" for each in by.values()), *(f"{each['bytes'] / 1e3:,.1f}" for each in by.values())]
        for name, by in found.items()
    ]
    header = ["step", *(f"ms, {ranks:,}" for ranks in arguments.ranks), *(f"kB, {ranks:,}" for ranks in arguments.ranks)]
    facts = {"machine": machine(), "versions": versions("torch"), "steps": found}
    emit(arguments, "Cost of one rank, by the number of ranks", header, rows, facts=facts)


if __name__ == "__main__":
    main()
