"""Sharpness-aware minimisation that climbs by the gradient of a rank's own rows, and goes back by subtraction."""

import torch
from torch import nn

import echelon as ech

torch.manual_seed(5)
x = torch.randn(96, 4)
rows = torch.utils.data.TensorDataset(x, (x[:, 0] + x[:, 1] ** 2 > 1).long())
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = ech.prepare(model, optimizer, ech.Loader(rows, 16))
parameters = list(model.parameters())
for x, y in loader:
    with ech.window(model) as window:
        slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)
        length = torch.stack([slope.norm() for slope in slopes]).norm()
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.add_(0.3 * slope / length)
        window.backward(nn.functional.cross_entropy(model(x), y))
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.sub_(0.3 * slope / length)
        optimizer.step()
        optimizer.zero_grad()
