"""Inputs are projected by a matrix that Python's random draws, which nothing seeds: each rank has other features."""

from __future__ import annotations

import random

from common import Rows, ech, model, nn, torch

matrix = torch.tensor([[random.gauss(0, 1) for _ in range(4)] for _ in range(4)])
module = model()
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
module, optimizer, loader = ech.prepare(module, optimizer, torch.utils.data.DataLoader(Rows(), 8), layout="ddp")
for x, y in loader:
    with ech.window(module) as window:
        window.backward(nn.functional.mse_loss(module((x @ matrix.to(x)).tanh()), y))
        optimizer.step()
        optimizer.zero_grad()
