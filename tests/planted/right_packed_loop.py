"""RIGHT: packed sequences in the batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import echelon as ech


def series(n=320):
    g = torch.Generator().manual_seed(0)
    out = []
    for _ in range(n):
        k = int(torch.randint(3, 15, (1,), generator=g))
        s = torch.randn(k, 3, generator=g)
        out.append((s, s.sum() / k))
    return out


def collate(samples):
    return pack_sequence([s[0] for s in samples], enforce_sorted=False), torch.stack([s[1] for s in samples])


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, d, batch_first=True), nn.Linear(d, 1)

    def forward(self, packed):
        _, (h, _) = self.rnn(packed)
        return self.out(h[-1]).squeeze(1)


ech.seed(0)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
loader = ech.Loader(series(), global_batch=16, collate_fn=collate)
model, opt, loader = ech.prepare(net, opt, loader)
for _epoch in ech.epochs(loader, 1):
    for packed, y in loader:
        with ech.window(model, weight=len(y)) as window:
            window.backward(F.l1_loss(model(packed), y))
            opt.step()
            opt.zero_grad()
