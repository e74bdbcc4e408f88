"""Sweep a learning rate: each value is a job of its own on Slurm, or, to try it, on this machine.

    python examples/sweep.py                                         here, one trial after another, on 2 ranks each
    python examples/sweep.py --mode slurm --partition gpu --gpus 2   a job array on the cluster
    echelon jobs --runs runs/sweep/jobs                              how they are doing, from another terminal

A trial that was preempted, or a sweep that is started again, goes on from each trial's newest checkpoint. A script with flags of
its own needs none of this: `echelon submit --sweep lr=1e-3,3e-4 train.py` makes the same array.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import echelon as ech

Batch = tuple[torch.Tensor, torch.Tensor]  # (B, 8), (B,)


def waves(count: int, seed: int) -> torch.utils.data.TensorDataset:
    """A smooth function of eight numbers."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2])


class Regress(ech.AutoUnit[Batch]):
    lr = 1e-3

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, None]:
        x, y = data
        return nn.functional.mse_loss(self.module(x).squeeze(1), y), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.AdamW(module.parameters(), lr=self.lr), None


@ech.slurm_fn
def trial(lr: float, layout: str, epochs: int, count: int, folder: str) -> float:
    """What every rank of a job does. Returns the held-out loss, the same on all ranks."""
    ech.init_from_env()
    ech.seed(0)  # every trial begins with the same model
    module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    unit = Regress(module=module, layout=layout)
    unit.lr = lr
    loader = ech.Loader(waves(count, seed=1), global_batch=64)
    checkpoints = Path(folder) / f"lr-{lr:g}" / "checkpoints"
    ech.train(unit, loader, max_epochs=epochs, checkpoints=ech.Checkpoints(checkpoints, keep=1))
    ech.evaluate(unit, ech.Loader(waves(1024, seed=2), global_batch=256, shuffle=False))
    return unit.eval_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-2, 1e-2, 1e-3, 1e-5], help="the values to try")
    parser.add_argument("--mode", default="local", choices=["local", "slurm", "run"], help="run: in this process")
    parser.add_argument("--partition", default="", help="of the cluster")
    parser.add_argument("--ranks", type=int, default=2, help="of each trial")
    parser.add_argument("--gpus", type=int, default=0, help="of each trial's node")
    parser.add_argument("--layout", default="ddp", help="none, ddp, fsdp, hsdp, zero1 or zero2")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--toy", action="store_true", help="less data: seconds")
    parser.add_argument("--checkpoints", default="runs/sweep", help="a folder for each trial is made in it")
    args = parser.parse_args()

    config = ech.SlurmConfig(
        mode=args.mode,
        job_name="sweep",
        partition=args.partition,
        tasks_per_node=args.ranks,
        gpus_per_node=args.gpus,
        timeout_min=60,
        output_parent_path=args.checkpoints,
        output_folder="jobs",
    )
    count, rates = 2048 if args.toy else 16384, args.lr
    same = [(args.layout, args.epochs, count, str(Path(args.checkpoints).absolute()))] * len(rates)
    jobs = trial[config].map(rates, *zip(*same, strict=True))
    losses = {}
    for lr, job in zip(rates, jobs, strict=True):
        try:
            values = job.result()  # waits for the job
        except ech.EchelonError as error:  # with the traceback of the first rank that failed; the others may be well
            print(f"lr {lr:<8g} failed: {error}", flush=True)
            continue
        losses[lr] = values[0] if isinstance(values, list) else values  # of several ranks one by rank
        print(f"lr {lr:<8g} held-out loss {losses[lr]:.4f}", flush=True)
    if not losses:
        raise SystemExit("no trial has a result")
    best = min(losses, key=losses.__getitem__)
    print(f"the best of {len(losses)} is lr {best:g}, with {losses[best]:.4f}")


if __name__ == "__main__":
    main()
