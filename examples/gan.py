"""Train a generative adversarial network: two models and two optimizers in a loop of your own.

    echelon run --ranks 2 examples/gan.py
    echelon run --ranks 2 examples/gan.py --layout fsdp
    python examples/gan.py --layout none                 one process, no launcher

Each batch has one window, with two backward passes and two optimizer steps. Started again, the script goes on from its newest
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
Batch = tuple[torch.Tensor, torch.Tensor]  # real points (B, 2); noise for as many made points (B, NOISE)


def ring(count: int, seed: int) -> torch.Tensor:
    """Points in eight clusters on a circle: (count, 2)"""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randint(8, (count,), generator=generator) * (2 * math.pi / 8)
    points = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)
    return points.to(torch.get_default_dtype())


def with_noise(samples: list[torch.Tensor]) -> Batch:
    """Noise is drawn with the batch, not in the step, so that `echelon prove` can compare the step."""
    return torch.stack(samples), torch.randn(len(samples), NOISE)


def mlp(inputs: int, outputs: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs)
    )


def distance(generator: nn.Module, real: torch.Tensor) -> float:
    """Energy distance between the real points and as many made ones: 0 if the distributions are equal. Every rank calls it."""
    noise = torch.randn(len(real), NOISE, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with ech.evaluating(generator):
        made = generator(noise.to(next(generator.parameters()).device, real.dtype)).cpu()
    between, within = torch.cdist(real, made).mean(), (torch.cdist(real, real) + torch.cdist(made, made)).mean()
    return float(2 * between - within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp or hsdp")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--toy", action="store_true", help="fewer points and small modules: seconds")
    parser.add_argument("--checkpoints", default="runs/gan/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same models
    count, width = (2048, 32) if args.toy else (16384, 128)
    generator, critic = mlp(NOISE, 2, width), mlp(2, 1, width)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=3e-4, betas=(0.5, 0.99))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=6e-4, betas=(0.5, 0.99))
    loader = ech.Loader(ring(count, seed=1), global_batch=128, collate_fn=with_noise, tail="drop")
    generator, critic, generator_optimizer, critic_optimizer, loader = ech.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader, layout=args.layout, checkpoints=args.checkpoints
    )
    held_out = ring(1024, seed=2)
    for _epoch in ech.epochs(loader, args.epochs):
        for real, noise in loader:
            with ech.window(generator) as window:
                made = generator(noise)
                # The critic learns to tell them apart.
                critic_optimizer.zero_grad()
                window.backward((softplus(-critic(real)) + softplus(critic(made.detach()))).mean())
                critic_optimizer.step()
                # The generator learns to make what the critic takes for real. The critic's gradients from it are cleared above.
                generator_optimizer.zero_grad()
                window.backward(softplus(-critic(made)).mean())
                generator_optimizer.step()

    found = distance(generator, held_out)  # every rank calls it
    if ech.is_main():
        print(f"energy distance of made from real points: {found:.4f}; of noise it is about 0.5")


if __name__ == "__main__":
    main()
