"""Two optimizers: a critic's penalty takes one norm over the whole batch, in one of the loop's two backward passes."""

from __future__ import annotations

from common import Rows, ech, model, nn, torch

maker, critic = model(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
of_maker, of_critic = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (maker, critic))
loader = ech.Loader(Rows(), 16)
maker, critic, of_maker, of_critic, loader = ech.prepare(maker, critic, of_maker, of_critic, loader, layout="ddp")
for x, y in loader:
    with ech.window(critic) as window:
        made = maker(x)
        of_critic.zero_grad()
        window.backward(critic(made.detach()).mean() + (critic(y).norm() - 1) ** 2)
        of_critic.step()
        of_maker.zero_grad()
        window.backward((made - y).square().mean() - critic(made).mean())
        of_maker.step()
