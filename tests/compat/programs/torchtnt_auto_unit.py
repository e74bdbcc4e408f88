"""A TorchTNT program: an AutoUnit under each way of naming a strategy, saved and restored by the checkpoint callback.

Only the imports are changed.

echelon run --ranks 2 torchtnt_auto_unit.py FOLDER 2    trains two epochs under each strategy, and saves
echelon run --ranks 4 torchtnt_auto_unit.py FOLDER 4    goes on from there, on any number of ranks, to the fourth
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from echelon.compat.torchtnt.framework import AutoUnit, State, train
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from echelon.compat.torchtnt.utils import init_from_env
from echelon.compat.torchtnt.utils.prepare_module import DDPStrategy, FSDPStrategy

GLOBAL_BATCH = 8
Batch = tuple[torch.Tensor, torch.Tensor]
STRATEGIES = {
    "ddp": "ddp",
    "DDPStrategy": DDPStrategy(broadcast_buffers=False, check_reduction=True),
    "fsdp": "fsdp",
    "FSDPStrategy": FSDPStrategy(forward_prefetch=True, limit_all_gathers=True),
}


def build_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(rows, rows.sum(1, keepdim=True).sin())


class MyAutoUnit(AutoUnit[Batch]):
    def compute_loss(self, state: State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = data
        outputs = self.module(inputs)
        return nn.functional.mse_loss(outputs, targets), outputs

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)


def main(folder: Path, epochs: int) -> None:
    device = init_from_env()
    alone = not dist.is_initialized()
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    data = dataset()
    sampler = DistributedSampler(data, world_size, rank, shuffle=False)
    loader = DataLoader(data, GLOBAL_BATCH // world_size, sampler=sampler)
    trained = {}
    for name, strategy in STRATEGIES.items():
        unit = MyAutoUnit(module=build_module(), device=device, strategy=None if alone else strategy)
        saver = DistributedCheckpointSaver(str(folder / name), save_every_n_epochs=1, keep_last_n_checkpoints=1)
        if (folder / name).exists():
            DistributedCheckpointSaver.restore_from_latest(str(folder / name), unit)
        began = unit.train_progress.num_steps_completed
        train(unit, loader, max_epochs=epochs, callbacks=[saver])
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        trained[name] = began, unit.train_progress.num_steps_completed, get_model_state_dict(unit.module, options=whole)
    if rank == 0:
        torch.save(trained, folder / "trained.pt")
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
