"""A training loop of one's own on any number of ranks: exact, resumed, stopped in agreement.

    echelon run --ranks 2 examples/bare_loop.py

A comment on a changed line shows the line of a loop for one process; "new" marks added lines.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech  # new

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--toy", action="store_true", help="the size of the tests")
parser.add_argument("--layout", default="ddp")  # new
parser.add_argument("--checkpoints", default="runs/bare_loop/checkpoints")  # new
args = parser.parse_args()


def spirals(points: int) -> TensorDataset:
    """Two arms of a spiral, which no straight line separates."""
    arm = torch.arange(points) % 2
    turn = torch.rand(points) * 2 * math.pi
    x = torch.stack([turn.cos(), turn.sin()], 1) * (turn[:, None] / 4 + 0.2) * (1 - 2 * arm[:, None])
    return TensorDataset(x + 0.05 * torch.randn(points, 2), arm)


torch.manual_seed(0)
train, held_out = (DataLoader(spirals(n), batch_size=64, shuffle=n > 600) for n in ((2000, 500) if args.toy else (8000, 500)))
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer, scheduler, train, held_out = ech.prepare(  # new
    model, optimizer, scheduler, train, held_out, layout=args.layout, checkpoints=args.checkpoints
)

for _epoch in ech.epochs(train, args.epochs):  # for _epoch in range(args.epochs)
    for x, arm in train:
        with ech.window(model) as window:  # new
            loss = nn.functional.cross_entropy(model(x), arm)
            window.backward(loss)  # loss.backward()
            window.clip_grad_norm_(1.0)  # nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()

right = ech.Mean()  # right = 0
with ech.evaluating(model):  # model.eval(); with torch.no_grad()
    for x, arm in held_out:
        right.update((model(x).argmax(1) == arm).double().mean(), len(x))  # right += ...
print(f"accuracy {right.compute():.3f} on 500 new points")  # right / 500
