"""Batches that are lists of samples of different lengths, and a mean over them."""

from __future__ import annotations

from common import Auto, ech, model, nn, torch

Lists = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


class Bags(Auto):
    def compute_loss(self, state: ech.State, data: Lists) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        losses = [nn.functional.mse_loss(self.module(bag.mean(0)), y) for bag, y in zip(*data, strict=True)]
        return torch.stack(losses).mean(), None

    def weight(self, data: Lists) -> int:  # type: ignore[override]
        return len(data[0])


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Lists:
    return tuple(zip(*samples, strict=True))  # type: ignore[return-value]


generator = torch.Generator().manual_seed(0)
bags = [(torch.randn(2 + i % 4, 4, generator=generator), torch.randn(1, generator=generator)) for i in range(64)]
ech.train(Bags(module=model(), layout="ddp"), ech.Loader(bags, 16, collate_fn=collate), max_epochs=3)
