"""A loop of two networks, one of which has a spectral norm and learns from noise that the loop draws before the other's step."""

import torch
from torch import nn
from torch.nn.functional import softplus

import echelon as ech

ech.init_from_env()
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
critic = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.LeakyReLU(), nn.Linear(8, 1))
of_generator, of_critic = torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
loader = ech.Loader(torch.utils.data.TensorDataset(rows), global_batch=16)
generator, critic, of_generator, of_critic, loader = ech.prepare(generator, critic, of_generator, of_critic, loader)
for _ in ech.epochs(loader, 4):
    for (real,) in loader:
        with ech.window(generator, critic) as window:
            made = generator(torch.randn(len(real), 4))
            of_critic.zero_grad()
            window.backward(softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean())
            of_critic.step()
            of_generator.zero_grad()
            window.backward(softplus(-critic(made)).mean())
            of_generator.step()
