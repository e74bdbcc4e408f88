"""Graphs of a batch laid end to end, with offsets: no part of the batch has a row for each, but the loader knows its samples."""

from __future__ import annotations

from common import Auto, ech, model, torch

Graph = tuple[torch.Tensor, torch.Tensor]  # nodes (N, 4), edges (2, E)
Graphs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Edges(Auto):
    def compute_loss(self, state: ech.State, data: Graphs) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        nodes, edges, graph_of_edge = data
        found = self.module(nodes[edges[0]] - nodes[edges[1]]).square().flatten()
        sums = torch.zeros(int(graph_of_edge[-1]) + 1).to(found).index_add(0, graph_of_edge, found)
        return sums.mean(), None

    def weight(self, data: Graphs) -> int:  # type: ignore[override]
        return int(data[2][-1]) + 1


def collate(graphs: list[Graph]) -> Graphs:
    offsets = [0, *torch.tensor([len(nodes) for nodes, _ in graphs]).cumsum(0).tolist()]
    edges = torch.cat([edges + offset for (_, edges), offset in zip(graphs, offsets, strict=False)], 1)
    which = torch.cat([torch.full((edges.shape[1],), i) for i, (_, edges) in enumerate(graphs)])
    return torch.cat([nodes for nodes, _ in graphs]), edges, which


generator = torch.Generator().manual_seed(0)
graphs = [
    (torch.randn(3 + i % 5, 4, generator=generator), torch.randint(3 + i % 5, (2, 4 + i % 3), generator=generator))
    for i in range(64)
]
ech.train(Edges(module=model(), layout="ddp"), ech.Loader(graphs, 16, collate_fn=collate), max_epochs=3)
