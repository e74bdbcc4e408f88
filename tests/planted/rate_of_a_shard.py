"""One rank steps with another learning rate, on its part of the parameters."""

from __future__ import annotations

from common import Auto, dist, ech, loader, model, nn, torch


class Rated(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(module.parameters(), lr=0.1 if dist.get_rank() == 0 else 0.2), None


ech.train(Rated(module=model(), layout="fsdp"), loader(), max_epochs=1)
