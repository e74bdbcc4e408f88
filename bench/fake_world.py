"""A training step of models of 70 and 405 billion parameters on 256 and 4,096 ranks that do not exist, traced in one process.

The library's own code is traced: it makes the model parallel (`parallelize`) and does one update, with fake tensors and torch's
fake process group. The trace counts the collectives by kind and mesh axis, the bytes that a rank sends in them (in a ring, or to
each rank only its part), the bytes of its tensors, and its floating-point operations. All must equal the theory (`theory`),
except the peak, which depends on the order of operations.

    python bench/fake_world.py [--shapes 70B 405B 8x22B "128 experts"] [--ranks 256 4096] [--only fsdp ...] [--json]

Each rank has one sequence of 8,192 tokens, or in a pipeline (1F1B) twice as many sequences as stages. Blocks are recomputed in
the backward pass; matrix products are in bfloat16, gradients are reduced in float32, the optimizer is AdamW. Time is not
measured.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._fake import Step, Traced, even_loads, fake_tensors, fake_world
from bench._fake_stage import trace_stage
from bench._theory import Mixture, Theory, narrow, theory, theory_of_stage
from bench._timing import emit, machine, options, versions
from bench.gpu.llama import Block, Llama, Size

import echelon as ech
from echelon.parallel.experts.stacks import GroupedExperts
from echelon.parallel.parallelize import parallelize
from echelon.parallel.recipe.activation import ActivationCheckpointParams
from echelon.parallel.recipe.recipe import Recipe
from echelon.world.mesh import ParallelDims

# Shapes of the Llama 3 family (arXiv 2407.21783, table 3).
SHAPES = {
    "70B": Size(width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, vocabulary=128_256, context=8192),
    "405B": Size(width=16_384, depth=126, heads=128, kv_heads=8, hidden=53_248, vocabulary=128_256, context=8192),
}
# Mixtral 8x22B, and a model of the size of Qwen3-235B-A22B whose heads have another width.
MIXTURES = {
    "8x22B": (
        Size(width=6144, depth=56, heads=48, kv_heads=8, hidden=16_384, vocabulary=32_768, context=8192),
        Mixture(experts=8, chosen=2, hidden=16_384),
    ),
    "128 experts": (
        Size(width=4096, depth=94, heads=64, kv_heads=4, hidden=12_288, vocabulary=151_936, context=8192),
        Mixture(experts=128, chosen=8, hidden=1536),
    ),
}
COMPOSITIONS: dict[str, Callable[[int], ech.Layout]] = {
    "fsdp": lambda ranks: ech.Layout(dp_shard=-1),
    "hsdp": lambda ranks: ech.Layout(dp_replicate=-1, dp_shard=min(128, ranks // 2)),
    "tp x fsdp": lambda ranks: ech.Layout(dp_shard=-1, tp=min(8, ranks // 2)),
    "cp x fsdp": lambda ranks: ech.Layout(dp_shard=-1, cp=min(8, ranks // 2), check_context=False),
    "tp x cp x fsdp": lambda ranks: ech.Layout(dp_shard=-1, tp=min(8, ranks // 4), cp=2, check_context=False),
    "tp x hsdp": lambda ranks: ech.Layout(dp_replicate=2, tp=min(8, ranks // 4)),
}
STAGES = "pp x tp x fsdp"
CPU = torch.device("cpu")


class MixtureBlock(Block):
    """A block with experts in place of the MLP."""

    def __init__(self, size: Size, mixture: Mixture) -> None:
        super().__init__(size)
        del self.mlp
        experts = GroupedExperts(size.width, mixture.hidden, mixture.experts)
        self.experts = ech.nn.MoE(size.width, experts, top_k=mixture.chosen, balance=None)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.experts(self.norm_2(x))


class Model(Llama):
    """A Llama that uses the positions of a rank's tokens in the whole sequence.

    Args:
        mixture: the experts in each block, if there are any.
    """

    def __init__(self, size: Size, *, mixture: Mixture | None = None) -> None:
        super().__init__(size)
        if mixture is not None:
            self.blocks = nn.ModuleList(MixtureBlock(size, mixture) for _ in range(size.depth))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        at = ech.nn.positions(tokens)
        h, cos, sin = self.tokens(tokens), self.cos[at], self.sin[at]
        for block in self.blocks:
            h = block(h, cos, sin)
        logits = self.head(self.norm(h)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


def trace(size: Size, ranks: int, layout: ech.Layout, mixture: Mixture | None = None) -> Traced:
    """Trace the second update on rank 0; the first sets up.

    Args:
        mixture: the experts, with expert parallelism; by default narrow ones.
    """
    mixture = mixture or narrow(size)
    with fake_world(ranks):
        with fake_tensors() as mode:
            model = Model(size, mixture=mixture if layout.ep > 1 else None)
        recipe = Recipe(ActivationCheckpointParams(), None, ech.layouts.Precision.of("bf16"))
        prepared = parallelize(model, layout, CPU, recipe)
        step = Step(_axes(layout.dims(ranks)))
        # Real tensors: they are cut and counted before they go into the model.
        batch = prepared.batches.part_of(tuple(torch.randint(0, size.vocabulary, (1, size.context)) for _ in range(2)))
        with fake_tensors(mode):
            optimizer = torch.optim.AdamW(prepared.module.parameters())

        def update(tracing: Any) -> None:
            with even_loads(size.context * mixture.chosen), prepared.accumulate(True), fake_tensors(mode), tracing:
                prepared.module(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        update(contextlib.nullcontext())
        step.keep(prepared.module.parameters(), *(state.values() for state in optimizer.state.values()))
        update(step)
    return step.traced


def _axes(dims: ParallelDims) -> dict[str, str]:
    """The mesh axis of each group, by torch's name of the group."""
    meshes = [dims.root_mesh(CPU), *([dims.cp_mesh(CPU)] if dims.cp > 1 else [])]
    meshes += [dims.ep_mesh(CPU), dims.ep_data_mesh(CPU)] if dims.ep > 1 else []
    return {mesh.get_group(name).group_name: name for mesh in meshes for name in mesh.mesh_dim_names or ()}


def _row(name: str, ranks: int, dims: ParallelDims, found: Traced, said: Theory, seconds: float) -> dict[str, Any]:
    sends = {
        f"{kind} {axis}": {
            "calls": found.calls[kind, axis],
            "sent": found.sent(kind, axis),
            "message": found.message[kind, axis],
            "theory": said.messages.get((kind, axis)),
        }
        for kind, axis in found.calls
    }
    facts = {
        "held": found.held_before,
        "held_theory": said.held,
        "peak": found.peak,
        "flops": found.flops,
        "flops_theory": said.flops,
    }
    return {"what": name, "ranks": ranks, "axes": dims.used, "seconds": seconds, "sends": sends, **facts}


def _cells(row: dict[str, Any]) -> list[list[str]]:
    """A row for the rank, and one for each kind of collective and axis."""
    equal = row["held"] == row["held_theory"] and row["flops"] == row["flops_theory"]
    mesh = " x ".join(f"{name} {size}" for name, size in row["axes"].items())
    head = [f"{row['what']}, {row['ranks']:,} ranks", mesh, f"{row['held'] / 1e9:.2f}", f"{row['peak'] / 1e9:.1f}"]
    lines = [[*head, f"{row['flops'] / 1e12:,.0f}", "", "", "yes" if equal else "NO", f"{row['seconds']:.0f}"]]
    for name, each in row["sends"].items():
        equal = each["message"] == each["theory"]
        lines.append(["", name, "", "", "", f"{each['calls']:,}", f"{each['sent'] / 1e9:.2f}", "yes" if equal else "NO", ""])
    return lines


def _stages(size: Size, ranks: int) -> Iterator[tuple[str, ParallelDims, Traced, Theory]]:
    """Trace the first stage of a pipeline, with the most micro-batches in flight, and the last, which has the head."""
    pp = min(8 if ranks < 1024 else 16, size.depth)
    layout, micro_batches = ech.Layout(dp_shard=-1, tp=min(8, ranks // pp), pp=pp), 2 * pp
    dims = layout.dims(ranks)
    for stage in (0, pp - 1):
        found, units = trace_stage(Model, size, ranks, layout, stage, micro_batches, _axes)
        about = f"stage {stage + 1} of {pp}, {micro_batches} sequences"
        yield about, dims, found, theory_of_stage(size, dims, units, micro_batches)


def _traced(shape: str, ranks: int, name: str) -> Iterator[tuple[str, ParallelDims, Traced, Theory]]:
    if shape in MIXTURES:
        size, mixture = MIXTURES[shape]
        layout = ech.Layout(dp_shard=-1, ep=min(mixture.experts, 8))
        found, dims = trace(size, ranks, layout, mixture), layout.dims(ranks)
        yield "", dims, found, theory(size, dims, mixture)
    elif name == STAGES:
        yield from _stages(SHAPES[shape], ranks)
    else:
        layout = COMPOSITIONS[name](ranks)
        found, dims = trace(SHAPES[shape], ranks, layout), layout.dims(ranks)
        yield "", dims, found, theory(SHAPES[shape], dims)


def main() -> None:
    parser = options(__doc__, rounds=1)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *MIXTURES], default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[256, 4096])
    parser.add_argument("--only", nargs="+", choices=[*COMPOSITIONS, STAGES], default=[*COMPOSITIONS, STAGES])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for shape in arguments.shapes:
        for ranks in arguments.ranks:
            for name in arguments.only if shape in SHAPES else ["ep x fsdp"]:
                start = time.process_time()
                for about, dims, found, said in _traced(shape, ranks, name):
                    label = ", ".join(part for part in (f"{shape} {name}", about) if part)
                    rows.append(_row(label, ranks, dims, found, said, time.process_time() - start))
                    start = time.process_time()
    header = ["", "mesh, collective", "held, GB", "peak, GB", "TFLOP", "calls", "sent, GB", "as in theory", "CPU s"]
    facts = {"machine": machine(), "versions": versions("torch"), "rows": rows}
    emit(arguments, "One update of one rank", header, [line for row in rows for line in _cells(row)], facts=facts)


if __name__ == "__main__":
    main()
