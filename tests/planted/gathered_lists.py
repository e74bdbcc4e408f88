"""Lists of other lengths whose mean is over the items of all ranks: nothing that one process can add up by itself."""

from __future__ import annotations

from common import Auto, ech, model, nn, torch


class Bags(Auto):
    def compute_loss(self, state: ech.State, data: list[torch.Tensor]) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        losses = torch.cat([self.module(bag).square().flatten() for bag in data])
        return losses.sum() / ech.all_mean(float(len(losses))), None


generator = torch.Generator().manual_seed(0)
bags = [torch.randn(1 + i % 5, 4, generator=generator) for i in range(64)]
ech.train(Bags(module=nn.Sequential(model()), layout="ddp"), ech.Loader(bags, 16, collate_fn=list), max_epochs=1)
