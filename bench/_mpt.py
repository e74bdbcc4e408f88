"""An MPT-style model, written plainly: LayerNorm, learned positions, one product for q, k and v, GELU, a tied head.

Its attention is an operator of its own, because MPT's runs used FlashAttention in Triton, of 2023 (mosaicml/llm-foundry,
`attn_impl: triton` of scripts/train/yamls/pretrain and of scripts/train/benchmarking/submit_benchmarks.py). Here torch's kernel
computes it, and the operator's name tells a plan which kernel MPT's runs used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from bench.gpu.llama import Size
from torch import nn
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["MPT", "MPT_SHAPES"]


def _shape(width: int, heads: int, depth: int) -> Size:
    return Size(width, depth, heads, heads, 4 * width, vocabulary=50_368, context=2048)


# mosaicml/llm-foundry, scripts/train/yamls/pretrain.
MPT_SHAPES = {
    "mpt-125m": _shape(768, 12, 12),
    "mpt-350m": _shape(1024, 16, 24),
    "mpt-760m": _shape(1536, 12, 24),
    "mpt-1b": _shape(2048, 16, 24),
    "mpt-3b": _shape(2560, 20, 32),
    "mpt-7b": _shape(4096, 32, 32),
    "mpt-13b": _shape(5120, 40, 40),
    "mpt-30b": _shape(7168, 56, 48),
    "mpt-70b": _shape(8192, 64, 80),
}


aten = torch.ops.aten


@torch.library.custom_op("flash_attn_triton::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, T, E) each -> the same, and (B, H, T)."""
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
    return out, logsumexp


@torch.library.custom_op("flash_attn_triton::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, logsumexp, 0.0, is_causal)
    return found[0], found[1], found[2]


def _like(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the memory layout of the kernels' outputs: heads after tokens."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


attention.register_fake(lambda q, k, v, is_causal: (_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)))
attention_backward.register_fake(lambda grad, q, k, v, *_: (_like(q), _like(k), _like(v)))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    return *attention_backward(grad, *ctx.saved_tensors, ctx.is_causal), None


attention.register_autograd(_backward, setup_context=_keep)
register_flop_formula(torch.ops.flash_attn_triton.attention)(lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v))
register_flop_formula(torch.ops.flash_attn_triton.attention_backward)(
    lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
)


class Block(nn.Module):
    """x: (B, T, D) -> (B, T, D)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D / H)
        attended, _ = attention(q, k, v, True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    """Tokens and targets (B, T) -> the mean loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.tokens.weight).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())
