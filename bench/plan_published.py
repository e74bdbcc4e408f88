"""Planned against published: Llama and MPT models that others trained, by `echelon plan`. No constant was fitted to these rows.

    python bench/plan_published.py [--only torchao-013 ...] [--json]

The numbers are those that the sources print, tokens a second on each device and the peak that torch's allocator reserved, which
includes what it cannot use; a plan's peak is what is allocated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._timing import emit, machine, options, versions


@dataclass(frozen=True)
class Run:
    """Published: `tokens` a second on a device, `reserved` bytes / 2**30 or 0."""

    name: str
    cluster: str
    size: str
    context: int
    sequences: int  # of a micro-batch
    layout: str
    recompute: str
    compiles: bool
    tokens: float
    reserved: float = 0.0
    accumulate: int = 1

    @property
    def ranks(self) -> int:
        nodes, devices, _ = self.cluster.split("x", 2)
        return int(nodes) * int(devices)


# pytorch/ao docs/source/workflows/training.md and torchao/prototype/float8nocompile/README.md; pytorch/torchtitan benchmarks/
# llama3_h100_202412_torchtitan.md, asyncTP_llama3_h100_2025-06_torchtitan.md and docs/performance.md of 2024 (A100);
# foundation-model-stack/fms-fsdp README.md; mosaicml/llm-foundry scripts/train/benchmarking/README.md; nanotron/old_bench on
# Hugging Face (llama-1B/8_GPUS/dp-1_tp-1_pp-8_mbz-4).
RUNS = (
    Run("torchao-013", "1x8xh100-96", "8B", 4096, 1, "fsdp", "none", False, 5339, 53.12 * 1e9 / 2**30),
    Run("torchao-001", "1x8xh100-96", "8B", 8192, 1, "fsdp", "every-second-product", True, 6150, 47.65 * 1e9 / 2**30),
    Run("titan-2412-001", "1x8xh100-96", "8B", 8192, 2, "fsdp", "every-second-product", False, 5762, 82.4),
    Run("titan-a100-002", "8x8xa100-80", "8B", 8192, 1, "fsdp", "every-second-product", True, 2973),
    Run("fms-fsdp-002", "12x8xh100-sxm", "2-7B", 4096, 2, "hsdp", "none", True, 9600),
    Run("fms-fsdp-001", "16x8xa100-80", "2-7B", 4096, 2, "hsdp", "none", True, 4550),
    Run("titan-a100-004", "8x8xa100-80", "2-13B", 4096, 2, "fsdp", "none", True, 2162),
    Run("titan-a100-006", "8x8xa100-80", "2-13B", 4096, 2, "fsdp", "every-second-product", True, 1904),
    Run("titan-a100-003", "8x8xa100-80", "70B", 8192, 1, "fsdp", "blocks", True, 331),
    Run("mosaic-003", "16x8xh100-sxm", "mpt-70b", 2048, 8, "fsdp", "blocks", False, 1058),
    Run("mosaic-010", "64x8xh100-sxm", "mpt-7b", 2048, 6, "fsdp", "none", False, 9670),
    Run("mosaic-039", "1x8xh100-sxm", "mpt-7b", 2048, 6, "fsdp", "none", False, 10_643),
    Run("mosaic-057", "4x8xh100-sxm", "mpt-1b", 2048, 20, "fsdp", "none", False, 45_130),
    Run("mosaic-066", "4x8xh100-sxm", "mpt-760m", 2048, 24, "fsdp", "none", False, 67_971),
    Run("mosaic-088", "1x8xa100-80", "mpt-13b", 4096, 10, "fsdp", "blocks", False, 2060, accumulate=3),
    Run("mosaic-096", "1x8xa100-80", "mpt-7b", 2048, 6, "fsdp", "none", False, 4641, accumulate=2),
    Run("mosaic-103", "1x8xa100-80", "mpt-3b", 2048, 10, "fsdp", "none", False, 10_811, accumulate=2),
    Run("mosaic-115", "1x8xa100-80", "mpt-760m", 32_768, 1, "fsdp", "none", False, 8802, accumulate=2),
    Run("mosaic-147", "4x8xa100-40", "mpt-13b", 2048, 14, "fsdp", "blocks", False, 1998),
    Run("mosaic-157", "4x8xa100-40", "mpt-7b", 2048, 18, "fsdp", "blocks", False, 3725),
    Run("mosaic-166", "16x8xa100-40", "mpt-3b", 2048, 6, "fsdp", "none", False, 9538),
    Run("mosaic-178", "8x8xa100-40", "mpt-1b", 2048, 10, "fsdp", "none", False, 19_001),
    Run("mosaic-199", "16x8xa100-40", "mpt-350m", 2048, 18, "fsdp", "none", False, 51_934),
    Run("mosaic-214", "1x8xa100-40", "mpt-125m", 2048, 26, "fsdp", "none", False, 136_334, accumulate=3),
    Run(
        "nanotron-oldbench-003",
        "1x8xh100-sxm",
        "nanotron-1b",
        4096,
        4,
        "pp=8",
        "none",
        False,
        18_000,
        43.0 * 1e9 / 2**30,
        accumulate=256,
    ),
    Run("titan-asynctp-002", "32x8xh100-96", "70B", 8192, 16, "dp_shard=32,tp=8", "blocks", True, 652.4),
)


def planned(run: Run) -> dict[str, float]:
    ways = run.ranks // 8 if "tp=8" in run.layout or "pp=8" in run.layout else run.ranks  # that have other sequences
    sequences = run.sequences * run.accumulate * ways
    words = ["--size", run.size, "--context", str(run.context), "--sequences", str(sequences), "--layout", run.layout]
    words += ["--accumulate", str(run.accumulate), "--recompute", run.recompute, *(["--compile"] if run.compiles else [])]
    command = [sys.executable, "-m", "echelon", "plan", "--cluster", run.cluster, "--layout", run.layout, "--json"]
    script = str(Path(__file__).with_name("plan_models.py"))
    done = subprocess.run([*command, script, *words], capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(f"{run.name}: {done.stderr}")
    found = json.loads(done.stdout)["layouts"][0]
    if not found["peak"]:
        sys.exit(f"{run.name}: {found['why']}")
    rate = found["tokens"] / found["seconds"] / run.ranks
    return {"tokens": rate, "peak": found["peak"] / 2**30, "mfu": found["mfu"], "seconds": found["seconds"]}


def main() -> None:
    parser = options(__doc__, rounds=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the runs")
    arguments = parser.parse_args()
    rows, facts = [], {}
    for run in RUNS:
        if arguments.only and run.name not in arguments.only:
            continue
        found = facts[run.name] = planned(run)
        print(run.name, found, file=sys.stderr)
        memory = f"{found['peak'] / run.reserved - 1:+.0%}" if run.reserved else "-"
        rows.append(
            [
                f"{run.name}: {run.size}, {run.ranks} {run.cluster.split('x', 2)[2]}",
                f"{run.context} x {run.sequences}",
                run.layout,
                run.recompute,
                "yes" if run.compiles else "no",
                f"{run.tokens:,.0f}",
                f"{found['tokens']:,.0f}",
                f"{found['tokens'] / run.tokens - 1:+.0%}",
                f"{run.reserved:.1f}" if run.reserved else "-",
                f"{found['peak']:.1f}",
                memory,
            ]
        )
    header = [
        "run",
        "tokens x rows",
        "layout",
        "recompute",
        "compiled",
        "published/s",
        "planned/s",
        "off",
        "reserved, GiB",
        "peak, GiB",
        "off",
    ]
    emit(
        arguments,
        "echelon plan and published runs",
        header,
        rows,
        facts={"runs": facts, "machine": machine(), "versions": versions("torch")},
    )


if __name__ == "__main__":
    main()
