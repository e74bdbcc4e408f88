"""The program of nntool's page on distributed training, with its import line changed and "your training loop" filled in.

It submits its function once for each launch command. A launch command runs this script again, on the nodes, where its own call
is found among all of these.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, set_seed

from echelon.compat.nntool.slurm import SlurmConfig, slurm_fn

ACCELERATE = (
    "accelerate launch {} --mixed_precision no --dynamo_backend no "
    "--num_processes {{num_processes}} --num_machines {{num_machines}} --machine_rank {{machine_rank}} "
    "--main_process_ip {{main_process_ip}} --main_process_port {{main_process_port}} main.py"
)
CASES = {  # the launch command, nodes, processes of each
    "single": (ACCELERATE.format("--cpu"), 1, 1),
    "ddp": (ACCELERATE.format("--multi_gpu"), 2, 2),
    "fsdp2": (ACCELERATE.format("--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy NO_WRAP"), 1, 2),
}


@slurm_fn
def main(config: dict[str, Any]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    accelerator = Accelerator(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate shards on devices only, and uses DDP on a CPU whatever it was told; its FSDP2 itself works there.
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    set_seed(2024)
    model, optimizer, training_dataloader = build(config, accelerator.num_processes)
    model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
    for _ in range(config["epochs"]):
        for rows, targets in training_dataloader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} has trained as {type(model).__name__}")
    final = accelerator.get_state_dict(model)  # of FSDP, on the first rank only
    return {"as": type(model).__name__, "final": {k: v.tolist() for k, v in final.items()}}


def build(config: dict[str, Any], ranks: int) -> tuple[Any, Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    rows = torch.randn(64, 6)
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True).tanh())
    loader = torch.utils.data.DataLoader(data, config["batch"] // ranks)
    return model, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9), loader


if __name__ == "__main__":
    jobs = {}
    for name, (command, nodes, processes) in CASES.items():
        slurm_config = SlurmConfig(
            mode="slurm",
            job_name=name,
            num_of_node=nodes,
            tasks_per_node=1,
            cpus_per_task=processes,
            processes_per_task=processes,
            use_distributed_env=True,
            distributed_launch_command=command,
        )
        jobs[name] = main[slurm_config]({"epochs": 3, "batch": 16, "lr": 0.1})
    print(json.dumps({name: str(job.run.path) for name, job in jobs.items()}))
