"""A mean over the nodes of a batch's graphs, which are laid end to end: its rows are nodes, and no row goes without its graph."""

from __future__ import annotations

from common import ech, nn, torch

Graph = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # nodes (N, 4), adjacency (N, N), classes (N)

generator = torch.Generator().manual_seed(0)


def graph(count: int) -> Graph:
    nodes = torch.randn(count, 4, generator=generator)
    return nodes, torch.rand(count, count, generator=generator), nodes[:, :2].argmax(1)


def collate(graphs: list[Graph]) -> Graph:
    nodes, adjacencies, classes = zip(*graphs, strict=True)
    return torch.cat(nodes), torch.block_diag(*adjacencies), torch.cat(classes)


torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
loader = torch.utils.data.DataLoader([graph(2 + i * 5 % 9) for i in range(64)], 16, collate_fn=collate)  # type: ignore[arg-type]
model, optimizer, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, layout="ddp")
for nodes, adjacency, classes in loader:
    with ech.window(model) as window:
        window.backward(nn.functional.cross_entropy(model(adjacency @ nodes), classes))
        optimizer.step()
        optimizer.zero_grad()
