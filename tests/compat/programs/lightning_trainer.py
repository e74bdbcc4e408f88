"""A program for Lightning's Trainer with dp, ddp and fsdp: its import is changed, and its module is an AutoUnit.

python lightning_trainer.py OUT: each Trainer starts its own two ranks, and what they trained is written to OUT.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import AutoUnit
from echelon.compat.lightning import Trainer, seed_everything
from echelon.compat.lightning.pytorch.strategies import DDPStrategy

EPOCHS = 2
OLDER = {name: {"gpus": 2, "accelerator": name} for name in ("dp", "ddp", "fsdp")}
NEWER = {
    'strategy="ddp"': {"devices": 2, "accelerator": "auto", "strategy": "ddp"},
    "DDPStrategy": {"devices": 2, "strategy": DDPStrategy(find_unused_parameters=True)},
    'strategy="fsdp"': {"devices": 2, "strategy": "fsdp"},
}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(rows, rows.sum(1, keepdim=True).sin())


class Model(AutoUnit):
    """Lightning's training_step is compute_loss, its configure_optimizers has the schedule as a second value."""

    def compute_loss(self, state, batch):
        self.where = os.getpid(), type(self.prepared).__name__
        x, y = batch
        out = self.module(x)
        return nn.functional.mse_loss(out, y), out

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), None


def build_module() -> nn.Module:
    seed_everything(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def main() -> None:
    trained = {}
    for name, arguments in {**OLDER, **NEWER}.items():
        model = Model(module=build_module())
        trainer = Trainer(**arguments, max_epochs=EPOCHS, logger=False, enable_progress_bar=False)
        # As with Lightning, a DataLoader's batch size is each rank's; dp divides it between its devices.
        trainer.fit(model, DataLoader(dataset(), batch_size=8 if name == "dp" else 4))
        process, prepared = model.where
        parameters = {name.removeprefix("module."): p.detach().cpu() for name, p in model.module.named_parameters()}
        trained[name] = prepared, process != os.getpid(), model.train_progress.num_steps_completed, parameters
    torch.save(trained, sys.argv[1])


if __name__ == "__main__":
    main()
