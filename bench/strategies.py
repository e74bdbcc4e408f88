"""What each layout costs: speed against the same parts of torch used by hand, memory against DistributedDataParallel.

speed     a step through AutoUnit against a bare loop over the same model, wrapped by hand: DistributedDataParallel, with it
          ZeroRedundancyOptimizer, `fully_shard` on each block and the root, `parallelize_module`. The model is the GPT of
          examples/gpt.py; both sides have the same batches, fused AdamW and clipping (not with tp, whose mixture of meshes
          torch's own norm refuses). They run in the same two processes (gloo, one thread) and take turns of two updates; a ratio
          compares neighbours. echelon writes every update to metrics.jsonl, as by default; the bare loop records nothing.
          At the end the parameters of both sides are compared: if they are equal, both did the same work.
context   the same for context parallelism: sequences of 512 over 2 and 4 ranks, attention by hand with torch.distributed.
pipeline  the same for pipelines over 2 and 4 ranks, 8 micro-batches, against torch's 1F1B with stages written by hand; and the
          idle part of a step with each schedule, for a model whose passes sleep, against theory.
experts   the same for experts over 2 and 4 ranks (`ep`): 8 in each of 4 layers, 2 for each token.
bitwise   the same for deterministic="bitwise", which reduces every micro-batch, against accumulation by hand.
memory    the largest resident size of a rank (VmHWM) minus that of the same job with a tiny model, each in fresh processes;
          freed memory is returned to the system (mallopt, M_MMAP_THRESHOLD 256 KiB). AdamW, float32, linear layers.
prove     wall time of `echelon prove examples/gpt.py`: the whole matrix.

    python bench/strategies.py [--only speed context pipeline experts bitwise memory prove] [--quick] [--json]

Targets: at most 2% slower, context parallelism and pipelines 3%; zero1 saves 35% of DistributedDataParallel's memory or the share
that theory gives, whichever is smaller, and zero2 saves more; prove in 90 s.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _timing import emit, machine, median, options, spread, versions

ROOT = Path(__file__).resolve().parents[1]
SLOWER, PROVE_S, SAVES = 1.02, 90.0, 0.35
CONTEXT_SLOWER = PIPELINE_SLOWER = EXPERTS_SLOWER = 1.03
IDLE = 0.03  # allowed above the theory, as a part of the step
SLEEP_S = 0.05
# schedule, stages a rank, theoretical time of a step by ranks and micro-batches, in passes of all layers of a rank; None: the
# time of torch's order, since the ideal has no idle part
SCHEDULES = [
    ("gpipe", 1, lambda p, m: 3 * (m + p - 1)),
    ("1f1b", 1, lambda p, m: 3 * (m + p - 1)),
    ("interleaved", 2, lambda p, m: 3 * (m + (p - 1) / 2)),
    ("zero_bubble", 1, lambda p, m: 3 * m + p - 1),
    ("zbv", 2, None),
]
# layout, the counterpart by hand
SPEED = {
    "ddp": "DDP",
    "zero1": "DDP + ZeroRedundancyOptimizer",
    "zero2": "fully_shard, not resharded",
    "zero3": "fully_shard",
    "fsdp": "fully_shard",
    "hsdp": "fully_shard, 2 x 1 mesh",
    "tp": "parallelize_module + fully_shard",
}
# layout, side, theoretical bytes per parameter for a number of ranks: parameters, gradients, AdamW's two moments; float32.
# By default, DDP's gradients are copies of its buckets. zero2 keeps whole parameters beside their shards.
MEMORY = [
    ("ddp as torch makes it", "by hand", lambda n: 4 + 8 + 8),
    ("ddp", "by hand", lambda n: 4 + 4 + 8),
    ("zero1", "by hand", lambda n: 4 + 4 + 8 / n),
    ("ddp", "echelon", lambda n: 4 + 4 + 8),
    ("zero1", "echelon", lambda n: 4 + 4 + 8 / n),
    ("zero2", "echelon", lambda n: 4 + 4 / n + 8 / n),
    ("zero2", "by hand", lambda n: 4 + 4 / n + 8 / n),
    ("zero3", "by hand", lambda n: 4 / n + 4 / n + 8 / n),
    ("zero3", "echelon", lambda n: 4 / n + 4 / n + 8 / n),
]


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def launch(program: Any, *arguments: Any, ranks: int = 2) -> list[dict[str, Any]]:
    import echelon

    return echelon.launch(program, ranks=ranks, args=arguments, quiet=True, timeout_s=300)


def ratios(times: dict[str, list[float]]) -> list[float]:
    return [ours / hand for hand, ours in zip(times["by hand"], times["echelon"], strict=True)]


def quartiles(values: list[float]) -> str:
    ordered = sorted(values)
    return spread([ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]], 3)


def margin(values: list[float]) -> float:
    """Half of the 95% interval of the median, from the ranks of the values: no assumption about how noise is distributed."""
    ordered, n = sorted(values), len(values)
    reach = round(0.98 * n**0.5)
    low, high = max(0, n // 2 - reach), min(n - 1, n // 2 + reach)
    return (ordered[high] - ordered[low]) / 2


def facts() -> dict[str, Any]:
    return {"machine": machine(), "versions": versions("torch", "echelon")}


def speed(arguments: Any) -> None:
    from _by_hand import Case, compare

    about, rows = {**facts(), "layouts": {}}, []
    cases = [(s, Case(s, turns=arguments.rounds), by) for s, by in SPEED.items()]
    cases.append(("tp", Case("tp", "tp alone", turns=arguments.rounds), "parallelize_module alone"))
    cases.append(("tp", Case("tp", "tp alone", turns=arguments.rounds, heads=4), "parallelize_module alone, 4 ranks"))
    cases.append(("tp", Case("tp", turns=arguments.rounds, heads=4), "parallelize_module + fully_shard, 4 ranks"))
    for name, case, by in cases:
        found = launch(compare, case, ranks=4 if "4 ranks" in by else 2)[0]
        about["layouts"][f"{name}, {by}"] = found
        wall, cpu = ratios(found["wall_ms"]), ratios(found["cpu_ms"])
        same = f"{found['difference']:.0e}" if found["difference"] else "equal"
        times = [f"{median(found['wall_ms'][side]):.1f}" for side in ("by hand", "echelon")]
        ratio = [f"{median(wall):.3f}", f"{margin(wall):.3f}", quartiles(wall), f"{median(cpu):.3f}", f"{margin(cpu):.3f}"]
        rows.append([f"{name}: {by}", *times, *ratio, f"<= {SLOWER}", verdict(median(wall) <= SLOWER), same])
    title = f"AutoUnit against the same parts by hand: GPT of {found['parameters'] / 1e6:.1f} M parameters, 2 ranks"
    header = [
        "layout: by hand",
        "by hand, ms",
        "AutoUnit, ms",
        "ratio",
        "+-",
        "quartiles",
        "CPU",
        "+-",
        "target",
        "",
        "parameters",
    ]
    notes = [
        f"Medians of {arguments.rounds} pairs of neighbouring turns; +- is half of the median's 95% interval.",
        "CPU: the ratio of processor time, which other programs disturb less.",
    ]
    emit(arguments, title, header, rows, notes=notes, facts=about)


def _beside_hand(ranks: int, found: dict[str, Any], slower: float) -> list[str]:
    """A row: both times, their ratio, and whether it is at most `slower`."""
    wall, cpu = ratios(found["wall_ms"]), ratios(found["cpu_ms"])
    times = [f"{median(found['wall_ms'][side]):.1f}" for side in ("by hand", "echelon")]
    ratio = [f"{median(wall):.3f}", f"{margin(wall):.3f}", f"{median(cpu):.3f}", f"{margin(cpu):.3f}"]
    difference = f"{found['difference']:.0e}" if found["difference"] else "equal"
    return [str(ranks), *times, *ratio, f"<= {slower}", verdict(median(wall) <= slower), difference]


def context(arguments: Any) -> None:
    from _by_hand import Case, compare

    about, rows = {**facts(), "ranks": {}}, []
    for ranks in (2, 4):
        case = Case(f"cp={ranks}", turns=max(5, arguments.rounds // 2), batch=2, context=512)
        about["ranks"][ranks] = found = launch(compare, case, ranks=ranks)[0]
        rows.append(_beside_hand(ranks, found, CONTEXT_SLOWER))
    header = ["ranks", "by hand, ms", "AutoUnit, ms", "ratio", "+-", "CPU", "+-", "target", "", "parameters"]
    title = "Layout(cp=...) against attention over gathered keys by hand, and fully_shard: GPT, 2 sequences of 512"
    notes = ["Medians of pairs of neighbouring turns; +- is half of the median's 95% interval."]
    emit(arguments, title, header, rows, notes=notes, facts=about)


def pipeline(arguments: Any) -> None:
    from _by_hand import Case, compare

    about, rows = {**facts(), "ranks": {}, "idle": {}}, []
    for context, ranks in ((64, 2), (64, 4), (512, 2), (512, 4)):
        # echelon's own time does not depend on the size of a micro-batch: the small one shows it, the large one its share in
        # practice.
        case = Case(f"pp={ranks}", accumulation=8, updates=1, turns=max(5, arguments.rounds // 2), batch=2, context=context)
        about["ranks"][f"{ranks}, 2 x {context}"] = found = launch(compare, case, ranks=ranks)[0]
        rows.append([f"2 x {context}", *_beside_hand(ranks, found, PIPELINE_SLOWER)])
    header = ["bytes", "ranks", "by hand, ms", "AutoUnit, ms", "ratio", "+-", "CPU", "+-", "target", "", "parameters"]
    title = "Layout(pp=...) against torch's 1F1B over stages written by hand: GPT, 8 micro-batches"
    notes = ["Medians of pairs of neighbouring turns; +- is half of the median's 95% interval."]
    emit(arguments, title, header, rows, notes=notes, facts=about)
    _idle(arguments, about)


def experts(arguments: Any) -> None:
    from _by_hand import Case, compare

    about, rows = {**facts(), "ranks": {}}, []
    for ranks in (2, 4):
        case = Case(f"ep={ranks}", turns=max(5, arguments.rounds // 2), batch=4, context=128)
        about["ranks"][ranks] = found = launch(compare, case, ranks=ranks)[0]
        rows.append(_beside_hand(ranks, found, EXPERTS_SLOWER))
    header = ["ranks", "by hand, ms", "AutoUnit, ms", "ratio", "+-", "CPU", "+-", "target", "", "parameters"]
    title = "Layout(ep=...) against all-to-alls by hand, and fully_shard: 4 layers of 8 experts, 4 sequences of 128 a rank"
    notes = ["Medians of pairs of neighbouring turns; +- is half of the median's 95% interval."]
    emit(arguments, title, header, rows, notes=notes, facts=about)


def _idle(arguments: Any, about: dict[str, Any]) -> None:
    from _pipeline_by_hand import order_takes, slept, slept_by_hand

    ranks, micro_batches, rows = 4, 8, []
    for schedule, per_rank, theory in SCHEDULES:
        found = launch(slept, schedule, per_rank, micro_batches, SLEEP_S, 3, ranks=ranks)
        by_hand = launch(slept_by_hand, schedule, per_rank, micro_batches, SLEEP_S, 3, ranks=ranks)
        about["idle"][schedule] = {"echelon": found, "by hand": by_hand}
        (seconds, idle), (hand, idle_by_hand) = _idle_part(found), _idle_part(by_hand)
        takes = launch(order_takes, schedule, per_rank, micro_batches, ranks=ranks)[0] if theory is None else 0.0
        wanted = theory(ranks, micro_batches) if theory is not None else takes
        should = 1 - 3 * micro_batches / wanted
        row = [schedule, f"{wanted * SLEEP_S:.2f}", f"{seconds:.2f}", f"{should:.1%}", f"{idle:.1%}"]
        row += [f"<= {should + IDLE:.1%}", verdict(idle <= should + IDLE), f"{idle_by_hand:.1%}", f"{seconds / hand:.3f}"]
        rows.append(row)
    header = ["schedule", "in theory, s", "step, s", "idle in theory", "idle", "target", "", "idle by hand", "/ by hand"]
    title = f"Idle part of a step: {ranks} ranks, {micro_batches} micro-batches, passes that sleep {SLEEP_S:g} s"
    notes = [
        "Forward, backward of the input and backward of the weight sleep equally long. Medians of three steps.",
        "Idle is what is not slept in a pass: a sleep takes up to 2% longer than it should. zbv: in theory as torch orders it.",
        "By hand: torch's own schedule over the same blocks, without echelon.",
    ]
    emit(arguments, title, header, rows, notes=notes, facts=about)


def _idle_part(ranks: list[Any]) -> tuple[float, float]:
    """Medians of a step's seconds and idle part, from all ranks' steps as (seconds, slept). A step's seconds are those of the
    slowest rank; busy time is that of the rank that slept longest, since the first stage needs no gradient of its input.
    """
    steps = list(zip(*ranks, strict=True))
    seconds = [max(each for each, _ in step) for step in steps]
    idle = [1 - max(slept for _, slept in step) / whole for step, whole in zip(steps, seconds, strict=True)]
    return median(seconds), median(idle)


def bitwise(arguments: Any) -> None:
    from _by_hand import Case, compare

    about, rows = {**facts(), "layouts": {}}, []
    for name in ("ddp", "fsdp"):
        usual, exact = (
            launch(compare, Case(name, accumulation=2, bitwise=b, updates=1, turns=max(5, arguments.rounds // 2)))[0]
            for b in (False, True)
        )
        about["layouts"][name] = {"as usual": usual, "bitwise": exact}
        a, b = median(ratios(usual["wall_ms"])), median(ratios(exact["wall_ms"]))
        times = [f"{median(f['wall_ms']['echelon']):.1f}" for f in (usual, exact)]
        rows.append([name, *times, f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}"])
    header = ["", "as usual, ms", "bit-equal, ms", "as usual / by hand", "bit-equal / by hand", "costs"]
    title = "An update with deterministic='bitwise': 2 ranks, 2 micro-batches each"
    notes = ["Both against the same accumulation by hand, in turns; `costs` is the quotient of the two ratios."]
    emit(arguments, title, header, rows, notes=notes, facts=about)


def memory(arguments: Any) -> None:
    from _by_hand import peak_memory

    width, depth = (512, 16) if arguments.quick else (1024, 24)
    parameters = depth * (width * width + width)
    for ranks in (2,) if arguments.quick else (2, 4):
        about, rows = {**facts(), "kinds": {}}, []
        peaks: dict[tuple[str, str], float] = {}
        for kind, side, theory in MEMORY:
            found = launch(peak_memory, kind, side, width, depth, ranks=ranks)
            peaks[kind, side] = peak = max(f["bytes"] for f in found)
            about["kinds"][f"{kind}, {side}"] = found
            rows.append([f"{kind}, {side}", f"{peak / 2**20:.0f}", f"{peak / parameters:.1f}", f"{theory(ranks):.1f}"])
            rows[-1] += _savings(kind, side, peaks, ranks)
            rows[-1].append(f"{median(f['step_ms'] for f in found):.0f}")
        header = ["", "peak MiB", "bytes a parameter", "in theory", "saves of plain DDP", "target", "", "of ddp", "step, ms"]
        title = f"Peak memory of a rank: {depth} x Linear({width}), {parameters / 1e6:.1f} M parameters, AdamW, {ranks} ranks"
        emit(arguments, title, header, rows, facts=about)


def _savings(kind: str, side: str, peaks: dict[tuple[str, str], float], ranks: int) -> list[str]:
    """Cells: memory saved against plain DistributedDataParallel, and against echelon's ddp, without gradient copies."""
    peak, plain = peaks[kind, side], peaks["ddp as torch makes it", "by hand"]
    if peak == plain:
        return ["", "", "", ""]
    saved, cells = 1 - peak / plain, ["", ""]
    if (kind, side) == ("zero1", "echelon"):
        target = min(SAVES, (8 - 8 / ranks + 4) / 20)
        cells = [f">= {target:.0%}", verdict(saved >= target)]
    elif (kind, side) == ("zero2", "echelon"):
        cells = ["> zero1", verdict(peak < peaks["zero1", "echelon"])]
    ours = peaks.get(("ddp", "echelon"))
    return [f"{saved:.1%}", *cells, f"{1 - peak / ours:.1%}" if ours and kind != "ddp" else ""]


def prove(arguments: Any) -> None:
    about = facts()
    command = [sys.executable, "-m", "echelon", "prove", *(["--ranks", "1,2"] if arguments.quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run([*command, str(ROOT / "examples" / "gpt.py")], cwd=folder, capture_output=True, text=True)
        took = time.perf_counter() - start
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    about |= {"seconds": took, "exit": done.returncode, "said": said}
    rows = [
        [
            "echelon prove examples/gpt.py",
            f"{took:.0f}",
            f"<= {PROVE_S:.0f}",
            verdict(took <= PROVE_S and not done.returncode),
            str(done.returncode),
        ]
    ]
    emit(arguments, "The whole matrix", ["", "s", "target", "", "exit"], rows, notes=[said], facts=about)


SECTIONS = {
    "speed": speed,
    "context": context,
    "pipeline": pipeline,
    "experts": experts,
    "bitwise": bitwise,
    "memory": memory,
    "prove": prove,
}


def main() -> None:
    parser = options(__doc__, rounds=100)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes: to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 10)
    for name in arguments.only:
        SECTIONS[name](arguments)
        print(flush=True)


if __name__ == "__main__":
    main()
