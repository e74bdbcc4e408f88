"""What a rank should send, hold and compute in one update of the models of bench/fake_world.py, by arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.gpu.llama import Size

from echelon.world.mesh import ParallelDims

__all__ = ["Mixture", "Theory", "narrow", "theory", "theory_of_stage"]

BF16, FP32 = 2, 4
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Mixture:
    """Experts in each block: their number, the number chosen for a token, and the hidden width of one expert."""

    experts: int
    chosen: int
    hidden: int


def narrow(size: Size) -> Mixture:
    """16 experts, 8 for each token, so narrow that they need as many multiplications as the dense layers."""
    return Mixture(16, 8, size.hidden // 8)


@dataclass(frozen=True)
class Theory:
    """
    Attributes:
        messages: bytes of whole tensors, by collective and axis.
        held: bytes of this rank's shards of parameters and of AdamW's two averages, and AdamW's counters.
        flops: of matrix products and attention.
    """

    messages: dict[tuple[str, str], int]
    held: int
    flops: int


def theory(size: Size, dims: ParallelDims, mixture: Mixture | None = None) -> Theory:
    """`fully_shard` gathers each block twice in bfloat16, for the forward and the backward pass, and the head once. It gathers
    the norms and the embedding once, in float32, because they do not compute in bfloat16. All gradients are reduced in float32.
    A parameter is split along its first dim into equal parts; the last parts may be padding.

    Args:
        mixture: the experts of each block, with expert parallelism.
    """
    mixture = mixture or narrow(size)
    messages: Counter[tuple[str, str]] = Counter()
    shards, wide = dims.dp_shard * dims.cp, size.width
    data = "dp_shard" if dims.cp == 1 else "dp_shard_cp"
    block = _block(size, dims, mixture)
    blocks, ends = size.depth * _padded(block, shards), _padded([(size.vocabulary, wide)], shards)
    norms = (2 * size.depth + 1) * _padded([(wide,)], shards)
    sharded = blocks + norms + 2 * ends
    messages["all-gather", data] = 2 * BF16 * blocks + BF16 * ends + FP32 * (norms + ends)
    messages["reduce-scatter", data] = FP32 * sharded
    if dims.dp_replicate > 1:
        messages["all-reduce", "dp_replicate"] = FP32 * sharded // shards
    mine, count = sharded // shards, (len(block) + 2) * size.depth + 3
    if dims.ep > 1:
        over = shards // dims.ep
        experts = size.depth * 3 * (mixture.experts // dims.ep) * mixture.hidden * wide
        messages["all-gather", "dp_shard_ep"], messages["reduce-scatter", "dp_shard_ep"] = 2 * BF16 * experts, FP32 * experts
        mine, count = mine + experts // over, count + 3 * size.depth
    messages += _activations(size, dims, mixture)
    return Theory(dict(messages), 3 * FP32 * mine + FP32 * count, _flops(size, dims, mixture))


def theory_of_stage(size: Size, dims: ParallelDims, units: Sequence[str], micro_batches: int) -> Theory:
    """For a rank of a stage, with one sequence in a micro-batch. Everything, gathers and reductions too, happens for each
    micro-batch. The residual stream, in float32, comes from the previous stage and goes to the next, and its gradient the other
    way. In the first backward pass of a window, `fully_shard` gathers one block more if several micro-batches are in flight: it
    prefetches by the order of the latest forward pass, if there is a next layer.

    Args:
        units: the names of the stage's units.
    """
    blocks = sum(name.startswith("blocks.") for name in units)
    first, last = "tokens" in units, "head" in units
    part = dataclasses.replace(size, depth=blocks)
    block, table = _block(part, dims, narrow(part)), _padded([(size.vocabulary, size.width)], dims.dp_shard)
    matrices = _padded(block, dims.dp_shard)
    norms = (2 * blocks + last) * _padded([(size.width,)], dims.dp_shard)
    sharded = blocks * matrices + norms + (first + last) * table
    gathered = 2 * BF16 * blocks * matrices + FP32 * norms + FP32 * first * table + BF16 * last * table
    messages: Counter[tuple[str, str]] = Counter()
    messages["all-gather", "dp_shard"] = micro_batches * gathered + (BF16 * matrices if not last and blocks + first > 1 else 0)
    messages["reduce-scatter", "dp_shard"] = micro_batches * FP32 * sharded
    for key, message in _activations(part, dims, narrow(part)).items():
        messages[key] = micro_batches * message
    passed = micro_batches * size.context * size.width * FP32
    messages["send", "pp"] = messages["receive", "pp"] = passed * (2 - first - last)
    messages["broadcast", "pp"] = 8 * micro_batches  # losses
    count = (len(block) + 2) * blocks + first + 2 * last
    flops = _flops(part, dims, narrow(part)) - (0 if last else 6 * size.vocabulary * size.width * size.context)
    return Theory(dict(messages), 3 * FP32 * (sharded // dims.dp_shard) + FP32 * count, micro_batches * flops)


def _block(size: Size, dims: ParallelDims, mixture: Mixture) -> Shapes:
    """The shapes, after tensor parallelism, of the matrices of a block that `fully_shard` splits; without experts."""
    wide, kv = size.width, size.kv_heads * (size.width // size.heads)
    if dims.ep > 1:
        return [(wide, wide), (kv, wide), (kv, wide), (wide, wide), (mixture.experts, wide)]
    by_outputs = [(wide, wide), (kv, wide), (kv, wide), (size.hidden, wide), (size.hidden, wide)]
    by_inputs = [(wide, wide), (wide, size.hidden)]
    return [*((rows // dims.tp, n) for rows, n in by_outputs), *((rows, n // dims.tp) for rows, n in by_inputs)]


def _activations(size: Size, dims: ParallelDims, mixture: Mixture) -> Counter[tuple[str, str]]:
    """Tensor parallelism all-reduces the outputs of two layers of each block, that of the attention once more in recomputation,
    and in the backward pass, in float32, the gradients of two inputs: that of q, k, v, and that of gate and up.

    Context parallelism gathers keys and values twice, and reduces their gradients.

    Experts receive the numbers of their tokens, then the tokens in float32, the norm's output dtype, and return bfloat16; both
    happen once more in recomputation; and the gradients go the other way.
    """
    messages: Counter[tuple[str, str]] = Counter()
    tokens, kv = size.context // dims.cp, size.kv_heads * (size.width // size.heads)
    if dims.tp > 1:
        messages["all-reduce", "tp"] = size.depth * tokens * size.width * (3 * BF16 + 2 * FP32)
    if dims.cp > 1:
        keys_and_values = size.depth * 2 * size.context * kv // dims.tp * BF16
        messages["all-gather", "cp"], messages["reduce-scatter", "cp"] = 2 * keys_and_values, keys_and_values
    if dims.ep > 1:
        messages["all-to-all", "ep"] = size.depth * (
            3 * (FP32 + BF16) * mixture.chosen * tokens * size.width + 2 * 8 * mixture.experts
        )
    return messages


def _flops(size: Size, dims: ParallelDims, mixture: Mixture) -> int:
    """Matrix products count once forward, once in recomputation, and twice backward. The last product of a plain block is not
    recomputed, since its output is not needed, and neither is the head, which no parallelism divides. Attention has 2 products
    forward, 2 in recomputation and 5 backward, over the whole square of a causal mask; for a sequence in parts, over an early and
    a late part and the keys before them.
    """
    tokens = size.context // dims.cp
    head = size.vocabulary * size.width
    multiplied = size.multiplied - head
    again = multiplied - size.depth * size.hidden * size.width
    if dims.ep > 1:
        dense, experts = 3 * size.width * size.hidden, 3 * size.width * mixture.hidden * mixture.chosen
        multiplied += size.depth * (experts - dense + mixture.experts * size.width)  # with the router
        again = multiplied
    products = (6 * multiplied + 2 * again) * tokens // dims.tp + 6 * head * tokens
    part = tokens // 2
    pairs = part * part * (2 * dims.cp + 1) if dims.cp > 1 else tokens * tokens
    return products + 9 * size.depth * 2 * pairs * size.width // dims.tp


def _padded(shapes: Shapes, ranks: int) -> int:
    return sum(math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) for shape in shapes)
