"""Denoising diffusion (DDPM) on points of the plane: random steps and noise in the loss, samples from averaged weights.

    echelon run --ranks 2 examples/diffusion.py
    echelon run --ranks 2 examples/diffusion.py --layout fsdp
    python examples/diffusion.py --layout none           one process, no launcher

Each rank draws its own noise, and a resumed run draws the same noise as one that never stopped. Started again, the script goes on
from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import nn

import echelon as ech

STEPS = 50  # of noise


# The share of the signal's variance that remains after each step: a cosine from 1 to almost 0.
KEPT = ((torch.arange(1, STEPS + 1) / STEPS + 0.008) / 1.008 * math.pi / 2).cos().square().clamp(1e-3, 1.0)


def moons(count: int, seed: int) -> torch.Tensor:
    """Points on two interleaved half circles: (count, 2)"""
    points, _ = make_moons(count, noise=0.02, random_state=seed)
    return torch.tensor(points - points.mean(0), dtype=torch.get_default_dtype())


class Denoiser(nn.Module):
    """Noisy points (B, 2) and their noise level, 0 .. STEPS - 1 (B,) -> the noise in them (B, 2)"""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.steps, self.points = nn.Embedding(STEPS, width), nn.Linear(2 * 9, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.noise = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        waves = [wave(k * x) for k in (1, 2, 4, 8) for wave in (torch.sin, torch.cos)]  # for fine detail
        h = self.points(torch.cat([x, *waves], 1)) + self.steps(step)
        for block in self.blocks:
            h = h + block(h)
        return self.noise(h)


class Diffusion(ech.AutoUnit[torch.Tensor]):
    def __init__(self, *, updates: int, **options: object) -> None:
        super().__init__(clip_grad_norm=1.0, **options)
        self.updates = updates

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        step = torch.randint(STEPS, (len(data),), device=data.device)
        noise = torch.randn_like(data)
        kept = KEPT.to(data)[step, None]
        return F.mse_loss(self.module(kept.sqrt() * data + (1 - kept).sqrt() * noise, step), noise), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        # The function is not saved, so a run can resume with more epochs; CosineAnnealingLR would keep the old number.
        return optimizer, torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: 0.5 + 0.5 * math.cos(math.pi * min(1.0, update / self.updates))
        )


@torch.no_grad()
def sample(unit: Diffusion, count: int) -> torch.Tensor:
    """Points made from noise. Every rank calls it and draws the same numbers: a sharded module computes on all ranks at once."""
    generator, kept = torch.Generator().manual_seed(0), KEPT.to(unit.device)
    x = torch.randn(count, 2, generator=generator).to(unit.device)
    for step in reversed(range(STEPS)):
        before = kept[step - 1] if step else torch.ones_like(kept[0])
        guess = unit.swa_model(x, torch.full((count,), step, device=x.device))
        clean = ((x - (1 - kept[step]).sqrt() * guess) / kept[step].sqrt()).clamp(-3, 3)  # points are within these bounds
        # The mean and variance of the step before, given this one and the clean points (Ho et al. 2020, equation 7).
        alpha = kept[step] / before
        x = (before.sqrt() * (1 - alpha) * clean + alpha.sqrt() * (1 - before) * x) / (1 - kept[step])
        noise = torch.randn(count, 2, generator=generator).to(x)
        x = x + ((1 - before) / (1 - kept[step]) * (1 - alpha)).sqrt() * noise
    return x.cpu()


def distance(made: torch.Tensor, real: torch.Tensor) -> float:
    """The mean distance of a made point from the nearest real one."""
    return torch.cdist(made, real.to(made)).amin(1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1 or zero2")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--toy", action="store_true", help="a smaller module and fewer points: seconds")
    parser.add_argument("--checkpoints", default="runs/diffusion/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same module
    count, width, depth = (2048, 64, 2) if args.toy else (32768, 256, 4)
    loader = ech.Loader(moons(count, seed=1), global_batch=64 if args.toy else 256)
    module = Denoiser(width, depth)
    unit = Diffusion(module=module, layout=args.layout, ema=0.99, updates=args.epochs * loader.global_batches)
    ech.train(unit, loader, max_epochs=args.epochs, checkpoints=args.checkpoints)

    real, made = moons(4096, seed=2), sample(unit, 512)
    if ech.is_main():
        noise = torch.randn(512, 2, generator=torch.Generator().manual_seed(3))
        print(f"made points are {distance(made, real):.3f} from the moons, in the mean; noise {distance(noise, real):.3f}")


if __name__ == "__main__":
    main()
