"""Each rank clamps its own gradient, before the mean over the ranks."""

import torch
from torch.nn.functional import mse_loss

import echelon as ech

ech.seed(0)
samples = torch.randn(128, 4)
model = torch.nn.Linear(4, 1)
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ech.Loader(torch.utils.data.TensorDataset(samples, samples.pow(2).sum(1, keepdim=True)), global_batch=16)
model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="ddp")
for _ in ech.epochs(loader, 1):
    for x, y in loader:
        with ech.window(model) as window:
            window.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
