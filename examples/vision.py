"""Train a ResNet of torchvision on images: augmentation and mixup as batches are made, batch norm over all ranks, an EMA.

    echelon run --ranks 2 examples/vision.py               batch statistics are those of both ranks
    echelon run --ranks 2 examples/vision.py --model resnet50 --layout fsdp
    python examples/vision.py --model small --layout none     one process, no launcher, no torchvision

The images are drawn here: a disk, a square, a cross or a ring, anywhere, light on dark, under noise. Evaluations use an
exponential moving average of the weights. Needs `pip install torchvision`; only --model small, which --toy takes, does not.
Started again, the script goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech

SHAPES = ("disk", "square", "cross", "ring")
Batch = tuple[torch.Tensor, torch.Tensor]  # images (B, 3, S, S); how much of each class (B, 4)


def draw(count: int, size: int, seed: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    x, y = (torch.arange(size).view(shape) - size * (0.3 + 0.4 * uniform(count, 1, 1)) for shape in ((1, 1, -1), (1, -1, 1)))
    radius = size * (0.15 + 0.15 * uniform(count, 1, 1))
    distance, square = (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
    cross = (torch.minimum(x.abs(), y.abs()) < radius / 3) & (square < radius)
    masks = torch.stack([distance < radius, square < radius, cross, (distance < radius) & (distance > radius / 2)])
    mask = masks[labels, torch.arange(count), None]  # (count, 1, size, size)
    paper, ink = 0.4 * uniform(count, 3, 1, 1), 0.6 + 0.4 * uniform(count, 3, 1, 1)
    images = torch.where(mask, ink, paper) + 0.1 * torch.randn(count, 3, size, size, generator=generator)
    return torch.utils.data.TensorDataset(images.to(torch.get_default_dtype()), F.one_hot(labels, len(SHAPES)))


def as_batch(samples: list[Any]) -> Batch:
    images, labels = torch.utils.data.default_collate(samples)
    return images, labels.to(images.dtype)


def augmented(samples: list[Any]) -> Batch:
    """Each image mirrored and shifted at random, then mixed with another one, and so are their labels."""
    # Here and not in the training step, so that loader workers can do it. The random numbers are this rank's own, and resume.
    images, labels = as_batch(samples)
    b, _, size, _ = images.shape
    images = torch.where(torch.rand(b, 1, 1, 1) < 0.5, images.flip(3), images)
    padded = F.pad(images, (2, 2, 2, 2), mode="reflect")
    corners = torch.randint(5, (b, 2)).tolist()
    images = torch.stack([image[:, i : i + size, j : j + size] for image, (i, j) in zip(padded, corners, strict=True)])
    share = torch.distributions.Beta(0.2, 0.2).sample((b,)).to(images.dtype)
    share, partner = torch.maximum(share, 1 - share), torch.randperm(b)
    mixed = images * share.view(b, 1, 1, 1) + images[partner] * (1 - share).view(b, 1, 1, 1)
    return mixed, labels * share.view(b, 1) + labels[partner] * (1 - share).view(b, 1)


def small(width: int = 16) -> nn.Module:
    """Images (B, 3, S, S) -> logits (B, 4), without torchvision"""
    layers: list[nn.Module] = []
    for channels, wider, stride in ((3, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
        layers += [nn.Conv2d(channels, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, len(SHAPES)))


def network(name: str) -> nn.Module:
    if name == "small":
        return small()
    import torchvision

    module: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=len(SHAPES))
    return module


class Classify(ech.AutoUnit[Batch]):
    def __init__(self, *, updates: int, **options: Any) -> None:
        super().__init__(**options)
        self.updates, self.accuracy = updates, ech.Mean()

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = data
        logits = self.module(images)
        return F.cross_entropy(logits, labels), logits

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        # A function is not saved, so that a run can be resumed with more epochs; OneCycleLR would keep the old ones.
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)

    def schedule(self, update: int) -> float:
        done = min(1.0, (update + 1) / self.updates)
        return min(5 * done, 0.5 + 0.5 * math.cos(math.pi * done))  # a linear warm-up, then a cosine down to 0

    def on_eval_epoch_start(self, state: ech.State) -> None:
        self.accuracy.reset()

    def on_eval_step_end(self, state: ech.State, data: Batch, step: int, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        right = outputs.argmax(1) == data[1].argmax(1)
        self.accuracy.update(right.double().mean(), len(right))  # the mean over all ranks' images, each counted once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="resnet18 (default), resnet50, or another of torchvision; small needs none (with --toy default)"
    )
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1 or zero2")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--toy", action="store_true", help="small images that are learned in seconds")
    parser.add_argument("--checkpoints", default="runs/vision/checkpoints")
    args = parser.parse_args()

    ech.init_from_env()
    ech.seed(0)  # every rank builds the same model
    count, size = (512, 16) if args.toy else (8192, 32)
    train_loader = ech.Loader(draw(count, size, seed=1), global_batch=32 if args.toy else 64, collate_fn=augmented)
    eval_loader = ech.Loader(draw(count // 4, size, seed=2), global_batch=128, shuffle=False, collate_fn=as_batch)
    unit = Classify(
        module=nn.SyncBatchNorm.convert_sync_batchnorm(network(args.model or ("small" if args.toy else "resnet18"))),
        layout=args.layout,
        ema=0.98,
        updates=args.epochs * train_loader.global_batches,
    )
    checkpoints = ech.Checkpoints(args.checkpoints, every="epoch", keep=2)
    ech.train(unit, train_loader, max_epochs=args.epochs, eval=eval_loader, checkpoints=checkpoints)

    accuracy = unit.accuracy.compute()  # every rank calls it
    if ech.RankInfo().rank == 0:
        print(f"accuracy {accuracy:.3f} of the averaged weights on {count // 4} new images")


if __name__ == "__main__":
    main()
