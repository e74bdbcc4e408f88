"""A Llama-style model, written plainly: RMSNorm, rotary positions, grouped queries, SwiGLU, torch's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["SIZES", "Attention", "Llama", "Size", "flops_per_token", "rotated"]


@dataclass(frozen=True)
class Size:
    """The size of a model; `context` is the number of tokens of a sequence."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    context: int

    @property
    def multiplied(self) -> int:
        """The number of parameters in matrix products, including the head."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * (self.width // self.heads)
        return self.depth * (attention + 3 * self.width * self.hidden) + self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """The number of all parameters, with the embedding, which is not tied to the head, and the norms."""
        return self.multiplied + self.vocabulary * self.width + (2 * self.depth + 1) * self.width


# The shapes of Llama 3 (arXiv 2407.21783, table 3) and 3.2, and smaller ones for smaller cards; the head is never tied.
SIZES = {
    "tiny": Size(width=32, depth=2, heads=4, kv_heads=2, hidden=64, vocabulary=128, context=16),
    "125M": Size(width=768, depth=12, heads=12, kv_heads=4, hidden=2048, vocabulary=32_000, context=2048),
    "1B": Size(width=2048, depth=16, heads=32, kv_heads=8, hidden=8192, vocabulary=128_256, context=2048),
    "3B": Size(width=3072, depth=28, heads=24, kv_heads=8, hidden=8192, vocabulary=128_256, context=2048),
    "8B": Size(width=4096, depth=32, heads=32, kv_heads=8, hidden=14_336, vocabulary=128_256, context=2048),
}


def flops_per_token(size: Size) -> float:
    """Forward and backward: 6 for each parameter of a matrix product, and 12 L H Q T for attention (PaLM, arXiv 2204.02311,
    appendix B), which counts the whole square of a causal mask. The embedding is looked up, not multiplied; recomputation does
    not count."""
    return 6 * size.multiplied + 12 * size.depth * size.width * size.context


class Attention(nn.Module):
    """x: (B, T, D) -> (B, T, D). The number of heads is -1, since with tensor parallelism a rank has only some."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.v = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (project(x).view(b, t, -1, self.head).transpose(1, 2) for project in (self.q, self.k, self.v))  # (B, H, T, D/H)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864) on halves of the head: x (B, H, T, E), cos and sin (T, E)."""
    one, other = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-other, one), dim=-1) * sin.to(x.dtype)


class MLP(nn.Module):
    """x: (B, T, D) -> (B, T, D)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x: (B, T, D) -> (B, T, D)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(size.width, eps=1e-5), nn.RMSNorm(size.width, eps=1e-5)
        self.attention, self.mlp = Attention(size), MLP(size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """Tokens and targets (B, T) -> the mean loss, computed inside, so that a sharded head is whole when the loss uses it.

    Args:
        linear_cross_entropy: a function of hidden (B * T, D), weight (V, D) and targets (B * T) that never has all logits.
    """

    tp_plan: ClassVar = {
        "blocks.*.attention.q": "colwise",
        "blocks.*.attention.k": "colwise",
        "blocks.*.attention.v": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.gate": "colwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
    }

    def __init__(self, size: Size, linear_cross_entropy: Any = None) -> None:
        super().__init__()
        self.linear_cross_entropy = linear_cross_entropy
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        half = size.width // size.heads // 2
        frequencies = 500_000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(size.context, dtype=torch.float32), frequencies).repeat(1, 2)  # (T, E)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        h = self.norm(h)
        if self.linear_cross_entropy is not None:
            return self.linear_cross_entropy(h.flatten(0, 1), self.head.weight, targets.flatten())
        logits = self.head(h).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())
