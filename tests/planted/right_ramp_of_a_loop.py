"""A loop whose penalty follows the number of the update, and is left out in every second one: nothing is wrong."""

import torch
from torch import nn

import echelon as ech

numbers = torch.Generator().manual_seed(0)
x = torch.randn(240, 6, generator=numbers)
ech.seed(0)
model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = ech.Loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), global_batch=24)
model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="ddp")
for _ in ech.epochs(loader, 2):
    for inputs, targets in loader:
        with ech.window(model) as window:
            given = model(inputs)
            loss = (given - targets).pow(2).mean()
            if window.update % 2:
                loss = loss + min(1.0, window.update / 5) * given.abs().mean()
            window.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
