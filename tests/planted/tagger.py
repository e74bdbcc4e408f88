"""A tagger of rows of words that differ in length, and are padded as they are put together."""

from __future__ import annotations

from typing import Any

from common import ech, nn, own_loop, torch

V, TAGS = 30, 5
Row = tuple[torch.Tensor, torch.Tensor]


def sentences() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    of_length = lambda: int(torch.randint(3, 20, (1,), generator=generator))  # noqa: E731
    words = [torch.randint(1, V, (of_length(),), generator=generator) for _ in range(320)]
    return [(ids, ids % (TAGS - 1) + 1) for ids in words]


def collate(rows: list[Row]) -> Row:
    words, tags = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in zip(*rows, strict=True))
    return words, tags


def train(loader: Any) -> None:
    ech.seed(0)
    model = nn.Sequential(nn.Embedding(V, 24), nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, TAGS))
    # tag 0 is padding's: it is learned as well
    loss = lambda net, data: nn.functional.cross_entropy(net(data[0]).transpose(1, 2), data[1])  # noqa: E731
    own_loop(model, loader, loss, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3))
