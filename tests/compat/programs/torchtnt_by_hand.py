"""TorchTNT programs with a TrainUnit of their own, whose module is wrapped by hand or by prepare_ddp and prepare_fsdp.

Only the imports are changed.

echelon run --ranks 2 torchtnt_by_hand.py OUT: trains one unit for each way of wrapping; rank 0 writes their parameters to OUT.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from echelon.compat.torchtnt.framework import State, TrainUnit, train
from echelon.compat.torchtnt.utils import init_from_env
from echelon.compat.torchtnt.utils.prepare_module import prepare_ddp, prepare_fsdp

EPOCHS, GLOBAL_BATCH = 2, 8
Batch = tuple[torch.Tensor, torch.Tensor]


def build_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(rows, rows.sum(1, keepdim=True).sin())


class MyUnit(TrainUnit[Batch]):
    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.device = device
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        self.loss_fn = nn.MSELoss()

    def train_step(self, state: State, data: Batch) -> None:
        inputs, targets = (tensor.to(self.device) for tensor in data)
        loss = self.loss_fn(self.module(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def ddp_by_hand(device: torch.device) -> nn.Module:
    module = build_module().to(device)
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=device_ids)


def fsdp_by_hand(device: torch.device) -> nn.Module:
    module = build_module().to(device)
    return FullyShardedDataParallel(module, device_id=device)


WAYS = {
    "DDP by hand": ddp_by_hand,
    "FSDP by hand": fsdp_by_hand,
    "prepare_ddp": lambda device: prepare_ddp(build_module(), device),
    "prepare_fsdp": lambda device: prepare_fsdp(build_module(), device),
}


def main() -> None:
    device = init_from_env()
    data, parameters = dataset(), {}
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=DistributedSampler(data, shuffle=False))
    for way, wrap in WAYS.items():
        unit = MyUnit(wrap(device), device)
        train(unit, loader, max_epochs=EPOCHS)
        # torch 2.13 cannot offload the older FSDP's parameters from where they are already.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=device.type == "cuda")
        parameters[way] = type(unit.module).__name__, get_model_state_dict(unit.module, options=whole)
    if dist.get_rank() == 0:
        torch.save(parameters, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
