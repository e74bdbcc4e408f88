"""Planned against measured on CPUs: memory of a rank, and seconds of an update, under each layout.

    python bench/plan_cpu.py [--model gpt|resnet|llama|moe ...] [--only 2:fsdp ...] [--time] [--json]

Memory: the peak resident memory of the fullest rank, minus that before the model was built, when torch's kernels and gloo were
loaded. In this run glibc gives each larger tensor memory of its own (MALLOC_MMAP_THRESHOLD_), since otherwise it keeps freed
memory. That costs time, so seconds are measured in another run. --time first calibrates the machine, once for each number of
ranks, and needs idle cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._peak import PeakMemory
from bench._timing import emit, machine, options, versions
from bench.gpu.llama import Llama, Size

import echelon as ech

HERE = Path(__file__)
UPDATES = 3


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    layout: str
    accumulate: int = 1
    precision: str = "fp32"
    recompute: str = "none"

    @property
    def words(self) -> list[str]:
        return [self.model, self.layout, str(self.accumulate), self.precision, self.recompute]

    @property
    def said(self) -> str:
        beside = [f"accumulation {self.accumulate}"] if self.accumulate > 1 else []
        beside += [each for each in (self.precision, self.recompute) if each not in ("fp32", "none")]
        return ", ".join([self.layout, *beside])


CASES = (
    *(Case("gpt", 1, "none", *how) for how in ((1,), (2,), (1, "fp32", "blocks"), (1, "bf16"))),
    *(Case("gpt", 2, layout) for layout in ("ddp", "zero1", "zero2", "fsdp", "tp=2")),
    *(Case("gpt", 2, layout, 2) for layout in ("ddp", "zero2", "fsdp", "pp=2")),
    *(Case("gpt", 2, "fsdp", *how) for how in ((1, "fp32", "blocks"), (1, "bf16"))),
    Case("gpt", 2, "pp=2", 4),
    *(Case("gpt", 4, layout, 2) for layout in ("ddp", "fsdp", "dp_shard=2,tp=2", "pp=2,dp_shard=2")),
    *(Case("resnet", ranks, layout) for ranks, layout in ((1, "none"), (2, "ddp"), (2, "zero1"), (2, "fsdp"))),
    *(Case("llama", ranks, layout) for ranks, layout in ((1, "none"), (2, "ddp"), (2, "fsdp"), (2, "tp=2"), (4, "fsdp"))),
    *(Case("moe", ranks, layout) for ranks, layout in ((1, "none"), (2, "fsdp"), (2, "ep=2"), (4, "fsdp"), (4, "ep=4"))),
)


class Basic(nn.Module):
    """Two convolutions with a shortcut (arXiv 1512.03385)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.past = nn.Sequential() if into == out and stride == 1 else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm_1(self.first(x)))
        return F.relu(self.norm_2(self.second(h)) + self.past(x))


def built(model: str) -> tuple[nn.Module, Any]:
    """The module and its data, as tensors."""
    if model == "resnet":
        widths = (64, 128, 256, 512)
        stages = [(into, out, 2 if into != out else 1) for into, out in zip((64, *widths[:-1]), widths, strict=True)]
        blocks = [block for into, out, stride in stages for block in (Basic(into, out, stride), Basic(out, out, 1))]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
        return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.ReLU(), *blocks, *head), (
            torch.randn(64, 3, 192, 192),
            torch.randint(0, 1000, (64,)),
        )
    if model == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, use_cache=False
        )
        tokens = torch.randint(0, 8192, (64, 256))
        return LlamaForCausalLM(config), (tokens,)
    if model == "moe":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        moe = Qwen3MoeConfig(
            vocab_size=8192,
            hidden_size=512,
            moe_intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_experts=16,
            num_experts_per_tok=2,
            use_cache=False,
        )
        return Qwen3MoeForCausalLM(moe), (torch.randint(0, 8192, (64, 256)),)
    tokens = torch.randint(0, 8192, (64, 256))
    return Llama(Size(width=768, depth=8, heads=12, kv_heads=12, hidden=2048, vocabulary=8192, context=256)), (tokens,)


class Unit(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        if len(data) == 2:
            return F.cross_entropy(self.module(data[0]), data[1]), None
        made = self.module(data[0], labels=data[0]) if hasattr(self.module, "config") else self.module(data[0], data[0])
        return getattr(made, "loss", made), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), None


class Watch(ech.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        if not self.seconds or self.updated:
            self.started = time.perf_counter()
        self.before = unit.train_progress.num_updates_completed

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        self.updated = unit.train_progress.num_updates_completed > self.before
        if self.updated:
            self.seconds.append(time.perf_counter() - self.started)


def warm_up(model: str) -> None:
    """Load what Python, torch's kernels and gloo load at first use, so that it is not counted as the model's memory."""
    if model in ("llama", "moe"):
        import transformers.models.llama.modeling_llama
        import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
    small: nn.Module = nn.Sequential(Basic(3, 4, 2), nn.Flatten(), nn.Linear(64, 8)) if model == "resnet" else nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(small.parameters(), fused=True)
    data = torch.randn(2, 3, 8, 8) if model == "resnet" else torch.randn(2, 8)
    for _ in range(2):
        F.cross_entropy(small(data), torch.tensor([0, 1])).backward()
        optimizer.step()
    for dtype in (torch.float32, torch.bfloat16):  # products keep a workspace of the size that they need
        large = torch.randn(2048, 2048).to(dtype)
        _ = large @ large
    if ech.world_size() > 1:
        torch.distributed.all_reduce(torch.zeros(2**20))


def train() -> None:
    """The program that is planned, and run: a few updates. Each rank writes its measurements to the folder, if one is given."""
    model, layout, accumulate, precision, recompute, *folder = sys.argv[2:]
    ech.init_from_env()
    if folder:
        warm_up(model)
    torch.manual_seed(0)
    memory, watch = PeakMemory(), Watch()
    module, data = built(model)
    held = sum(each.numel() * each.element_size() for each in data)
    unit = Unit(module=module, layout=layout, precision=None if precision == "fp32" else precision, recompute=recompute)
    del module
    loader = ech.Loader(torch.utils.data.TensorDataset(*data), global_batch=8, accumulate=int(accumulate))
    ech.train(unit, loader, max_updates=UPDATES, callbacks=[watch])
    memory.pause()
    if folder:
        told = {"peak": (memory.peak() or 0) - held, "seconds": statistics.median(watch.seconds[1:])}
        Path(folder[0], f"{ech.rank()}.json").write_text(json.dumps(told))


def planned(case: Case, device: str) -> dict[str, Any]:
    words = ["--gpus", str(case.ranks), "--nodes", "1", "--only", "yours", "--json", "--device", device]
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "plan", *words, str(HERE), "train", *case.words],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        sys.exit(f"{case}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)["layouts"][0]
    if not found["peak"]:
        sys.exit(f"{case}: {found['why']}")
    return found


_OWN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def measured(case: Case, env: Mapping[str, str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "echelon", "run", "--ranks", str(case.ranks), "--runs", folder]
        done = subprocess.run(
            [*command, str(HERE), "train", *case.words, folder],
            env=os.environ | env,
            capture_output=True,
            text=True,
            check=False,
        )
        files = [Path(folder, f"{rank}.json") for rank in range(case.ranks)]
        if done.returncode:
            sys.exit(f"{case}: {done.stderr[-2000:]}")
        told = [json.loads(file.read_text()) for file in files]
    return {key: max(each[key] for each in told) for key in ("peak", "seconds")}


def main() -> None:
    parser = options(__doc__, rounds=1)
    parser.add_argument("--model", nargs="+", choices=["gpt", "resnet", "llama", "moe"])
    parser.add_argument("--only", nargs="+", metavar="RANKS:LAYOUT")
    parser.add_argument("--time", action="store_true", help="calibrate this machine, and compare seconds, too")
    arguments = parser.parse_args()
    rows, facts = [], {}
    cpu = Path(tempfile.gettempdir(), "plan-cpu.toml")
    cpu.write_text("overlaps = false\n")
    devices: dict[int, str] = {}
    for case in CASES:
        if (arguments.model and case.model not in arguments.model) or (
            arguments.only and f"{case.ranks}:{case.layout}" not in arguments.only
        ):
            continue
        if arguments.time and case.ranks not in devices:
            devices[case.ranks] = str(Path(tempfile.gettempdir(), f"plan-cpu-{case.ranks}.toml"))
            calibrate = ["--calibrate", devices[case.ranks], "--gpus", str(case.ranks)]
            subprocess.run([sys.executable, "-m", "echelon", "plan", *calibrate], check=True, capture_output=True)
        plan, real = planned(case, devices.get(case.ranks, str(cpu))), measured(case, _OWN_MEMORY)
        if arguments.time:
            real["seconds"] = measured(case, {})["seconds"]
        facts[f"{case.model} {case.ranks} {case.said}"] = {"planned": plan, "measured": real}
        row = [case.model, str(case.ranks), case.said, f"{plan['peak'] / 2**20:,.0f}", f"{real['peak'] / 2**20:,.0f}"]
        row.append(f"{plan['peak'] / real['peak'] - 1:+.1%}")
        if arguments.time:
            row += [f"{plan['seconds']:.2f}", f"{real['seconds']:.2f}", f"{plan['seconds'] / real['seconds'] - 1:+.0%}"]
        print(*row, file=sys.stderr)
        rows.append(row)
    header = ["model", "ranks", "layout", "planned, MiB", "measured, MiB", "off"]
    header += ["planned, s", "measured, s", "off"] if arguments.time else []
    facts |= {"machine": machine(), "versions": versions("torch", "transformers")}
    emit(arguments, "echelon plan and this machine", header, rows, facts=facts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train()
    else:
        main()
