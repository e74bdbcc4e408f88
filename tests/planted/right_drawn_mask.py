"""A loop's mean over what a drawn mask hides, which counts what is hidden; with noise for no sample, and dropout across them."""

from __future__ import annotations

from torch.utils.data import DataLoader

from common import Rows, ech, model, nn, torch

net = model()
net, optimizer, loader = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), DataLoader(Rows(), 16), layout="ddp")
for x, _ in loader:
    hidden = torch.rand(x.shape) < 0.3
    with ech.window(net, weight=hidden.sum()) as window:
        made = net(nn.functional.dropout(x.masked_fill(hidden, 0.0).T, 0.1).T + 0.1 * torch.randn(4))
        window.backward((made - x)[hidden].square().mean())
        optimizer.step()
        optimizer.zero_grad()
