"""A small language model, its data and units, for the tests of context parallelism, and the reference: plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech

VOCABULARY = 32


class Block(nn.Module):
    """Pre-norm attention with grouped queries, and an MLP. x: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int, groups: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.size, self.dropout, self.causal = width // heads, dropout, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * self.size)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.norm_1(x)
        q = self.q(h).unflatten(2, (-1, self.size)).transpose(1, 2)
        k, v = (part.unflatten(2, (-1, self.size)).transpose(1, 2) for part in self.kv(h).chunk(2, 2))
        p = self.dropout if self.training else 0.0
        causal = self.causal and mask is None
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal, enable_gqa=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class LM(nn.Module):
    """Tokens (B, T), and for packed documents their numbers (B, T) -> logits (B, T, V)."""

    def __init__(self, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block(16, 4, 2, dropout, causal) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        h = self.tokens(x) + self.places(ech.nn.positions(x))
        mask = None
        if documents is not None:
            where = ech.nn.positions(x)
            every = torch.arange(ech.nn.whole_sequence(x).shape[1])
            same = documents[:, :, None] == ech.nn.whole_sequence(documents)[:, None, :]
            mask = (same & (where[:, None] >= every))[:, None]
        return self.head(self.norm(self.body(h, mask)))

    def body(self, h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        for block in self.blocks:
            h = block(h, mask)
        return h


def lm(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return LM(**options).double()


class Tokenwise(nn.Module):
    """Tokens (B, T) -> logits (B, T, V); each token by itself but for `mix(self, h)`, which may use further parts."""

    def __init__(self, mix: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.mix = mix
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self, self.tokens(x)))


def tokens(rows: int, length: int, seed: int, *, ignored: float = 0.0, packed: bool = False) -> dict[str, torch.Tensor]:
    """Inputs and the tokens that follow them, (rows, length); a part of the latter is no target."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    targets = drawn[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < ignored] = -100
    made = {"inputs": drawn[:, :-1], "targets": targets}
    if packed:
        made["documents"] = (torch.rand(targets.shape, generator=generator) < 0.2).cumsum(1)
    return made


def loss_of(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = module(batch["inputs"], *([batch["documents"]] if "documents" in batch else []))
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def made_optimizer(module: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)


class Language(ech.AutoUnit[Any]):
    """Counts rows, or with `by_tokens` the targets."""

    def __init__(self, *, optimizer: str = "SGD", by_tokens: bool = False, loss: Any = loss_of, **options: Any) -> None:
        super().__init__(**options)
        self.kind, self.by_tokens, self.loss = optimizer, by_tokens, loss
        self.norms: list[float] = []
        self.losses: list[float] = []

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        return self.loss(self.module, data), None

    def weight(self, data: Any) -> Any:
        if not self.by_tokens:
            return super().weight(data)
        if "labels" in data:
            return ech.count_tokens(data, next_token=True)
        return (data["targets"] != -100).sum()

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return made_optimizer(module, self.kind), None

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: ech.units.TrainStepResults) -> None:
        if results.total_grad_norm is not None:
            self.norms.append(float(results.total_grad_norm))
            self.losses.append(float(self.latest_update[0]))


def plain(
    module: nn.Module,
    windows: Sequence[Sequence[dict[str, torch.Tensor]]],
    *,
    optimizer: str = "SGD",
    clip: float = float("inf"),
    by_tokens: bool = False,
    loss: Any = loss_of,
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """One process of plain PyTorch: parameters, norms before clipping and losses. A window is one update."""
    opt = made_optimizer(module, optimizer)
    norms, losses = [], []
    for window in windows:
        labels = [b["targets"] if "targets" in b else b["labels"][..., 1:] for b in window]
        weights = [float((each != -100).sum()) if by_tokens else len(each) for each in labels]
        found = 0.0
        for batch, weight in zip(window, weights, strict=True):
            one = loss(module, batch)
            (one * (weight / sum(weights))).backward()
            found += float(one.detach()) * weight / sum(weights)
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip)))
        opt.step()
        opt.zero_grad()
        losses.append(found)
    return {n: p.detach().clone() for n, p in module.named_parameters()}, norms, losses
