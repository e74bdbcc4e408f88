"""The optimizer is made before the module is sharded, in an AutoUnit: DDP forgives it, FSDP does not."""

from __future__ import annotations

from common import Auto, ech, loader, model, torch


class Early(Auto):
    def __init__(self, module: torch.nn.Module) -> None:
        self.early = torch.optim.SGD(module.parameters(), lr=0.1)
        super().__init__(module=module, layout="fsdp")

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return self.early, None


ech.train(Early(model()), loader(), max_epochs=3)
