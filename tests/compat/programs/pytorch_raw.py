"""Programs of plain PyTorch, unchanged: nn.DataParallel, and DistributedDataParallel with init_method="env://".

echelon run --ranks 2 pytorch_raw.py OUT, or torchrun: every rank trains the first for itself, then all train the second
together. Each writes its parameters to OUT/rankN.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

EPOCHS = 2


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(5)]
    return [(x, x.sum(1, keepdim=True).sin()) for x in rows]


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for inputs, targets in data:
            if torch.cuda.is_available():
                inputs, targets = inputs.cuda(), targets.cuda()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def data_parallel() -> nn.Module:
    model = build_model()
    if torch.cuda.is_available():
        model = model.cuda()
    model = nn.DataParallel(model)
    train(model, batches())
    return model


def distributed_data_parallel() -> nn.Module:
    torch.distributed.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[rank])
    else:
        model = nn.parallel.DistributedDataParallel(model)
    train(model, [(inputs[rank::world_size], targets[rank::world_size]) for inputs, targets in batches()])
    return model


if __name__ == "__main__":
    models = [data_parallel(), distributed_data_parallel()]
    torch.save([model.cpu().module.state_dict() for model in models], Path(sys.argv[1]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
