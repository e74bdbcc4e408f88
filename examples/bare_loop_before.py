"""A training loop as everybody writes it, for one process. bare_loop.py is the same on any number of ranks.

python examples/bare_loop_before.py
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--toy", action="store_true", help="the size of the tests")
args = parser.parse_args()


def spirals(points: int) -> TensorDataset:
    """Two arms of a spiral, which no straight line divides."""
    arm = torch.arange(points) % 2
    turn = torch.rand(points) * 2 * math.pi
    x = torch.stack([turn.cos(), turn.sin()], 1) * (turn[:, None] / 4 + 0.2) * (1 - 2 * arm[:, None])
    return TensorDataset(x + 0.05 * torch.randn(points, 2), arm)


torch.manual_seed(0)
train, held_out = (DataLoader(spirals(n), batch_size=64, shuffle=n > 600) for n in ((2000, 500) if args.toy else (8000, 500)))
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

for _epoch in range(args.epochs):
    model.train()
    for x, arm in train:
        loss = nn.functional.cross_entropy(model(x), arm)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, arm in held_out:
            right += int((model(x).argmax(1) == arm).sum())
    accuracy = right / 500
print(f"accuracy {accuracy:.3f} on 500 new points")
