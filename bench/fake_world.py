"""A training step of models of 70 and 405 billion parameters on 256 and 4,096 ranks that do not exist, traced in one process.

What is traced is what runs: the library makes the model parallel (`parallelize`), and one update is done, with fake tensors and
torch's fake process group. Counted are the collectives by kind and axis of the mesh, what a rank sends in them (in a ring, or to
each its part), the bytes of its tensors, and its floating-point operations. What theory says (`theory`) must be equal, but for
the peak, which depends on the order of operations.

    python bench/fake_world.py [--shapes 70B 405B] [--ranks 256 4096] [--only fsdp tp ...] [--json]

One sequence of 8,192 tokens a rank; blocks are computed again in the backward pass; matrix products in bfloat16, gradients
reduced in float32, AdamW. Nothing is learned about time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._fake import Step, Traced, fake_tensors, fake_world
from bench._timing import emit, machine, options, versions
from bench.gpu.llama import Llama, Size

import echelon as ech
from echelon.parallel.activation import ActivationCheckpointParams
from echelon.parallel.parallelize import parallelize
from echelon.parallel.recipe import Recipe
from echelon.world.mesh import ParallelDims

# Of the Llama 3 family (arXiv 2407.21783, table 3).
SHAPES = {
    "70B": Size(width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, vocabulary=128_256, context=8192),
    "405B": Size(width=16_384, depth=126, heads=128, kv_heads=8, hidden=53_248, vocabulary=128_256, context=8192),
}
COMPOSITIONS: dict[str, Callable[[int], ech.Parallel]] = {
    "fsdp": lambda ranks: ech.Parallel(dp_shard=-1),
    "hsdp": lambda ranks: ech.Parallel(dp_replicate=-1, dp_shard=min(128, ranks // 2)),
    "tp x fsdp": lambda ranks: ech.Parallel(dp_shard=-1, tp=min(8, ranks // 2)),
    "tp x hsdp": lambda ranks: ech.Parallel(dp_replicate=2, tp=min(8, ranks // 4)),
}
CPU = torch.device("cpu")
BF16, FP32 = 2, 4
Key = tuple[str, str]


def trace(size: Size, ranks: int, strategy: ech.Parallel) -> Traced:
    """One update on rank 0, after one that sets up."""
    with fake_world(ranks):
        with fake_tensors() as mode:
            model = Llama(size)
        recipe = Recipe(ActivationCheckpointParams(), None, ech.Precision.of("bf16"))
        prepared = parallelize(model, strategy, CPU, recipe)
        step = Step(_axes(strategy.dims(ranks)))
        with fake_tensors(mode):
            optimizer = torch.optim.AdamW(prepared.module.parameters())
            tokens, targets = (torch.randint(0, size.vocabulary, (1, size.context)) for _ in range(2))

            def update() -> None:
                prepared.module(tokens, targets).backward()
                optimizer.step()
                optimizer.zero_grad()

            update()
            step.keep(prepared.module.parameters(), *(state.values() for state in optimizer.state.values()))
            with step:
                update()
    return step.traced


def _axes(dims: ParallelDims) -> dict[str, str]:
    """By torch's name of a group, the axis."""
    meshes = [dims.root_mesh(CPU)]
    return {mesh.get_group(name).group_name: name for mesh in meshes for name in mesh.mesh_dim_names or ()}


@dataclasses.dataclass(frozen=True)
class Theory:
    """What a rank should send, hold and compute in one update.

    Attributes:
        messages: bytes of whole tensors, by collective and axis.
        held: bytes of its shards of parameters and of AdamW's two averages.
        flops: of matrix products and attention.
    """

    messages: dict[Key, int]
    held: int
    flops: int


def theory(size: Size, dims: ParallelDims) -> Theory:
    """In words: `fully_shard` gathers each block twice in bfloat16, for the forward and the backward pass, and the head once;
    once in float32 the norms and the embedding, whose products are not in bfloat16. All gradients are reduced in float32. A
    parameter is split along its first dimension into equal parts, the last of which may be padding. Tensor parallelism adds up
    the outputs of two layers of each block, once more those of the attention's when it is computed again, and in the backward
    pass, in float32, the inputs' gradients of the five layers that are split by outputs.
    """
    shards, wide, tokens = dims.dp_shard * dims.cp, size.width, size.context
    kv = size.kv_heads * (wide // size.heads)
    by_outputs = [(wide, wide), (kv, wide), (kv, wide), (size.hidden, wide), (size.hidden, wide)]
    by_inputs = [(wide, wide), (wide, size.hidden)]
    block = [(rows // dims.tp, columns) for rows, columns in by_outputs] + [
        (rows, columns // dims.tp) for rows, columns in by_inputs
    ]
    blocks, ends = size.depth * _padded(block, shards), _padded([(size.vocabulary, wide)], shards)
    norms = (2 * size.depth + 1) * _padded([(wide,)], shards)
    parameters = blocks + norms + 2 * ends
    messages: dict[Key, int] = {}
    data = "dp_shard" if dims.cp == 1 else "dp_shard_cp"
    messages["all-gather", data] = 2 * BF16 * blocks + BF16 * ends + FP32 * (norms + ends)
    messages["reduce-scatter", data] = FP32 * parameters
    if dims.dp_replicate > 1:
        messages["all-reduce", "dp_replicate"] = FP32 * parameters // shards
    if dims.tp > 1:
        messages["all-reduce", "tp"] = size.depth * tokens * wide * (3 * BF16 + 5 * FP32)
    count = 7 * size.depth + 2 * size.depth + 1 + 2
    multiplied = size.multiplied - size.vocabulary * wide
    attention = size.depth * 2 * tokens * tokens * wide  # of one product
    # Forward, again, and twice as much backward; not again the last product of a block, whose output nobody needs, and the head.
    # Of attention's products there are 2, again 2, and 5 backward.
    again = multiplied - size.depth * size.hidden * wide
    products = (6 * multiplied + 2 * again) * tokens // dims.tp + 6 * size.vocabulary * wide * tokens
    flops = products + 9 * attention // dims.tp
    return Theory(messages, 3 * FP32 * parameters // shards + FP32 * count, flops)


def _padded(shapes: list[tuple[int, ...]], ranks: int) -> int:
    return sum(math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) for shape in shapes)


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
    """One line for the rank, and one for each kind of collective and axis."""
    equal = row["held"] == row["held_theory"] and row["flops"] == row["flops_theory"]
    mesh = " x ".join(f"{name} {size}" for name, size in row["axes"].items())
    head = [f"{row['what']}, {row['ranks']:,} ranks", mesh, f"{row['held'] / 1e9:.2f}", f"{row['peak'] / 1e9:.1f}"]
    lines = [[*head, f"{row['flops'] / 1e12:,.0f}", "", "", "yes" if equal else "NO", f"{row['seconds']:.0f}"]]
    for name, each in row["sends"].items():
        equal = each["message"] == each["theory"]
        lines.append(["", name, "", "", "", f"{each['calls']:,}", f"{each['sent'] / 1e9:.2f}", "yes" if equal else "NO", ""])
    return lines


def main() -> None:
    parser = options(__doc__, rounds=1)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[256, 4096])
    parser.add_argument("--only", nargs="+", choices=list(COMPOSITIONS), default=list(COMPOSITIONS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for shape in arguments.shapes:
        for ranks in arguments.ranks:
            for name in arguments.only:
                strategy, start = COMPOSITIONS[name](ranks), time.process_time()
                found = trace(SHAPES[shape], ranks, strategy)
                seconds, dims = time.process_time() - start, strategy.dims(ranks)
                rows.append(_row(f"{shape} {name}", ranks, dims, found, theory(SHAPES[shape], dims), seconds))
    header = ["", "mesh, collective", "held, GB", "peak, GB", "TFLOP", "calls", "sent, GB", "as in theory", "CPU s"]
    facts = {"machine": machine(), "versions": versions("torch"), "rows": rows}
    emit(arguments, "One update of one rank", header, [line for row in rows for line in _cells(row)], facts=facts)


if __name__ == "__main__":
    main()
