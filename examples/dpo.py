"""Preference tuning (DPO): a policy learns to prefer the chosen answer to the rejected one, held near a frozen reference.

    echelon run --ranks 2 examples/dpo.py
    echelon run --ranks 2 examples/dpo.py --layout fsdp         policy and reference are both divided over the ranks

The loss is -log sigmoid(beta (policy's log-ratio - reference's log-ratio)), as in Rafailov et al. 2023 (arXiv 2305.18290).
Prompts are digits; the chosen answer counts up from them, the rejected one down. Started again, the script goes on from its
newest checkpoint.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech

WORDS, PROMPT, ANSWER = 16, 2, 6
Pair = dict[str, torch.Tensor]  # "chosen", "rejected": (B, PROMPT + ANSWER)


class Policy(nn.Module):
    """A language model: (B, T) -> (B, T, WORDS)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def log_probability(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of each answer, given its prompt: (B,)"""
    each = F.log_softmax(model(ids[:, :-1]), dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return each[:, PROMPT - 1 :].sum(1)


class DPO(ech.AutoUnit[Pair]):
    beta = 0.1

    def __init__(self, *, module: nn.Module, layout: str, **options: Any) -> None:
        # Copied before the module is sharded. It has no optimizer: its weights never change, and need no gradient.
        reference = copy.deepcopy(module).requires_grad_(False)
        super().__init__(module=module, layout=layout, **options)
        self.reference = ech.layouts.prepare_module(reference, self.device, layout=layout)

    def compute_loss(self, state: ech.State, data: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([data["chosen"], data["rejected"]])  # one pass for both
        with torch.no_grad():
            reference = log_probability(self.reference, both).chunk(2)
        policy = log_probability(self.module, both).chunk(2)
        margin = self.beta * ((policy[0] - policy[1]) - (reference[0] - reference[1]))
        state.log("accuracy", (margin > 0).double().mean())
        return -F.logsigmoid(margin).mean(), margin

    def weight(self, data: Pair) -> int:
        return len(data["chosen"])

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.0), None


def pairs(count: int, seed: int) -> list[Pair]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(WORDS, (count, 1), generator=generator)
    steps, prompt = torch.arange(1, ANSWER + 1), starts.expand(count, PROMPT)
    up, down = (torch.cat([prompt, (starts + sign * steps) % WORDS], 1) for sign in (1, -1))
    return [{"chosen": chosen, "rejected": rejected} for chosen, rejected in zip(up, down, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1, zero2")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--toy", action="store_true", help="fewer pairs: seconds")
    parser.add_argument("--checkpoints", default="runs/dpo/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    unit = DPO(module=Policy(), layout=args.layout)
    train_loader = ech.Loader(pairs(512 if args.toy else 4096, seed=1), global_batch=32)
    eval_loader = ech.Loader(pairs(256, seed=2), global_batch=64, shuffle=False)
    ech.train(unit, train_loader, max_epochs=args.epochs, eval=eval_loader, checkpoints=args.checkpoints)
    if ech.is_main():
        print(f"held-out preference loss {unit.eval_loss:.3f} after {args.epochs} epochs; ln 2 = 0.693 prefers nothing")


if __name__ == "__main__":
    main()
