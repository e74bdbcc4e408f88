"""A teacher follows by the number of samples that a rank has, with noise: more slowly than in one process, on all ranks alike."""

from __future__ import annotations

import copy

from common import Rows, ech, model, nn, torch

ech.seed(0)
student = model()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
loader = ech.Loader(Rows(), 16)
student, teacher, optimizer, loader = ech.prepare(student, teacher, optimizer, loader, layout="ddp")
for _ in ech.epochs(loader, 1):
    for x, y in loader:
        with ech.window(student) as window:
            made = student(x + 0.1 * torch.randn_like(x))
            window.backward(nn.functional.mse_loss(made, y) + nn.functional.mse_loss(made, teacher(x)))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 1 - 0.5 ** (len(x) / 20))
