"""Classes are numbered in the order of a set of strings, which is another in each process that Python starts."""

from __future__ import annotations

from common import Auto, Rows, ech, model, torch

names = ["north", "east", "south", "west", "up", "down"]
number = {name: i for i, name in enumerate(set(names))}


class Named(Rows):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(i)
        return x, y + number[names[i % len(names)]]


ech.train(Auto(module=model(), layout="ddp"), ech.Loader(Named(), 16), max_epochs=1)
