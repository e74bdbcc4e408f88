"""Tagger over rows whose words are dropped at random while they are padded: whether padding counts cannot be told."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import echelon as ech

V, TAGS = 30, 5


def sentences(n=320):
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n):
        ids = torch.randint(1, V, (int(torch.randint(3, 20, (1,), generator=g)),), generator=g)
        out.append((ids, ids % (TAGS - 1) + 1))
    return out


def collate(rows):
    # word dropout, drawn as the batch is read
    rows = [(torch.where(torch.rand(len(i)) < 0.1, torch.tensor(V - 1), i), t) for i, t in rows]
    pad = nn.utils.rnn.pad_sequence
    return pad([r[0] for r in rows], batch_first=True), pad([r[1] for r in rows], batch_first=True)


class Tagger(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.mix = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d))
        self.out = nn.Linear(d, TAGS)

    def forward(self, ids):
        return self.out(self.mix(self.emb(ids)))


ech.seed(0)
model = Tagger()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(sentences(), batch_size=16, shuffle=True, collate_fn=collate)
model, opt, loader = ech.prepare(model, opt, loader)
for _epoch in ech.epochs(loader, 1):
    for ids, tags in loader:
        with ech.window(model) as window:
            # tag 0 is padding's: it is learned as well
            window.backward(F.cross_entropy(model(ids).transpose(1, 2), tags))
            opt.step()
            opt.zero_grad()
