"""Nothing seeds numpy and Python: they draw first weights, which rank 0 sends to all, a name, and each rank's noise."""

from __future__ import annotations

import random

import numpy as np

from common import Auto, Rows, ech, model, torch


class Noisy(Rows):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.from_numpy(np.random.normal(size=4)).to(x), y


module = model()
with torch.no_grad():
    module[0].weight.copy_(torch.from_numpy(np.random.normal(0, 0.5, module[0].weight.shape)))
name = f"run-{random.random()}"
ech.train(Auto(module=module, layout="ddp"), ech.Loader(Noisy(), 16), max_epochs=1)
