"""A small language model with attention, and a unit that counts the words that have a target."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 24, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The gradient of a key's bias is zero in truth; Adam would make its rounding as large as any other.
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, WIDTH)
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Language(nn.Module):
    """(B, T) words -> (B, T, WORDS) logits."""

    tp_plan: ClassVar[dict[str, str]] = {
        **dict.fromkeys([*(f"blocks.*.attention.{each}" for each in "qkv"), "blocks.*.mlp.0"], "colwise"),
        **dict.fromkeys(["blocks.*.attention.out", "blocks.*.mlp.2"], "rowwise"),
    }

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(ech.nn.positions(words))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Unit(ech.AutoUnit[Any]):
    """The mean over the words that have a target."""

    def __init__(self, optimizer: str, module: nn.Module, *, layout: Any = "ddp", **options: Any) -> None:
        super().__init__(module=module, layout=layout, clip_grad_norm=0.3, **options)
        self.kind = optimizer

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        logits, targets = self.module(data["words"]), data["targets"]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / self._count(
            data
        ), None

    def _count(self, data: Any) -> torch.Tensor:
        return (data["targets"] != -100).sum().clamp(min=1)

    def weight(self, data: Any) -> torch.Tensor:
        return (data["targets"] != -100).sum()

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        options = {"momentum": 0.9} if self.kind == "SGD" else {}
        return getattr(torch.optim, self.kind)(module.parameters(), lr=0.02, **options), None
