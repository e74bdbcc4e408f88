"""Seconds from the death of a rank to the first step after it, with the state read from a checkpoint.

Rank 1 kills itself with SIGKILL in the first attempt, some steps after a checkpoint. The time runs from then until the last rank
has finished its first step in the restarted group, with parameters, AdamW's state, the position in the data and the RNG states
restored from the checkpoint. Ours: `echelon run --max-restarts`, AutoUnit under "ddp", `restore_from_latest`, which compares all
checksums.
Theirs: torchrun, DistributedDataParallel, torch.distributed.checkpoint's save and load of the same tensors into one folder per
step, a DistributedSampler that starts the epoch again. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which it needs to
succeed every time.

    python bench/resume.py [--rounds N] [--ranks 2] [--width 1024] [--json]

Target: at most a quarter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _timing import emit, machine, median, options, spread, versions

TARGET, LIMIT_S = 0.25, 120.0
SAVED_AT, KILLED_AT, BATCH, SAMPLES = 20, 25, 32, 4096
PAUSE_S = 3.0  # before the kill: in the first seconds our server still loads what a restart will need


def note(folder: Path, name: str) -> None:
    path = folder / f"{name}.{os.environ['RANK']}"
    if not path.exists():
        path.write_text(repr(time.monotonic()))


def die(folder: Path) -> None:
    if os.environ["RANK"] == "1" and not (folder / "killed.1").exists():
        time.sleep(PAUSE_S)
        note(folder, "killed")
        os.kill(os.getpid(), signal.SIGKILL)


def model(width: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def data() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 64), torch.randn(SAMPLES, 1))


def ours(folder: Path, width: int) -> None:
    import torch

    import echelon as ech

    class Fit(ech.AutoUnit[Any]):
        def compute_loss(self, state: ech.State, data: Any) -> Any:
            out = self.module(data[0])
            return torch.nn.functional.mse_loss(out, data[1]), None

        def configure_optimizers_and_lr_scheduler(self, module: Any) -> Any:
            return torch.optim.AdamW(module.parameters(), lr=1e-4), None

        def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
            if went_on:
                note(folder, "resumed")
            elif step + 1 == KILLED_AT:
                die(folder)

    ech.init_from_env()
    unit, loader = Fit(module=model(width), layout="ddp"), ech.Loader(data(), BATCH)
    saver = ech.DistributedCheckpointSaver(folder / "c", save_every_n_updates=SAVED_AT)
    went_on = saver.restore_from_latest(folder / "c", unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=KILLED_AT + 5, callbacks=[saver])


def theirs(folder: Path, width: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    module = torch.nn.parallel.DistributedDataParallel(model(width))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    sampler = torch.utils.data.DistributedSampler(data())
    loader = torch.utils.data.DataLoader(data(), BATCH // dist.get_world_size(), sampler=sampler)
    step, saved = 0, folder / "c" / f"step-{SAVED_AT}"
    went_on = (saved / ".metadata").exists()
    if went_on:
        state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
        dcp.load(state, checkpoint_id=saved)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = SAVED_AT
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        step += 1
        if went_on:
            note(folder, "resumed")
        elif step == SAVED_AT:
            parts = get_state_dict(module, optimizer)
            dcp.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=saved)
        elif step == KILLED_AT:
            die(folder)
        if step == KILLED_AT + 5:
            break
    dist.destroy_process_group()


def measure(who: str, ranks: int, width: int) -> float | None:
    """Seconds of one recovery; None if the job failed or took too long."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")}
    environment.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if who == "echelon":
            launcher = ["-m", "echelon", "run", "--ranks", str(ranks), "--max-restarts", "1", "--runs", f"{name}/runs"]
        else:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
        command = [sys.executable, *launcher, str(Path(__file__).resolve()), "--as-rank", who, name, "--width", str(width)]
        with open(folder / "log", "wb") as log:
            job = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                code = job.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                code = -1
        resumed = list(folder.glob("resumed.*"))
        if code or len(resumed) != ranks:
            print(f"{who}: exit code {code}\n{(folder / 'log').read_text()[-2000:]}", file=sys.stderr)
            return None
        return max(float(p.read_text()) for p in resumed) - float((folder / "killed.1").read_text())


def main() -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers: parameters are about its square")
    parser.add_argument("--as-rank", nargs=2, metavar=("WHO", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.as_rank:
        who, folder = arguments.as_rank
        (ours if who == "echelon" else theirs)(Path(folder), arguments.width)
        return
    times: dict[str, list[float]] = {"echelon": [], "torchrun + DCP": []}
    failed = dict.fromkeys(times, 0)
    for _ in range(arguments.rounds):
        for who, values in times.items():
            seconds = measure(who, arguments.ranks, arguments.width)
            if seconds is None:
                failed[who] += 1
            else:
                values.append(seconds)
    ratio = median(times["echelon"]) / median(times["torchrun + DCP"])
    rows = [(who, f"{median(values):.2f}", spread(values, 2), str(failed[who])) for who, values in times.items()]
    notes = [f"ratio {ratio:.2f}, target {TARGET}: {'met' if ratio <= TARGET else 'missed'}"]
    facts = {"times": times, "ratio": ratio, "machine": machine(), "versions": versions("echelon", "torch")}
    emit(
        arguments,
        f"death to the next step, {arguments.ranks} ranks, s",
        ("", "median", "range", "failed"),
        rows,
        notes=notes,
        facts=facts,
    )


if __name__ == "__main__":
    main()
