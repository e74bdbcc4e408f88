"""Planned against published: models that others trained, by `echelon plan`. No constant was fitted to these rows.

    python bench/plan_published.py [--only torchao-013 ...] [--group mosaic ...] [--every 5] [--json]

`published_runs.csv` has the rows: tokens a second on each device, and the peak in GiB if it was given, as the sources print
them (pytorch/ao docs/source/workflows/training.md and torchao/prototype/float8nocompile; pytorch/torchtitan benchmarks/,
docs/performance.md of 2024 and pull request 808; foundation-model-stack/fms-fsdp README.md; mosaicml/llm-foundry
scripts/train/benchmarking; InternLM/InternEvo doc/en/train_performance.md; huggingface/nanotron docs/benchmark_summary.svg, whose
rates follow from the utilisation that it prints, and nanotron/old_bench on Hugging Face; Lightning-AI/litgpt
tutorials/resource-tables.md; pytorch/torchtune README.md; NVIDIA-NeMo/Automodel docs/performance-summary.mdx). A peak is what
torch's allocator reserved or allocated. torchao's are torchtitan's GiB, though its page says GB: the pull request prints the same
47.65 as 50.16% of a card of 95 GiB.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._timing import emit, machine, median, options, versions


@dataclass(frozen=True)
class Run:
    """A row of the file.

    Args:
        method: of a finetuning: full, lora, adapter or adapter_v2; "" for pretraining.
        sequences: the number of a micro-batch.
        tokens: per second on a device; 0 if not given.
        memory: the peak in GiB; 0 if not given.
        kind: of the memory: "allocated" or "reserved".
    """

    name: str
    group: str
    cluster: str
    model: str
    method: str
    context: int
    sequences: int
    accumulate: int
    layout: str
    precision: str
    recompute: str
    compiled: bool
    tokens: float
    memory: float
    kind: str

    @property
    def ranks(self) -> int:
        nodes, devices, _ = self.cluster.split("x", 2)
        return int(nodes) * int(devices)

    @property
    def data_ranks(self) -> int:
        """The number of ranks with different sequences."""
        axes = dict(part.split("=") for part in self.layout.split(",") if "=" in part)
        return self.ranks // int(axes.get("tp", 1)) // int(axes.get("pp", 1))


@dataclass(frozen=True)
class Found:
    """A plan's results: tokens a second on each device, GiB at the peak and reserved."""

    run: Run
    tokens: float
    peak: float
    reserved: float

    @property
    def off(self) -> float:
        return self.tokens / self.run.tokens - 1

    @property
    def memory(self) -> float:
        """The planned memory of the kind that was published."""
        return self.reserved if self.run.kind == "reserved" else self.peak

    @property
    def memory_off(self) -> float:
        return self.memory / self.run.memory - 1


def published() -> list[Run]:
    with open(Path(__file__).with_name("published_runs.csv"), newline="") as lines:
        return [
            Run(
                row["name"],
                row["group"],
                row["cluster"],
                row["model"],
                row["method"],
                int(row["context"]),
                int(row["sequences"]),
                int(row["accumulate"]),
                row["layout"],
                row["precision"],
                row["recompute"],
                row["compiled"] == "yes",
                float(row["tokens"] or 0),
                float(row["memory"] or 0),
                row["kind"],
            )
            for row in csv.DictReader(lines)
        ]


def planned(run: Run) -> Found | str:
    """The plan's results for a run, or why there is no plan."""
    sequences = run.sequences * run.accumulate * run.data_ranks
    words = ["--model", run.model, "--method", run.method] if run.method else ["--size", run.model, "--precision", run.precision]
    words += ["--context", str(run.context), "--sequences", str(sequences), "--layout", run.layout]
    words += ["--accumulate", str(run.accumulate), "--recompute", run.recompute]
    words += ["--compile"] if run.compiled else []
    command = [sys.executable, "-m", "echelon", "plan", "--cluster", run.cluster, "--only", "yours", "--json"]
    script = str(Path(__file__).with_name("plan_finetunes.py" if run.method else "plan_models.py"))
    # torchtitan's script, which torchao's runs use, too, sets this.
    titan = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if run.model.startswith("titan-") else {}
    done = subprocess.run([*command, script, *words], capture_output=True, text=True, check=False, env=os.environ | titan)
    if not done.stdout:
        return done.stderr.strip()
    found = json.loads(done.stdout)["layouts"][0]
    if not found["peak"]:
        return str(found["why"])
    return Found(run, found["tokens"] / found["seconds"] / run.ranks, found["peak"] / 2**30, found["reserved"] / 2**30)


def order(found: Sequence[Found]) -> tuple[int, int]:
    """The number of pairs in the right order, and of all pairs (Kendall 1938). A pair is two runs of one model on devices of one
    kind; pairs that were published within 2% of each other are left out.
    """
    right = pairs = 0
    for one, other in itertools.combinations(found, 2):
        kinds = [(each.run.group, each.run.model, each.run.cluster.split("x", 2)[2]) for each in (one, other)]
        if kinds[0] != kinds[1] or abs(one.run.tokens / other.run.tokens - 1) < 0.02:
            continue
        pairs += 1
        right += (one.tokens > other.tokens) == (one.run.tokens > other.run.tokens)
    return right, pairs


def summary(group: str, found: Sequence[Found]) -> list[str]:
    timed = [each for each in found if each.run.tokens]
    offs = [abs(each.off) for each in timed]
    memory = [abs(each.memory_off) for each in found if each.run.memory]
    right, pairs = order(timed)
    return [
        group,
        str(len(timed)),
        f"{median(offs):.1%}" if timed else "-",
        f"{median(each.off for each in timed):+.1%}" if timed else "-",
        f"{sum(off <= 0.3 for off in offs) / len(offs):.0%}" if timed else "-",
        f"{2 * right / pairs - 1:.2f} of {pairs}" if pairs else "-",
        f"{median(memory):.1%} of {len(memory)}" if memory else "-",
        f"{sum(off <= 0.1 for off in memory) / len(memory):.0%}" if memory else "-",
    ]


def main() -> None:
    parser = options(__doc__, rounds=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the runs")
    parser.add_argument("--group", nargs="+", metavar="NAME", help="those of a source")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth of them")
    arguments = parser.parse_args()
    wanted = [run for run in published() if not arguments.only or run.name in arguments.only]
    wanted = [run for run in wanted if not arguments.group or run.group in arguments.group][:: arguments.every]
    groups: dict[str, list[Found]] = defaultdict(list)
    rows, failed = [], {}
    for run in wanted:
        found = planned(run)
        print(run.name, found, file=sys.stderr, flush=True)
        if isinstance(found, str):
            failed[run.name] = found
            continue
        groups[run.group].append(found)
        memory = [f"{run.memory:.1f} {run.kind}", f"{found.memory_off:+.0%}"] if run.memory else ["-", "-"]
        where = f"{run.ranks} {run.cluster.split('x', 2)[2]}"
        batch = f"{run.accumulate} x {run.sequences} x {run.context}"
        how = f"{run.layout}, {run.precision}, {run.recompute}{', compiled' if run.compiled else ''}"
        rates = (
            [f"{run.tokens:,.0f}", f"{found.tokens:,.0f}", f"{found.off:+.0%}"]
            if run.tokens
            else ["-", f"{found.tokens:,.0f}", "-"]
        )
        rows.append([run.name, run.model, where, batch, how, *rates, f"{found.memory:.1f}", *memory])
    everything = [found for group in groups.values() for found in group]
    header = ["run", "model", "devices", "batch", "how", "published/s", "planned/s", "off", "GiB", "published", "off"]
    facts = {"failed": failed, "machine": machine(), "versions": versions("torch")}
    emit(arguments, "echelon plan and published runs", header, rows, facts=facts)
    if everything and not arguments.json:
        columns = ["source", "runs", "off, median", "signed", "within 30%", "Kendall's tau, pairs", "memory off", "within 10%"]
        table = [summary(group, found) for group, found in groups.items()] + [summary("all", everything)]
        emit(arguments, "By source", columns, table, facts=facts)


if __name__ == "__main__":
    main()
