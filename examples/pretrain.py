"""Pretrain a GPT from token files: documents packed into rows, two sources mixed by weight, the loss over tokens that count.

    echelon run --ranks 2 examples/pretrain.py
    echelon run --ranks 4 examples/pretrain.py --layout dp_shard=2,tp=2

The first start writes the token files: Python's own source, and the docstrings in it, as bytes. Started again, the script goes on
from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech


def documents(files: list[Path], docstrings: bool) -> Iterator[bytes]:
    for text in (path.read_text(errors="replace") for path in files):
        if docstrings:
            documented = (n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
            yield from (said.encode() for node in documented if (said := ast.get_docstring(node)))
        else:
            yield text.encode()


def tokens(folder: Path, name: str, files: list[Path], docstrings: bool) -> ech.Tokens:
    """Rank 0 writes the token file, and all ranks read it: each maps it into memory."""
    path = folder / f"{name}.bin"
    if ech.is_main() and not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        ech.data.write_tokens(path, (list(document) for document in documents(files, docstrings)), dtype="uint16")
    ech.all_mean(0.0)  # the others wait for it
    return ech.Tokens(path)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # A token attends to the tokens before it in its own document. A document that a row cuts keeps counting positions.
        sees = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        x = self.embed(ids) + self.place(positions % self.place.num_embeddings)
        for block in self.blocks:
            x = block(x, sees)
        return self.head(self.norm(x))


class Pretrain(ech.AutoUnit[Any]):  # batches have inputs, targets, documents and positions: (B, T) each
    weight_unit = "tokens"

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        logits = self.module(data.inputs, data.documents, data.positions)
        return F.cross_entropy(logits.flatten(0, 1), data.targets.flatten()), None

    def weight(self, data: Any) -> torch.Tensor:
        return ech.count_tokens(data.targets, next_token=False)  # targets of -100 (padding, a document's last token) do not count

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="fsdp", help="ddp, fsdp, hsdp, zero1; or axes, such as dp_shard=2,tp=2")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--toy", action="store_true", help="a narrow model and short rows: seconds")
    parser.add_argument("--checkpoints", default="runs/pretrain/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    context, width, depth = (64, 32, 2) if args.toy else (256, 128, 4)
    train_files, held_out = ech.data.split_files(Path(sysconfig.get_paths()["stdlib"]), "*.py")
    folder = Path(args.checkpoints).parent / "tokens"
    sources = {name: tokens(folder, name, train_files, name == "docstrings") for name in ("source", "docstrings")}
    data = ech.Mixture({name: ech.Packed(each, context) for name, each in sources.items()}, {"source": 0.7, "docstrings": 0.3})
    held_out_rows = ech.Packed(tokens(folder, "held_out", held_out[:4], docstrings=False), context)

    unit = Pretrain(module=GPT(width, depth, context), layout=args.layout, clip_grad_norm=1.0)
    ech.train(
        unit,
        ech.Loader(data, global_batch=32),
        max_updates=args.updates,
        eval=ech.Loader(held_out_rows, global_batch=32, shuffle=False),
        eval_every=args.updates,
        checkpoints=args.checkpoints,
    )
    if ech.is_main():
        print(f"held-out loss {unit.eval_loss:.3f} nats per byte after {args.updates} updates")


if __name__ == "__main__":
    main()
