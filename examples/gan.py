"""Train a generative adversarial network: two modules, two optimizers, and a training step of one's own.

    echelon run --ranks 2 examples/gan.py
    echelon run --ranks 2 examples/gan.py --layout fsdp
    python examples/gan.py --layout none                 one process, no launcher

A `TrainUnit` holds modules and optimizers as plain attributes, and saves them all. Its step is plain PyTorch: what
`prepare_module` returns reduces its gradients over the ranks in `backward`. Started again, the script goes on from its newest
checkpoint.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import softplus

import echelon as ech

NOISE = 8
Batch = tuple[torch.Tensor, torch.Tensor]  # real points (B, 2); noise for as many others (B, NOISE)


def ring(count: int, seed: int) -> torch.Tensor:
    """Points in eight clusters on a circle: (count, 2)"""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randint(8, (count,), generator=generator) * (2 * math.pi / 8)
    points = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)
    return points.to(torch.get_default_dtype())


def with_noise(samples: list[torch.Tensor]) -> Batch:
    """Drawn with the batch and not in the step, so that `echelon prove` can compare the step."""
    return torch.stack(samples), torch.randn(len(samples), NOISE)


def mlp(inputs: int, outputs: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs)
    )


class Gan(ech.TrainUnit[Batch]):
    may_stop = False  # nothing in a step calls state.stop(), so that no rank has to wait for the others to say so

    def __init__(self, device: torch.device, layout: str, width: int) -> None:
        super().__init__()
        self.device = device
        self.generator = ech.layouts.prepare_module(mlp(NOISE, 2, width), device, layout=layout)
        self.critic = ech.layouts.prepare_module(mlp(2, 1, width), device, layout=layout)
        # After the modules were prepared: a sharded module has other parameters than before.
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=3e-4, betas=(0.5, 0.99))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=6e-4, betas=(0.5, 0.99))

    def train_step(self, state: ech.State, data: Batch) -> None:
        real, noise = (part.to(self.device) for part in data)
        made = self.generator(noise)

        # Phase 1: the critic learns to tell them apart. One forward pass over both, so that DDP reduces once.
        of_real, of_made = self.critic(torch.cat([real, made.detach()])).chunk(2)
        self.critic_optimizer.zero_grad()
        (softplus(-of_real) + softplus(of_made)).mean().backward()
        self.critic_optimizer.step()

        # Phase 2: the generator learns what the critic takes for real. The critic's gradients are left to be cleared.
        self.generator_optimizer.zero_grad()
        softplus(-self.critic(made)).mean().backward()
        self.generator_optimizer.step()


@torch.no_grad()
def distance(unit: Gan, real: torch.Tensor) -> float:
    """Energy distance of as many made points from the real ones: 0 for the same distribution. Every rank calls it."""
    noise = torch.randn(len(real), NOISE, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    made = unit.generator(noise.to(unit.device, real.dtype)).cpu()
    between, within = torch.cdist(real, made).mean(), (torch.cdist(real, real) + torch.cdist(made, made)).mean()
    return float(2 * between - within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp or hsdp")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--toy", action="store_true", help="fewer points and small modules: seconds")
    parser.add_argument("--checkpoints", default="runs/gan/checkpoints")
    args = parser.parse_args()

    device = ech.init_from_env()
    ech.seed(0)  # every rank builds the same modules
    count, width = (2048, 32) if args.toy else (16384, 128)
    loader = ech.Loader(ring(count, seed=1), global_batch=128, collate_fn=with_noise, tail="drop")
    unit, held_out = Gan(device, args.layout, width), ring(1024, seed=2)
    before = distance(unit, held_out)
    torch.manual_seed(1 + ech.RankInfo().rank)  # ranks draw other noise
    ech.train(unit, loader, max_epochs=args.epochs, checkpoints=args.checkpoints)

    after = distance(unit, held_out)
    if ech.RankInfo().rank == 0:
        print(f"energy distance of made from real points: {after:.4f}; untrained {before:.4f}")


if __name__ == "__main__":
    main()
