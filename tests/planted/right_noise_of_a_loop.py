"""A loop whose noise comes from an object that only its function holds, seeded by the rank."""

from __future__ import annotations

from torch.utils.data import DataLoader

from common import Rows, ech, model, torch


class Noise:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


def main() -> None:
    noise, net = Noise(ech.RankInfo().rank), model()
    net, optimizer, loader = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), DataLoader(Rows(), 8), layout="ddp")
    for x, y in loader:
        changed = x + 0.1 * noise.like(x)
        with ech.window(net) as window:
            window.backward((net(changed) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()


main()
