"""RIGHT: nested (jagged) tensors in the batch; weight in tokens."""

import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech

V = 20


def rows(n=320):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(V, (int(torch.randint(2, 12, (1,), generator=g)),), generator=g) for _ in range(n)]


def collate(samples):
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.a, self.out = nn.Embedding(V, d), nn.Linear(d, d), nn.Linear(d, V)

    def forward(self, flat):
        return self.out(F.silu(self.a(self.emb(flat))))


ech.seed(0)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
loader = ech.Loader(rows(), global_batch=16, collate_fn=collate)
model, opt, loader = ech.prepare(net, opt, loader)
for _epoch in ech.epochs(loader, 1):
    for nested in loader:
        flat = nested.values()
        with ech.window(model, weight=len(flat)) as window:
            window.backward(F.cross_entropy(model(flat), (flat * 3 + 1) % V))
            opt.step()
            opt.zero_grad()
