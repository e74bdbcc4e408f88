"""Small losses, which a forward pass in float16 takes for gradients of zero, where the module is sharded; else in bfloat16.

With "right", in bfloat16 everywhere.
"""

from __future__ import annotations

import sys

from common import Auto, Batch, dist, ech, loader, model, nn, torch


class Small(Auto):
    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        narrow = "right" not in sys.argv and dist.is_initialized() and dist.get_world_size() > 1
        with torch.autocast("cpu", torch.float16 if narrow else torch.bfloat16):
            out = self.module(data[0])
        return 1e-6 * nn.functional.mse_loss(out.float(), data[1]), None


ech.train(Small(module=model(), layout="fsdp"), loader(), max_epochs=1)
