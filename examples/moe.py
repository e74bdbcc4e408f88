"""Train a mixture-of-experts language model over bytes, with its experts divided over the ranks.

    echelon run --ranks 2 examples/moe.py                     each rank has half of the experts of every layer
    echelon run --ranks 4 examples/moe.py --layout ep=2     two ranks divide the experts; each expert has two shards
    echelon run --ranks 2 examples/moe.py --layout ddp      each rank has all experts
    python examples/moe.py --layout none                    one process, no launcher

Learns from the source of Python's standard library, or from --data FOLDER. The numbers do not depend on how the experts are
divided. metrics.jsonl has the largest load of an expert and the entropy of the routers beside the loss.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.data import ByteText, split_files

BYTES = 256
Batch = tuple[torch.Tensor, torch.Tensor]  # (B, T) each


class Block(nn.Module):
    """Attention, and experts in place of an MLP. x: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        # Two experts compute each token, so together they cost as much as one MLP of twice the size of an expert.
        self.moe = ech.nn.MoE(width, ech.nn.GroupedExperts(width, width, experts), top_k=2, balance="loss_free")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, self.heads, 3, d // self.heads).permute(3, 0, 2, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.norm_2(x))


class Model(nn.Module):
    """Bytes (B, T) -> logits (B, T, 256)."""

    def __init__(self, width: int, depth: int, experts: int, context: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 4, experts) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Unit(ech.AutoUnit[Batch]):
    """Next-byte prediction. The loss is in nats per byte."""

    weight_unit = "tokens"

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        inputs, targets = data
        # With balance="auxiliary" above, add `+ ech.nn.auxiliary_loss(self.module)`.
        return F.cross_entropy(self.module(inputs).flatten(0, 1).float(), targets.flatten()), None

    def weight(self, data: Batch) -> int:
        return data[1].numel()

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", help="ep=2, dp_replicate=2,ep=2, ddp, fsdp, none, ...; default: experts over all ranks")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="text files to learn from; default: Python's own source")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--experts", type=int, default=8, help="in each layer")
    parser.add_argument("--toy", action="store_true", help="a smaller model and less text: seconds")
    parser.add_argument("--checkpoints", default="runs/moe/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same module
    width, depth, context, batch = (32, 2, 32, 8) if args.toy else (128, 4, 128, 32)
    folder = args.data or Path(sysconfig.get_paths()["stdlib"])
    train_files, held_out = split_files(folder, "**/*" if args.data else "*.py")
    train_set, eval_set = ByteText(train_files, context), ByteText(held_out, context)
    few = range(0, len(eval_set), max(1, len(eval_set) // (32 if args.toy else 512)))
    loader = ech.Loader(train_set, batch, seed=0)
    unit = Unit(
        module=Model(width, depth, args.experts, context),
        layout=args.layout or (f"ep={ech.world_size()}" if ech.world_size() > 1 else "none"),
        clip_grad_norm=1.0,
    )
    ech.train(unit, loader, max_updates=args.updates, checkpoints=args.checkpoints)
    ech.evaluate(unit, ech.Loader(torch.utils.data.Subset(eval_set, few), batch, shuffle=False))
    if ech.is_main():
        most = max(float(load.max()) * args.experts for load in ech.nn.expert_loads(unit.module).values())
        print(f"held-out loss {unit.eval_loss:.3f} nats per byte; the busiest expert had {most:.2f} times the mean load")


if __name__ == "__main__":
    main()
