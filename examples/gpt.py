"""Train a byte-level GPT on the source of Python's standard library, or on text files of yours.

    echelon run --ranks 2 examples/gpt.py                              FSDP over two processes
    echelon run --ranks 2 examples/gpt.py --layout tp=2 --data ~/texts
    python examples/gpt.py --layout none                               one process, no launcher

Each start is a new run with its own checkpoints. With `--name big` before the script, the same command resumes that run.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech


class Block(nn.Module):  # pre-norm attention and MLP: (B, T, D) -> (B, T, D)
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Heads are the outer dim, of size -1: with tensor parallelism this rank has only some heads, with their q, k and v.
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (-1, 3, x.shape[2] // self.heads)).permute(3, 0, 2, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):  # bytes (B, T) -> logits (B, T, 256)
    # How tensor parallelism may split the blocks: one layer by its outputs, the next by its inputs.
    tp_plan: ClassVar = {"blocks.*.qkv": "colwise", "blocks.*.mlp.0": "colwise"}
    tp_plan |= {"blocks.*.out": "rowwise", "blocks.*.mlp.2": "rowwise"}

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # residual branches start small, so that depth does not change the scale of their sum
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if name.endswith(("out.weight", "mlp.2.weight")) else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.positions(ech.nn.positions(x))  # of this rank's part of the sequence, if ranks share it
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class NextByte(ech.AutoUnit[Any]):
    """Batches are pairs of inputs and targets, (B, T) each. The loss is in nats per byte."""

    weight_unit, updates = "tokens", 400

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        inputs, targets = data
        return F.cross_entropy(self.module(inputs).flatten(0, 1).float(), targets.flatten()), None

    def weight(self, data: Any) -> int:
        return data[1].numel()

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        matrices, others = ([p for p in module.parameters() if (p.dim() >= 2) == wanted] for wanted in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)

    def schedule(self, update: int) -> float:  # a linear warm-up over the first 5%, and a cosine down to a tenth
        done = min(1.0, update / self.updates)
        return min(20 * (done + 1 / self.updates), 0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def continue_text(unit: NextByte, prompt: str, length: int, context: int) -> str:
    """Bytes that the model samples after a prompt. Every rank calls it and draws the same: a sharded model needs all ranks."""
    generator, text = torch.Generator().manual_seed(0), torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = unit.module(text[:, -context:].to(unit.device))[0, -1].float().cpu()
        following = torch.multinomial(F.softmax(logits / 0.8, -1), 1, generator=generator)
        text = torch.cat([text, following[None]], 1)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in bytes(text[0].tolist()).decode("utf-8", "replace"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="fsdp", help="none, ddp, fsdp, hsdp, zero1, tp, cp, or axes: dp_shard=2,tp=2")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="text files to learn from; default: Python's own source")
    parser.add_argument("--toy", action="store_true", help="a narrow model and short rows: seconds")
    args = parser.parse_args()
    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    width, depth, context, batch = (32, 2, 32, 8) if args.toy else (128, 4, 128, 32)
    source = (args.data, "**/*") if args.data else (Path(sysconfig.get_paths()["stdlib"]), "*.py")
    train_files, held_out = ech.data.split_files(*source)
    train_set, eval_set = ech.data.ByteText(train_files, context), ech.data.ByteText(held_out, context)
    few = torch.utils.data.Subset(eval_set, range(0, len(eval_set), max(1, len(eval_set) // 512)))  # tells the loss to 1%
    folder = run.checkpoints if (run := ech.evidence.RunDir.current()) else Path("runs/gpt/checkpoints")
    unit = NextByte(module=GPT(width, depth, heads=2, context=context), layout=args.layout, clip_grad_norm=1.0)
    unit.updates = args.updates
    kept = ech.Checkpoints(folder, every=max(1, args.updates // 2), keep=2, asynchronous=True)
    ech.train(unit, ech.Loader(train_set, global_batch=batch), max_updates=args.updates, checkpoints=kept)
    ech.evaluate(unit, ech.Loader(few, global_batch=batch, shuffle=False))
    text = continue_text(unit, "import os\n\n\ndef ", 200, context)
    if ech.is_main():
        print(f"\nheld-out loss {unit.eval_loss:.3f} nats per byte after {args.updates} updates\n\n{text}")


if __name__ == "__main__":
    main()
