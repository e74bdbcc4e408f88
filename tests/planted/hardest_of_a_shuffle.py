"""The hardest half of each rank's batch, in an order that is drawn after the model: in float64 it would be another one."""

from __future__ import annotations

from torch.utils.data import DataLoader

from common import Rows, ech, nn, torch

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
model, optimizer, loader = ech.prepare(net, optimizer, DataLoader(Rows(), 8, shuffle=True), layout="ddp")
for _ in range(3):
    for x, y in loader:
        with ech.window(model) as window:
            losses = (model(x) - y).square().flatten()
            window.backward(losses.topk(len(losses) // 2).values.mean())
            optimizer.step()
            optimizer.zero_grad()
