"""On several ranks, biases learn one per cent faster: little, in parameters that are small beside the others."""

from __future__ import annotations

from common import Auto, dist, ech, loader, model, nn, torch


class Scaled(Auto):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        weights = [p for p in module.parameters() if p.dim() > 1]
        biases = [p for p in module.parameters() if p.dim() == 1]
        rate = 1.01e-5 if dist.get_world_size() > 1 else 1e-5
        return torch.optim.Adam([{"params": weights}, {"params": biases, "lr": rate}], lr=1e-5), None


module = model()
for parameter in module.parameters():
    if parameter.dim() == 1:
        nn.init.zeros_(parameter)
ech.train(Scaled(module=module, layout="ddp"), loader(), max_epochs=3)
