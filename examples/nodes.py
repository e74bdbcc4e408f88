"""Pretrain over several nodes: tensor parallelism within a node, pipeline stages between them, and shards over the rest.

    echelon submit --nodes 4 --ranks-per-node 8 --gpus-per-node 8 --time 12h --dry-run \\
        examples/nodes.py --layout pp=2,dp_shard=4,tp=4         32 GPUs; without --dry-run it is submitted
    echelon run --ranks 4 examples/nodes.py --toy --layout pp=2,tp=2      the same on four processes of this machine
    echelon prove --layouts pp=2,tp=2 --ranks 2 examples/nodes.py --toy   do they train what one process trains?

The script does not mention nodes. The model is a Llama of transformers, which has the plan by which tp splits its layers; pp cuts
the model between its blocks. Needs `pip install transformers`. A job that reaches its time limit is queued again and goes on.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf

import echelon as ech


class Pretrain(ech.AutoUnit[Any]):  # batches are pairs of inputs and targets: (B, T) each
    weight_unit = "tokens"

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, None]:
        inputs, targets = data
        logits = self.module(input_ids=inputs).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), None

    def weight(self, data: Any) -> int:
        return data[1].numel()

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="tp=2", help="axes and their sizes, such as pp=2,dp_shard=4,tp=4; or fsdp, ddp")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--toy", action="store_true", help="a narrow model and short rows: seconds")
    parser.add_argument("--checkpoints", default="runs/nodes/checkpoints", help="a folder that all nodes see")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)
    width, depth, context, batch = (32, 2, 32, 16) if args.toy else (256, 8, 256, 64)
    config = tf.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=depth, num_attention_heads=8
    )
    with ech.on_meta():  # no memory: each rank later fills the parameters that it keeps, with one process's values
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    train_files, held_out = ech.data.split_files(Path(sysconfig.get_paths()["stdlib"]), "*.py")
    unit = Pretrain(module=model, layout=args.layout, accumulate=4, clip_grad_norm=1.0)  # pp: 4 in flight
    ech.train(
        unit,
        ech.Loader(ech.data.ByteText(train_files, context), global_batch=batch),
        max_updates=args.updates,
        eval=ech.Loader(ech.data.ByteText(held_out[:4], context), global_batch=batch, shuffle=False),
        eval_every=args.updates,
        checkpoints=ech.Checkpoints(args.checkpoints, every="30min", asynchronous=True),
    )
    if ech.is_main():
        print(f"held-out loss {unit.eval_loss:.3f} nats per byte after {args.updates} updates")


if __name__ == "__main__":
    main()
