"""A loop in float64 over samples that are drawn from their number, as they are read."""

from __future__ import annotations

from torch.utils.data import DataLoader, Dataset

from common import ech, torch


class Drawn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


torch.set_default_dtype(torch.float64)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
net, optimizer, loader = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), DataLoader(Drawn(), 8), layout="ddp")
for x in loader:
    with ech.window(net) as window:
        window.backward((net(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
