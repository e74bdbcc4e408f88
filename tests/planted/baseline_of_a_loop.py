"""A running mean in a variable of the loop's function, which each rank takes of its own samples."""

from __future__ import annotations

from common import ech, loader, model, torch


def main() -> None:
    net = model()
    net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
    baseline = 0.0
    for x, y in batches:
        with ech.window(net) as window:
            out = net(x)
            reward = -(out.detach() - y).square()
            window.backward(-((reward - baseline) * out).mean())
            baseline = 0.9 * baseline + 0.1 * reward.mean().item()
            optimizer.step()
            optimizer.zero_grad()


main()
