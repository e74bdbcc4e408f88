"""A program for TorchTNT 0.2, shaped like its example of digits: a convolutional network in an AutoUnit, with evaluations.

The test changes the name in its import lines, and nothing else. The digits are drawn, since nothing is downloaded.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchtnt.framework.auto_unit import AutoUnit, TrainStepResults
from torchtnt.framework.fit import fit
from torchtnt.framework.state import State
from torchtnt.utils import init_from_env, seed
from torchtnt.utils.loggers import InMemoryLogger

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(128, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count: int) -> TensorDataset:
    """Noisy pictures of 12 x 12 points, of ten kinds."""
    generator = torch.Generator().manual_seed(2)
    kinds = torch.randn(10, 1, 12, 12, generator=generator, dtype=torch.float64)
    targets = torch.randint(10, (count,), generator=generator)
    return TensorDataset(kinds[targets] + 0.3 * torch.randn(count, 1, 12, 12, generator=generator, dtype=torch.float64), targets)


class MyUnit(AutoUnit[Batch]):
    def __init__(self, *, lr: float, gamma: float, logger: InMemoryLogger, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.lr = lr
        self.gamma = gamma
        self.logger = logger
        self.correct = self.seen = 0

    def compute_loss(self, state: State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = data
        outputs = self.module(inputs)
        return F.nll_loss(outputs, targets), outputs

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr, momentum=0.5)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=self.gamma)

    def on_train_step_end(self, state: State, data: Batch, step: int, results: TrainStepResults) -> None:
        if (step + 1) % 5 == 0:
            self.logger.log("loss", results.loss, step)

    def on_eval_step_end(self, state: State, data: Batch, step: int, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        self.correct += int((outputs.argmax(1) == data[1]).sum())
        self.seen += len(data[1])

    def on_eval_end(self, state: State) -> None:
        self.logger.log("accuracy", self.correct / self.seen, self.train_progress.num_epochs_completed)
        self.correct = self.seen = 0


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.7)
    args = parser.parse_args(argv)

    seed(7)
    device = init_from_env()
    train, test = digits(80), digits(40)
    world_size = torch.distributed.get_world_size()
    train_dataloader = DataLoader(train, args.batch_size // world_size, sampler=DistributedSampler(train, shuffle=False))
    eval_dataloader = DataLoader(test, args.batch_size)
    logger = InMemoryLogger()

    my_unit = MyUnit(
        module=Net().double(), device=device, strategy="ddp", lr=args.lr, gamma=args.gamma, logger=logger, clip_grad_norm=0.2
    )
    fit(my_unit, train_dataloader=train_dataloader, eval_dataloader=eval_dataloader, max_epochs=args.max_epochs)

    if torch.distributed.get_rank() == 0:
        parameters = {name.removeprefix("module."): p.detach().cpu() for name, p in my_unit.module.named_parameters()}
        torch.save(
            (parameters, {step: {k: float(v) for k, v in row.items()} for step, row in logger.log_buffer.items()}), args.out
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
