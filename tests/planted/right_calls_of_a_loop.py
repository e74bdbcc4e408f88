"""A weight of the loss that grows with the batches, in a variable of the loop's function, and noise from a generator there."""

from __future__ import annotations

from common import dist, ech, loader, model, nn, torch


def main() -> None:
    net = model()
    net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
    calls, generator = 0, torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    for x, y in batches:
        with ech.window(net) as window:
            calls += 1
            out = net(x + 0.1 * torch.randn(x.shape, generator=generator))
            loss = nn.functional.mse_loss(out, y) + min(1.0, calls / 10) * out.square().mean()
            window.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
