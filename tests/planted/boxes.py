"""Detection with dropout: a list of mappings, a tensor of three rows and other numbers of boxes in each; weighed by boxes."""

from __future__ import annotations

from typing import Any

from common import Auto, ech, nn, torch

Scene = dict[str, torch.Tensor]


class Boxes(Auto):
    def compute_loss(self, state: ech.State, data: list[Scene]) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        found = self.module(torch.stack([scene["image"] for scene in data]).flatten(1))
        losses = [(boxes - found[i]).square().sum() for i, scene in enumerate(data) for boxes in scene["boxes"]]
        return torch.stack(losses).sum() / len(losses), None

    def weight(self, data: list[Scene]) -> int:  # type: ignore[override]
        return sum(len(scene["boxes"]) for scene in data)


def scenes(count: int = 64) -> list[Scene]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"image": torch.randn(3, 4, generator=generator), "boxes": torch.randn(1 + i % 4, 2, generator=generator)}
        for i in range(count)
    ]


def detector() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))


def main(unit: type[Any] = Boxes) -> None:
    ech.train(unit(module=detector(), layout="ddp"), ech.Loader(scenes(), 16, collate_fn=list), max_epochs=3)
