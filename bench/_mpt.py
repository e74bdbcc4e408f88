"""An MPT-style model, written plainly: LayerNorm, learned positions, one product for q, k and v, GELU, a tied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from bench.gpu.llama import Size
from torch import nn

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
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
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
