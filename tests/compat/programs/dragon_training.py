"""The program of Dragon's page, its imports changed: an all-reduce in a CollectiveGroup; then training, with its data.

echelon dragon dragon_training.py    on Dragon's runtime
python dragon_training.py            without it, on ranks of this machine

The first argument, if there is one, is the port of the group's store.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from echelon import Loader
from echelon.compat.dragon.ai.collective_group import CollectiveGroup, RankInfo
from echelon.compat.dragon.native.machine import System

EPOCHS, GLOBAL_BATCH = 2, 8


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(rows, rows.sum(1, keepdim=True).sin())


def train() -> tuple[float, dict[str, list[float]]]:
    rank_info = RankInfo()
    rank = rank_info.my_rank
    master_addr = rank_info.master_addr
    master_port = rank_info.master_port
    world_size = rank_info.world_size
    cuda = torch.cuda.is_available()

    dist.init_process_group(
        backend="nccl" if cuda else "gloo",
        init_method=f"tcp://{master_addr}:{master_port}",
        world_size=world_size,
        rank=rank,
    )

    device = torch.device("cuda" if cuda else "cpu")  # the provided Policy already sets which GPU id to use
    tensor = torch.ones(1, device=device) * rank
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    print(f"Rank {rank}: Tensor after all_reduce = {tensor.item()}")

    model = nn.parallel.DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = Loader(dataset(), GLOBAL_BATCH, shuffle=False)  # each rank gets its share of every global batch
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()

    parameters = {name: p.tolist() for name, p in model.module.state_dict().items()}
    dist.destroy_process_group()
    return tensor.item(), parameters


if __name__ == "__main__":
    policies = System().gpu_policies() or System().cpu_policies(2)
    pg = CollectiveGroup(
        training_fn=train,
        training_args=None,
        training_kwargs=None,
        policies=policies,
        hide_stderr=False,
        port=int(sys.argv[1]) if len(sys.argv) > 1 else 29500,
    )
    pg.init()
    pg.start()
    pg.join()
    pg.close()
    print(f"the ranks returned {json.dumps(pg.values)}")
