"""Functions that are submitted by `slurm_fn`, for the tests; run as a script it submits them all and prints their folders."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import echelon as ech
from echelon.world.stop import asked

TORCHRUN = (
    "torchrun --nnodes {num_machines} --nproc-per-node 2 --node-rank {machine_rank} "
    "--master-addr {main_process_ip} --master-port {main_process_port} functions.py"
)


@ech.slurm_fn
def place(x: int, y: int = 0) -> tuple[int, int, int, str]:
    import torch
    import torch.distributed as dist

    ech.init_from_env()
    total = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(total)
    print(f"secret of length {len(os.environ.get('PLANTED_TOKEN', ''))}, {os.environ.get('PLANTED')}")
    return x + y, ech.RankInfo().rank, int(total), socket.gethostname()


@ech.slurm_fn
def fails(rank: int) -> None:
    _meet()
    if ech.RankInfo().rank == rank:
        raise ValueError(f"planted on rank {rank}", rank)
    _meet()


@ech.slurm_fn
def killed(rank: int) -> None:
    _meet()
    if ech.RankInfo().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    _meet()


@ech.slurm_fn
def waits() -> None:
    print("waiting", flush=True)
    time.sleep(600)


@ech.slurm_fn
def trains(steps: int) -> tuple[int, int, list[float]]:
    """In its first start it goes on after the third step only when it is asked to save and end."""
    import torch

    ech.init_from_env()
    run = ech.evidence.RunDir.current()
    assert run is not None
    torch.manual_seed(0)

    class Unit(ech.AutoUnit):
        def compute_loss(self, state, data):
            print(f"step of attempt {run.attempt}", flush=True)
            while run.attempt == 0 and self.train_progress.num_steps_completed == 3 and asked() is None:
                time.sleep(0.02)
            return self.module(data[0]).square().mean(), None

        def configure_optimizers_and_lr_scheduler(self, module):
            return torch.optim.SGD(module.parameters(), lr=0.1), None

    unit = Unit(module=torch.nn.Linear(3, 1), layout="ddp")
    loader = ech.Loader(torch.utils.data.TensorDataset(torch.randn(32, 3)), 8, seed=1)
    ech.DistributedCheckpointSaver.restore_from_latest(run.checkpoints, unit, train_dataloader=loader)
    began = unit.train_progress.num_steps_completed
    ech.train(unit, loader, max_updates=steps, callbacks=[ech.DistributedCheckpointSaver(run.checkpoints)])
    weights = [float(p.detach().sum()) for p in unit.module.parameters()]
    return began, unit.train_progress.num_steps_completed, weights


def _meet() -> None:
    import torch
    import torch.distributed as dist

    ech.init_from_env()
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    two = ech.SlurmConfig(mode="slurm", num_of_node=2, tasks_per_node=2)
    one = ech.SlurmConfig(mode="slurm", job_name=sys.argv[1], extra_params_kwargs={"comment": "a b; $HOME"})
    secret = {"PLANTED_TOKEN": os.environ.get("PLANTED_TOKEN", "")}
    launched = replace(two, distributed_launch_command=TORCHRUN)
    jobs: dict[str, Any] = {
        "trains-launched": trains[launched](12),
        "held": place.configure(one, extra_params_kwargs={"hold": True})(9),
        "plain": place.configure(two, extra_task_kwargs=secret, setup=["export PLANTED=set-up"])(5),
        "fails": fails[two](3),
        "fails-launched": fails[launched](3),
        "killed-launched": killed[launched](2),
        "waits": waits[one](),
        "named": place[one](1, y=2),
    }
    jobs["after"] = place[one].afternotok(jobs["fails"], jobs["killed-launched"]).afterany(jobs["named"])(7)
    jobs["never"] = place[one].afterok(jobs["waits"])(8)
    for n, job in enumerate(place[one].map_array([1, 2], [10, 20])):
        jobs[f"array-{n}"] = job
    print(json.dumps({name: str(job.run.path) for name, job in jobs.items()}))
