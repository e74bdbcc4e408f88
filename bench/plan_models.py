"""A training script of the Llama and MPT families for `echelon plan`: nothing is learned from its data, which are zeros.

echelon plan --cluster 1x8xH100 bench/plan_models.py --size 8B --context 8192 --sequences 16
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._compiled_loss import compiled_cross_entropy
from bench._mpt import MPT, MPT_SHAPES
from bench.gpu.llama import SIZES, Attention, Block, Llama, Size, rotated

import echelon as ech

# Llama 2 (arXiv 2307.09288) and Llama 3 (arXiv 2407.21783, table 3).
SHAPES = SIZES | {
    "2-7B": Size(width=4096, depth=32, heads=32, kv_heads=32, hidden=11_008, vocabulary=32_000, context=4096),
    "2-13B": Size(width=5120, depth=40, heads=40, kv_heads=40, hidden=13_824, vocabulary=32_000, context=4096),
    "2-70B": Size(width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, vocabulary=32_000, context=4096),
    "70B": Size(width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, vocabulary=128_256, context=8192),
    "405B": Size(width=16_384, depth=126, heads=128, kv_heads=8, hidden=53_248, vocabulary=128_256, context=8192),
    # From arXiv 2403.17297 and the configuration of internlm/internlm-7b.
    "internlm-7b": Size(width=4096, depth=32, heads=32, kv_heads=32, hidden=11_008, vocabulary=103_168, context=2048),
    # From huggingface/nanotron's benchmarks: that of 2024, and scripts/scaling_benchmarks.py. Their heads are tied.
    "nanotron-1b": Size(width=2048, depth=24, heads=32, kv_heads=32, hidden=4096, vocabulary=50_264, context=4096),
    "nanotron-1.3b": Size(width=2048, depth=16, heads=32, kv_heads=32, hidden=8192, vocabulary=131_072, context=4096),
    "nanotron-3.6b": Size(width=3072, depth=28, heads=32, kv_heads=32, hidden=8192, vocabulary=131_072, context=4096),
    "nanotron-8.9b": Size(width=4096, depth=32, heads=32, kv_heads=32, hidden=14_336, vocabulary=131_072, context=4096),
    "nanotron-80b": Size(width=8192, depth=80, heads=64, kv_heads=64, hidden=28_672, vocabulary=131_072, context=4096),
}


TITAN = tuple(f"titan-{name}" for name in ("8B", "70B", "405B", "2-13B", "2-70B"))
# TITAN is torchtitan of 2024 and early 2025. torchtitan of August 2025 (commit 6fc499f) also compiles its loss (pull requests 755
# and 1033), shards the embedding by itself, and steps by one kernel.
TITAN_2508 = ("titan-2508-8B",)


class TitanNorm(nn.RMSNorm):
    """torchtitan's norm of 2024, in torch operators: several kernels, unless it is compiled (torchtitan/models/norms.py)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.float()
        return (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class TitanAttention(Attention):
    """torchtitan's attention, which repeats k and v for all heads (torchtitan/models/llama/model.py)."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(2, (-1, self.head)) for project in (self.q, self.k, self.v))
        q, k = rotated(q.transpose(1, 2), cos, sin), rotated(k.transpose(1, 2), cos, sin)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v.transpose(1, 2)))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def compiled_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return compiled_cross_entropy(F.linear(hidden, weight), targets)


def titan(shape: Size, *, compiled: bool, loss: Any = None) -> Llama:
    """The model with torchtitan's attention and norms."""
    model = Llama(shape, loss)
    for module in list(model.modules()):
        if type(module) is nn.RMSNorm and not compiled:
            module.__class__ = TitanNorm
        elif type(module) is Attention:
            module.__class__ = TitanAttention
    return model


def every_second_product() -> Any:
    """As torchtitan's "selective (op)": keeps attention and every second matrix product, and recomputes the rest.

    On B200 attention is cuDNN's kernel, which is not in torchtitan's list (torchtitan/models/attention.py of August 2025).
    Source: pytorch/torchtitan, torchtitan/parallelisms/parallelize_llama.py of December 2024.
    """
    count: Counter[bool] = Counter()
    aten = torch.ops.aten
    attends = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0):
        attends.clear()

    def kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count[context.is_recompute] += op == aten.mm.default
        saves = op in attends or (op == aten.mm.default and count[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(kept)


def with_split_sequences(layout: str) -> Any:
    """Also split the sequence between the split layers, and the vocabulary of the loss, as torchtitan and nanotron do.

    Source: torchtitan/models/llama3/infra/parallelize.py; nanotron, scripts/scaling_benchmarks.py (`REDUCE_SCATTER`).
    """
    sizes = dict(part.split("=") for part in layout.split(",")) if "tp=" in layout else {}
    plan = Llama.tp_plan | {"tokens": "rowwise", "head": "colwise_gather"}
    axes = {name: int(size) for name, size in sizes.items()}
    return ech.Layout(**axes, plan=plan, sequence_parallel=True) if axes else layout


def of_torchtitan(layout: str, groups: Sequence[type[nn.Module]]) -> Any:
    """`fully_shard` gathers shards in bfloat16, and products are computed in it, without autocast, which copies its input for
    each product. Gradients are reduced in float32 (torchtitan/parallelisms/parallelize_llama.py).
    """
    if layout != "fsdp":
        return with_split_sequences(layout)
    return ech.layouts.FSDPStrategy(blocks=groups, mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


Float8 = ech.layouts.Float8
PRECISIONS = {
    "bf16": "bf16",
    "float8-rowwise": Float8("rowwise"),
    "float8-tensorwise": Float8("tensorwise"),
    "float8-gathered": Float8("tensorwise", enable_fsdp_float8_all_gather=True),
}
RECOMPUTES = {
    "none": "none",
    "blocks": "blocks",
    "selective": "selective",
    "every-second-block": ech.layouts.ActivationCheckpointParams(every=2),
    "every-second-product": ech.layouts.ActivationCheckpointParams(context_fn=every_second_product),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SHAPES, *MPT_SHAPES, *TITAN, *TITAN_2508], default="8B")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="of an update, on all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an update on each rank")
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--recompute", choices=RECOMPUTES, default="none")
    parser.add_argument("--compile", action="store_true", help="the blocks")
    given = parser.parse_args()
    ech.init_from_env()
    of_titan, of_2508 = given.size in (*TITAN, *TITAN_2508), given.size in TITAN_2508
    with ech.on_meta():
        shape = replace((SHAPES | MPT_SHAPES)[given.size.removeprefix("titan-").removeprefix("2508-")], context=given.context)
        if given.size in MPT_SHAPES:
            model = MPT(shape)
        elif "tp=" in given.layout:
            model = Llama(shape, ech.nn.linear_cross_entropy)
        elif of_titan:
            model = titan(shape, compiled=given.compile, loss=compiled_loss if of_2508 and given.compile else None)
        else:
            model = Llama(shape)
    rows = torch.zeros(1, dtype=torch.int64).expand(2 * given.sequences, given.context)
    groups = [Block, nn.Embedding] if of_2508 else [Block]
    unit = (TitanUnit if given.size in TITAN else Unit)(
        module=model,
        layout=of_torchtitan(given.layout, groups) if of_titan else with_split_sequences(given.layout),
        precision="fp32" if of_titan and given.layout == "fsdp" and given.precision == "bf16" else PRECISIONS[given.precision],
        recompute=RECOMPUTES[given.recompute],
        compile="blocks" if given.compile else None,
        clip_grad_norm=1.0 if of_titan else None,
    )
    loader = ech.Loader(torch.utils.data.TensorDataset(rows), global_batch=given.sequences, accumulate=given.accumulate)
    ech.train(unit, loader, max_updates=2)


class Unit(ech.AutoUnit[Any]):
    options: ClassVar[dict[str, bool]] = {"fused": True}  # the optimizer's options

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        (tokens,) = data
        return self.module(tokens, tokens), None

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=3e-4, **self.options), None


class TitanUnit(Unit):
    options: ClassVar[dict[str, bool]] = {"foreach": True}


if __name__ == "__main__":
    main()
