"""A loop of one's own that counts epochs and batches by itself, leaves epochs early, and steps behind its window."""

import torch
from torch import nn

import echelon as ech

torch.manual_seed(0)
x = torch.randn(44, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(data, 16, shuffle=True)
model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="fsdp")
for _ in range(10):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        counts = (y > 0) + 1.0
        with ech.window(optimizer, weight=counts.sum()) as window:
            window.backward((counts * (model(x) - y) ** 2).sum() / counts.sum())
        optimizer.step()
        if i == 1:
            break
