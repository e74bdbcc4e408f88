"""A small run with checkpoints: trained and saved, gone on with, or left alone; for the tests of checkpoints."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

import echelon as ech
from tests.kit.models import batch, net, whole
from tests.kit.units import Regression

DATA = torch.utils.data.TensorDataset(*batch(48, 0))


def make_unit(layout: str, seed: int = 0, **options: Any) -> Regression:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)

    return Regression(
        module=net(seed, dropout=options.pop("dropout", 0.0)),
        layout=layout,
        optimizer="AdamW",
        lr=0.05,
        schedule=schedule,
        step_lr_interval="step",
        **options,
    )


def make_loader() -> ech.Loader:
    return ech.Loader(DATA, 8, seed=1)


def train_and_save(folder: Path, layout: str, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    unit = make_unit(layout, **options)
    ech.train(unit, make_loader(), max_updates=steps, callbacks=[ech.DistributedCheckpointSaver(folder)])
    return whole(unit.module)


def resume(folder: Path, layout: str, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    unit, loader = make_unit(layout, seed=99, **options), make_loader()
    assert ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=steps)
    assert unit.train_progress.num_steps_completed == steps
    return whole(unit.module)


def uninterrupted(layout: str, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    unit = make_unit(layout, **options)
    ech.train(unit, make_loader(), max_updates=steps)
    return whole(unit.module)


def goes_on(folder: Path | None, unit: Any, until: int, batch: int = 8) -> Any:
    """Trains a unit to that update: restored from the folder if there is something, and saved there."""
    loader = ech.Loader(DATA, batch, seed=1)
    if folder is not None:
        ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=until, callbacks=[] if folder is None else [ech.DistributedCheckpointSaver(folder)])
    return unit


def of_all(unit: Any) -> dict[str, torch.Tensor]:
    """Its module's parameters, also those of the older FSDP, and its buffers as far as they are finite."""
    if isinstance(unit.module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(unit.module):
            return {n: p.detach().clone() for n, p in unit.module.module.named_parameters()}
    buffers = {name: buffer.double().clone() for name, buffer in unit.prepared.unwrapped.named_buffers()}
    return whole(unit.module) | {name: buffer for name, buffer in buffers.items() if buffer.isfinite().all()}


class Marked:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


class Held:
    """Something of a script's own that has a state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def steps_in(folder: str | Path, *, beside: Sequence[str] = ()) -> list[int]:
    """After which updates the folder's checkpoints were saved. Nothing else is there, but for what is named."""
    names = {path.name for path in Path(folder).iterdir()}
    steps = {name for name in names if re.fullmatch("step-[0-9]+", name)}
    assert names - steps == set(beside), sorted(names - steps)
    return sorted(int(name.removeprefix("step-")) for name in steps)


# A program that holds the lease of the folder that it is given.
_HOLD = """
import sys, time
from pathlib import Path
from echelon.checkpoint.lease import Lease
Lease(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def held_by_another(folder: Path) -> Iterator[None]:
    """Another process has the folder's lease, and dies in the end without giving it back."""
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            yield
        finally:
            other.kill()


def no_locks(*_: Any) -> None:
    """In the place of `fcntl.fcntl`, as on a file system without locks."""
    raise OSError(38, "Function not implemented")
