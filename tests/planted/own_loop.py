"""A loop of one's own, which is right; with the argument "wrong" each rank weighs its loss as it likes.

With "looks" it looks at its data first.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import echelon as ech

torch.manual_seed(0)
x = torch.randn(44, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer, scheduler, loader = ech.prepare(model, optimizer, scheduler, ech.Loader(data, 16))
if "looks" in sys.argv:
    next(iter(loader))
    list(loader)
for _ in ech.epochs(loader, 10):
    for x, y in loader:
        with ech.window(model) as window:
            loss = nn.functional.mse_loss(model(x), y)
            if "wrong" in sys.argv and dist.is_initialized() and dist.get_rank():
                loss = loss * 2
            window.backward(loss)
            window.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
