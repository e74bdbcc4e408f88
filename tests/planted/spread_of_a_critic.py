"""Two optimizers in a loop of one's own, and a critic that sees how far the rows of its micro-batch lie apart."""

import torch
from torch import nn
from torch.nn.functional import softplus

import echelon as ech


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 8), nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).tanh()
        return self.outer(torch.cat([h, h.std(0).mean().expand(len(h), 1)], 1))


torch.manual_seed(3)
maker, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), Critic()
of_maker, of_critic = torch.optim.Adam(maker.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
rows = torch.utils.data.TensorDataset(torch.randn(96, 2).abs(), torch.randn(96, 4))
maker, critic, of_maker, of_critic, loader = ech.prepare(maker, critic, of_maker, of_critic, ech.Loader(rows, 16))
for real, noise in loader:
    with ech.window(maker) as window:
        made = maker(noise)
        of_critic.zero_grad()
        window.backward((softplus(-critic(real)) + softplus(critic(made.detach()))).mean())
        of_critic.step()
        of_maker.zero_grad()
        window.backward(softplus(-critic(made)).mean())
        of_maker.step()
