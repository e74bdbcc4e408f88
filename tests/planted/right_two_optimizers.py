"""A step of one's own with two optimizers, dropout that nobody seeds, a schedule in a hook, and no loss that is told."""

from __future__ import annotations

from common import Batch, device, ech, loader, nn, torch


def net(outputs: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, outputs))
    return ech.layouts.prepare_module(layers, device, layout="ddp")


class Contest(ech.TrainUnit[Batch]):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = net(4), net(1)
        self.of_maker = torch.optim.Adam(self.maker.parameters(), 1e-3)
        self.of_judge = torch.optim.Adam(self.judge.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.of_judge, 1, 0.1)

    def train_step(self, state: ech.State, data: Batch) -> None:
        x, made, softplus = data[0], self.maker(data[0].flip(1)), nn.functional.softplus
        self.of_judge.zero_grad()
        (softplus(-self.judge(x)) + softplus(self.judge(made.detach()))).mean().backward()
        self.of_judge.step()
        self.of_maker.zero_grad()
        softplus(-self.judge(made)).mean().backward()
        self.of_maker.step()

    def on_train_epoch_end(self, state: ech.State) -> None:
        self.schedule.step()


ech.train(Contest(), loader(32), max_epochs=3)
