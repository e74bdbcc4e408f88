"""torch.compile by hand under torch's own memory budget, which computes dropout again in the backward pass."""

from __future__ import annotations

from common import Auto, Batch, ech, loader, nn, torch


class Compiled(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        return nn.functional.mse_loss(fast(data[0]), data[1]), None


torch._functorch.config.activation_memory_budget = 0.5
torch.manual_seed(3)
layers = [nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1)]
unit = Compiled(module=nn.Sequential(*layers), layout="ddp")
fast = torch.compile(unit.module, backend="aot_eager")
ech.train(unit, loader(), max_epochs=1)
