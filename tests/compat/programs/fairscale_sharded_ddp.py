"""A FairScale program, as its users write it: OSS and ShardedDataParallel under mp.spawn. Only its imports are changed.

python fairscale_sharded_ddp.py RANKS OUT: trains on RANKS processes, and writes the parameters of every rank to OUT/rankN.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from echelon.compat.fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from echelon.compat.fairscale.optim.oss import OSS

EPOCHS = 2


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def build_dataloader(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Five batches of eight rows, of which every rank has its share."""
    generator = torch.Generator().manual_seed(1)
    whole = [(torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(5)]
    return [(data[rank::world_size], target[rank::world_size]) for data, target in whole]


def train(rank: int, world_size: int, epochs: int, out: str) -> None:
    cuda = torch.cuda.device_count() >= world_size
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{out}/meet", rank=rank, world_size=world_size)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)

    model = build_model().to(device)
    dataloader = build_dataloader(rank, world_size)
    loss_fn = nn.MSELoss()

    base_optimizer_arguments = {"lr": 0.1, "momentum": 0.9}
    base_optimizer = torch.optim.SGD
    optimizer = OSS(params=model.parameters(), optim=base_optimizer, **base_optimizer_arguments)
    model = ShardedDDP(model, optimizer)

    model.train()
    for epoch in range(epochs):
        for data, target in dataloader:
            data, target = data.to(device), target.to(device)
            # Both ways of clearing, of which FairScale's own release gets the second one wrong on torch 2.
            model.zero_grad() if epoch == 0 else optimizer.zero_grad()
            outputs = model(data)
            loss = loss_fn(outputs, target)
            loss.backward()
            optimizer.step()

    optimizer.consolidate_state_dict(recipient_rank=0)
    state = optimizer.state_dict() if rank == 0 else None
    torch.save((model.module.state_dict(), state), Path(out) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    mp.spawn(train, args=(ranks, EPOCHS, sys.argv[2]), nprocs=ranks, join=True)
