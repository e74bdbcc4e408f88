"""A FairScale program, only its imports changed: a block in checkpoint_wrapper, ShardedGradScaler with autocast, under mp.spawn.

python fairscale_checkpoint_scaler.py RANKS OUT: trains on RANKS processes, and writes the parameters of every rank and the
scales that it saw to OUT/rankN.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from echelon.compat.fairscale.nn.checkpoint.checkpoint_activations import checkpoint_wrapper
from echelon.compat.fairscale.nn.data_parallel import ShardedDataParallel
from echelon.compat.fairscale.optim import OSS
from echelon.compat.fairscale.optim.grad_scaler import ShardedGradScaler


class CheckpointModel(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        torch.manual_seed(0)  # make sure weights are deterministic.
        self.ffn_module = nn.Sequential(nn.Linear(32, 128), nn.Dropout(p=0.5), nn.Linear(128, 32))
        if kwargs.pop("wrapped", True):
            self.ffn_module = checkpoint_wrapper(self.ffn_module, **kwargs)
        self.last_linear = nn.Linear(32, 1)

    def forward(self, input):
        output = self.ffn_module(input)
        return self.last_linear(output)


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 32, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(6)]


def train(rank: int, world_size: int, out: str) -> None:
    cuda = torch.cuda.device_count() >= world_size
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{out}/meet", rank=rank, world_size=world_size)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)

    model = CheckpointModel(offload_to_cpu=True).to(device)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.05)
    model = ShardedDataParallel(model, optimizer)
    scaler = ShardedGradScaler(init_scale=2.0**10, growth_interval=4)

    scales = []
    for step, (input, target) in enumerate(batches(rank)):
        torch.manual_seed(100 * step + rank)  # dropout
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            output = model(input.to(device))
        loss = nn.functional.mse_loss(output.float(), target.to(device))
        if step == 1 and rank == 1:
            loss = loss * float("inf")  # all ranks skip this update
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    torch.save((model.module.state_dict(), scales), Path(out) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    mp.spawn(train, args=(ranks, sys.argv[2]), nprocs=ranks, join=True)
