"""What the forked processes run: a small training run that saves, meets an accident, and goes on; and what became of it."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import echelon as ech
from echelon.checkpoint import manifest
from echelon.common.errors import CheckpointError, CheckpointInUseError
from tests.chaos import forks
from tests.chaos.forks import COUNT, FAIL, KILL, TEAR, arm, calls
from tests.kit.models import batch, net
from tests.kit.units import Regression

Saver = ech.DistributedCheckpointSaver

# 22 samples in batches of 8: every third batch is short.
DATA = torch.utils.data.TensorDataset(*batch(22, 0))

# The accident happens to the save of step 4: step 2 is the old checkpoint, step 6 the one after.
OLD, NEW, END = 2, 4, 6

# One run meets all that writes: litter to sweep, a corrupt step 4 to set aside, a save, the same step again, retention.
SCENARIOS: dict[str, dict[str, Any]] = {
    "sync": {"keep_last_n_checkpoints": 1},
    "async": {"keep_last_n_checkpoints": 1, "async_checkpoint": True},
    "sync all": {},
    "async all": {"async_checkpoint": True},
}


def scratch() -> str | None:
    """In memory where that is possible: a save's syncs cost more than all the rest."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def unit_and_loader(seed: int = 0) -> tuple[Regression, ech.Loader]:
    layout = "fsdp" if dist.is_initialized() else "none"
    unit = Regression(
        module=net(seed, dropout=0.3),
        layout=layout,
        optimizer="AdamW",
        lr=0.05,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7),
        options=ech.UnitOptions(lr_interval="update"),
    )
    return unit, ech.Loader(DATA, 8, seed=1)


def digest(unit: Any) -> str:
    """Of every bit that decides how training goes on, on this rank."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(f"{local.dtype} {tuple(local.shape)}".encode() + local.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    # Not `app_state()`, which is what a checkpoint is made of: what it forgot would be forgotten here, too.
    for state in (unit.module, unit.optimizer, unit.lr_scheduler, unit.train_progress):
        add(state.state_dict())
    add(torch.get_rng_state())
    return found.hexdigest()[:16]


class Watch(ech.Callback):
    """Digests after each step, and failed saves as the log tells them."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        step = unit.train_progress.num_steps_completed
        if step in (OLD, NEW, END):
            self.digests[step] = digest(unit)

    on_train_epoch_end = on_train_step_end  # an epoch's last step is saved after its end


def written() -> None:
    """Wait for the thread of an asynchronous save. Not for ever: of two ranks, 0 may wait for what the other could not write."""
    end = time.monotonic() + (1.0 if dist.is_initialized() else 60.0)
    while any(t.name.startswith("echelon-save") for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.001)


class Accident(ech.Callback):
    """Refusals while step 4 is saved: arms the shim at the start of step 4, and looks at the folder when that save is over."""

    def __init__(self, folder: str, at: int, action: int, error: int) -> None:
        self._what = (folder, at, action, error)
        self.calls = ""
        self.whole: list[str] = []

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        done = unit.train_progress.num_steps_completed
        if done == NEW - 1:
            arm(*self._what)
        elif done == NEW + 1:  # the thread of an asynchronous save meets the refusal, too, before it is over
            written()
            self.calls = calls()
            arm("", 0, COUNT)
            folder = Path(self._what[0])
            self.whole = [p.name for p in manifest.committed(folder) if not manifest.problems(p, manifest.read(p))]
            shutil.copytree(folder, folder.parent / "seen")


class Again(ech.Callback):
    """Saves a step that is saved already."""

    def __init__(self, saver: Any) -> None:
        self._saver = saver

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == OLD:
            assert self._saver.save(state, unit) is None


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(folder: str, scenario: str, until: int, victim: int = -1, at: int = 0, action: int = COUNT, error: int = 0) -> Any:
    """Go on from what the folder has, to step `until`, and say what happened."""
    told = Told()
    logging.getLogger("echelon").addHandler(told)
    me = dist.get_rank() if dist.is_initialized() else 0
    unit, loader = unit_and_loader(seed=9 if manifest.named_folders(Path(folder)) else 0)
    watch = Watch()
    lethal = action in (COUNT, KILL, TEAR)
    if me == victim and lethal:
        arm(folder, at, action)
    began = Saver.restore_from_latest(folder, unit, train_dataloader=loader) and unit.train_progress.num_steps_completed
    restored = digest(unit)
    saver = Saver(folder, save_every_n_updates=2, options=ech.callbacks.SaveOptions(tolerated_failures=1), **SCENARIOS[scenario])
    accident = Accident(folder, at, action, error)
    callbacks = [watch, *([accident] if me == victim and not lethal else []), saver, Again(saver)]
    ech.train(unit, loader, max_updates=until, callbacks=callbacks)
    seen = calls() if lethal else accident.calls
    return {
        "began": began,
        "restored": restored,
        "digests": watch.digests,
        "told": told.lines,
        "calls": seen,
        "whole": accident.whole,
    }


def prepare(scenario: str, ranks: int, folder: str) -> dict[str, Any]:
    """A folder with step 2, litter and a corrupt step 4; what an undisturbed run gives; and which calls there are to meet."""
    home = Path(folder, f"{scenario}-{ranks}")
    straight = forks.run(train, str(home / "straight"), scenario, END, ranks=ranks)
    start = home / "start"
    _values(forks.run(train, str(start), scenario, OLD, ranks=ranks))
    litter = start / ".staged-step-00000009"
    litter.mkdir()
    (litter / "tensors-00000.safetensors").write_bytes(b"half")
    shutil.copytree(start / manifest.named(OLD), start / manifest.named(NEW))
    (start / manifest.named(NEW) / "index.json").unlink()
    counted = {}
    for name, action, until in (("kill", COUNT, NEW), ("fail", FAIL, END)):
        counted[name] = []
        for victim in range(ranks):
            copy = _copy(start)
            ended = _values(forks.run(train, str(copy), scenario, until, victim, 0, action, errno.EIO, ranks=ranks))
            counted[name].append(ended[victim]["calls"])
            shutil.rmtree(copy.parent)
    return {"start": str(start), "want": [each["digests"] for each in _values(straight)], "calls": counted}


def _values(ended: list[dict[str, Any]]) -> list[Any]:
    for each in ended:
        assert "value" in each, each
    return [each["value"] for each in ended]


def first_calls(folder: str) -> str:
    """The calls with which a run begins whose folder, and the one above, are not there yet."""

    def act() -> str:
        arm(folder, 0, COUNT)
        unit, loader = unit_and_loader()
        ech.train(unit, loader, max_updates=1, callbacks=[Saver(Path(folder, "a", "b"))])
        return calls()

    (ended,) = _values(forks.run(act))
    return str(ended)


def _copy(start: Path) -> Path:
    to = Path(tempfile.mkdtemp(prefix="point-", dir=scratch()), "checkpoints")
    return Path(shutil.copytree(start, to))


def point(ready: dict[str, Any], scenario: str, ranks: int, victim: int, at: int, action: int, error: int) -> str:
    """One crash point: how it came out.

    "old", "new": from which checkpoint the next start goes on. "saved", "told": what a refused save came to, "both" if it was
    reported and is there. Everything else is an error, in capitals, with what there is to know.
    """
    folder = _copy(Path(ready["start"]))
    try:
        lethal = action in (KILL, TEAR)
        writers = forks.run(train, str(folder), scenario, NEW if lethal else END, victim, at, action, error, ranks=ranks)
        # After every other refusal, from what was there when it was over, as if the run had been killed then.
        early = not lethal and at % 2 == 0 and (folder.parent / "seen").exists()
        here = folder.parent / "seen" if early else folder
        before = _names(here)
        readers = forks.run(train, str(here), scenario, END, ranks=ranks)
        problem = _judge_start(ready["want"], scenario, before, _names(here), readers)
        if problem is not None:
            return problem
        began = readers[0]["value"]["began"]
        if lethal:
            return _judge_kill(writers, victim, began)
        return _judge_refusal(ready["want"], folder, error, writers, victim, began, early)
    finally:
        shutil.rmtree(folder.parent)


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def _judge_start(want: Any, scenario: str, before: list[str], after: list[str], readers: Any) -> str | None:
    """Whether the next start found a whole checkpoint, went on from it as if nothing had been, and swept."""
    for rank, reader in enumerate(readers):
        if "value" not in reader:
            return f"ERR: the next start: {reader.get('error', reader)[-800:]}"
        value, expected = reader["value"], want[rank]
        if not value["began"]:
            return "FRESH"
        if value["restored"] != expected[str(value["began"])]:
            return f"MIXED: at step {value['began']}"
        if value["began"] != END and value["digests"][str(END)] != expected[str(END)]:
            return f"DIVERGED from step {value['began']}"
    began = {reader["value"]["began"] for reader in readers}
    if len(began) > 1:
        return f"MIXED: ranks went on from {began}"
    there = manifest.named(NEW) in before or OLD in began
    kept = [OLD, *([NEW] if there else []), END] if "all" in scenario else [END]
    if set(after) - {f"corrupt-{manifest.named(NEW)}"} != {manifest.named(step) for step in kept}:
        return f"LITTER: {after} is left of {before}"
    return None


def _judge_kill(writers: Any, victim: int, began: int) -> str:
    if writers[victim].get("signal") != signal.SIGKILL or "hung" in writers[victim]:
        return f"NOT KILLED: {writers[victim]}"
    return {OLD: "old", NEW: "new"}.get(began, f"ERR: went on from {began}") + (", hung" if _hung(writers) else "")


def _hung(writers: Any) -> bool:
    return any("hung" in each for each in writers)


def _judge_refusal(want: Any, folder: Path, error: int, writers: Any, victim: int, began: int, early: bool) -> str:
    reports = set()
    for rank, writer in enumerate(writers):
        if "value" not in writer:
            return f"STOPPED: {writer.get('error', writer)[-800:]}"
        if writer["value"]["digests"][str(END)] != want[rank][str(END)]:
            return "DISTURBED"
        reports.add(tuple(line for line in writer["value"]["told"] if line.startswith("update 4 could not be saved")))
    if len(reports) > 1:
        return f"NOT ON ALL: {reports}"
    (report,) = reports
    whole = writers[victim]["value"]["whole"]
    if not whole:
        return "LOST: neither the old nor the new one"
    there = manifest.named(NEW) in whole
    if began != (END if not early else NEW if there else OLD):
        return f"ERR: went on from step {began} of {whole}"
    if not report:
        return "saved" if there else f"SILENT: {whole}"
    if os.strerror(error) not in report[0] or str(folder) not in report[0] or f"rank {victim}" not in report[0]:
        return f"UNNAMED: {report[0]}"
    return "both" if there else "told"


# --- two runs in one folder


def _one_of_two(folder: str) -> str:
    """Both ranks are runs of their own, which begin at the same moment."""
    dist.barrier()
    dist.destroy_process_group()
    unit, loader = unit_and_loader()
    watch = Watch()
    try:
        ech.train(unit, loader, max_updates=END, callbacks=[Saver(folder, save_every_n_updates=2), watch])
    except CheckpointInUseError as error:
        return f"refused: {error}"
    except CheckpointError as error:
        return f"ahead: {error}" if "is ahead of this run" in str(error) else f"ERR: {error}"
    return f"trained: {watch.digests[END]}"


def race(seed: int) -> list[str]:
    with tempfile.TemporaryDirectory(dir=scratch()) as home:
        told = [str(each.get("value", each)) for each in forks.run(_one_of_two, home, ranks=2)]
        (ended,) = forks.run(train, home, "sync all", END)
        assert ended["value"]["began"] == END
        (winner,) = [each for each in told if each.startswith("trained")]
        assert winner == f"trained: {ended['value']['restored']}", "a mixture"
        assert _names(Path(home)) == [manifest.named(step) for step in (OLD, NEW, END)]
        return told


def second() -> tuple[str, float, int]:
    """What a run hears while another one trains, after how long, and which that is."""

    class Wait(ech.Callback):
        def on_train_step_start(self, state: ech.State, unit: Any) -> None:
            Path(home, "trains").touch()
            time.sleep(3600)

    with tempfile.TemporaryDirectory(dir=scratch()) as home:
        folder = str(Path(home, "c"))
        unit, loader = unit_and_loader()
        first = os.fork()
        if first == 0:
            ech.train(unit, loader, max_updates=END, callbacks=[Saver(folder), Wait()])
            os._exit(1)
        try:
            while not Path(home, "trains").exists():
                time.sleep(0.01)
            began = time.monotonic()
            try:
                ech.train(unit, loader, max_updates=END, callbacks=[Saver(folder)])
            except CheckpointInUseError as error:
                return str(error), time.monotonic() - began, first
            return "trained", time.monotonic() - began, first
        finally:
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
