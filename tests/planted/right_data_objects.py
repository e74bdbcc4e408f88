"""Graph regression: graphs of different sizes are laid end to end by the collate function."""

import torch
from torch import nn

import echelon as ech


def graphs(n=256):
    g = torch.Generator().manual_seed(0)
    out = []
    for _ in range(n):
        k = int(torch.randint(4, 12, (1,), generator=g))
        x = torch.randn(k, 6, generator=g)
        e = torch.randint(k, (2, 3 * k), generator=g)
        out.append((x, e, (x[e[0]] * x[e[1]]).sum() / k))
    return out


class Data:
    """As torch_geometric's: attributes, and `to`"""

    def __init__(self, x, edges, owner, y):
        self.x, self.edges, self.owner, self.y = x, edges, owner, y

    def to(self, device):
        return Data(*(t.to(device) for t in (self.x, self.edges, self.owner, self.y)))

    def __len__(self):
        return len(self.y)


def lay(samples):
    xs, es, owner, shift = [], [], [], 0
    for i, (x, e, _) in enumerate(samples):
        xs.append(x)
        es.append(e + shift)
        owner.append(torch.full((len(x),), i))
        shift += len(x)
    return Data(torch.cat(xs), torch.cat(es, 1), torch.cat(owner), torch.stack([s[2] for s in samples]))


class Conv(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.msg = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU(), nn.Linear(d, d))
        self.upd = nn.GRUCell(d, d)

    def forward(self, h, edges):
        src, dst = edges
        m = self.msg(torch.cat([h[src], h[dst]], 1))
        return self.upd(torch.zeros_like(h).index_add(0, dst, m), h)


class GNN(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.convs = nn.ModuleList(Conv(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, 1)

    def forward(self, batch):
        h = self.inp(batch.x)
        for conv in self.convs:
            h = self.norm(conv(h, batch.edges))
        count = len(batch.y)
        pooled = torch.zeros(count, h.shape[1]).index_add(0, batch.owner, h)
        size = torch.zeros(count).index_add(0, batch.owner, torch.ones(len(h)))
        return self.out(pooled / size[:, None]).squeeze(1)


ech.seed(1)
model = GNN()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = ech.Loader(graphs(), global_batch=16, collate_fn=lay)
model, opt, loader = ech.prepare(model, opt, loader, layout="ddp")
for _epoch in ech.epochs(loader, 2):
    for batch in loader:
        with ech.window(model) as window:
            error = model(batch) - batch.y
            window.log("mae", error.abs().mean())
            window.backward(nn.functional.huber_loss(error, torch.zeros_like(error)))
            window.clip_grad_value_(0.5)
            opt.step()
            opt.zero_grad()
