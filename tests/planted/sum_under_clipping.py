"""Two sums over a batch, whose gradient is clipped."""

from __future__ import annotations

from common import Auto, Batch, Rows, ech, model, nn, torch


class Sum(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        out = self.module(data[0])
        return nn.functional.mse_loss(out, data[1], reduction="sum") + 0.1 * torch.sum(out.exp() - out), None


ech.train(Sum(module=model(nn.Dropout(0.1)), layout="ddp", clip_grad_norm=0.1), ech.Loader(Rows(), 16), max_epochs=3)
