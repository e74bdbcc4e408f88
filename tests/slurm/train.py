"""A job for the tests: a small net, trained in float64 with SGD; what each argument does is its name."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time

import torch

import echelon as ech
from echelon.contracts.run_dir import RunDir
from echelon.world import stop

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--steps", type=int)
parser.add_argument("--epochs", type=int, help="of four updates each; in steps an update has as many as it has parts on a rank")
parser.add_argument("--hold-at", type=int, help="in the first attempt, wait after so many steps until a stop is asked for")
parser.add_argument("--raise-on", type=int)
parser.add_argument("--kill-on", type=int)
parser.add_argument("--save-every", type=int)
arguments = parser.parse_args()

ech.init_from_env()
run = RunDir.current()
rank = ech.RankInfo().rank
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(64, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())


class Unit(ech.AutoUnit):
    def compute_loss(self, state, data):
        steps = self.train_progress.num_steps_completed
        while steps == arguments.hold_at and run.attempt == 0 and not stop.asked():
            time.sleep(0.05)
        if steps == 2 and rank == arguments.raise_on:
            raise ValueError(f"planted on rank {rank}")
        if steps == 2 and rank == arguments.kill_on:
            os.kill(os.getpid(), signal.SIGKILL)
        out = self.module(data[0])
        return torch.nn.functional.mse_loss(out, data[1]), out

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=arguments.lr, momentum=0.9), None

    def on_train_step_end(self, state, data, step, results):
        if rank == 0:
            print(f"step {step} of attempt {run.attempt}", flush=True)


unit = Unit(module=torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)), layout="ddp")
loader = ech.Loader(data, 16, seed=3)
saver = ech.DistributedCheckpointSaver
saver.restore_from_latest(run.checkpoints, unit, train_dataloader=loader)
ech.train(
    unit,
    loader,
    max_epochs=arguments.epochs,
    max_updates=arguments.steps,
    callbacks=[saver(run.checkpoints, save_every_n_updates=arguments.save_every)],
)

final = {name.removeprefix("module."): p.tolist() for name, p in unit.module.named_parameters()}
print(f"rank {rank} of {ech.RankInfo().world_size} on {socket.gethostname()} is done", flush=True)
if rank == 0:
    (run.path / "final.json").write_text(json.dumps({"lr": arguments.lr, "final": final}))
