"""A mean over all places of batches that are padded to their longest sample: what a sample counts depends on the others."""

from __future__ import annotations

from common import Auto, ech, model, nn, torch

generator = torch.Generator().manual_seed(0)
sequences = [torch.randn(1 + i * 13 % 31, 4, generator=generator) for i in range(64)]
Padded = tuple[torch.Tensor, torch.Tensor]


def collate(samples: list[torch.Tensor]) -> Padded:
    mask = [torch.ones(len(s), 1) for s in samples]
    return nn.utils.rnn.pad_sequence(samples, True), nn.utils.rnn.pad_sequence(mask, True)


class Places(Auto):
    def compute_loss(self, state: ech.State, data: Padded) -> tuple[torch.Tensor, None]:
        errors = (self.module(data[0]) - data[0].sum(2, keepdim=True)) ** 2 * data[1]
        return errors.mean(), None


network = model(nn.Dropout(0.1))
ech.train(Places(module=network, layout="ddp"), ech.Loader(sequences, 16, collate_fn=collate), max_epochs=3)
