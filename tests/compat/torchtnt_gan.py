"""A program for TorchTNT 0.2: two networks and two optimizers in a TrainUnit, wrapped by hand."""

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchtnt.framework.callback import Callback
from torchtnt.framework.callbacks import LearningRateMonitor
from torchtnt.framework.state import State
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit
from torchtnt.utils import init_from_env
from torchtnt.utils.loggers import InMemoryLogger

folder = sys.argv[1]
device = init_from_env()
rank, world = distributed.get_rank(), distributed.get_world_size()


class GAN(TrainUnit[torch.Tensor]):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(device))
        self.critic = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(device))
        self.generator_optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.critic_optimizer, 0.5)
        self.loss = nn.BCEWithLogitsLoss()

    def train_step(self, state: State, data: torch.Tensor) -> None:
        data = data.to(device)
        noise, real = data[:, :2], data[:, 2:]
        made = self.generator(noise)
        judged = self.critic.module(made)
        self.loss(judged, torch.ones_like(judged)).backward()
        self.generator_optimizer.step()
        self.generator_optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        judged = self.critic(torch.cat([real, made.detach()]))
        ones = torch.ones(len(real), 1, device=device).double()
        self.loss(judged, torch.cat([ones, 0 * ones])).backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()

    def on_train_epoch_end(self, state: State) -> None:
        self.scheduler.step()


generator = torch.Generator().manual_seed(1)
data = [torch.randn(6, 5, generator=generator).double() for _ in range(4)]
unit, logger, seen = GAN(), InMemoryLogger(), []


class Sees(Callback):
    def on_train_step_end(self, state, unit):
        seen.append(state.train_state.dataloader)


callbacks = [LearningRateMonitor(logger), Sees()]
train(unit, [batch[rank::world] for batch in data], max_epochs=3, callbacks=callbacks)
assert len(seen) == 12 and unit.train_progress.num_steps_completed == 12
assert sorted(unit.tracked_modules()) == ["critic", "generator", "loss"]
assert [row["lr_schedulers/scheduler/pg:0"] for row in logger.log_buffer.values()] == [0.2, 0.1, 0.05]
assert [row["optimizers/generator_optimizer/pg:0"] for row in logger.log_buffer.values()] == [0.1] * 3
if rank == 0:
    torch.save([each.cpu().module.state_dict() for each in (unit.generator, unit.critic)], f"{folder}/gan.pt")
distributed.barrier()
distributed.destroy_process_group()
