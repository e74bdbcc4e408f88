"""Train a byte-level GPT on the source of Python's standard library, on any number of ranks.

    echelon run --ranks 2 examples/gpt.py                     FSDP over two processes
    echelon run --ranks 2 examples/gpt.py --layout ddp
    python examples/gpt.py --layout none                    one process, no launcher
    echelon run --ranks 2 examples/gpt.py --data ~/texts      your own text files
    echelon run --ranks 2 --name big --stop-after 50m examples/gpt.py     the same command once more goes on
    echelon run --ranks 2 examples/gpt.py --resume            a new run that begins where the last one stopped

The script says what is trained; how many processes there are, and how the model is split over them, is said elsewhere.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.data import ByteText, split_files

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Pre-norm attention and MLP. x: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        # Heads outermost and -1 of them: with tensor parallelism this rank has a part of the heads, with their q, k and v.
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, -1, 3, d // self.heads).permute(3, 0, 2, 1, 4)  # (B, H, T, D/H)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Bytes (B, T) -> logits (B, T, 256)."""

    # How tensor parallelism may split the blocks: a layer by its outputs, the one after it by its inputs.
    tp_plan: ClassVar = {
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
    }

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # residual branches start small, so that depth does not change the scale of their sum
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if name.endswith(("out.weight", "mlp.2.weight")) else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.positions(ech.nn.positions(x))  # of this rank's part of the window, if ranks share it
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class GPTUnit(ech.AutoUnit[tuple[torch.Tensor, torch.Tensor]]):
    """Next-byte prediction. The loss is nats per byte."""

    weight_unit = "tokens"

    def __init__(self, *, lr: float, steps: int, **options: Any) -> None:
        super().__init__(clip_grad_norm=1.0, **options)
        self.lr, self.steps = lr, steps

    def compute_loss(self, state: ech.State, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = data  # (B, T)
        logits = self.module(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), logits

    def weight(self, data: tuple[torch.Tensor, torch.Tensor]) -> int:
        return data[1].numel()  # a mean over tokens, not over windows

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        matrices = [p for p in module.parameters() if p.dim() >= 2]
        others = [p for p in module.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule)

    def _schedule(self, step: int) -> float:
        """Linear warm-up over the first 5%, then a cosine down to a tenth."""
        warm_up = max(1, self.steps // 20)
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, self.steps - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def continue_text(unit: GPTUnit, prompt: str, length: int, context: int, temperature: float = 0.8) -> str:
    """Sample bytes after a prompt. Every rank calls it and draws alike: a sharded model computes on all of them at once."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = unit.module(text[:, -context:].to(unit.device))[0, -1].float().cpu()
        following = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)
        text = torch.cat([text, following[None]], 1)
    written = bytes(text[0].tolist()).decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in written)  # an untrained model writes anything


def another_run(own: Path, resume: str) -> Path:
    """Checkpoints of the run that --resume names, or of the newest other run of this script."""
    if resume:
        given = Path(resume)
        return given / "checkpoints" if (given / "checkpoints").is_dir() else given
    newest = (ech.evidence.RunDir.current() or ech.evidence.RunDir(own.parent)).newest_sibling_with_checkpoint("gpt")
    if newest is None:
        raise SystemExit("--resume: no run of this script with a checkpoint is in runs/. Name its folder: --resume runs/NAME")
    return newest.checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="fsdp", help="none, ddp, fsdp, ..., or axes: dp_shard=2,cp=2")
    parser.add_argument("--steps", type=int, default=400, help="optimizer updates")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="text files to learn from; default: Python's own source")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="begin with the newest checkpoint of another run; default: the latest",
    )
    parser.add_argument("--batch", type=int, default=32, help="windows per update over all ranks")
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per update and rank")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--save-every", type=int, default=200, help="updates between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(args.seed)
    if args.data is None:
        folder, pattern = Path(sysconfig.get_paths()["stdlib"]), "*.py"
    else:
        folder, pattern = args.data, "**/*"
    train_files, held_out = split_files(folder, pattern)
    train_set = ByteText(train_files, args.context)
    eval_set = ByteText(held_out, args.context)
    train_loader = ech.Loader(train_set, args.batch, seed=args.seed, accumulation=args.accumulate)
    # A sample of the held-out windows, spread evenly: enough to tell the loss to one percent.
    spread = range(0, len(eval_set), max(1, len(eval_set) // 512))
    eval_loader = ech.Loader(torch.utils.data.Subset(eval_set, spread), args.batch, shuffle=False)

    unit = GPTUnit(
        module=GPT(args.width, args.depth, heads=max(1, args.width // 64), context=args.context),
        layout=args.layout,
        precision=args.precision,
        lr=args.lr,
        steps=args.steps,
    )
    run = ech.evidence.RunDir.current()
    own = run.checkpoints if run is not None else Path("runs") / "gpt" / "checkpoints"
    # This run goes on where it was killed or stopped: started again by the launcher, by a cluster, or under the same --name.
    restore = ech.DistributedCheckpointSaver.restore_from_latest
    if not restore(own, unit, train_dataloader=train_loader) and args.resume is not None:
        other = another_run(own, args.resume)
        if not restore(other, unit, train_dataloader=train_loader):
            raise SystemExit(f"--resume: {other} holds no checkpoint")
    saver = ech.DistributedCheckpointSaver(
        own, save_every_n_updates=args.save_every, keep_last_n_checkpoints=2, async_checkpoint=True
    )

    ech.train(unit, train_loader, max_updates=args.steps, callbacks=[saver])
    ech.evaluate(unit, eval_loader)
    in_stages = unit.prepared.stage[1] > 1  # of a pipeline, which computes losses and predictions of whole batches only
    sample = "" if in_stages else continue_text(unit, "import os\n\n\ndef ", 200, args.context)
    if ech.RankInfo().rank == 0:
        size = len(train_set.bytes) / 1e6
        print(f"\nheld-out loss {unit.eval_loss:.3f} nats per byte after {unit.window.updates} updates ({size:.1f} MB of text)")
        print(
            f"\n--- a continuation of 'def ' ---\n{sample}\n---" if sample else "no sample: the model is in stages of a pipeline"
        )


if __name__ == "__main__":
    main()
