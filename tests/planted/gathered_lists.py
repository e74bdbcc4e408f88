"""Items laid end to end, with their bags in a row beside, and a mean over those of all ranks: one process cannot add it up."""

from __future__ import annotations

from common import Auto, ech, model, nn, torch


class Bags(Auto):
    def compute_loss(self, state: ech.State, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        losses = self.module(data["items"])[data["order"][0]].square()
        return losses.sum() / ech.all_mean(float(len(losses))), None


def collate(bags: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    items = torch.cat(bags)
    return {"items": items, "order": torch.arange(len(items))[None]}


generator = torch.Generator().manual_seed(0)
bags = [torch.randn(1 + i % 5, 4, generator=generator) for i in range(64)]
ech.train(Bags(module=nn.Sequential(model()), layout="ddp"), ech.Loader(bags, 16, collate_fn=collate), max_epochs=1)
