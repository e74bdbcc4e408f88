"""A mean over sentences of means over their tokens, in a loop of one's own that counts tokens; batches are padded."""

from __future__ import annotations

from common import ech, nn, torch

generator = torch.Generator().manual_seed(0)
lengths = torch.randint(3, 15, (256,), generator=generator).tolist()
sentences = [torch.randint(1, 9, (length,), generator=generator) for length in lengths]


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, True)


torch.manual_seed(3)
model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 9))
loader = torch.utils.data.DataLoader(sentences, 16, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
model, optimizer, loader = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, layout="ddp")
for _ in ech.epochs(loader, 3):
    for ids in loader:
        x, y = ids[:, :-1], ids[:, 1:]
        mask = y != 0
        with ech.window(model, weight=mask.sum()) as window:
            each = nn.functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
            window.backward(((each * mask).sum(1) / mask.sum(1)).mean())
            optimizer.step()
            optimizer.zero_grad()
