"""The bias behind a batch norm learns a fiftieth faster on several ranks: far below what rounding does to it in float32."""

from __future__ import annotations

from gates import Gated, nn, torch, train


class Faster(Gated):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        if torch.distributed.get_world_size() > 1:
            bias = next(p for n, p in module.named_parameters() if n.endswith("3.1.bias"))
            bias.register_hook(lambda gradient: gradient * 1.02)
        return torch.optim.SGD(module.parameters(), lr=0.01), None


train(Faster)
