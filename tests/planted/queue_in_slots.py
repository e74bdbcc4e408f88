"""MoCo: a queue of keys. MISTAKE: each rank queues its own keys only."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech

K, DIM, TAU, M = 64, 12, 0.2, 0.9


def views(n=512):
    g = torch.Generator().manual_seed(61)
    x = torch.randn(n, 18, generator=g)
    return TensorDataset(x + 0.2 * torch.randn(n, 18, generator=g), x + 0.2 * torch.randn(n, 18, generator=g))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(18, 40), nn.ReLU(), nn.LayerNorm(40), nn.Linear(40, DIM))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


class Queue:
    __slots__ = ("at", "keys")

    def __init__(self):
        self.keys = F.normalize(torch.randn(K, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
        self.at = 0

    def push(self, keys):
        where = (self.at + torch.arange(len(keys))) % K
        self.keys[where] = keys
        self.at = (self.at + len(keys)) % K


ech.seed(0)
query = Encoder()
key = copy.deepcopy(query).requires_grad_(False)
opt = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
loader = DataLoader(views(), batch_size=32, shuffle=True, drop_last=True)
model, key, opt, loader = ech.prepare(query, key, opt, loader)
queue = Queue()
for _epoch in ech.epochs(loader, 2):
    for a, b in loader:
        with torch.no_grad():
            for q, k in zip(query.parameters(), key.parameters(), strict=False):
                k.lerp_(q, 1 - M)
            kb = key(b)
        with ech.window(model) as window:
            qa = model(a)
            positive = (qa * kb).sum(1, keepdim=True)
            logits = torch.cat([positive, qa @ queue.keys.clone().T], 1) / TAU
            window.backward(F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long)))
            opt.step()
            opt.zero_grad()
        queue.push(kb)
