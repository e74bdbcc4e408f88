"""Context parallelism written by hand with torch alone. bench/strategies.py compares `Layout(cp=...)` with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _by_hand import ByHand
from gpt import GPT
from torch import nn


class Gathered(torch.autograd.Function):
    """Keys and values of all ranks, in the order of the sequence. x: (2, B, H, T, D) -> (2, B, H, ranks x T, D)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size()
        out = x.new_empty(size * 2, *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        chunks = [part.chunk(2, 3) for part in out.chunk(size)]
        return torch.cat([early for early, _ in chunks] + [late for _, late in reversed(chunks)], 3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size()
        chunks = grads[0].chunk(2 * size, 3)
        laid = torch.cat([torch.cat([chunks[r], chunks[-1 - r]], 3) for r in range(size)])
        mine = laid.new_empty(2, *laid.shape[1:])
        dist.reduce_scatter_tensor(mine, laid)
        return mine


def cut(x: torch.Tensor) -> torch.Tensor:
    """This rank's early and late chunk of (B, T)."""
    chunks, rank = x.chunk(2 * dist.get_world_size(), 1), dist.get_rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]], 1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = Gathered.apply(torch.stack([k, v])).unbind()
    made, rank, chunk = [], dist.get_rank(), q.shape[2] // 2
    for part, number in zip(q.chunk(2, 2), (rank, 2 * dist.get_world_size() - 1 - rank), strict=True):
        last = (number + 1) * chunk
        mask = torch.ones(chunk, last, dtype=torch.bool).tril(last - chunk) if number else None
        made.append(
            F.scaled_dot_product_attention(part, keys[:, :, :last], values[:, :, :last], attn_mask=mask, is_causal=not number)
        )
    return torch.cat(made, 2)


class CutBlock(nn.Module):
    """A block of examples/gpt.py with that attention."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.heads = block.heads
        self.norm_1, self.norm_2, self.qkv, self.out, self.mlp = block.norm_1, block.norm_2, block.qkv, block.out, block.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, -1, 3, d // self.heads).permute(3, 0, 2, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class CutGPT(nn.Module):
    """The GPT of examples/gpt.py on its part of a sequence."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.bytes, self.positions, self.norm, self.head = gpt.bytes, gpt.positions, gpt.norm, gpt.head
        self.blocks = nn.ModuleList(CutBlock(block) for block in gpt.blocks)
        self.register_buffer("places", cut(torch.arange(gpt.positions.num_embeddings)[None])[0], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.positions.weight[self.places]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class ContextByHand(ByHand):
    def __init__(self, model: GPT, clip: float | None) -> None:
        super().__init__("fsdp", CutGPT(model), 1, clip)

    def train(self, batches: list[Any]) -> None:
        super().train([tuple(cut(x) for x in batch) for batch in batches])
