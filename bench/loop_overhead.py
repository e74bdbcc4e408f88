"""Microseconds that a training loop adds to each step of the bare PyTorch loop.

A step of a small MLP (64-128-128-10, 32 samples, SGD with momentum, cross entropy) on one thread takes a fraction of a
millisecond, so the framework's own time shows. Every contender trains the same model on the same batches from the
same kind of DataLoader, in a process of its own that stays alive; they take turns, one pass of `--steps` steps each, and
only one runs at a time. The clock is read inside the data set, when a warm step and when the last step asks for its batch,
so that building a trainer or closing a file does not count. The overhead of a round is a contender's time per step
minus the bare loop's time per step in the same round. The table shows the median over the rounds, by the wall clock and by
the CPU time of the training thread, which other programs on the machine disturb less.

    plain     no progress, no metrics
    watched   with each contender's own means: echelon writes every update to metrics.jsonl and progress to stderr;
              TorchTNT, Accelerate (its own tqdm) and Lightning draw a tqdm bar and log the loss to TensorBoard every
              50 steps; so does Fabric, without a bar

    python bench/loop_overhead.py [--rounds N] [--steps N] [--only NAME ...] [--json]

Target: echelon, watched, at most 25 us.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _timing import emit, installed, machine, median, options, spread, versions

TARGET_US = 25.0
WARM_STEPS = 100
LOG_EVERY = 50
# Name of a contender -> the module it needs.
CONTENDERS = {
    "bare": "torch",
    "echelon": "echelon",
    "echelon, live line": "echelon",
    "echelon, own loop": "echelon",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "TorchTNT": "torchtnt",
    "Lightning": "lightning",
}
PACKAGES = ("torch", "echelon", "accelerate", "torchtnt", "lightning")


# --- inside a contender's process


def make_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def settle(device: str) -> None:
    """Wait for the GPU: its queued work belongs to the previous steps."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def make_optimizer(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Batches:
    """A map-style data set of ready batches that records when the first timed step and the last step ask for a batch."""

    def __init__(self, steps: int, device: str = "cpu", warm: int = WARM_STEPS) -> None:
        import torch

        self.device, self.first, self.last = device, warm, warm + steps
        self.batches = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(64)]
        self.at: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return self.last + 1

    def __getitem__(self, index: int) -> Any:
        if index == self.first or index == self.last:
            settle(self.device)
            self.at[index] = time.perf_counter(), time.thread_time()
        return self.batches[index % 64]

    def loader(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(self, batch_size=None, pin_memory=self.device == "cuda")  # type: ignore[arg-type]

    @property
    def step_us(self) -> list[float]:
        """Wall time and the thread's CPU time per step."""
        return [(b - a) / (self.last - self.first) * 1e6 for a, b in zip(self.at[self.first], self.at[self.last], strict=True)]


def run_bare(data: Batches, watched: bool, folder: Path) -> None:
    import torch.nn.functional as F

    model = make_model().to(data.device)
    optimizer = make_optimizer(model)
    for x, y in data.loader():
        x, y = x.to(data.device, non_blocking=True), y.to(data.device, non_blocking=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run_echelon(data: Batches, watched: bool, folder: Path) -> None:
    import torch
    import torch.nn.functional as F

    import echelon as ech

    class Unit(ech.AutoUnit[Any]):
        def compute_loss(self, state: ech.State, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = batch
            logits = self.module(x)
            return F.cross_entropy(logits, y), logits

        def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[Any, Any]:
            return make_optimizer(module), None

    os.environ.pop("ECHELON_RUN_DIR", None)
    run = ech.evidence.RunDir.create(folder, None)
    if watched:
        os.environ.update(run.to_env())
    ech.train(Unit(module=make_model(), device=torch.device(data.device)), data.loader(), max_epochs=1)
    if watched:
        written = run.metrics.read_text().count("\n")
        if written != len(data):
            raise SystemExit(f"{written} records in metrics.jsonl after {len(data)} steps")


class _Iterable:
    """A loader that offers nothing but its batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def run_echelon_own(data: Batches, watched: bool, folder: Path) -> None:
    import torch
    import torch.nn.functional as F

    import echelon as ech

    os.environ.pop("ECHELON_RUN_DIR", None)
    run = ech.evidence.RunDir.create(folder, None)
    if watched:
        os.environ.update(run.to_env())
    model = make_model()
    optimizer = make_optimizer(model)
    device = torch.device(data.device)
    model, optimizer, loader = ech.prepare(model, optimizer, _Iterable(data.loader()), layout=None, device=device)
    for _ in ech.epochs(loader, 1):
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    if watched and run.metrics.read_text().count("\n") != len(data):
        raise SystemExit(f"not {len(data)} records in metrics.jsonl")


def run_fabric(data: Batches, watched: bool, folder: Path) -> None:
    import torch.nn.functional as F
    from lightning.fabric import Fabric
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.plugins.environments import LightningEnvironment

    loggers = [TensorBoardLogger(str(folder))] if watched else []
    # Named, since Lightning's search for a launcher starts MPI if mpi4py is installed, and MPI may end the process.
    fabric = Fabric(accelerator=data.device, devices=1, loggers=loggers, plugins=[LightningEnvironment()])
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model))
    for step, (x, y) in enumerate(fabric.setup_dataloaders(data.loader())):
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if watched and step % LOG_EVERY == 0:
            fabric.log("loss", loss.item(), step=step)
    for logger in loggers:
        logger.finalize("success")


def run_accelerate(data: Batches, watched: bool, folder: Path) -> None:
    import torch.nn.functional as F
    from accelerate import Accelerator
    from accelerate.utils import tqdm

    accelerator = Accelerator(cpu=data.device == "cpu", log_with="tensorboard" if watched else None, project_dir=str(folder))
    if watched:
        accelerator.init_trackers("bench")
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), data.loader())
    for step, (x, y) in enumerate(tqdm(loader) if watched else loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if watched and step % LOG_EVERY == 0:
            accelerator.log({"loss": loss.item()}, step=step)
    if watched:
        accelerator.end_training()


def run_torchtnt(data: Batches, watched: bool, folder: Path) -> None:
    import torch
    import torch.nn.functional as F
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.callbacks import TQDMProgressBar
    from torchtnt.framework.train import train
    from torchtnt.utils.loggers import TensorBoardLogger

    logger = TensorBoardLogger(str(folder)) if watched else None

    class Unit(AutoUnit[Any]):
        def compute_loss(self, state: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = batch
            logits = self.module(x)
            return F.cross_entropy(logits, y), logits

        def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[Any, Any]:
            return make_optimizer(module), None

        def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
            if logger is not None and step % LOG_EVERY == 0:
                logger.log("loss", results.loss.item(), step)

    unit = Unit(module=make_model(), device=torch.device(data.device))
    train(unit, data.loader(), max_epochs=1, callbacks=[TQDMProgressBar()] if watched else [])
    if logger is not None:
        logger.close()


def run_lightning(data: Batches, watched: bool, folder: Path) -> None:
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            if watched:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.model)

    trainer = Trainer(
        accelerator=data.device,
        devices=1,
        max_epochs=1,
        logger=TensorBoardLogger(str(folder)) if watched else False,
        enable_progress_bar=watched,
        enable_checkpointing=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # as above
    )
    trainer.fit(Module(), data.loader())


RUNS: dict[str, Callable[[Batches, bool, Path], None]] = {
    "bare": run_bare,
    "echelon": run_echelon,
    "echelon, live line": run_echelon,
    "echelon, own loop": run_echelon_own,
    "Fabric": run_fabric,
    "Accelerate": run_accelerate,
    "TorchTNT": run_torchtnt,
    "Lightning": run_lightning,
}


def work(name: str, steps: int) -> None:
    """A contender's process: for each line that arrives, one pass; the answer is the microseconds per step."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a framework's output must not look like an answer
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        torch.manual_seed(0)
        data = Batches(steps)
        # A logger's thread may still write while the folder is removed.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            RUNS[name](data, json.loads(line)["watched"], Path(folder))
        answers.write(json.dumps(data.step_us) + "\n")
        answers.flush()


# --- the process that measures


class Contender:
    """A contender's process, which stays alive. `on_terminal` gives it a pseudo-terminal for stderr, read by a thread here."""

    def __init__(self, name: str, steps: int, log: Path, on_terminal: bool) -> None:
        self.name, self.log = name, log
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")}
        environment.update(OMP_NUM_THREADS="1", TERM="xterm", COLUMNS="120", TOKENIZERS_PARALLELISM="false")
        command = [sys.executable, __file__, "--worker", name, "--steps", str(steps)]
        if on_terminal:
            ours, theirs = pty.openpty()
            self.process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=theirs, text=True, env=environment)
            os.close(theirs)
            threading.Thread(target=self._drain, args=(ours,), daemon=True).start()
        else:
            with open(log, "w") as file:
                self.process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=file, text=True, env=environment)

    def _drain(self, fd: int) -> None:
        with open(self.log, "wb") as file:
            try:
                while data := os.read(fd, 65536):
                    file.write(data)
            except OSError:  # on Linux: the other end has closed
                pass

    def measure(self, watched: bool) -> tuple[float, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"watched": watched}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()
            raise SystemExit(f"{self.name} failed:\n{self.log.read_text(errors='replace')[-3000:]}")
        wall, cpu = json.loads(answer)
        return wall, cpu

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(names: list[str], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """{contender: {"plain", "watched" or "watched, CPU": [us per step of each round]}}."""
    found: dict[str, dict[str, list[float]]] = {name: {"plain": [], "watched": [], "watched, CPU": []} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        living = [Contender(n, steps, Path(folder) / f"{i}.log", "live" in n) for i, n in enumerate(names)]
        try:
            for contender in living:
                contender.measure(watched=True)  # imports, and other work that is slow only once
            for _ in range(rounds):
                for watched in (False, True):
                    for contender in living:
                        wall, cpu = contender.measure(watched)
                        found[contender.name]["watched" if watched else "plain"].append(wall)
                        if watched:
                            found[contender.name]["watched, CPU"].append(cpu)
        finally:
            for contender in living:
                contender.close()
    return found


def row(name: str, own: dict[str, list[float]], bare: dict[str, list[float]]) -> list[str]:
    plain, watched, cpu = ([a - b for a, b in zip(own[kind], bare[kind], strict=True)] for kind in own)
    ratio = f"{median(own['watched']) / median(bare['watched']):.2f}"
    target = f"<= {TARGET_US:.0f}" if name == "echelon" else ""
    overheads = [f"{median(plain):.1f}", f"{median(watched):.1f}", spread(watched), f"{median(cpu):.1f}"]
    return [name, f"{median(own['watched']):.0f}", *overheads, ratio, target]


def main() -> None:
    parser = options(__doc__, rounds=6)
    parser.add_argument("--steps", type=int, default=1500, help="timed steps of a pass (default 1500)")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="measure these, and the bare loop")
    parser.add_argument("--worker", help="for this script itself: be this contender")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.steps)
        return
    wanted = [n for n in CONTENDERS if n == "bare" or arguments.only is None or n in arguments.only]
    names = [n for n in wanted if installed(CONTENDERS[n])]
    before = machine()
    found = measure(names, arguments.rounds, arguments.steps)
    rows = [["bare loop", f"{median(found['bare']['watched']):.0f}", "", "", "", "", "1.00", ""]]
    rows += [row(n, found[n], found["bare"]) if n in found else [n, "not installed", *[""] * 6] for n in wanted[1:]]
    facts = {"machine": before, "versions": versions(*PACKAGES), "step_us": found}
    header = ["", "us/step", "+ plain", "+ watched", "rounds", "+ CPU", "ratio", "target"]
    title = f"Loop overhead: us per step beyond the bare loop ({arguments.rounds} rounds of {arguments.steps} steps, one thread)"
    notes = ["us/step, ratio, rounds (smallest and largest overhead) and CPU (time of the training thread alone): watched."]
    emit(arguments, title, header, rows, notes=notes, facts=facts)


if __name__ == "__main__":
    main()
